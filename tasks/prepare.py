"""prepare: a TFDS dataset -> every split decoded once, as memory-mappable arrays with their statistics and hashes."""

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf
from filelock import FileLock

from tasks import config, datasets, files, prepared_data, records
from tasks.errors import UserError
from tasks.records import DatasetManifest, PreparedDataset, PreparedSplit

CHUNK_BYTES = 8 * 2**20


def prepare(dataset: config.Dataset, manifest: DatasetManifest) -> PreparedDataset:
    """Decode each split of a downloaded dataset into data/<name>/prepared, in the order of its shards.

    A split becomes <split>_images.npy, uint8 (n, height, width, channels), and <split>_labels.npy, int64 (n,). A split
    with unlabelled examples (class -1, as in ImageNet's test split) is left out. The same input gives the same bytes.

    Args:
        dataset: ``image_size`` resizes every image (bilinear, antialiased, without keeping the aspect ratio).
        manifest: what `download` returned.

    Returns:
        The manifest, which is also in prepared/manifest.json.

    Raises:
        UserError: images of different sizes and no ``image_size``, a damaged shard, or a folder that cannot be written.
    """
    root = config.project_root()
    height, width = dataset.image_size or manifest.image_shape[:2]
    if height is None or width is None:
        raise UserError(
            f"dataset.image_size = null: the images of {manifest.name} differ in size (shape {manifest.image_shape}). "
            "Give --set dataset.image_size=[HEIGHT,WIDTH]"
        )
    shape = (height, width, manifest.image_shape[2])
    folder = root / "data" / manifest.name
    target = folder / "prepared"
    again = f"stratagem download --set dataset.name={manifest.name}"
    builder = datasets.build(manifest.name, manifest.version, root / manifest.folder)
    if not builder.is_prepared():
        raise UserError(f"{manifest.folder} does not hold {manifest.name} {manifest.version}: {again}")
    try:
        with FileLock(folder / ".prepare.lock"):
            files.remove_scratch(folder.glob(".prepared.*"), root)  # of killed runs
            with files.scratch(folder, ".prepared.") as scratch:
                new = scratch / "new"
                new.mkdir()
                splits = {
                    name: split
                    for name in sorted(manifest.num_examples)
                    if (split := _write(builder, name, shape, new, target.relative_to(root)))
                }
                prepared = PreparedDataset(
                    name=manifest.name,
                    version=manifest.version,
                    tfds_version=manifest.tfds_version,
                    folder=target.relative_to(root).as_posix(),
                    raw_folder=manifest.folder,
                    image_shape=shape,
                    num_classes=manifest.num_classes,
                    class_names=manifest.class_names,
                    splits=splits,
                    sources=manifest.sources,
                    licence=manifest.licence,
                )
                records.save(prepared, new / "manifest.json")
                prepared_data.set_foreign_aside(manifest.name)
                if target.exists():
                    target.rename(scratch / "old")
                new.rename(target)
    except tf.errors.OpError as error:
        shard = datasets.damaged_shard(builder)
        raise UserError(
            f"{shard.relative_to(root) if shard else manifest.folder}: damaged ({error.message.splitlines()[0]}). "
            f"Make it again from its archives: {again}"
        ) from None
    except OSError as error:
        raise UserError(
            f"{folder.relative_to(root)}: cannot be written ({error}). Check its permissions and the free space"
        ) from None
    return prepared


def _write(builder: Any, split: str, shape: tuple[int, int, int], new: Path, target: Path) -> PreparedSplit | None:
    """Write one split's arrays, counting in the same pass; None for a split with unlabelled examples."""
    num_examples = builder.info.splits[split].num_examples
    num_classes = builder.info.features[builder.info.supervised_keys[1]].num_classes
    class_counts, num_written = np.zeros(num_classes, np.int64), 0
    sums, squares = np.zeros(shape[2], np.int64), np.zeros(shape[2], np.int64)
    images_path, labels_path = new / f"{split}_images.npy", new / f"{split}_labels.npy"
    # Plain writes, because the pages of a memory map that is written to stay resident and grow with the dataset.
    with images_path.open("wb") as images_file, labels_path.open("wb") as labels_file:
        _write_header(images_file, np.uint8, (num_examples, *shape))
        _write_header(labels_file, np.int64, (num_examples,))
        for images, labels in _read(builder, split, shape):
            if labels.min() < 0:
                images_path.unlink()
                labels_path.unlink()
                return None
            images_file.write(images.data)
            labels_file.write(labels.data)
            num_written += len(labels)
            class_counts += np.bincount(labels, minlength=num_classes)
            sums += images.sum((0, 1, 2), np.int64)
            squares += np.square(images, dtype=np.uint16).sum((0, 1, 2), np.int64)
        for file in (images_file, labels_file):
            file.flush()
            os.fsync(file.fileno())
    if num_written != num_examples:
        raise tf.errors.DataLossError(None, None, f"{num_written} of the {num_examples} examples of split '{split}'")
    num_pixels = num_examples * shape[0] * shape[1]
    return PreparedSplit(
        num_examples=num_examples,
        images=(target / images_path.name).as_posix(),
        labels=(target / labels_path.name).as_posix(),
        sha256={(target / path.name).as_posix(): _sha256(path) for path in (images_path, labels_path)},
        class_counts=tuple(class_counts.tolist()),
        pixel_mean=tuple(total / num_pixels for total in sums.tolist()),
        # In whole numbers up to the root: exact, whatever the size of the dataset.
        pixel_std=tuple(
            math.sqrt(num_pixels * square - total**2) / num_pixels
            for total, square in zip(sums.tolist(), squares.tolist(), strict=True)
        ),
    )


def _read(builder: Any, split: str, shape: tuple[int, int, int]) -> Iterator[tuple[Any, Any]]:
    """Yield images uint8 (batch, height, width, channels) and labels int64 (batch,), always in the same order."""
    shards = datasets.shards(builder, split, shape)
    batch_size = min(max(CHUNK_BYTES // math.prod(shape), 1), 1024)
    batches = tf.data.TFRecordDataset(shards.paths, buffer_size=2**20).batch(batch_size)
    yield from batches.map(shards.decode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(1).as_numpy_iterator()


def _write_header(file: BinaryIO, dtype: type, shape: tuple[int, ...]) -> None:
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
