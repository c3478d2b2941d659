"""A dataset of TFDS, or one embedded in tasks/data/builders/, that `download` left in data/<name>/raw."""

import contextlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks import config, records
from tasks.data import builders
from tasks.data.encoding import Encoder, cells
from tasks.data.kinds import Block, Examples, most_frequent, text_length
from tasks.data.kinds._tfds_columns import (
    CHUNK_BYTES,
    MAX_VOCABULARY,
    ROWS_AT_ONCE,
    Columns,
    held_out_rows,
    image_shape,
    labelled_rows,
    refuse_infinite,
    target_columns,
)
from tasks.records import Column, DatasetManifest, Feature, HeldOut, Target
from tasks.system.errors import UserError


def examples(dataset: config.Tfds) -> Examples:
    """Return all examples (images, texts, numbers or columns) and what is learnt of them, in the order of their shards.

    Unlabelled examples (class -1) are left out and counted: of most datasets that have some, a whole split, as in
    ImageNet's test split. Where no test split is there, a fifth of the training examples becomes it. Images are resized
    (bilinear, antialiased, without keeping the aspect ratio) to ``image_size``, or to the median size where theirs
    differ.

    Raises:
        UserError: nothing was downloaded, columns that are not there, no labelled example to train on, or a damaged
            shard.
    """
    manifest, builder = _open(dataset)
    given, learnt = builders.supervised(builder).kinds
    if dataset.columns and given != "columns":
        raise UserError(
            f"data/{dataset.name}/params.yaml: dataset.columns = {', '.join(dataset.columns)}: an example of "
            f"{dataset.name} is one thing ({given}) without columns. Leave the key out"
        )
    with _explained(dataset, manifest, builder):
        unlabelled = {split: _count_unlabelled(builder, split) for split in sorted(builder.info.splits)}
    labelled = _labelled_splits(dataset, builder, unlabelled)
    held_out = None
    if "train" in labelled and "test" not in labelled:
        held_out = builders.hold_out(builder.info.splits["train"].num_examples)

    columns = None
    if given == "columns":
        with _explained(dataset, manifest, builder):
            columns = Columns(dataset, builder, labelled, held_out)
        features, vocabularies = columns.fitted.features, columns.fitted.vocabularies
    elif given == "image":
        (place,) = builders.supervised(builder).given
        with _explained(dataset, manifest, builder):
            shape = image_shape(dataset, builder, place)
        features = {"image": Feature(kind="image", shape=shape, dtype="uint8")}
        vocabularies = {}
    else:
        with _explained(dataset, manifest, builder):
            features, vocabularies = _fitted(dataset, builder, held_out)
    target = columns.target if columns else _target(builder, manifest)

    def blocks() -> Iterator[Block]:
        with _explained(dataset, manifest, builder):
            if columns:
                yield from columns.blocks()
                return
            for split in labelled:
                held = held_out if split == "train" else None
                if given == "image":
                    yield from _blocks(dataset, builder, split, shape, held, target)
                else:
                    yield from _row_blocks(dataset, builder, split, held, (features, vocabularies, target))

    streamed = (given, learnt) == ("image", "class")
    return Examples(
        version=manifest.version,
        features=features,
        target=target,
        vocabularies=vocabularies,
        splits=(*labelled, "test") if held_out else tuple(labelled),
        blocks=blocks,
        held_out=held_out,
        origin={
            "tfds_version": manifest.tfds_version,
            # What is streamed: all of it is a class and its image.
            "raw_folder": manifest.folder if streamed and not any(unlabelled[split] for split in labelled) else None,
            "sources": manifest.sources,
            "licence": manifest.licence,
        },
    )


def _open(dataset: config.Tfds) -> tuple[DatasetManifest, Any]:
    """Return what was downloaded, and the builder that reads it."""
    root = config.project_root()
    raw = root / "data" / dataset.name / "raw"
    if (raw / "manifest.json").exists():
        manifest = records.load(DatasetManifest, raw / "manifest.json")
        builder = builders.build(manifest.name, manifest.version, root / manifest.folder)
        if builder.is_prepared():
            return manifest, builder
    raise UserError(f"{raw.relative_to(root)} does not hold {dataset.name}: {_again(dataset)}")


def _again(dataset: config.Tfds) -> str:
    return f"stratagem download --set dataset.name={dataset.name}"


@contextlib.contextmanager
def _explained(dataset: config.Tfds, manifest: DatasetManifest, builder: Any) -> Iterator[None]:
    """Name the shard that is damaged where TensorFlow says that something is."""
    try:
        yield
    except tf.errors.OpError as error:
        shard = builders.damaged_shard(builder)
        place = shard.relative_to(config.project_root()) if shard else manifest.folder
        raise UserError(
            f"{place}: damaged ({error.message.splitlines()[0]}). Make it again from its archives: {_again(dataset)}"
        ) from None


def _target(builder: Any, manifest: DatasetManifest) -> Target:
    (((key,), wanted),) = builders.supervised(builder).wanted.items()
    learnt = builders.supervised(builder).kinds[1]
    if learnt == "class":
        return Target.of_classes(manifest.class_names)
    if learnt == "labels":
        names = manifest.class_names
        return Target(task="multilabel", num_outputs=len(names), class_names=names, columns=(key,))
    columns = target_columns(key, wanted.shape)
    return Target(task="regression", num_outputs=len(columns), columns=columns)


def _fitted(
    dataset: config.Tfds, builder: Any, held_out: HeldOut | None
) -> tuple[dict[str, Feature], dict[str, list[list[str]]]]:
    """Return the feature of texts or numbers, with the vocabulary of the training split."""
    (((key,), given),) = builders.supervised(builder).given.items()
    if builders.kind_of(given) == "numbers":
        width = math.prod(given.shape)
        return {
            "number": Feature(
                kind="number", shape=(width,), dtype="float32", columns=(Column(name=key, kind="number", width=width),)
            )
        }, {}
    words: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    held = held_out_rows(builder, "train", held_out)
    is_class = builders.supervised(builder).kinds[1] == "class"
    for row, (text, label) in enumerate(builders.rows(builder, "train") if "train" in builder.info.splits else ()):
        if not (held[row] or (is_class and label < 0)):
            found, _ = cells.words_of([text.decode("utf-8", "replace")])
            words.update(found)
            lengths[len(found)] += 1
    vocabulary = most_frequent(words, MAX_VOCABULARY)
    if not vocabulary:
        raise UserError(f"dataset {dataset.name}: no text of its training split has a word")
    feature = Feature(
        kind="text",
        shape=(text_length(lengths),),
        dtype="int32",
        columns=(Column(name=key, kind="text"),),
        vocabulary_sizes=(len(vocabulary) + cells.FIRST,),
    )
    return {"text": feature}, {"text": [vocabulary]}


def _row_blocks(
    dataset: config.Tfds,
    builder: Any,
    split: str,
    held_out: HeldOut | None,
    fitted: tuple[dict[str, Feature], dict[str, list[list[str]]], Target],
) -> Iterator[Block]:
    """Yield the blocks of a split of texts or numbers, or of two where a test split is held out of it."""
    features, vocabularies, target = fitted
    held = held_out_rows(builder, split, held_out)
    ((name, feature),) = features.items()
    encoder = Encoder({name: feature.model_dump()}, vocabularies)
    rows = builders.rows(builder, split)
    first = 0
    while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
        if name == "number":
            given = np.stack([np.asarray(one, np.float32).reshape(-1) for one, _ in some])
            refuse_infinite(dataset, split, first, given)
        else:
            given = encoder.encode({feature.columns[0].name: [one.decode("utf-8", "replace") for one, _ in some]})[name]
        labels = np.stack([_label(one, target) for _, one in some])
        if target.task == "regression":
            refuse_infinite(dataset, split, first, labels)
        own = held[first : first + len(some)]
        first += len(some)
        usable = labelled_rows(labels, target)
        for part, chosen in ((split, usable & ~own), ("test", usable & own)):
            if chosen.any():
                yield Block(part, {name: given[chosen]}, labels[chosen])
    if first != builder.info.splits[split].num_examples:
        raise tf.errors.DataLossError(None, None, f"{first} examples of split '{split}'")


def _label(value: Any, target: Target) -> npt.NDArray[Any]:
    if target.task == "multilabel":
        hot = np.zeros(target.num_outputs, np.uint8)
        hot[np.asarray(value, np.int64)] = 1
        return hot
    return np.asarray(value, target.label_dtype).reshape(target.label_shape)


def _count_unlabelled(builder: Any, split: str) -> int:
    """Return how many examples of a split have no class."""
    if builders.supervised(builder).kinds[1] != "class":
        return 0
    (place,) = builders.supervised(builder).wanted
    label_key = "/".join(place)  # As TFDS writes it.
    spec = {label_key: tf.io.FixedLenFeature((), tf.int64)}
    paths = [str(path) for path in builder.info.splits[split].filepaths]
    count = 0
    for serialized in tf.data.TFRecordDataset(paths, buffer_size=2**20).batch(1024):
        count += int(tf.math.count_nonzero(tf.io.parse_example(serialized, spec)[label_key] < 0))
    return count


def _labelled_splits(dataset: config.Tfds, builder: Any, unlabelled: Mapping[str, int]) -> list[str]:
    """Return the splits in which an example has a class, and say how many have none.

    Raises:
        UserError: the training split is not among them.
    """
    totals = {split: builder.info.splits[split].num_examples for split in unlabelled}
    labelled = [split for split, count in unlabelled.items() if count < max(totals[split], 1)]
    if "train" in unlabelled and "train" not in labelled:
        raise UserError(
            f"dataset {dataset.name}: none of the {totals['train']:,} examples of its split 'train' has a class (each "
            "has the label -1), so there is nothing to learn. Give another dataset, or a builder of your own"
        )
    for split, count in unlabelled.items():
        if count:
            print(
                f"warning: {count:,} of the {totals[split]:,} examples of the split '{split}' of {dataset.name} have "
                "no class (the label -1), and are left out",
                file=sys.stderr,
            )
    return labelled


def _blocks(
    dataset: config.Tfds,
    builder: Any,
    split: str,
    shape: tuple[int, int, int],
    held_out: HeldOut | None,
    target: Target,
) -> Iterator[Block]:
    """Yield the blocks of one split, or of two where a test split is held out of it."""
    num_examples = builder.info.splits[split].num_examples
    held = held_out_rows(builder, split, held_out)
    shards = builders.shards(builder, split, shape)
    batch_size = min(max(CHUNK_BYTES // math.prod(shape), 1), 1024)
    batches = tf.data.TFRecordDataset(shards.paths, buffer_size=2**20).batch(batch_size)
    num_read = 0
    decoded = batches.map(shards.decode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(1)
    for images, labels in decoded.as_numpy_iterator():
        if labels.dtype == np.float32:  # A regression's.
            refuse_infinite(dataset, split, num_read, labels)
        rows = held[num_read : num_read + len(labels)]
        num_read += len(labels)
        if not (usable := labelled_rows(labels, target)).all():
            images, labels, rows = images[usable], labels[usable], rows[usable]
        if held_out is None:
            yield Block(split, {"image": images}, labels)
            continue
        yield Block(split, {"image": images[~rows]}, labels[~rows])
        yield Block("test", {"image": images[rows]}, labels[rows])
    if num_read != num_examples:
        raise tf.errors.DataLossError(None, None, f"{num_read} of the {num_examples} examples of split '{split}'")
