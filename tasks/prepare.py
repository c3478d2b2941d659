"""prepare: a dataset of any kind -> each split decoded once, as memory-mappable arrays with statistics and hashes."""

import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from tasks import config, records
from tasks.data import checks, kinds, prepared_data, quality_report, source_files
from tasks.records import Feature, PreparedDataset, PreparedSplit, Target
from tasks.system import files, machine
from tasks.system.errors import UserError, listed


def prepare(dataset: config.Description) -> PreparedDataset:
    """Write the arrays of each split of a dataset into data/<name>/prepared.

    A split becomes <split>_<feature>s.npy for each feature, of its dtype, (n, *shape), <split>_labels.npy and, where
    examples have weights, <split>_weights.npy, see ``records.PreparedSplit``. A feature with a vocabulary has it in
    <feature>_vocabulary.json; columns of the test split that are not features are in test_metadata.json. The
    same source gives the same bytes.

    Args:
        dataset: the description in data/<name>/params.yaml.

    Returns:
        The manifest, which is also in prepared/manifest.json.

    Raises:
        UserError: what the dataset's kind or its checks refuse, or a folder that cannot be written.
    """
    root = config.project_root()
    folder = root / "data" / dataset.name
    target = folder / "prepared"
    try:
        with FileLock(folder / ".prepare.lock"):
            if isinstance(dataset, config.LocalDescription):
                for source in dataset.sources:
                    source_files.refuse_unreadable(source, root)
            examples = kinds.find_kind(dataset.kind).examples(dataset)
            files.remove_scratch(folder.glob(".prepared.*"), root)  # of killed runs
            with files.scratch(folder, ".prepared.") as scratch:
                new = scratch / "new"
                new.mkdir()
                splits, features, learnt = _write(dataset, examples, new, target.relative_to(root))
                vocabularies = _write_vocabularies(examples, new, target.relative_to(root))
                metadata = _write_metadata(examples, new, target.relative_to(root))
                prepared = PreparedDataset(
                    name=dataset.name,
                    kind=dataset.kind,
                    version=examples.version,
                    folder=target.relative_to(root).as_posix(),
                    features={
                        name: feature.model_copy(update={"vocabulary": vocabularies.get(name)})
                        for name, feature in features.items()
                    },
                    target=learnt,
                    splits=splits,
                    sha256={
                        path: files.digest(new / Path(path).name)
                        for path in (*vocabularies.values(), *([metadata] if metadata else []))
                    },
                    metadata=metadata,
                    # Without the broken files that were left out of it.
                    held_out=examples.held_out
                    and examples.held_out.model_copy(update={"num_examples": splits["test"].num_examples}),
                    validation_by_class=dataset.is_local and learnt.task == "classification",
                    **examples.origin,
                )
                records.save(prepared, new / "manifest.json")
                checks.judge(dataset, prepared, new, scratch / "report", examples.name_of, examples.sizes_of)
                prepared_data.set_foreign_aside(dataset.name)
                if target.exists():
                    target.rename(scratch / "old")
                new.rename(target)
                quality_report.replace(scratch / "report", folder)
    except OSError as error:
        raise files.unwritable(folder.relative_to(root), error) from None
    return prepared


def _write(
    dataset: config.Description, examples: kinds.Examples, new: Path, target: Path
) -> tuple[dict[str, PreparedSplit], dict[str, Feature], Target]:
    """Write all arrays into ``new``; return the records of the splits, with their paths in ``target``, and features and
    target with the statistics of the training split."""
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(_SplitWriter(new, split, examples)) for split in examples.splits}
        # Entered last, left first: where a write fails, nothing reads on for it.
        for block in stack.enter_context(contextlib.closing(_blocks(examples))):
            writers[block.split].write(block)
        splits = {split: writer.describe(target) for split, writer in sorted(writers.items())}
    if dataset.is_local:  # A builder of TFDS may declare classes and splits that have no examples.
        _check(dataset, examples.target, splits)
    if (fitted := writers.get("train")) is None:
        return splits, examples.features, examples.target
    features = {name: feature.model_copy(update=fitted.statistics(name)) for name, feature in examples.features.items()}
    return splits, features, examples.target.model_copy(update=fitted.target_statistics())


def _blocks(examples: kinds.Examples) -> Generator[kinds.Block]:
    """Yield all blocks; to close it also closes a generator that reads them."""
    yield from examples.blocks()


def _write_vocabularies(examples: kinds.Examples, new: Path, target: Path) -> dict[str, str]:
    """Write the vocabularies into ``new``; return their paths in ``target`` by feature."""
    for name, texts in examples.vocabularies.items():
        with (new / f"{name}_vocabulary.json").open("w", encoding="utf-8") as file:
            json.dump(texts, file, ensure_ascii=False, indent=0)
            files.flush(file)
    return {name: (target / f"{name}_vocabulary.json").as_posix() for name in examples.vocabularies}


def _write_metadata(examples: kinds.Examples, new: Path, target: Path) -> str | None:
    """Write the columns of the test split that are not features; return their path in ``target``, None without any."""
    if examples.metadata_of is None:
        return None
    with (new / "test_metadata.json").open("w", encoding="utf-8") as file:
        found = {name: {"kind": one.kind, "values": one.values} for name, one in examples.metadata_of("test").items()}
        json.dump(found, file, ensure_ascii=False, allow_nan=False)
        files.flush(file)
    return (target / "test_metadata.json").as_posix()


def _check(dataset: config.Description, target: Target, splits: dict[str, PreparedSplit]) -> None:
    """Refuse an empty split, and a class without training examples, as where files are broken; warn of classes without
    test examples."""
    for name, split in splits.items():
        if not split.num_examples:
            raise UserError(f"dataset {dataset.name}: no example is left in the split '{name}'")
        if name == "train" and 0 in split.class_counts:
            missing = target.class_names[split.class_counts.index(0)]
            raise UserError(f"dataset {dataset.name}: no example of the class '{missing}' is left to train on")
        if name == "test" and 0 in split.class_counts:
            counts = zip(target.class_names, split.class_counts, strict=True)
            untested = [repr(label) for label, count in counts if not count]
            print(
                f"warning: the test split of {dataset.name} has no example of {len(untested)} of "
                f"{len(target.class_names)} classes, so what is measured on it says nothing of them: "
                f"{listed(untested)}",
                file=sys.stderr,
            )


class _Array:
    """A .npy file that grows."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.path, self._dtype, self._shape, self._length = path, dtype, shape, 0
        # Plain writes, because the pages of a memory map that is written to stay resident and grow with the dataset.
        self._file = path.open("wb")
        self._write_header()

    def write(self, rows: npt.NDArray[Any]) -> None:
        """Append some rows.

        Raises:
            ValueError: they are of another dtype or shape.
        """
        if (rows.dtype, rows.shape[1:]) != (self._dtype, self._shape):
            raise ValueError(f"{self.path.name} takes {self._dtype} {self._shape}, got {rows.dtype} {rows.shape[1:]}")
        self._length += len(rows)
        self._file.write(np.ascontiguousarray(rows).data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def finish(self) -> str:
        """Write the number of rows, flush and close; return the sha256 of the file."""
        self._file.seek(0)
        self._write_header()  # As long as the one before: NumPy leaves room for any number of rows.
        files.flush(self._file)
        self._file.close()
        return files.digest(self.path)

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self._file, {**header, "shape": (self._length, *self._shape)})


class _SplitWriter:
    """The arrays of one split, with the statistics that are computed while they are written."""

    def __init__(self, new: Path, split: str, examples: kinds.Examples) -> None:
        self._new, self._split = new, split
        self._num_examples = 0
        self._target = examples.target
        self._class_counts = np.zeros(len(examples.target.class_names), np.int64)
        self._num_missing: Counter[str] = Counter()
        dtype, shape = np.dtype(examples.target.label_dtype), examples.target.label_shape
        self._labels = _Array(new / f"{split}_labels.npy", dtype, shape)
        self._label_moments = _Moments(examples.target.num_outputs)
        self._weights: _Array | None = None
        self._features = {}
        self._moments: dict[str, _PixelMoments | _Moments] = {}
        for name, feature in examples.features.items():
            self._features[name] = _Array(new / f"{split}_{name}s.npy", np.dtype(feature.dtype), feature.shape)
            if feature.kind == "image":
                self._moments[name] = _PixelMoments(feature)
            elif feature.kind == "number":
                self._moments[name] = _Moments(*feature.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for array in self._arrays():
            array.close()

    def _arrays(self) -> list[_Array]:
        return [*self._features.values(), self._labels, *([self._weights] if self._weights else [])]

    def write(self, block: kinds.Block) -> None:
        """Append some examples."""
        labels = block.labels
        if block.weights is not None:
            if self._weights is None:
                self._weights = _Array(self._new / f"{self._split}_weights.npy", np.dtype(np.float32), ())
            self._weights.write(block.weights)
        self._num_examples += len(labels)
        self._labels.write(labels)
        for name, array in block.features.items():
            self._features[name].write(array)
            if name in self._moments:
                self._moments[name].add(array)
        if self._target.task == "classification":
            self._class_counts += np.bincount(labels, minlength=len(self._class_counts))
        elif self._target.task == "multilabel":
            self._class_counts += labels.sum(0, np.int64)
        else:
            self._label_moments.add(labels)
        self._num_missing.update(block.missing)

    def describe(self, target: Path) -> PreparedSplit:
        """Finish the arrays; return their record, with their paths in ``target``."""
        places = {array.path: (target / array.path.name).as_posix() for array in self._arrays()}
        with ThreadPoolExecutor(machine.usable_cores()) as pool:
            digests = list(pool.map(_Array.finish, self._arrays()))
        return PreparedSplit(
            num_examples=self._num_examples,
            features={name: places[array.path] for name, array in self._features.items()},
            labels=places[self._labels.path],
            weights=places[self._weights.path] if self._weights else None,
            sha256=dict(zip(places.values(), digests, strict=True)),
            class_counts=tuple(self._class_counts.tolist()),
            num_missing={name: count for name, count in self._num_missing.items() if count},
        )

    def statistics(self, name: str) -> dict[str, tuple[float, ...]]:
        """Return mean and deviation of a feature; nothing for one that has none."""
        return self._moments[name].statistics() if name in self._moments else {}

    def target_statistics(self) -> dict[str, tuple[float, ...]]:
        """Return mean and deviation of the numbers of a regression; nothing for other tasks."""
        return self._label_moments.statistics() if self._target.task == "regression" else {}


MOST_SUMMED = 2**16
"""Images that are summed at once, pixel by pixel: the squares of so many values up to 255 sum to less than 2**32."""


class _PixelMoments:
    """Mean and deviation of each channel of an image, in whole numbers up to the root: exact for any dataset."""

    def __init__(self, feature: Feature) -> None:
        self._count = 0
        self._sums, self._squares = np.zeros(feature.shape[-1], np.int64), np.zeros(feature.shape[-1], np.int64)

    def add(self, images: npt.NDArray[Any]) -> None:
        self._count += math.prod(images.shape[:-1])
        # Over the images first, of which NumPy adds many pixels at once: a seventeenth of the time where there are
        # three channels.
        for first in range(0, len(images), MOST_SUMMED):
            rows = images[first : first + MOST_SUMMED].reshape(-1, math.prod(images.shape[1:]))
            self._sums += self._by_channel(rows.sum(0, np.uint32))
            self._squares += self._by_channel(np.square(rows, dtype=np.uint16).sum(0, np.uint32))

    def _by_channel(self, sums: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = sums.reshape(-1, len(self._sums)).sum(0, np.int64)
        return found

    def statistics(self) -> dict[str, tuple[float, ...]]:
        sums, squares = self._sums.tolist(), self._squares.tolist()
        return {
            "mean": tuple(total / self._count for total in sums),
            "deviation": tuple(
                math.sqrt(self._count * square - total**2) / self._count
                for total, square in zip(sums, squares, strict=True)
            ),
        }


class _Moments:
    """Mean and deviation of each of k numbers, float64: blocks are joined as Chan, Golub and LeVeque do, which loses no
    digits where the mean is far from 0."""

    def __init__(self, width: int) -> None:
        self._count, self._mean, self._squares = 0, np.zeros(width), np.zeros(width)

    def add(self, rows: npt.NDArray[Any]) -> None:
        if not len(rows):  # A block of which all images are broken: it has no mean.
            return
        count = self._count + len(rows)
        values = rows.astype(np.float64)
        mean = values.mean(0)
        apart = mean - self._mean
        values -= mean  # A copy for each step would take half of the time.
        self._squares += np.square(values, out=values).sum(0) + np.square(apart) * (self._count * len(rows) / count)
        self._mean += apart * (len(rows) / count)
        self._count = count

    def statistics(self) -> dict[str, tuple[float, ...]]:
        deviation = np.sqrt(self._squares / max(self._count, 1))
        return {"mean": tuple(self._mean.tolist()), "deviation": tuple(deviation.tolist())}
