"""Arrays that no one process holds: each process of a training writes its own pieces of them into a checkpoint's
folder, which all share, and any number of processes reads them back, each what it needs."""

import contextlib
import json
import math
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import numpy.typing as npt

from tasks.system import background, files
from tasks.system.errors import StratagemError, UserError

Index = tuple[slice, ...]
"""Where a piece lies in its array: a slice with a start and a stop for each dimension."""
SILENT_SECONDS = 60.0
"""How long the chief waits for a worker's pieces while nothing of them is written."""
POLL_SECONDS = 0.05


class Damaged(UserError):
    """A checkpoint is not what was written."""


class Pieces(NamedTuple):
    """What this process holds of an array that lies in several."""

    shape: tuple[int, ...]
    own: list[tuple[Index, npt.NDArray[Any]]]
    """What it has to write: a piece that several processes hold is written by one of them."""


def pieces_of(value: Any) -> Pieces | None:
    """Return a host copy of this process's pieces of a JAX array; None for an array of which each process has all."""
    if not in_pieces(value):
        return None
    own = [
        (_bounds(shard.index, value.shape), np.array(shard.data))
        for shard in value.addressable_shards
        if shard.replica_id == 0
    ]
    return Pieces(tuple(value.shape), own)


def in_pieces(value: Any) -> bool:
    """Return whether no process has all of an array."""
    # TensorFlow's distributed variables pass on what they are asked for: a metric would be summed over all workers.
    if keras.backend.backend() != "jax":
        return False
    return not value.is_fully_addressable and not value.is_fully_replicated


def as_laid_out(value: Any, saved: Any) -> Any:
    """Return what a variable is to be given of an array that was saved: of one that lies on several processes each
    reads its own pieces alone, and asks nothing of the others.

    Args:
        value: of the variable now.
        saved: (``value.shape``), a NumPy array or an ``InPieces``.
    """
    if keras.backend.backend() != "jax" or value.is_fully_addressable:
        return np.asarray(saved)
    import jax

    def read(index: Index) -> npt.NDArray[Any]:
        bounds = _bounds(index, value.shape)
        part = saved.read(bounds) if isinstance(saved, InPieces) else saved[bounds]
        return np.asarray(part, value.dtype)

    return jax.make_array_from_callback(value.shape, value.sharding, read)


class Files:
    """The files of a checkpoint that hold pieces. Each is compared with its sha256 before it is read, if it was not
    already (``whole``)."""

    def __init__(self, folder: Path, digests: Mapping[str, str], whole: bool = False) -> None:
        self.folder = folder
        self.digests = dict(digests)
        self._whole = set(digests) if whole else set[str]()

    def _verify(self, name: str) -> None:
        if name in self._whole:
            return
        if files.digest(self.folder / name) != self.digests[name]:
            raise ValueError(f"{name} has another sha256 than when it was written")
        self._whole.add(name)

    def arrays(self, shapes: Mapping[str, list[int]]) -> dict[str, Any]:
        """Return some of the arrays that lie in pieces: for their readers, each has a shape and is an array-like.

        Args:
            shapes: by the keys of those that are wanted.

        Raises:
            ValueError, OSError, zipfile.BadZipFile: a file cannot be read, or pieces are missing.
        """
        found: dict[str, InPieces] = {key: InPieces(self, tuple(shape)) for key, shape in shapes.items()}
        for name in self.digests:
            with np.load(self.folder / name) as content:
                for member in content.files:
                    key, bounds = _index(member)
                    if key in found:
                        found[key].places.append((name, member, bounds))
        for key, one in found.items():
            if sum(math.prod(b.stop - b.start for b in bounds) for *_, bounds in one.places) != math.prod(one.shape):
                raise ValueError(f"pieces of {key} are missing")
        return found

    def read(self, name: str, member: str) -> npt.NDArray[Any]:
        """Return one piece.

        Raises:
            Damaged: its file is not what was written.
        """
        try:
            self._verify(name)
            with np.load(self.folder / name) as content:
                piece: npt.NDArray[Any] = content[member]
                return piece
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise Damaged(f"the checkpoint {self.folder} is damaged ({error})") from None


@dataclass
class InPieces:
    """An array of a checkpoint, read when it is needed, as much of it as is needed."""

    files: Files
    shape: tuple[int, ...]
    places: list[tuple[str, str, Index]] = field(default_factory=list)
    """The file, its member and where in the array that is, of each piece; together they are the array."""

    def read(self, wanted: Index) -> npt.NDArray[Any]:
        """Return a part of the array."""
        result: npt.NDArray[Any] | None = None
        for name, member, bounds in self.places:
            both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(wanted, bounds, strict=True)]
            if any(one.start >= one.stop for one in both):
                continue
            piece = self.files.read(name, member)
            if result is None:
                result = np.empty([one.stop - one.start for one in wanted], piece.dtype)
            result[_within(both, wanted)] = piece[_within(both, bounds)]
        if result is None:
            raise ValueError("no piece holds this part of the array")
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self.read(tuple(slice(0, size) for size in self.shape)), dtype)


def write(pieces: Mapping[str, Pieces], folder: Path, worker: int) -> None:
    """Write a worker's pieces into a folder, and then their sha256, by which the chief sees that they are whole."""
    name = f"pieces-{worker}.npz"
    members: dict[str, Any] = {_member(key, index): array for key, one in pieces.items() for index, array in one.own}
    with (folder / name).open("wb") as file:
        np.savez(file, **members)
        files.flush(file)
    with files.replacing(_receipt(folder, worker)) as temporary:
        temporary.write_text(json.dumps({name: files.digest(folder / name)}))


def collect(folder: Path, num_workers: int, silent_seconds: float = SILENT_SECONDS) -> dict[str, str]:
    """Wait until all workers have written their pieces into a folder; return the sha256 of each file.

    Raises:
        StratagemError: a worker has written nothing for ``silent_seconds``.
    """
    digests: dict[str, str] = {}
    for worker in range(num_workers):
        receipt, written = _receipt(folder, worker), folder / f"pieces-{worker}.npz"
        size, seen_at = -1, time.monotonic()
        while not receipt.exists():
            now = written.stat().st_size if written.exists() else -1
            if now != size:
                size, seen_at = now, time.monotonic()
            if time.monotonic() - seen_at > silent_seconds:
                raise StratagemError(
                    f"worker {worker} has written nothing of its part of {folder} for {silent_seconds:g} s"
                )
            time.sleep(POLL_SECONDS)
        digests |= json.loads(receipt.read_text())
        receipt.unlink()
    return digests


class ShardWriter:
    """Writes the pieces of a worker that is not the chief, in the background. The end of its ``with`` waits for the
    last write."""

    def __init__(self, folder: Path, attempt: str, worker: int) -> None:
        """
        Args:
            folder: of the run's checkpoints.
            attempt: the chief's word for this training, which it has written there.
            worker: the number of this worker.

        Raises:
            UserError: the chief's folder is another one.
        """
        if not mark(folder, attempt).exists():
            raise UserError(
                f"worker {worker} does not see {mark(folder, attempt)}, which the chief has just written: each worker "
                "writes its own part of a checkpoint, so the project's folder must be the same on all machines. Put it "
                "where they share it, or let no rule of strategy.layout cut a variable over processes"
            )
        self.folder = folder
        self.attempt = attempt
        self.worker = worker
        self._writer = background.OneBehind("checkpoint-writer")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.stop()
        if value is None:
            self._writer.wait()

    def save(self, pieces: Mapping[str, Pieces], step: int) -> None:
        """Start writing this worker's part of a checkpoint.

        Raises:
            StratagemError: the part before could not be written.
        """
        self._writer.start(self._write, pieces, step)

    def _write(self, pieces: Mapping[str, Pieces], step: int) -> None:
        folder = partial(self.folder, step, self.attempt)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(pieces, folder, self.worker)
        except OSError as error:
            raise StratagemError(
                f"this worker's part of the checkpoint of step {step} cannot be written to {self.folder}: "
                f"{error.strerror or error}. Make room, and give the same command again: it goes on from the one before"
            ) from None


def mark(folder: Path, attempt: str) -> Path:
    """Return the file by which workers know the chief's folder."""
    return folder / f".{attempt}.attempt"


def partial(folder: Path, step: int, attempt: str) -> Path:
    """Return where a checkpoint is written before it is whole; nothing that a killed training left is in it."""
    return folder / f".{step}.{attempt}.partial"


@contextlib.contextmanager
def marked(folder: Path, attempt: str) -> Iterator[None]:
    """Let workers find a folder of checkpoints within the block."""
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder, attempt).touch()
    try:
        yield
    finally:
        mark(folder, attempt).unlink(missing_ok=True)


def _receipt(folder: Path, worker: int) -> Path:
    return folder / f"pieces-{worker}.json"


def _bounds(index: Index, shape: tuple[int, ...]) -> Index:
    return tuple(slice(*one.indices(size)[:2]) for one, size in zip(index, shape, strict=True))


def _within(part: list[slice], whole: Index) -> Index:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, whole, strict=True))


def _member(key: str, index: Index) -> str:
    return f"{key}@{','.join(f'{one.start}:{one.stop}' for one in index)}"


def _index(member: str) -> tuple[str, Index]:
    key, _, text = member.partition("@")
    return key, tuple(slice(*map(int, one.split(":"))) for one in text.split(","))
