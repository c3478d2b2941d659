"""prepare: a dataset of any kind -> every split decoded once, as memory-mappable arrays with statistics and hashes."""

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from tasks import config, dataset_folder, dataset_kinds, files, prepared_data, records
from tasks.errors import UserError
from tasks.records import Feature, HeldOut, PreparedDataset, PreparedSplit, Target


def prepare(dataset: config.Description) -> PreparedDataset:
    """Write the arrays of each split of a dataset into data/<name>/prepared.

    A split becomes <split>_<feature>s.npy for each feature, of its dtype, (n, *shape), and <split>_labels.npy, see
    ``records.PreparedSplit``. The same source gives the same bytes.

    Args:
        dataset: what data/<name>/params.yaml says.

    Returns:
        The manifest, which is also in prepared/manifest.json.

    Raises:
        UserError: what the dataset's kind refuses, or a folder that cannot be written.
    """
    root = config.project_root()
    folder = root / "data" / dataset.name
    target = folder / "prepared"
    try:
        with FileLock(folder / ".prepare.lock"):
            if isinstance(dataset, config.LocalDescription):
                dataset_folder.refuse_unreadable(dataset.source, root)
            examples = dataset_kinds.find(dataset.kind).examples(dataset)
            files.remove_scratch(folder.glob(".prepared.*"), root)  # of killed runs
            with files.scratch(folder, ".prepared.") as scratch:
                new = scratch / "new"
                new.mkdir()
                splits, features = _write(dataset, examples, new, target.relative_to(root))
                prepared = PreparedDataset(
                    name=dataset.name,
                    kind=dataset.kind,
                    version=examples.version,
                    folder=target.relative_to(root).as_posix(),
                    features=features,
                    target=examples.target,
                    splits=splits,
                    held_out=_counted(examples.held_out, splits),
                    **examples.origin,
                )
                records.save(prepared, new / "manifest.json")
                prepared_data.set_foreign_aside(dataset.name)
                if target.exists():
                    target.rename(scratch / "old")
                new.rename(target)
    except OSError as error:
        raise files.unwritable(folder.relative_to(root), error) from None
    return prepared


def _write(
    dataset: config.Description, examples: dataset_kinds.Examples, new: Path, target: Path
) -> tuple[dict[str, PreparedSplit], dict[str, Feature]]:
    """Write all arrays into ``new``; return the records of the splits, which will lie in ``target``, and the features
    with what was taken of the training split."""
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(_Writer(new, split, examples)) for split in examples.splits}
        for block in examples.blocks():
            writers[block.split].write(block.features, block.labels)
    splits = {split: writer.describe(target) for split, writer in sorted(writers.items())}
    if dataset.is_local:  # A builder of TFDS may declare classes and splits that have no examples.
        _check(dataset, examples.target, splits)
    fitted = writers.get("train")
    features = {
        name: feature.model_copy(update=fitted.statistics(name)) if fitted else feature
        for name, feature in examples.features.items()
    }
    return splits, features


def _counted(held_out: HeldOut | None, splits: dict[str, PreparedSplit]) -> HeldOut | None:
    """Return the test split that was held out, without the broken files that were left out of it."""
    return held_out.model_copy(update={"num_examples": splits["test"].num_examples}) if held_out else None


def _check(dataset: config.Description, target: Target, splits: dict[str, PreparedSplit]) -> None:
    """Refuse a split with nothing in it, and a class that nothing is left of to train on, as where files are broken."""
    for name, split in splits.items():
        if not split.num_examples:
            raise UserError(f"dataset {dataset.name}: no example is left in the split '{name}'")
        if name == "train" and 0 in split.class_counts:
            missing = target.class_names[split.class_counts.index(0)]
            raise UserError(f"dataset {dataset.name}: no example of the class '{missing}' is left to train on")


class _Writer:
    """The arrays of one split, with what is counted while they are written."""

    def __init__(self, new: Path, split: str, examples: dataset_kinds.Examples) -> None:
        self._num_examples = 0
        self._class_counts = np.zeros(len(examples.target.class_names), np.int64)
        self._moments = {name: _PixelMoments(feature) for name, feature in examples.features.items()}
        self._labels = _Array(new / f"{split}_labels.npy", np.dtype(np.int64), ())
        self._features = {}
        for name, feature in examples.features.items():
            self._features[name] = _Array(new / f"{split}_{name}s.npy", np.dtype(feature.dtype), feature.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for array in (*self._features.values(), self._labels):
            array.close()

    def write(self, features: Mapping[str, npt.NDArray[Any]], labels: npt.NDArray[Any]) -> None:
        """Write some examples after those before."""
        self._num_examples += len(labels)
        self._labels.write(labels)
        for name, array in features.items():
            self._features[name].write(array)
            self._moments[name].add(array)
        self._class_counts += np.bincount(labels, minlength=len(self._class_counts))

    def describe(self, target: Path) -> PreparedSplit:
        """Return the record of the arrays, which will lie in ``target``."""
        paths = {name: array.path for name, array in self._features.items()}
        return PreparedSplit(
            num_examples=self._num_examples,
            features={name: (target / path.name).as_posix() for name, path in paths.items()},
            labels=(target / self._labels.path.name).as_posix(),
            sha256={
                (target / path.name).as_posix(): files.digest(path) for path in (*paths.values(), self._labels.path)
            },
            class_counts=tuple(self._class_counts.tolist()),
        )

    def statistics(self, name: str) -> dict[str, tuple[float, ...]]:
        """Return the mean and the deviation of a feature."""
        return self._moments[name].statistics()


class _Array:
    """A .npy file that grows."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.path, self._dtype, self._shape, self._length = path, dtype, shape, 0
        # Plain writes, because the pages of a memory map that is written to stay resident and grow with the dataset.
        self._file = path.open("wb")
        self._write_header()

    def write(self, rows: npt.NDArray[Any]) -> None:
        """Write some rows after those before.

        Raises:
            ValueError: they are of another dtype or shape.
        """
        if (rows.dtype, rows.shape[1:]) != (self._dtype, self._shape):
            raise ValueError(f"{self.path.name} takes {self._dtype} {self._shape}, got {rows.dtype} {rows.shape[1:]}")
        self._length += len(rows)
        self._file.write(np.ascontiguousarray(rows).data)

    def close(self) -> None:
        """Write how many rows there are, and flush."""
        self._file.seek(0)
        self._write_header()  # As long as the one before: NumPy leaves room for any number of rows.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self._file, {**header, "shape": (self._length, *self._shape)})


class _PixelMoments:
    """Mean and deviation of each channel of an image, in whole numbers up to the root: exact for any dataset."""

    def __init__(self, feature: Feature) -> None:
        self._count = 0
        self._sums, self._squares = np.zeros(feature.shape[-1], np.int64), np.zeros(feature.shape[-1], np.int64)

    def add(self, images: npt.NDArray[Any]) -> None:
        self._count += math.prod(images.shape[:-1])
        self._sums += images.sum((0, 1, 2), np.int64)
        self._squares += np.square(images, dtype=np.uint16).sum((0, 1, 2), np.int64)

    def statistics(self) -> dict[str, tuple[float, ...]]:
        sums, squares = self._sums.tolist(), self._squares.tolist()
        return {
            "mean": tuple(total / self._count for total in sums),
            "deviation": tuple(
                math.sqrt(self._count * square - total**2) / self._count
                for total, square in zip(sums, squares, strict=True)
            ),
        }
