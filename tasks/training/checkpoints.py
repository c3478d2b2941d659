"""Write, restore, "latest" and "best": a flat ``{key: numpy array}`` of everything that changes, and a small JSON
state.

One format for every backend and number of devices: a folder named by its step, with arrays.npz and state.json, which
holds the sha256 of both. It is written aside, in the background, and committed by a rename. Arrays that no one process
holds lie beside in pieces-<worker>.npz, which each worker writes (``shards``).
"""

import contextlib
import io
import json
import logging
import secrets
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from pydantic import ValidationError

from tasks.modeling import metrics
from tasks.records import Record
from tasks.runs import committed
from tasks.system import background, files
from tasks.system.errors import StratagemError, UserError
from tasks.training import shards
from tasks.training.model_state import Arrays, snapshot, snapshot_pieces
from tasks.training.shards import Damaged as Damaged
from tasks.training.shards import InPieces, Pieces

# What a file system needs beside the bytes of the arrays.
SPARE_BYTES = 2**20

log = logging.getLogger(__name__)


class State(Record):
    """Where a training is, and what it has seen."""

    step: int
    """Training steps done since the start of the run."""
    epoch: int
    """The epoch that the next step belongs to, from 0."""
    step_in_epoch: int
    """Steps of that epoch already done."""
    global_batch_size: int
    seed: int
    settings_digest: str
    data_version: str | None
    history: dict[str, tuple[float, ...]]
    """One value for each whole epoch."""
    stopping: dict[str, float | int | None] = {}
    """The attributes of keras.callbacks.EarlyStopping that its next decision needs."""
    rollbacks: int = 0
    """How often the training went back to a checkpoint, with a lower learning rate, after a non-finite loss."""


def pack(arrays: Arrays, state: State) -> bytes:
    """Return a checkpoint as bytes, for the workers that cannot read the chief's folder. Of arrays in pieces it says
    where these lie: workers that share them share the folder."""
    whole = {key: array for key, array in arrays.items() if not isinstance(array, InPieces)}
    cut: dict[str, Any] = {key: array for key, array in arrays.items() if isinstance(array, InPieces)}
    text: dict[str, Any] = {
        "state": state.model_dump(mode="json"),
        "shapes": {key: one.shape for key, one in cut.items()},
    }
    for one in cut.values():
        text |= {"folder": str(one.files.folder), "pieces": one.files.digests}
    buffer = io.BytesIO()
    content: dict[str, Any] = {"text": np.frombuffer(json.dumps(text).encode(), np.uint8), **whole}
    np.savez(buffer, **content)
    return buffer.getvalue()


def unpack(payload: bytes) -> tuple[Arrays, State]:
    """Return what ``pack`` was given.

    Raises:
        UserError: pieces of arrays do not lie where the chief has them.
    """
    with np.load(io.BytesIO(payload)) as content:
        arrays = {name: content[name] for name in content.files}
    text = json.loads(arrays.pop("text").tobytes())
    if text["shapes"]:
        folder = Path(text["folder"])
        try:
            arrays |= shards.Files(folder, text["pieces"]).arrays(text["shapes"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{folder}, where the chief found its checkpoint, cannot be read here ({error}): the project's folder "
                "must be the same on all machines"
            ) from None
    return arrays, State.model_validate(text["state"])


class Checkpoints:
    """The checkpoints of one run, by training step. Close it, or use it in a ``with``, so that the last write is
    waited for."""

    def __init__(
        self,
        folder: Path,
        keep: int = 1,
        monitor: str = "validation/loss",
        read_only: bool = False,
        silent_seconds: float = shards.SILENT_SECONDS,
    ) -> None:
        """Open a run's checkpoints, also when there are none yet.

        Args:
            keep: the newest so many stay, and the best one.
            monitor: the metric that says which one is best.
            read_only: leave alone what a training is writing. Otherwise what a killed one left half-written is removed.
            silent_seconds: another worker's pieces are waited for as long as it is not silent for so long.
        """
        self.folder = folder
        self.keep = keep
        self.monitor = monitor
        self._silent_seconds = silent_seconds
        self._writer = background.OneBehind("checkpoint-writer")
        self.attempt = secrets.token_hex(4)
        """Tells what this process and its workers write from what others before them have left."""
        self.num_writers = 1
        """Workers that write the pieces of a model that no one process holds."""
        if not read_only:
            for leftover in folder.glob(".*.partial"):
                shutil.rmtree(leftover)
            for leftover in folder.glob(".*.attempt"):
                leftover.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StratagemError as error:
            if value is None:
                raise
            log.warning("%s", error)  # The error that ended the training is the one to raise.

    def close(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            StratagemError: it could not be written.
        """
        self._writer.stop()
        self._writer.wait()

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, rising as numbers (9, 10, 100)."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def save(self, model: Any, state: State, values: Mapping[str, float] | None = None) -> None:
        """Start writing a checkpoint; training goes on meanwhile.

        Args:
            model: compiled and built.
            state: where the training is; ``state.step`` names the checkpoint.
            values: the metrics of the epoch that just ended, for "best"; None inside an epoch.

        Raises:
            ValueError: the step has a checkpoint already.
            StratagemError: there is not enough disk space, or the checkpoint before this one could not be written.
        """
        self._writer.wait()
        arrays, pieces = snapshot(model), snapshot_pieces(model)
        if (self.folder / str(state.step)).exists():
            raise ValueError(f"{self.folder} has a checkpoint of step {state.step}")
        self.folder.mkdir(parents=True, exist_ok=True)
        own = (array for one in pieces.values() for _, array in one.own)
        needed = sum(array.nbytes for array in (*arrays.values(), *own)) + SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise self._unwritten(state.step, f"it needs {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free")
        self._writer.start(self._write, arrays, pieces, state, dict(values or {}))

    def find(self, which: Literal["latest", "best"] | int) -> int:
        """Return the step of a checkpoint.

        Raises:
            UserError: there is none, or none with that number.
            StratagemError: the last one could not be written.
        """
        self._writer.wait()
        present = self.steps()
        if not present:
            raise UserError(
                f"{self.folder} holds no checkpoint: the run was stopped before the first one; train it again"
            )
        if which == "latest":
            return present[-1]
        if which == "best":
            return self._ranked(present)[0]
        if which not in present:
            raise UserError(
                f"evaluate.checkpoint = {which}: {self.folder} has no checkpoint of that step. "
                f"Allowed: {', '.join(map(str, present))}, latest, best"
            )
        return which

    def restore(self, step: int) -> tuple[Arrays, State]:
        """Return the arrays and the state of a checkpoint; an array that lies in pieces is read when it is asked for.

        Raises:
            Damaged: files are missing, or are not what was written.
            UserError: it is of another format.
        """
        folder = self.folder / str(step)
        try:
            state = committed.verify(folder)
            with np.load(folder / "arrays.npz") as content:
                arrays = {name: content[name] for name in content.files}
            if "pieces" in state:
                arrays |= shards.Files(folder, state["pieces"], whole=True).arrays(state["shapes"])
            return arrays, State.model_validate(state["state"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, ValidationError) as error:
            reason = f"no such file: {Path(error.filename).name}" if isinstance(error, FileNotFoundError) else error
            raise Damaged(f"the checkpoint {folder} is damaged ({reason})") from None

    def restore_latest(self) -> tuple[Arrays, State]:
        """Return the newest checkpoint that is whole. Newer ones, which are damaged, are logged and set aside.

        Raises:
            UserError: none is there, or none is whole; then all stay as they are.
        """
        self.find("latest")
        return self._restore_first(reversed(self.steps()))

    def restore_best(self) -> tuple[Arrays, State]:
        """Return the best checkpoint that is whole, as ``restore_latest`` does."""
        self.find("best")
        return self._restore_first(self._ranked(self.steps()))

    def _restore_first(self, steps: Iterable[int]) -> tuple[Arrays, State]:
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                found = self.restore(step)
                _refuse_nonfinite(self.folder / str(step), found[0])
            except Damaged as error:
                damaged[step] = str(error)
                continue
            for bad in damaged:
                aside = self.set_aside(bad)
                log.warning("checkpoint %d is damaged; it now lies in %s, and %d is used", bad, aside, step)
            return found
        raise UserError(
            f"no checkpoint in {self.folder} is whole: {'; '.join(damaged.values())}. Nothing was deleted. Restore "
            "them from a backup, or start anew with --fresh"
        )

    def set_aside(self, step: int) -> Path:
        """Move a checkpoint that is not to be used any more beside the others' folder; return where to."""
        aside = self.folder.with_name("damaged_checkpoints")
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / str(step), ignore_errors=True)
        (self.folder / str(step)).rename(aside / str(step))
        return aside

    def set_aside_nonfinite(self) -> None:
        """Move the newest checkpoints aside, as long as their weights are not finite numbers."""
        for step in reversed(self.steps()):
            try:
                arrays, _ = self.restore(step)
                _refuse_nonfinite(self.folder / str(step), arrays)
            except Damaged:
                self.set_aside(step)
            else:
                return

    def _write(self, arrays: Arrays, pieces: Mapping[str, Pieces], state: State, values: dict[str, float]) -> None:
        partial = shards.partial(self.folder, state.step, self.attempt)
        try:
            partial.mkdir(exist_ok=bool(pieces))  # Another worker may have been quicker.
            with (partial / "arrays.npz").open("wb") as file:
                members: dict[str, Any] = arrays
                np.savez(file, **members)
                files.flush(file)
            digest = files.digest(partial / "arrays.npz")
            content = {"state": state.model_dump(mode="json"), "metrics": values, "arrays_sha256": digest}
            if pieces:
                shards.write(pieces, partial, worker=0)
                content["pieces"] = shards.collect(partial, self.num_writers, self._silent_seconds)
                content["shapes"] = {key: list(one.shape) for key, one in pieces.items()}
            with (partial / "state.json").open("wb") as file:
                file.write(committed.signed(content))
                files.flush(file)
            partial.rename(self.folder / str(state.step))
        except StratagemError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise self._unwritten(state.step, error.strerror or str(error)) from None
        # Weights that are not numbers show in the next step's loss only: the last good ones are still needed.
        if _nonfinite(arrays) is None:
            self._prune()

    def _unwritten(self, step: int, reason: str) -> StratagemError:
        present = [other for other in self.steps() if other != step]
        left = f"that of step {present[-1]} is whole" if present else "there is no other yet"
        return StratagemError(
            f"the checkpoint of step {step} cannot be written to {self.folder}: {reason}; {left}. Make room, and give "
            "the same command again: it goes on from there"
        )

    def _prune(self) -> None:
        present = self.steps()
        for step in set(present) - {*present[-self.keep :], self._ranked(present)[0]}:
            going = self.folder / f".{step}.partial"
            with contextlib.suppress(OSError):  # Someone may be reading it; it goes when this is opened again.
                (self.folder / str(step)).rename(going)  # Half of a checkpoint is never seen under its number.
                shutil.rmtree(going)

    def _ranked(self, steps: list[int]) -> list[int]:
        """Return the steps from the best to the worst; the newest first where their metric is the same, or none."""
        sign = -1.0 if metrics.better(self.monitor) == "lower" else 1.0

        def score(step: int) -> tuple[float, int]:
            try:
                value = sign * float(_read_state(self.folder / str(step))["metrics"].get(self.monitor, np.nan))
            except (OSError, ValueError, KeyError):
                value = np.nan  # Damaged; what reads it says so.
            return (-np.inf if np.isnan(value) else value, step)

        return sorted(steps, key=score, reverse=True)


def _refuse_nonfinite(folder: Path, arrays: Arrays) -> None:
    """Raise ``Damaged`` for weights that are not finite numbers: those of a training that diverged with the last step
    before, which only the next one's loss shows."""
    if (key := _nonfinite(arrays)) is not None:
        raise Damaged(f"the checkpoint {folder} has weights that are not finite numbers ({key})")


def _nonfinite(arrays: Arrays) -> str | None:
    """Return the first of the model's weights that are not finite numbers."""
    return next((key for key, a in arrays.items() if key.startswith("model/") and not np.isfinite(a).all()), None)


def _read_state(folder: Path) -> dict[str, Any]:
    """Return state.json of a checkpoint.

    Raises:
        OSError, ValueError: it is not there, or not what was written.
    """
    return committed.parse((folder / committed.STATE).read_bytes(), folder / committed.STATE)


def save_model(model: Any, path: Path) -> Path:
    """Write a model as a ``.keras`` file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path, ".partial.keras") as temporary:
        model.save(temporary)
    return path


def copy_model(source: Path, path: Path) -> Path:
    """Copy an exported model under a temporary name, then rename it."""
    with files.replacing(path, ".partial") as temporary:
        shutil.copyfile(source, temporary)
    return path
