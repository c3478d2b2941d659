"""Arrays of NumPy: a .npz file, or a folder of .npy files, with images or numbers, and what is to be learnt of each."""

import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data.encoding.cells import spelled
from tasks.data.kinds import Block, Examples, Metadata, split_rows
from tasks.data.source_files import is_by_product
from tasks.records import Feature, HeldOut, Target
from tasks.system.errors import UserError, cut, listed, one_of
from tasks.system.files import DAMAGED_FILE

NAMES = {"train": ("x_train", "y_train"), "validation": ("x_val", "y_val"), "test": ("x_test", "y_test")}
"""The arrays of each split, as in Keras' own datasets; without splits they are `x` and `y`."""
WANTED = {
    "category": ("texts, whole numbers, or true and false", "USiub"),
    "number": ("numbers", "iufb"),
    "datetime": ("datetime64", "M"),
}
"""What an array of metadata of each kind has, in words and as NumPy calls it."""
CHUNK_BYTES = 8 * 2**20
MAX_CLASSES = 100_000
MAX_FRACTION_CLASSES = 20
"""Whole numbers that are stored as fractions (0.0, 1.0) are classes if no more of them differ, as in a table."""
CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class _StoredArray:
    """One array, of which a part is read at a time."""

    source: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, rows_a_part: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows from the first to the last, so many at once."""
        with _opened(self.source, self.name) as (file, shape, _, dtype):
            width = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
            for first in range(0, shape[0], rows_a_part):
                count = min(rows_a_part, shape[0] - first)
                content = file.read(count * width)
                if len(content) < count * width:
                    raise _too_short(self.source, self.name)
                yield np.frombuffer(content, dtype).reshape(count, *shape[1:])

    def whole(self) -> npt.NDArray[Any]:
        """Return all rows."""
        return np.concatenate([*self.read(max(1, self.shape[0]))])


def examples(dataset: config.Arrays) -> Examples:
    """Return what lies in `x_train` and `y_train` (and `x_val`, `y_val`, `x_test`, `y_test`), or in `x` and `y`.

    `x` is uint8 (n, height, width) or (n, height, width, channels): images; or any real dtype (n, k): k numbers. `y` is
    (n,) of classes, whole numbers or words, each as it is written; (n, k) of 0 and 1, which are k labels, or one class
    where each row has a single 1; or fractions (n,) or (n, k): the numbers of a regression. ``dataset.task`` says so
    where it is meant otherwise. What ``dataset.metadata`` names lies beside them, one value an example. Objects, which
    NumPy would unpickle, are never read.

    Raises:
        UserError: no such arrays, or of another dtype, shape or number of examples than they must have.
    """
    members = _members(config.project_root() / dataset.source)
    splits = _splits(dataset, members)
    name, feature = _feature(dataset, splits["train"][0])
    target, labels = _target(dataset, {split: y.whole() for split, (_, y) in splits.items()})
    rows: dict[str, npt.NDArray[np.int64]] = {}
    held_out = None
    if "test" not in splits:
        if target.task == "classification":
            rows = split_rows(labels["train"], target.class_names, dataset)
        else:
            rows = split_rows(np.zeros(len(labels["train"]), np.int64), ("all",), dataset)
        held_out = HeldOut(num_examples=len(rows["test"]), seed=dataset.seed)
    metadata = _metadata(dataset, members, splits, rows)
    return Examples(
        version="1",
        features={name: feature},
        target=target,
        splits=tuple({**splits, **rows}),
        blocks=partial(_blocks, dataset, splits, rows, (name, feature), labels),
        held_out=held_out,
        name_of=(lambda split, row: f"row {rows[split][row] if split in rows else row}") if rows else None,
        metadata_of=(lambda split: metadata) if metadata else None,
    )


def _splits(dataset: config.Arrays, members: dict[str, _StoredArray]) -> dict[str, tuple[_StoredArray, _StoredArray]]:
    """Return what is given and what is learnt of each split; refuse arrays that do not belong together."""
    splits = {split: (members[x], members[y]) for split, (x, y) in NAMES.items() if x in members and y in members}
    for pair in NAMES.values():
        if len(members.keys() & set(pair)) == 1:
            there, absent = pair if pair[0] in members else pair[::-1]
            raise UserError(f"dataset.source = '{dataset.source}' has {there}, and not {absent}: give both or neither")
    if not splits and {"x", "y"} <= members.keys():
        splits = {"train": (members["x"], members["y"])}
    if "train" not in splits:
        raise UserError(
            f"dataset.source = '{dataset.source}' has the arrays {', '.join(sorted(members)) or 'none'}. Wanted: "
            f"x_train and y_train (and {', '.join(f'{x} and {y}' for x, y in list(NAMES.values())[1:])}), or x and y"
        )
    for x, y in splits.values():
        if not x.shape or not x.shape[0] or x.shape[:1] != y.shape[:1]:
            raise UserError(
                f"dataset.source = '{dataset.source}': {x.name} has the shape {x.shape} and {y.name} {y.shape}: they "
                "need as many rows, one for each example, and at least one"
            )
        if x.shape[1:] != splits["train"][0].shape[1:] or x.dtype != splits["train"][0].dtype:
            first = splits["train"][0]
            raise UserError(
                f"dataset.source = '{dataset.source}': {x.name} is {x.dtype} {x.shape} and {first.name} {first.dtype} "
                f"{first.shape}: all splits need one dtype and one shape of an example"
            )
    return splits


def _metadata(
    dataset: config.Arrays,
    members: Mapping[str, _StoredArray],
    splits: Mapping[str, tuple[_StoredArray, _StoredArray]],
    rows: Mapping[str, npt.NDArray[np.int64]],
) -> dict[str, Metadata]:
    """Return what is known of the test examples beside their features, by its name in ``dataset.metadata``."""
    x, _ = splits["train" if rows else "test"]
    learnt = {one.name for pair in splits.values() for one in pair}
    found = {}
    for name, kind in dataset.metadata.items():
        array = members.get(own := f"{name}{x.name[1:]}")  # `site_test` beside `x_test`, `site` beside `x`.
        if own in learnt or array is None:
            others = sorted(members.keys() - learnt)
            see = (
                None
                if others
                else f"dataset.source = '{dataset.source}' has no others than {', '.join(sorted(learnt))}"
            )
            raise UserError(f"dataset.metadata.{name}: {one_of('array', own, others, see)}")
        if array.shape != x.shape[:1]:
            raise UserError(
                f"dataset.metadata.{name}: {own} has the shape {array.shape}, and {x.name} {x.shape}: it needs one "
                "value an example"
            )
        values = array.whole()
        found[name] = Metadata(kind, _values(name, kind, values[rows["test"]] if rows else values))
    return found


def _values(name: str, kind: str, values: npt.NDArray[Any]) -> list[str | float | None]:
    """Return texts, or numbers, of which a datetime has days since 1970; None where there is none."""
    is_text = values.dtype.kind in "US"
    wanted, kinds = WANTED[kind]
    if values.dtype.kind not in kinds:
        others = [one for one, (_, of) in WANTED.items() if values.dtype.kind in of]
        instead = f", or give the kind {' or '.join(others)}" if others else ""
        raise UserError(f"dataset.metadata.{name} = {kind}: the array is {values.dtype}. Wanted: {wanted}{instead}")
    if kind == "category":
        texts = _decoded(f"dataset.metadata.{name} = category", values)
        return [None if is_text and not text else str(text) for text in texts.tolist()]
    if kind == "datetime":
        values = (values - np.datetime64(0, "D")) / np.timedelta64(1, "D")
    if np.isinf(values.astype(np.float64)).any():
        raise UserError(f"dataset.metadata.{name} = number: a value is infinite. A missing one is NaN")
    return [None if math.isnan(value) else float(value) for value in values.tolist()]


def _decoded(what: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return bytes as texts, and all else as it is.

    Args:
        what: the values are, with their key, for the message.
    """
    if values.dtype.kind != "S":
        return values
    try:
        return np.char.decode(values, "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what}: bytes that are not UTF-8 ({cut(repr(error.object))}). Save texts: np.char.decode(values, "
            "'latin-1'), or whatever their encoding is"
        ) from None


def _blocks(
    dataset: config.Arrays,
    splits: dict[str, tuple[_StoredArray, _StoredArray]],
    rows: dict[str, npt.NDArray[np.int64]],
    named: tuple[str, Feature],
    labels: dict[str, npt.NDArray[Any]],
) -> Iterator[Block]:
    """Yield the examples of all splits; ``rows`` says which of the training split's are whose where it is divided."""
    name, feature = named
    for split, (x, _) in splits.items():
        of_split = np.full(x.shape[0], split, object)
        for own, chosen in rows.items() if split == "train" else ():
            of_split[chosen] = own
        rows_a_part = max(1, CHUNK_BYTES // max(1, int(np.prod(x.shape[1:])) * x.dtype.itemsize))
        for first, part in zip(range(0, x.shape[0], rows_a_part), x.read(rows_a_part), strict=True):
            if feature.kind == "number" and not np.isfinite(part).all():
                row = first + int(np.argwhere(~np.isfinite(part))[0, 0])
                raise UserError(f"dataset.source = '{dataset.source}': row {row} of {x.name} is not finite")
            to, told = of_split[first : first + len(part)], labels[split][first : first + len(part)]
            for own in sorted(set(to)):
                values = part[to == own].reshape(-1, *feature.shape).astype(feature.dtype, copy=False)
                yield Block(own, {name: values}, told[to == own])


def _members(source: Path) -> dict[str, _StoredArray]:
    """Return the arrays of a file or folder by name; only their headers are read."""
    if source.is_dir():
        names = sorted(path.stem for path in source.glob("*.npy") if not is_by_product(path.name))
    else:
        try:
            with zipfile.ZipFile(source) as archive:
                names = sorted(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
        except FileNotFoundError:
            raise UserError(f"dataset.source = '{source}': no such file") from None
        except DAMAGED_FILE as error:
            raise UserError(f"dataset.source = '{source}': cannot be read as a .npz file ({cut(str(error))})") from None
    members = {}
    for name in names:
        with _opened(source, name) as (_, shape, fortran, dtype):
            pass
        if dtype.hasobject:
            raise UserError(
                f"dataset.source = '{source}': the array '{name}' holds pickled objects, which could run code when "
                "they are read. Save it as numbers or as text: np.asarray(values, dtype=str)"
            )
        if fortran and len(shape) > 1:
            raise UserError(
                f"dataset.source = '{source}': the array '{name}' is in Fortran's order: save "
                "np.ascontiguousarray of it"
            )
        members[name] = _StoredArray(source, name, shape, dtype)
    return members


@contextmanager
def _opened(source: Path, name: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], bool, np.dtype[Any]]]:
    """Open an array where its values begin; give its shape, whether it is in Fortran's order, and its dtype, too."""
    file: IO[bytes]
    try:
        if source.is_dir():
            with (source / f"{name}.npy").open("rb") as file:
                yield file, *_header(source, name, file, os.fstat(file.fileno()).st_size)
        else:
            with zipfile.ZipFile(source) as archive, archive.open(f"{name}.npy") as file:
                yield file, *_header(source, name, file, archive.getinfo(f"{name}.npy").file_size)
    except DAMAGED_FILE as error:
        raise UserError(f"dataset.source = '{source}': the array '{name}' cannot be read ({cut(str(error))})") from None


def _header(source: Path, name: str, file: IO[bytes], num_bytes: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return what the header of an array says, where the file is large enough for that array."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if min(shape, default=0) < 0:
        raise ValueError(f"its header says that its shape is {shape}")
    # What the header promises is never asked of the memory before it is known to be there.
    if not dtype.hasobject and file.tell() + dtype.itemsize * math.prod(shape) > num_bytes:
        raise _too_short(source, name)
    return shape, fortran, dtype


def _too_short(source: Path, name: str) -> UserError:
    return UserError(f"dataset.source = '{source}': the array '{name}' ends too early")


def _feature(dataset: config.Arrays, x: _StoredArray) -> tuple[str, Feature]:
    """Return the only feature and its name."""
    shape = x.shape[1:] if len(x.shape) == 4 else (*x.shape[1:], 1)
    if x.dtype == np.uint8 and len(shape) == 3 and shape[2] in CHANNELS:
        return "image", Feature(kind="image", shape=shape, dtype="uint8")
    if x.dtype.kind in "iufb" and len(x.shape) == 2 and x.shape[1]:
        return "number", Feature(kind="number", shape=x.shape[1:], dtype="float32")
    raise UserError(
        f"dataset.source = '{dataset.source}': {x.name} is {x.dtype} {x.shape}. Wanted: images, uint8 (n, height, "
        f"width) or (n, height, width, channels) with {' or '.join(map(str, CHANNELS))} channels; or numbers (n, k)"
    )


def _target(dataset: config.Arrays, found: dict[str, npt.NDArray[Any]]) -> tuple[Target, dict[str, npt.NDArray[Any]]]:
    """Return what is learnt, and each split's labels as ``records.PreparedSplit`` has them."""
    if len({own.shape[1:] for own in found.values()}) > 1:
        shapes = ", ".join(str(own.shape) for own in found.values())
        raise UserError(f"dataset.source = '{dataset.source}': the labels have the shapes {shapes}: all need one width")
    source = f"dataset.source = '{dataset.source}'"
    found = {split: _decoded(f"{source}: the labels of {split}", own) for split, own in found.items()}
    every = np.concatenate([own.reshape(len(own), -1) for own in found.values()])
    width = every.shape[1]
    is_binary = every.dtype.kind in "iufb" and bool(np.isin(every, (0, 1)).all())
    is_one_hot = width > 1 and is_binary and bool((every.sum(1) == 1).all())
    task = dataset.task
    if task == "auto" and width == 1 and every.dtype.kind == "f":
        task = _task_of_fractions(dataset, every)
    elif task == "auto":
        is_of_classes = width == 1 or is_one_hot
        task = "classification" if is_of_classes else "multilabel" if is_binary else "regression"
    refused = f"dataset.source = '{dataset.source}', dataset.task = '{dataset.task}': the labels are {every.dtype}"
    if task == "regression" and every.dtype.kind in "iufb" and width:
        if not np.isfinite(every).all():
            raise UserError(f"{refused}, and row {int(np.argwhere(~np.isfinite(every))[0, 0])} of them is not finite")
        return Target(task="regression", num_outputs=width), {
            split: own.reshape(len(own), width).astype(np.float32) for split, own in found.items()
        }
    if task == "multilabel" and is_binary and width:
        names = tuple(map(str, range(width)))
        return Target(task="multilabel", num_outputs=width, class_names=names), {
            split: own.reshape(len(own), width).astype(np.uint8) for split, own in found.items()
        }
    if task == "classification" and is_one_hot:
        return Target.of_classes(map(str, range(width))), {
            split: own.argmax(1).astype(np.int64) for split, own in found.items()
        }
    is_whole = every.dtype.kind in "iub" or (every.dtype.kind == "f" and _are_whole(every))
    if task != "classification" or width != 1 or not (is_whole or every.dtype.kind == "U"):
        raise UserError(
            f"{refused} (n, {width}). Wanted: classes (n,), whole numbers or words; 0 and 1 (n, labels); or, for a "
            "regression, numbers (n,) or (n, k)"
        )
    names, numbers = _classes(dataset, every)
    if numbers.min() == numbers.max():
        only = names[numbers[0]]
        raise UserError(f"{refused}, and all labels are of the class '{only}': a classification needs two classes")
    ends = np.cumsum([len(own) for own in found.values()])[:-1]
    return Target.of_classes(names), dict(zip(found, np.split(numbers, ends), strict=True))


def _task_of_fractions(dataset: config.Arrays, labels: npt.NDArray[Any]) -> Literal["classification", "regression"]:
    """Return what is learnt of fractions, and print it where these are few whole numbers."""
    values = np.unique(labels)
    if len(values) > min(MAX_FRACTION_CLASSES, len(labels) / 2) or not _are_whole(values):
        return "regression"
    print(
        f"the labels of {dataset.name} are {labels.dtype}, and {len(values)} whole numbers, so they are classes "
        f"({listed([f'{value:.0f}' for value in values], 3)}). For a regression, give --set dataset.task=regression",
        file=sys.stderr,
    )
    return "classification"


def _are_whole(numbers: npt.NDArray[Any]) -> bool:
    return bool((np.isfinite(numbers) & (numbers == np.rint(numbers))).all())


def _classes(dataset: config.Arrays, labels: npt.NDArray[Any]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """Return the names of the classes, as a table's, and the class of each example, int64 (n,)."""
    values, places = np.unique(labels, return_inverse=True)
    numbers = places.ravel().astype(np.int64)
    if labels.dtype.kind == "U":
        names, of_value = np.unique([spelled(str(value)) for value in values], return_inverse=True)
        return tuple(map(str, names)), of_value.astype(np.int64)[numbers]
    lowest, highest = int(values[0]), int(values[-1])
    # -1 is how many write that there is no class; -1 and 1 alone are two classes.
    if (lowest < 0 and values.tolist() != [-1, 1]) or len(values) > MAX_CLASSES:
        raise UserError(
            f"dataset.source = '{dataset.source}': the labels go from {lowest} to {highest}: classes are whole numbers "
            f"from 0 on, or -1 and 1, and at most {MAX_CLASSES:,}. Leave out what has no class, write classes as "
            "words, or give dataset.task=regression where these are numbers to be learnt"
        )
    return tuple(str(int(value)) for value in values), numbers
