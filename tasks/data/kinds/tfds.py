"""A TFDS dataset, or one of tasks/data/builders/, that `download` created in data/<name>/raw.

This module decodes images with a class. It writes all other examples into a table, which is read like a user's table.
"""

import contextlib
import io
import itertools
import math
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from PIL import Image

from tasks import config, records
from tasks.data import builders
from tasks.data.images import median_size
from tasks.data.kinds import Block, Examples, missing_words, table, with_class_names
from tasks.data.splits import NAMES
from tasks.records import DatasetManifest, Feature, HeldOut, Target
from tasks.system import files
from tasks.system.errors import UserError, listed

TEST_SHARE = 0.2
"""The share of the training examples that become the test split if a dataset has none."""
CHUNK_BYTES = 8 * 2**20
ROWS_AT_ONCE = 1024
MEASURED = 10_000
"""The number of images whose sizes determine the median."""
KINDS = {"class": "category", "bool": "category", "numbers": "number", "image": "image"}
"""The kind of a column by its TFDS feature; the kind of a text depends on its values, as in a table."""
SPLIT = "(split)"
TASKS = {"class": "classification", "text": "classification", "labels": "multilabel", "numbers": "regression"}


def examples(dataset: config.Tfds) -> Examples:
    """Return all examples with their targets, in the order of their shards.

    Unlabelled examples (class -1) are left out and counted: in most datasets they are a whole split, such as ImageNet's
    test split. Without a test split, a fifth of the training examples becomes one. Images are resized (bilinear,
    antialiased, without keeping the aspect ratio) to ``image_size``, or to the median size if their sizes differ.

    Raises:
        UserError: nothing was downloaded, missing columns, no labelled training example, or a damaged shard.
    """
    manifest, builder = _open(dataset)
    has_columns = not builders.supervised(builder).is_of_images
    if dataset.columns and not has_columns:
        raise UserError(
            f"data/{dataset.name}/params.yaml: dataset.columns = {', '.join(dataset.columns)}: an example of "
            f"{dataset.name} is one image without columns. Remove the key"
        )
    with _explained(dataset, manifest, builder):
        found = _of_columns(dataset, builder) if has_columns else _of_images(dataset, builder, manifest)

    def blocks() -> Generator[Block]:
        with _explained(dataset, manifest, builder):
            yield from found.blocks()

    return replace(
        found,
        version=manifest.version,
        blocks=blocks,
        origin={
            "tfds_version": manifest.tfds_version,
            "sources": manifest.sources,
            "licence": manifest.licence,
            **found.origin,
        },
    )


def _open(dataset: config.Tfds) -> tuple[DatasetManifest, Any]:
    """Return the manifest of the download, and the builder that reads it."""
    root = config.project_root()
    raw = root / "data" / dataset.name / "raw"
    if (raw / "manifest.json").exists():
        manifest = records.load(DatasetManifest, raw / "manifest.json")
        builder = builders.build(manifest.name, manifest.version, root / manifest.folder)
        if builder.is_prepared():
            return manifest, builder
    raise UserError(f"{raw.relative_to(root)} does not contain {dataset.name}: {_again(dataset)}")


def _again(dataset: config.Tfds) -> str:
    return f"stratagem data download --set dataset.name={dataset.name}"


@contextlib.contextmanager
def _explained(dataset: config.Tfds, manifest: DatasetManifest, builder: Any) -> Iterator[None]:
    """Convert TensorFlow's errors to a message with the name of the damaged shard."""
    try:
        yield
    except tf.errors.OpError as error:
        shard = builders.damaged_shard(builder)
        place = shard.relative_to(config.project_root()) if shard else manifest.folder
        raise UserError(
            f"{place}: damaged ({error.message.splitlines()[0]}). Make it again from its archives: {_again(dataset)}"
        ) from None


def _of_images(dataset: config.Tfds, builder: Any, manifest: DatasetManifest) -> Examples:
    """Return images with one class each, which can also be streamed from their shards."""
    unlabelled = _unlabelled(dataset, builder)
    labelled = list(unlabelled)
    held_out = None
    if "train" in labelled and "test" not in labelled and (total := builder.info.splits["train"].num_examples) > 1:
        held_out = HeldOut(num_examples=max(1, round(total * TEST_SHARE)), seed=0)
    shape = _image_shape(dataset, builder)

    def blocks() -> Generator[Block]:
        for split in labelled:
            yield from _blocks(builder, split, shape, held_out if split == "train" else None)

    return Examples(
        version="",
        features={"image": Feature(kind="image", shape=shape, dtype="uint8")},
        target=Target.of_classes(builders.supervised(builder).class_names),
        splits=(*labelled, "test") if held_out else tuple(labelled),
        blocks=blocks,
        held_out=held_out,
        # Only datasets in which each example has a class can be streamed.
        origin={"raw_folder": None if any(unlabelled.values()) else manifest.folder},
    )


def _unlabelled(dataset: config.Tfds, builder: Any) -> dict[str, int]:
    """Return the number of examples without a class, for each split with labelled examples, and print it; refuse a
    training split without labelled examples."""
    (place,) = builders.supervised(builder).wanted
    label_key = "/".join(place)  # As TFDS writes it.
    spec = {label_key: tf.io.FixedLenFeature((), tf.int64)}
    labelled = {}
    for split, info in sorted(builder.info.splits.items()):
        total, count = info.num_examples, 0
        shards = tf.data.TFRecordDataset([str(path) for path in info.filepaths], buffer_size=2**20)
        for some in shards.batch(1024):
            count += int(tf.math.count_nonzero(tf.io.parse_example(some, spec)[label_key] < 0))
        if split == "train" and 0 < total == count:
            raise UserError(
                f"dataset {dataset.name}: none of the {total:,} examples of its split 'train' has a class (each has "
                "the label -1), so there is nothing to learn. Choose another dataset, or write your own builder"
            )
        if count:
            print(
                f"warning: {count:,} of the {total:,} examples of the split '{split}' of {dataset.name} have no class "
                "(the label -1), and are left out",
                file=sys.stderr,
            )
        if count < max(total, 1):
            labelled[split] = count
    return labelled


def _image_shape(dataset: config.Tfds, builder: Any) -> tuple[int, int, int]:
    """Return height, width and channels of the prepared images.

    Images of different sizes get ``image_size``, or by default the median size of the first ``MEASURED`` images of the
    training split (or of the first split if there is none), which is printed.
    """
    ((place, feature),) = builders.supervised(builder).given.items()
    size = dataset.image_size or feature.shape[:2]
    if None in size:
        split = "train" if "train" in builder.info.splits else min(builder.info.splits)
        pictures = (file for some in builders.columns(builder, split, [place], ROWS_AT_ONCE) for file in some[place])
        opened = (Image.open(io.BytesIO(file)) for file in itertools.islice(pictures, MEASURED))
        size, line = median_size(dataset.name, [(image.height, image.width) for image in opened])
        print(line, file=sys.stderr)
    return *size, feature.shape[2]


def _blocks(builder: Any, split: str, shape: tuple[int, int, int], held_out: HeldOut | None) -> Iterator[Block]:
    """Yield the blocks of one split, or of two if a test split is held out from it."""
    num_examples = builder.info.splits[split].num_examples
    held = np.zeros(num_examples, bool) if held_out is None else builders.is_held_out(num_examples, held_out)
    shards = builders.shards(builder, split, shape)
    batch_size = min(max(CHUNK_BYTES // math.prod(shape), 1), 1024)
    batches = tf.data.TFRecordDataset(shards.paths, buffer_size=2**20).batch(batch_size)
    num_read = 0
    decoded = batches.map(shards.decode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(1)
    for images, labels in decoded.as_numpy_iterator():
        rows = held[num_read : num_read + len(labels)]
        num_read += len(labels)
        for own, chosen in ((split, ~rows), ("test", rows)):
            usable = chosen & (labels >= 0)
            if usable.all():  # Without a copy.
                yield Block(own, {"image": images}, labels)
            elif usable.any():
                yield Block(own, {"image": images[usable]}, labels[usable])
    if num_read != num_examples:
        raise tf.errors.DataLossError(None, None, f"{num_read} of the {num_examples} examples of split '{split}'")


def _of_columns(dataset: config.Tfds, builder: Any) -> Examples:
    """Return examples with columns, by writing them into a temporary table."""
    found = builders.supervised(builder)
    with contextlib.ExitStack() as stack:
        place = config.project_root() / "data" / dataset.name
        folder = stack.enter_context(files.scratch(place, ".prepared."))
        written = _write_table(dataset, builder, found, folder)
        with _named(dataset, written.source):
            guessed, lines = table.guess(written)
            columns, known = guessed.columns or {}, written.columns or {}
            # TFDS datasets have no files next to their examples.
            named = [name for name, one in columns.items() if one.kind == "image" and name not in known]
            columns = columns | dict.fromkeys(named, config.TableColumn(kind="ignore"))
            lines += [f"left out because it contains file names: {name}" for name in named]
            print("\n".join(lines), file=sys.stderr)
            made = table.examples(guessed.model_copy(update={"columns": columns}))
        until_read = stack.pop_all()
    total = sum(one.num_examples for one in builder.info.splits.values())
    if found.target_kind == "text" and made.target.num_outputs * 2 > total:
        raise UserError(
            f"dataset {dataset.name}: its {total:,} examples have {made.target.num_outputs:,} different texts as "
            "targets, too many for classes: choose a builder whose texts are classes"
        )
    if found.target_kind == "class":
        made = with_class_names(made, found.class_names)
    elif found.target_kind == "labels":
        target_columns = tuple(place[-1] for place in found.wanted)
        told = {"class_names": found.class_names, "columns": target_columns}
        made = replace(made, target=made.target.model_copy(update=told))

    def blocks() -> Generator[Block]:
        with until_read, _named(dataset, written.source):
            yield from made.blocks()

    return replace(made, blocks=blocks, name_of=None)


@contextlib.contextmanager
def _named(dataset: config.Tfds, source: str) -> Iterator[None]:
    """Replace the temporary table in messages by the dataset's name."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(f"dataset.source = '{source}'", f"dataset {dataset.name}")) from None


def _write_table(dataset: config.Tfds, builder: Any, found: builders.Supervised, folder: Path) -> config.Table:
    """Write the examples into a table in ``folder``, next to their images; return its description."""
    names = {name: place for name, place in found.names.items() if builders.is_column(found.given[place])}
    others = {name: type(found.given[place]).__name__ for name, place in found.names.items() if name not in names}
    unusable = [f"{name} ({kind})" for name, kind in others.items()]
    unusable += [f"split {name}" for name in builder.info.splits if name not in NAMES]
    if unusable:
        print(f"left out of {dataset.name}: {listed(unusable)}", file=sys.stderr)
    kinds: dict[str, config.TableColumn] = {}
    if [builders.kind_of(found.given[place]) for place in names.values()] == ["text"]:
        kinds = dict.fromkeys(names, config.TableColumn(kind="text"))
    targets: list[str] = []
    (folder / "images").mkdir()
    with contextlib.ExitStack() as stack:
        writer = None
        for split in [name for name in NAMES if name in builder.info.splits]:
            for batch in builders.columns(builder, split, [*names.values(), *found.wanted], ROWS_AT_ONCE):
                columns: dict[str, Any] = {}
                for name, place in names.items():
                    kind, own = builders.kind_of(found.given[place]), _columns(name, found.given[place], batch[place])
                    if kind == "image":
                        own = {name: _saved(batch[place], folder)}
                    if kind in KINDS:
                        kinds |= {column: config.TableColumn.model_validate({"kind": KINDS[kind]}) for column in own}
                    columns |= own
                target = _targets(found, batch)
                targets = list(target)
                for name, described in dataset.columns.items():
                    if (
                        described.kind in ("category", "text")
                        and getattr(columns.get(name), "dtype", None) == np.float32
                    ):
                        # As short decimals: a float32 of 0.1 is 0.10000000149011612 in Python.
                        columns[name] = _texts(None if math.isnan(value) else str(value) for value in columns[name])
                part = pa.table(columns | target | {SPLIT: [split] * len(next(iter(target.values())))})
                if writer is None:
                    writer = stack.enter_context(pq.ParquetWriter(folder / "table.parquet", part.schema))
                writer.write_table(part)
    return config.Table.model_validate(
        {
            "kind": "table",
            "name": dataset.name,
            "source": (folder / "table.parquet").relative_to(config.project_root()).as_posix(),
            "target": tuple(targets),
            "task": TASKS[found.target_kind],
            "columns": kinds | dataset.columns,
            "split_column": SPLIT,
            "decimal": ".",
            "images": ("images",),
            "image_size": dataset.image_size,
            "on_broken": "skip",
            "not_missing": missing_words(found.class_names if found.target_kind == "class" else ()),
        }
    )


def _columns(name: str, feature: Any, values: Any) -> dict[str, Any]:
    """Return a TFDS feature as columns, with human-readable values: a class by its name."""
    kind = builders.kind_of(feature)
    if kind == "class":
        return {name: _texts(np.array([*feature.names, None], object)[values])}  # -1 is none.
    if kind == "bool":
        return {name: _texts(map(str, values))}
    if kind == "text":
        return {name: _texts(one.decode("utf-8", "replace") for one in values)}
    if kind == "numbers" and feature.shape:
        flat = values.reshape(len(values), -1)
        return {f"{name} {number}": np.ascontiguousarray(column) for number, column in enumerate(flat.T)}
    return {name: values}


def _texts(values: Iterable[str | None]) -> Any:
    return pa.array(list(values), pa.string())


def _saved(images: npt.NDArray[Any], folder: Path) -> list[str]:
    first = sum(1 for _ in (folder / "images").iterdir())
    paths = [f"images/{number}" for number in range(first, first + len(images))]
    for path, image in zip(paths, images, strict=True):
        (folder / path).write_bytes(image)
    return paths


def _targets(found: builders.Supervised, batch: dict[builders.Place, Any]) -> dict[str, Any]:
    """Return the target columns: a class by its name, a column for each label or number."""
    columns: dict[str, Any] = {}
    for place, feature in found.wanted.items():
        values, name = batch[place], place[-1]
        if builders.kind_of(feature) == "labels":
            hot = np.zeros((len(values), len(found.class_names)), np.uint8)
            for row, labels in enumerate(values):
                hot[row, np.asarray(labels, np.int64)] = 1
            names = [f"{name}: {label}" for label in found.class_names]
            columns |= dict(zip(names, hot.T.copy(), strict=True))
        elif found.target_kind == "labels":
            columns[name] = np.asarray(values, np.uint8)
        else:
            columns |= _columns(name, feature, values)
    return columns
