"""A dataset of TFDS, or one embedded in tasks/datasets/, that `download` left in data/<name>/raw."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tasks import config, datasets, records
from tasks.dataset_kinds import Block, Examples
from tasks.errors import UserError
from tasks.records import DatasetManifest, Feature, HeldOut, Target

CHUNK_BYTES = 8 * 2**20


def examples(dataset: config.Tfds) -> Examples:
    """Return all images and their classes, in the order of their shards.

    A split with unlabelled examples (class -1, as in ImageNet's test split) is left out. Where neither a test nor a
    validation split is there, a fifth of the training examples becomes the test split. Images are resized (bilinear,
    antialiased, without keeping the aspect ratio) where ``image_size`` says so.

    Raises:
        UserError: nothing was downloaded, images of different sizes and no ``image_size``, or a damaged shard.
    """
    root = config.project_root()
    again = f"stratagem download --set dataset.name={dataset.name}"
    raw = root / "data" / dataset.name / "raw"
    absent = UserError(f"{raw.relative_to(root)} does not hold {dataset.name}: {again}")
    if not (raw / "manifest.json").exists():
        raise absent
    manifest = records.load(DatasetManifest, raw / "manifest.json")
    shape = _shape(dataset, manifest)
    builder = datasets.build(manifest.name, manifest.version, root / manifest.folder)
    if not builder.is_prepared():
        raise absent

    @contextlib.contextmanager
    def explained() -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            shard = datasets.damaged_shard(builder)
            raise UserError(
                f"{shard.relative_to(root) if shard else manifest.folder}: damaged ({error.message.splitlines()[0]}). "
                f"Make it again from its archives: {again}"
            ) from None

    with explained():
        labelled = [split for split in sorted(builder.info.splits) if _is_labelled(builder, split)]
    held_out = None
    if "train" in labelled and {"test", "validation"}.isdisjoint(labelled):
        held_out = datasets.hold_out(builder.info.splits["train"].num_examples)

    def blocks() -> Iterator[Block]:
        with explained():
            for split in labelled:
                held = held_out if split == "train" else None
                yield from _blocks(builder, split, shape, held)

    return Examples(
        version=manifest.version,
        features={"image": Feature(kind="image", shape=shape, dtype="uint8")},
        target=Target.of_classes(manifest.class_names),
        splits=(*labelled, "test") if held_out else tuple(labelled),
        blocks=blocks,
        held_out=held_out,
        origin={
            "tfds_version": manifest.tfds_version,
            "raw_folder": manifest.folder,
            "sources": manifest.sources,
            "licence": manifest.licence,
        },
    )


def _shape(dataset: config.Tfds, manifest: DatasetManifest) -> tuple[int, int, int]:
    height, width = dataset.image_size or manifest.image_shape[:2]
    if height is None or width is None:
        raise UserError(
            f"dataset.image_size = null: the images of {manifest.name} differ in size (shape {manifest.image_shape}). "
            "Give --set dataset.image_size=[HEIGHT,WIDTH]"
        )
    return height, width, manifest.image_shape[2]


def _is_labelled(builder: Any, split: str) -> bool:
    label_key = builder.info.supervised_keys[1]
    spec = {label_key: tf.io.FixedLenFeature((), tf.int64)}
    paths = [str(path) for path in builder.info.splits[split].filepaths]
    for serialized in tf.data.TFRecordDataset(paths, buffer_size=2**20).batch(1024):
        if int(tf.reduce_min(tf.io.parse_example(serialized, spec)[label_key])) < 0:
            return False
    return True


def _blocks(builder: Any, split: str, shape: tuple[int, int, int], held_out: HeldOut | None) -> Iterator[Block]:
    """Yield the blocks of one split, or of two where a test split is held out of it."""
    num_examples = builder.info.splits[split].num_examples
    held = datasets.is_held_out(num_examples, held_out) if held_out else np.zeros(num_examples, bool)
    shards = datasets.shards(builder, split, shape)
    batch_size = min(max(CHUNK_BYTES // math.prod(shape), 1), 1024)
    batches = tf.data.TFRecordDataset(shards.paths, buffer_size=2**20).batch(batch_size)
    num_read = 0
    decoded = batches.map(shards.decode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(1)
    for images, labels in decoded.as_numpy_iterator():
        rows = held[num_read : num_read + len(labels)]
        num_read += len(labels)
        if held_out is None:
            yield Block(split, {"image": images}, labels)
            continue
        yield Block(split, {"image": images[~rows]}, labels[~rows])
        yield Block("test", {"image": images[rows]}, labels[rows])
    if num_read != num_examples:
        raise tf.errors.DataLossError(None, None, f"{num_read} of the {num_examples} examples of split '{split}'")
