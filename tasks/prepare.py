"""prepare: decodes each split of a dataset of any kind once, into memory-mappable arrays with statistics and hashes."""

import contextlib
import json
import math
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tasks import config, records
from tasks.data import checks, kinds, prepared_data
from tasks.data.images import MAX_SIDE
from tasks.records import Feature, PreparedDataset, PreparedSplit, Target
from tasks.system import files, machine
from tasks.system.errors import UserError, listed


def prepare(dataset: config.Description) -> PreparedDataset:
    """Write the arrays of each split of a dataset into data/<name>/prepared.

    A split becomes <split>_<feature>s.npy for each feature, of its dtype, (n, *shape), <split>_labels.npy and, if
    examples have weights, <split>_weights.npy, see ``records.PreparedSplit``. <feature>_vocabulary.json contains the
    vocabulary of a feature, and test_metadata.json the metadata columns of the test split. The same source gives the
    same bytes. Return the manifest, which is also in prepared/manifest.json.

    Raises:
        UserError: the dataset's kind or its checks refuse the data, or the folder cannot be written.
    """
    # Pillow warns about damaged EXIF data, but reads the pixels.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    root = config.project_root()
    folder = root / "data" / dataset.name
    target = folder / "prepared"
    try:
        files.remove_scratch(folder.glob(".prepared.*"), root)  # of killed runs
        examples = kinds.find_kind(dataset.kind).examples(dataset)
        with files.scratch(folder, ".prepared.") as scratch:
            new = scratch / "new"
            new.mkdir()
            splits, features, to_learn = _write(dataset, examples, new, target.relative_to(root))
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
                target=to_learn,
                splits=splits,
                sha256={
                    path: files.digest(new / Path(path).name)
                    for path in (*vocabularies.values(), *([metadata] if metadata else []))
                },
                metadata=metadata,
                # Without broken files, which were left out.
                held_out=examples.held_out
                and examples.held_out.model_copy(update={"num_examples": splits["test"].num_examples}),
                validation_by_class=dataset.is_local and to_learn.task == "classification",
                **examples.origin,
            )
            records.save(prepared, new / "manifest.json")
            checks.judge(dataset, prepared, new, scratch / "report", examples.name_of, examples.sizes_of)
            prepared_data.set_foreign_aside(dataset.name)
            for part, made in (("prepared", new), ("report", scratch / "report")):
                if (folder / part).is_dir():
                    (folder / part).rename(scratch / f"old {part}")
                if made.is_dir():
                    made.rename(folder / part)
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
        # Entered last and left first: if a write fails, reading stops.
        for block in stack.enter_context(contextlib.closing(examples.blocks())):
            writers[block.split].write(block)
        splits = {split: writer.describe(target) for split, writer in sorted(writers.items())}
    if dataset.is_local:  # A builder of TFDS may declare classes and splits that have no examples.
        _check(dataset, examples.target, splits)
    if (fitted := writers.get("train")) is None:
        return splits, examples.features, examples.target
    for feature in examples.features.values():
        if feature.kind == "image" and max(feature.shape) > MAX_SIDE and not getattr(dataset, "image_size", None):
            height, width, _ = feature.shape
            less = f"set dataset.image_size in data/{dataset.name}/params.yaml"
            print(
                f"all images of {dataset.name} are {height} x {width} (height x width) and keep this size. To train on "
                f"smaller ones, {less if hasattr(dataset, 'image_size') else 'resize them first'}",
                file=sys.stderr,
            )
    features = {name: feature.model_copy(update=fitted.statistics(name)) for name, feature in examples.features.items()}
    return splits, features, examples.target.model_copy(update=fitted.statistics("label"))


def _write_vocabularies(examples: kinds.Examples, new: Path, target: Path) -> dict[str, str]:
    """Write the vocabularies into ``new``; return their paths in ``target`` by feature."""
    for name, texts in examples.vocabularies.items():
        with (new / f"{name}_vocabulary.json").open("w", encoding="utf-8") as file:
            json.dump(texts, file, ensure_ascii=False, indent=0)
            files.flush(file)
    return {name: (target / f"{name}_vocabulary.json").as_posix() for name in examples.vocabularies}


def _write_metadata(examples: kinds.Examples, new: Path, target: Path) -> str | None:
    """Write the metadata columns of the test split; return their path in ``target``, None without any."""
    if examples.metadata_of is None:
        return None
    with (new / "test_metadata.json").open("w", encoding="utf-8") as file:
        found = {name: {"kind": one.kind, "values": one.values} for name, one in examples.metadata_of("test").items()}
        json.dump(found, file, ensure_ascii=False, allow_nan=False)
        files.flush(file)
    return (target / "test_metadata.json").as_posix()


def _check(dataset: config.Description, target: Target, splits: dict[str, PreparedSplit]) -> None:
    """Refuse an empty split, and a class without training examples, as can result from broken files; warn of classes
    without test examples."""
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
                f"{len(target.class_names)} classes, so its metrics do not cover them: "
                f"{listed(untested)}",
                file=sys.stderr,
            )


class _Array:
    """A .npy file that grows."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.path, self._dtype, self._shape, self._length = path, dtype, shape, 0
        # Plain writes, because the pages of a writable memory map stay resident and grow with the dataset.
        self._file = path.open("wb")
        self._write_header()

    def write(self, rows: npt.NDArray[Any]) -> None:
        """Append some rows."""
        self._length += len(rows)
        self._file.write(np.ascontiguousarray(rows).data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def finish(self) -> str:
        """Write the number of rows, flush and close; return the sha256 of the file."""
        self._file.seek(0)
        self._write_header()  # It keeps its length: NumPy leaves room for any number of rows.
        files.flush(self._file)
        self._file.close()
        return files.digest(self.path)

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self._file, {**header, "shape": (self._length, *self._shape)})


class _SplitWriter:
    """Writes the arrays of one split and computes their statistics."""

    def __init__(self, new: Path, split: str, examples: kinds.Examples) -> None:
        self._new, self._split = new, split
        self._num_examples = 0
        self._target = examples.target
        self._class_counts = np.zeros(len(examples.target.class_names), np.int64)
        self._num_missing: Counter[str] = Counter()
        dtype, shape = np.dtype(examples.target.label_dtype), examples.target.label_shape
        self._labels = _Array(new / f"{split}_labels.npy", dtype, shape)
        self._weights: _Array | None = None
        self._features = {}
        self._moments: dict[str, _PixelMoments | _Moments] = {}
        if examples.target.task == "regression":
            self._moments["label"] = _Moments(examples.target.num_outputs)
        for name, feature in examples.features.items():
            self._features[name] = _Array(new / f"{split}_{name}s.npy", np.dtype(feature.dtype), feature.shape)
            if feature.kind == "image":
                self._moments[name] = _PixelMoments(feature.shape[-1])
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
            self._moments["label"].add(labels)
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
        """Return mean and deviation of a feature or of ``label``; an empty dict without statistics."""
        return self._moments[name].statistics() if name in self._moments else {}


class _PixelMoments:
    """Mean and deviation of each channel of an image, in integers up to the root: exact for any dataset."""

    def __init__(self, channels: int) -> None:
        self._count, self._sums, self._squares = 0, np.zeros(channels, np.int64), np.zeros(channels, np.int64)

    def add(self, images: npt.NDArray[Any]) -> None:
        # Four times as fast as a histogram, and releases Python's lock. 2**16 squares of bytes fit into 32 bits.
        pixels, channels = images.reshape(len(images), -1), len(self._sums)
        dtype = np.uint32 if len(images) <= 2**16 else np.int64
        sums = np.einsum("ij->j", pixels, dtype=dtype, casting="unsafe")
        squares = np.einsum("ij,ij->j", pixels, pixels, dtype=dtype, casting="unsafe")
        self._sums += sums.reshape(-1, channels).sum(0, np.int64)
        self._squares += squares.reshape(-1, channels).sum(0, np.int64)
        self._count += images.size // channels

    def statistics(self) -> dict[str, tuple[float, ...]]:
        count, sums, squares = self._count, self._sums.tolist(), self._squares.tolist()
        return {
            "mean": tuple(total / count for total in sums),
            "deviation": tuple(
                math.sqrt(count * square - total**2) / count for total, square in zip(sums, squares, strict=True)
            ),
        }


class _Moments:
    """Mean and deviation of each of k numbers, float64, combined over blocks by the method of Chan, Golub and LeVeque,
    which keeps its precision if the mean is far from 0."""

    def __init__(self, width: int) -> None:
        self._count, self._mean, self._squares = 0, np.zeros(width), np.zeros(width)

    def add(self, rows: npt.NDArray[Any]) -> None:
        if not len(rows):  # All images of the block are broken, so it has no mean.
            return
        count = self._count + len(rows)
        values = rows.astype(np.float64)
        mean = values.mean(0)
        apart = mean - self._mean
        values -= mean  # In place, because copies would take half of the time.
        self._squares += np.square(values, out=values).sum(0) + np.square(apart) * (self._count * len(rows) / count)
        self._mean += apart * (len(rows) / count)
        self._count = count

    def statistics(self) -> dict[str, tuple[float, ...]]:
        deviation = np.sqrt(self._squares / max(self._count, 1))
        return {"mean": tuple(self._mean.tolist()), "deviation": tuple(deviation.tolist())}
