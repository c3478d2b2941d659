"""Write, restore, "latest" and "best": a flat ``{key: numpy array}`` of everything that changes, and a small JSON
state.

One format for every backend and number of devices. Orbax writes aside in the background and commits by a rename.
"""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp

from tasks.errors import UserError
from tasks.records import Record

Arrays = dict[str, npt.NDArray[Any]]

policies = ocp.checkpoint_managers


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


def variables(model: Any) -> dict[str, Any]:
    """Return every Keras variable that training changes, by key: model, seed generators, optimizer, metrics.

    Keys are places (``model/0003``), because Keras numbers names anew for each build in a process (``dense_1``).
    """
    optimizer = getattr(model, "optimizer", None)  # A model that was never compiled has no such attribute.
    weights = {id(variable) for variable in model.weights}
    groups = {
        "model": model.weights,
        # Dropout's seeds: neither `.keras` nor `.weights.h5` restores them, and a resumed run then draws other masks.
        "seed": [variable for variable in model.variables if id(variable) not in weights],
        "optimizer": optimizer.variables if optimizer is not None else [],
        "metric": model.metrics_variables,
    }
    return {f"{group}/{i:04d}": variable for group, members in groups.items() for i, variable in enumerate(members)}


def snapshot(model: Any) -> Arrays:
    """Return a host copy of ``variables``; a copy, because the training goes on while it is written."""
    return {key: np.array(variable.numpy()) for key, variable in variables(model).items()}


def assign(model: Any, arrays: Mapping[str, npt.NDArray[Any]], groups: tuple[str, ...]) -> None:
    """Give a built model the saved values of some groups (``model``, ``seed``, ``optimizer``, ``metric``).

    Raises:
        UserError: another model was saved: a variable is missing or has another shape.
    """
    own = {key: variable for key, variable in variables(model).items() if key.split("/")[0] in groups}
    saved = {key: array for key, array in arrays.items() if key.split("/")[0] in groups}
    for key in sorted(own.keys() | saved.keys()):
        name = own[key].path if key in own else "nothing"
        here = tuple(own[key].shape) if key in own else None
        there = tuple(saved[key].shape) if key in saved else None
        if here != there:
            raise UserError(
                f"the checkpoint is of another model or optimizer: {key} ({name}) has shape {here} here and {there} "
                "in the checkpoint. Use the settings that the run was trained with"
            )
    for key, variable in own.items():
        variable.assign(saved[key])


class Checkpoints:
    """The checkpoints of one run, by training step. Close it, or use it in a ``with``, so that the last write is
    waited for."""

    def __init__(self, folder: Path, keep: int = 1, monitor: str = "validation/loss", read_only: bool = False) -> None:
        sign = -1.0 if monitor.endswith("loss") else 1.0

        def score(metrics: Any) -> float:
            value = sign * float(metrics.get(monitor, math.nan))
            return -math.inf if math.isnan(value) else value

        kept = [policies.LatestN(keep), policies.BestN(get_metric_fn=score, n=1)]
        self.folder = folder
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(
                best_fn=score,
                best_mode="max",
                preservation_policy=policies.AnyPreservationPolicy(kept),
                # A reader must leave alone what the training is writing.
                read_only=read_only,
                cleanup_tmp_directories=not read_only,
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, rising as numbers (9, 10, 100)."""
        return sorted(self._manager.all_steps())

    def save(self, model: Any, state: State, metrics: Mapping[str, float] | None = None) -> None:
        """Start writing a checkpoint; training goes on meanwhile.

        Args:
            model: compiled and built.
            state: where the training is; ``state.step`` names the checkpoint.
            metrics: of the epoch that just ended, for "best"; None inside an epoch.
        """
        if state.step in self._manager.all_steps():
            return  # The last step of an epoch can be due twice: by steps and by epochs.
        content = ocp.args.Composite(
            variables=ocp.args.StandardSave(snapshot(model)), state=ocp.args.JsonSave(state.model_dump(mode="json"))
        )
        # Never None: Orbax keeps a checkpoint without metrics for ever, and warns of each.
        self._manager.save(state.step, args=content, metrics=dict(metrics or {}))

    def find(self, which: Literal["latest", "best"] | int) -> int:
        """Return the step of a checkpoint.

        Raises:
            UserError: there is none, or none with that number.
        """
        self._manager.wait_until_finished()
        present = self.steps()
        if not present:
            raise UserError(
                f"{self.folder} holds no checkpoint: the run was stopped before the first one; train it again"
            )
        if which == "latest":
            return present[-1]
        if which == "best":
            best = self._manager.best_step()
            return present[-1] if best is None else int(best)
        if which not in present:
            raise UserError(
                f"evaluate.checkpoint = {which}: {self.folder} has no checkpoint of that step. "
                f"Allowed: {', '.join(map(str, present))}, latest, best"
            )
        return which

    def restore(self, step: int) -> tuple[Arrays, State]:
        """Return the arrays and the state of a checkpoint."""
        content = ocp.args.Composite(variables=ocp.args.StandardRestore(), state=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=content)
        return dict(restored.variables), State.model_validate(restored.state)


def export(model: Any, path: Path) -> Path:
    """Write a model as a ``.keras`` file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary = temporary.with_suffix(".partial.keras")
    try:
        model.save(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def copy(source: Path, path: Path) -> Path:
    """Copy an exported model under a temporary name, then rename it."""
    temporary = path.with_name(f".{path.name}.partial")
    shutil.copyfile(source, temporary)
    temporary.replace(path)
    return path
