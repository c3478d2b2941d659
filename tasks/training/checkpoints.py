"""Write, restore and find checkpoints: a flat ``{key: numpy array}`` of everything that changes, and a small JSON
state.

The format is the same for every backend and number of devices: a folder named after its step, with arrays.npz and
state.json, which holds the sha256 of both. A background thread writes it under a temporary name and renames it when it
is complete.
"""

import contextlib
import io
import logging
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasks.modeling import metrics
from tasks.records import Record
from tasks.runs import committed
from tasks.system import files
from tasks.system.errors import StratagemError, UserError
from tasks.training.model_state import Arrays, snapshot

log = logging.getLogger(__name__)


class State(Record):
    """Position and history of a training; by default those of its first step."""

    step: int = 0
    """Training steps done since the start of the run."""
    epoch: int = 0
    """Epoch of the next step, from 0."""
    step_in_epoch: int = 0
    """Finished steps of that epoch."""
    global_batch_size: int
    seed: int = 0
    settings_digest: str = ""
    data_version: str | None = None
    history: dict[str, tuple[float, ...]] = {}
    """One value for each complete epoch."""
    callbacks: dict[str, dict[str, Any]] = {}
    """States of early stopping and of the user's own callbacks, by name."""
    jit_compile: bool = False
    """Whether ``train.jit_compile=auto`` has chosen XLA."""
    rollbacks: int = 0
    """Number of times that the training went back to a checkpoint, with a lower learning rate, after a non-finite loss.
    """


def pack(arrays: Arrays, state: State) -> bytes:
    """Return a checkpoint as bytes for workers that cannot read the chief's folder."""
    buffer = io.BytesIO()
    content: dict[str, Any] = dict(arrays)
    np.savez(buffer, state=np.frombuffer(state.model_dump_json().encode(), np.uint8), **content)
    return buffer.getvalue()


def unpack(payload: bytes) -> tuple[Arrays, State]:
    """Return the arguments of ``pack``."""
    with np.load(io.BytesIO(payload)) as content:
        arrays = {name: content[name] for name in content.files}
    return arrays, State.model_validate_json(arrays.pop("state").tobytes())


class Damaged(UserError):
    """A checkpoint's files are missing or have changed."""


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run, by training step. Close it, or use it in a ``with`` block, to wait for the last
    write."""

    def __init__(self, folder: Path, keep: int = 1, monitor: str = "validation/loss", read_only: bool = False) -> None:
        """Open a run's checkpoints; there may be none yet.

        Args:
            keep: the number of newest checkpoints to keep, in addition to the best one.
            monitor: the metric that determines the best checkpoint.
            read_only: if false, remove incomplete checkpoints that a killed training left behind.
        """
        self.folder = folder
        self.keep = keep
        self.monitor = monitor
        self._thread = ThreadPoolExecutor(1, "checkpoint-writer")
        self._writing: Future[None] | None = None
        if not read_only:
            for leftover in folder.glob(".*.partial"):
                shutil.rmtree(leftover)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            StratagemError: it could not be written.
        """
        self._thread.shutdown()
        self._wait()

    def _wait(self) -> None:
        """Wait for the checkpoint that the thread writes, and raise its exception, once."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint in ascending numeric order (9, 10, 100)."""
        return committed.steps(self.folder)

    def save(self, model: Any, state: State, values: Mapping[str, float] | None = None) -> None:
        """Start writing a checkpoint in the background.

        Args:
            model: compiled and built.
            state: its ``step`` names the checkpoint.
            values: the metrics of the epoch that just ended, for "best"; None inside an epoch.

        Raises:
            StratagemError: the previous checkpoint could not be written.
        """
        self._wait()  # Before the copy, so that memory holds one copy.
        self.folder.mkdir(parents=True, exist_ok=True)
        self._writing = self._thread.submit(self._write, snapshot(model), state, dict(values or {}))

    def find(self, which: Literal["latest", "best"] | int) -> int:
        """Return the step of a checkpoint.

        Raises:
            UserError: there is no checkpoint, or none of that step.
            StratagemError: the last checkpoint could not be written.
        """
        self._wait()
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
        """Return the arrays and the state of a checkpoint.

        Raises:
            Damaged: files are missing or have changed.
            UserError: it has another format.
        """
        folder = self.folder / str(step)
        try:
            state = committed.verify(folder)
            with np.load(folder / "arrays.npz") as content:
                arrays = {name: content[name] for name in content.files}
            return arrays, State.model_validate(state["state"])
        except (OSError, ValueError, KeyError) as error:
            reason = f"no such file: {Path(error.filename).name}" if isinstance(error, FileNotFoundError) else error
            raise Damaged(f"the checkpoint {folder} is damaged ({reason})") from None

    def restore_latest(self) -> tuple[Arrays, State]:
        """Return the newest intact checkpoint; log newer, damaged checkpoints and move them aside.

        Raises:
            UserError: there is no checkpoint, or none is intact; then no file is changed.
        """
        self.find("latest")
        return self._restore_first(reversed(self.steps()))

    def restore_best(self) -> tuple[Arrays, State]:
        """Return the best intact checkpoint; see ``restore_latest``."""
        self.find("best")
        return self._restore_first(self._ranked(self.steps()))

    def _restore_first(self, steps: Iterable[int]) -> tuple[Arrays, State]:
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                found = self._restore_finite(step)
            except Damaged as error:
                damaged[step] = str(error)
                continue
            for bad in damaged:
                aside = self.set_aside(bad)
                log.warning("checkpoint %d is damaged: it is now in %s, and checkpoint %d is used", bad, aside, step)
            return found
        raise UserError(
            f"no checkpoint in {self.folder} is intact: {'; '.join(damaged.values())}. Nothing was deleted. Restore "
            "them from a backup, or start again with --fresh"
        )

    def _restore_finite(self, step: int) -> tuple[Arrays, State]:
        """Restore a checkpoint whose weights are finite. If the training diverged in its last step, only the next
        step's loss would show it."""
        arrays, state = self.restore(step)
        if (key := _nonfinite(arrays)) is not None:
            raise Damaged(f"the checkpoint {self.folder / str(step)} has weights that are not finite numbers ({key})")
        return arrays, state

    def set_aside(self, step: int) -> Path:
        """Move a checkpoint out of use to the folder ``damaged_checkpoints``; return that folder."""
        aside = self.folder.with_name("damaged_checkpoints")
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / str(step), ignore_errors=True)
        (self.folder / str(step)).rename(aside / str(step))
        return aside

    def set_aside_nonfinite(self) -> None:
        """Move the newest checkpoints aside until one has finite weights."""
        for step in reversed(self.steps()):
            try:
                self._restore_finite(step)
            except Damaged:
                self.set_aside(step)
            else:
                return

    def _write(self, arrays: Arrays, state: State, values: dict[str, float]) -> None:
        partial = self.folder / f".{state.step}.new.partial"
        try:
            partial.mkdir()
            with (partial / "arrays.npz").open("wb") as file:
                members: dict[str, Any] = arrays
                np.savez(file, **members)
                files.flush(file)
            digest = files.digest(partial / "arrays.npz")
            content = {"state": state.model_dump(mode="json"), "metrics": values, "arrays_sha256": digest}
            with (partial / "state.json").open("wb") as file:
                file.write(committed.signed(content))
                files.flush(file)
            partial.rename(self.folder / str(state.step))
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            present = self.steps()
            left = f"that of step {present[-1]} is intact" if present else "there is no other yet"
            raise StratagemError(
                f"the checkpoint of step {state.step} cannot be written to {self.folder}: {error.strerror or error}; "
                f"{left}. Make room, and run the same command again: it continues from there"
            ) from None
        # Only the next step's loss reveals non-finite weights, so the last good checkpoint is still needed.
        if _nonfinite(arrays) is None:
            self._prune()

    def _prune(self) -> None:
        present = self.steps()
        for step in set(present) - {*present[-self.keep :], self._ranked(present)[0]}:
            going = self.folder / f".{step}.old.partial"
            with contextlib.suppress(OSError):  # If it cannot be removed, the next training removes it.
                (self.folder / str(step)).rename(going)  # Its number must never name half a checkpoint.
                shutil.rmtree(going)

    def _ranked(self, steps: list[int]) -> list[int]:
        """Return the steps from best to worst; the newest first if their metrics are equal or missing."""
        sign = -1.0 if metrics.better(self.monitor) == "lower" else 1.0

        def score(step: int) -> tuple[float, int]:
            try:
                path = self.folder / str(step) / committed.STATE
                state = committed.parse(path.read_bytes(), path)
                value = sign * float(state["metrics"].get(self.monitor, np.nan))
            except (OSError, ValueError, KeyError):
                value = np.nan  # It is damaged; `restore` reports that.
            return (-np.inf if np.isnan(value) else value, step)

        return sorted(steps, key=score, reverse=True)


def _nonfinite(arrays: Arrays) -> str | None:
    """Return the key of the first model weight that is not finite, or None."""
    return next((key for key, a in arrays.items() if key.startswith("model/") and not np.isfinite(a).all()), None)


def save_model(model: Any, path: Path) -> Path:
    """Write a model as a ``.keras`` file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path, ".keras") as temporary:
        model.save(temporary)
    return path
