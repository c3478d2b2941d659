"""Arrays of NumPy: a .npz file, or a folder of .npy files, with images and their classes."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.dataset_kinds import Block, Examples, split_rows
from tasks.errors import UserError
from tasks.records import Feature, HeldOut, Target

NAMES = {"train": ("x_train", "y_train"), "validation": ("x_val", "y_val"), "test": ("x_test", "y_test")}
"""The arrays of each split, as in Keras' own datasets; without splits they are `x` and `y`."""
CHUNK_BYTES = 8 * 2**20
MAX_CLASSES = 100_000
CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class _Member:
    """One array, of which a part is read at a time."""

    source: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, rows_at_once: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows from the first to the last, so many at once."""
        with _opened(self.source, self.name) as file:
            shape, _, dtype = _header(file)
            width = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
            for first in range(0, shape[0], rows_at_once):
                count = min(rows_at_once, shape[0] - first)
                content = file.read(count * width)
                if len(content) < count * width:
                    raise UserError(f"dataset.source = '{self.source}': the array '{self.name}' ends too early")
                yield np.frombuffer(content, dtype).reshape(count, *shape[1:])

    def whole(self) -> npt.NDArray[Any]:
        """Return all rows."""
        return np.concatenate([*self.read(max(1, self.shape[0]))])


def examples(dataset: config.Arrays) -> Examples:
    """Return what lies in `x_train` and `y_train` (and `x_val`, `y_val`, `x_test`, `y_test`), or in `x` and `y`.

    `x` is uint8 (n, height, width) or (n, height, width, channels): images. `y` are classes (n,): whole numbers from 0
    on, or words, which are counted in the order of the alphabet. Objects, which NumPy would unpickle, are never read.

    Raises:
        UserError: no such arrays, or of another dtype, shape or number of examples than they must have.
    """
    source = config.project_root() / dataset.source
    members = _members(source)
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
    feature = _feature(dataset, splits["train"][0])
    found = {split: y.whole() for split, (_, y) in splits.items()}
    names, labels = _classes(dataset, found)
    rows: dict[str, npt.NDArray[np.int64]] = {}
    held_out = None
    if splits.keys() == {"train"}:
        rows = split_rows(labels["train"], names, dataset)
        held_out = HeldOut(num_examples=len(rows["test"]), seed=dataset.seed)

    def blocks() -> Iterator[Block]:
        for split, (x, _) in splits.items():
            of_split = np.full(x.shape[0], split, object)
            for name, chosen in rows.items():
                of_split[chosen] = name
            at_once = max(1, CHUNK_BYTES // max(1, int(np.prod(x.shape[1:])) * x.dtype.itemsize))
            for first, part in zip(range(0, x.shape[0], at_once), x.read(at_once), strict=True):
                own, numbers = of_split[first : first + len(part)], labels[split][first : first + len(part)]
                for name in sorted(set(own)):
                    images = part[own == name].reshape(-1, *feature.shape)
                    yield Block(name, {"image": images}, numbers[own == name])

    return Examples(
        version="1",
        features={"image": feature},
        target=Target.of_classes(names),
        splits=tuple(rows or splits),
        blocks=blocks,
        held_out=held_out,
    )


def _members(source: Path) -> dict[str, _Member]:
    """Return the arrays of a file or folder by name; only their headers are read."""
    if source.is_dir():
        names = sorted(path.stem for path in source.glob("*.npy"))
    else:
        try:
            with zipfile.ZipFile(source) as archive:
                names = sorted(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
        except FileNotFoundError:
            raise UserError(f"dataset.source = '{source}': no such file") from None
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"dataset.source = '{source}': cannot be read as a .npz file ({error})") from None
    members = {}
    for name in names:
        with _opened(source, name) as file:
            shape, fortran, dtype = _header(file)
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
        members[name] = _Member(source, name, shape, dtype)
    return members


@contextmanager
def _opened(source: Path, name: str) -> Iterator[IO[bytes]]:
    try:
        if source.is_dir():
            with (source / f"{name}.npy").open("rb") as file:
                yield file
        else:
            with zipfile.ZipFile(source) as archive, archive.open(f"{name}.npy") as member:
                yield member
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise UserError(f"dataset.source = '{source}': the array '{name}' cannot be read ({error})") from None


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether it is in Fortran's order, and dtype."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return shape, fortran, dtype


def _feature(dataset: config.Arrays, x: _Member) -> Feature:
    shape = x.shape[1:] if len(x.shape) == 4 else (*x.shape[1:], 1)
    if x.dtype != np.uint8 or len(shape) != 3 or shape[2] not in CHANNELS:
        raise UserError(
            f"dataset.source = '{dataset.source}': {x.name} is {x.dtype} {x.shape}, and must be images: uint8 "
            f"(n, height, width) or (n, height, width, channels), with {' or '.join(map(str, CHANNELS))} channels"
        )
    return Feature(kind="image", shape=shape, dtype="uint8")


def _classes(
    dataset: config.Arrays, found: dict[str, npt.NDArray[Any]]
) -> tuple[tuple[str, ...], dict[str, npt.NDArray[np.int64]]]:
    """Return the names of the classes, and each split's labels int64 (n,)."""
    every = np.concatenate([own.reshape(len(own), -1) for own in found.values()])
    if every.shape[1] != 1 or every.dtype.kind not in "iuUSb":
        raise UserError(
            f"dataset.source = '{dataset.source}': the labels are {every.dtype} with {every.shape[1]} columns. Wanted: "
            "classes (n,), whole numbers from 0 on, or words"
        )
    flat = {split: own.ravel() for split, own in found.items()}
    if every.dtype.kind == "S":
        return _classes(dataset, {split: np.char.decode(own, "utf-8") for split, own in found.items()})
    if every.dtype.kind == "U":
        names = np.unique(every)
        return tuple(map(str, names)), {
            split: np.searchsorted(names, own).astype(np.int64) for split, own in flat.items()
        }
    lowest, highest = int(every.min()), int(every.max())
    if lowest < 0 or highest >= MAX_CLASSES:
        raise UserError(
            f"dataset.source = '{dataset.source}': the labels go from {lowest} to {highest}: classes are whole numbers "
            f"from 0 on, less than {MAX_CLASSES:,}"
        )
    return tuple(map(str, range(highest + 1))), {split: own.astype(np.int64) for split, own in flat.items()}
