"""prepare: a TFDS dataset -> every split decoded once, as memory-mappable arrays with their statistics and hashes."""

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import tensorflow as tf
from filelock import FileLock

from tasks import config, datasets, files, prepared_data, records
from tasks.errors import UserError
from tasks.records import DatasetManifest, HeldOut, PreparedDataset, PreparedSplit

CHUNK_BYTES = 8 * 2**20


def prepare(dataset: config.Dataset, manifest: DatasetManifest) -> PreparedDataset:
    """Decode each split of a downloaded dataset into data/<name>/prepared, in the order of its shards.

    A split becomes <split>_images.npy, uint8 (n, height, width, channels), and <split>_labels.npy, int64 (n,). A split
    with unlabelled examples (class -1, as in ImageNet's test split) is left out. Where neither a test nor a validation
    split is there, a fifth of the training examples becomes the test split. The same input gives the same bytes.

    Args:
        dataset: ``image_size`` resizes every image (bilinear, antialiased, without keeping the aspect ratio).
        manifest: what `download` returned.

    Returns:
        The manifest, which is also in prepared/manifest.json.

    Raises:
        UserError: images of different sizes and no ``image_size``, a damaged shard, or a folder that cannot be written.
    """
    root = config.project_root()
    shape = _shape(dataset, manifest)
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
                splits, held_out = _write_all(builder, shape, new, target.relative_to(root))
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
                    held_out=held_out,
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
        raise files.unwritable(folder.relative_to(root), error) from None
    return prepared


def _shape(dataset: config.Dataset, manifest: DatasetManifest) -> tuple[int, int, int]:
    height, width = dataset.image_size or manifest.image_shape[:2]
    if height is None or width is None:
        raise UserError(
            f"dataset.image_size = null: the images of {manifest.name} differ in size (shape {manifest.image_shape}). "
            "Give --set dataset.image_size=[HEIGHT,WIDTH]"
        )
    return height, width, manifest.image_shape[2]


def _write_all(
    builder: Any, shape: tuple[int, int, int], new: Path, target: Path
) -> tuple[dict[str, PreparedSplit], HeldOut | None]:
    """Write every split that has labels; the training split last, because it may have to give a test split."""
    splits: dict[str, PreparedSplit] = {}
    held_out = None
    for name in sorted(builder.info.splits, key=lambda name: (name == "train", name)):
        if name == "train" and splits.keys().isdisjoint(("test", "validation")):
            held_out = datasets.hold_out(builder.info.splits[name].num_examples)
        splits |= _write(builder, name, shape, new, target, held_out)
    return dict(sorted(splits.items())), held_out


def _write(
    builder: Any, split: str, shape: tuple[int, int, int], new: Path, target: Path, held_out: HeldOut | None
) -> dict[str, PreparedSplit]:
    """Write one split's arrays, or two where a test split is held out; none for a split with unlabelled examples."""
    num_examples = builder.info.splits[split].num_examples
    num_classes = builder.info.features[builder.info.supervised_keys[1]].num_classes
    chosen = {split: np.ones(num_examples, bool)}
    if held_out is not None:
        held = datasets.is_held_out(num_examples, held_out)
        chosen = {split: ~held, "test": held}
    num_read = 0
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(_Writer(new, name, int(rows.sum()), shape, num_classes))
            for name, rows in chosen.items()
        }
        for images, labels in _read(builder, split, shape):
            if labels.min() < 0:
                for writer in writers.values():
                    writer.remove()
                return {}
            for name, writer in writers.items():
                rows = chosen[name][num_read : num_read + len(labels)]
                writer.write(images[rows], labels[rows]) if held_out else writer.write(images, labels)
            num_read += len(labels)
    if num_read != num_examples:
        raise tf.errors.DataLossError(None, None, f"{num_read} of the {num_examples} examples of split '{split}'")
    return {name: writer.describe(target) for name, writer in writers.items()}


class _Writer:
    """The two arrays of one split, with what is counted while they are written."""

    def __init__(self, new: Path, split: str, num_examples: int, shape: tuple[int, int, int], num_classes: int) -> None:
        self._num_examples = num_examples
        self._num_pixels = num_examples * shape[0] * shape[1]
        self._class_counts = np.zeros(num_classes, np.int64)
        self._sums, self._squares = np.zeros(shape[2], np.int64), np.zeros(shape[2], np.int64)
        self._paths = new / f"{split}_images.npy", new / f"{split}_labels.npy"
        # Plain writes, because the pages of a memory map that is written to stay resident and grow with the dataset.
        self._images, self._labels = (path.open("wb") for path in self._paths)
        _write_header(self._images, np.uint8, (num_examples, *shape))
        _write_header(self._labels, np.int64, (num_examples,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._images, self._labels):
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def remove(self) -> None:
        """Remove what was written."""
        for path in self._paths:
            path.unlink()

    def write(self, images: Any, labels: Any) -> None:
        """Write some examples after those before."""
        self._images.write(images.data)
        self._labels.write(labels.data)
        self._class_counts += np.bincount(labels, minlength=len(self._class_counts))
        self._sums += images.sum((0, 1, 2), np.int64)
        self._squares += np.square(images, dtype=np.uint16).sum((0, 1, 2), np.int64)

    def describe(self, target: Path) -> PreparedSplit:
        """Return the record of the arrays, which will lie in ``target``."""
        images, labels = self._paths
        return PreparedSplit(
            num_examples=self._num_examples,
            images=(target / images.name).as_posix(),
            labels=(target / labels.name).as_posix(),
            sha256={(target / path.name).as_posix(): _sha256(path) for path in self._paths},
            class_counts=tuple(self._class_counts.tolist()),
            pixel_mean=tuple(total / self._num_pixels for total in self._sums.tolist()),
            # In whole numbers up to the root: exact, whatever the size of the dataset.
            pixel_std=tuple(
                math.sqrt(self._num_pixels * square - total**2) / self._num_pixels
                for total, square in zip(self._sums.tolist(), self._squares.tolist(), strict=True)
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
