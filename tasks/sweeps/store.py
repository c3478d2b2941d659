"""The trials of a sweep, in a database as Optuna makes it: ``optuna.db`` in the sweep's folder.

SQLite and not Optuna's journal: a process that is killed while it appends to the journal leaves half a line, after
which Optuna 5.0.0 cannot add another one. What SQLite has been told is there whole or not at all. One process at a
time writes it, the one that holds the sweep's lock; others, such as Optuna's dashboard, may read.
"""

import contextlib
import functools
import json
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import QueuePool

from tasks.records import Trial
from tasks.sweeps import sampler
from tasks.sweeps.space import Parameter
from tasks.system.errors import UserError, one_line

FILE = "optuna.db"
STUDY = "sweep"
REST = "trial"
"""The attribute that has what Optuna has no place for."""


class Trials:
    """The trials of a sweep, each of which is written when it begins and when it has ended."""

    def __init__(self, folder: Path, parameters: Mapping[str, Parameter], lower_is_better: bool) -> None:
        """
        Raises:
            UserError: the database is damaged, or another Optuna's.
        """
        self._parameters = parameters
        path = folder / FILE
        if not path.exists():
            _make(path, lower_is_better)
        try:
            self._storage = _open(path)
            self._study = optuna.load_study(storage=self._storage, study_name=STUDY)
        except Exception as error:  # SQLAlchemy's, sqlite3's, Optuna's own, KeyError.
            raise UserError(f"{path} cannot be read ({one_line(error)[:200]}): give --fresh for a new sweep") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._storage.engine.dispose()

    def all(self) -> list[Trial]:
        """Return the trials so far, by their numbers."""
        return [self._trial(one) for one in self._study.get_trials(deepcopy=False)]

    def begin(self, params: Mapping[str, Any]) -> Trial:
        """Add a trial with these parameters."""
        trial = Trial(number=len(self._study.get_trials(deepcopy=False)), state="running", params=dict(params))
        self._study.add_trial(sampler.frozen(self._parameters, trial))
        return trial

    def end(self, trial: Trial) -> None:
        """Write how a trial ended. What is not whole when the process dies is written again, by the same values."""
        study_id = self._storage.get_study_id_from_name(STUDY)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        for epoch, value in enumerate(trial.values, start=1):
            self._storage.set_trial_intermediate_value(trial_id, epoch, value)
        rest = trial.model_dump(mode="json", include={"run_id", "same_as", "reason", "seconds"})
        self._storage.set_trial_user_attr(trial_id, REST, json.dumps(rest))
        values = [trial.value] if trial.value is not None and trial.state != "failed" else None
        self._storage.set_trial_state_values(trial_id, sampler.STATES[trial.state], values)

    def _trial(self, kept: FrozenTrial) -> Trial:
        state = next(name for name, one in sampler.STATES.items() if one == kept.state)
        values = [kept.intermediate_values[epoch] for epoch in sorted(kept.intermediate_values)]
        return Trial(
            number=kept.number,
            state=state,
            params=sampler.decode(self._parameters, kept.params),
            value=kept.value if kept.state in (TrialState.COMPLETE, TrialState.PRUNED) else None,
            values=tuple(values) if kept.state.is_finished() else (),
            **json.loads(kept.user_attrs.get(REST, "{}")) if kept.state.is_finished() else {},
        )


def _make(path: Path, lower_is_better: bool) -> None:
    """Make the database under another name, and rename it: a process that is killed meanwhile leaves none."""
    aside = path.with_name(f".{path.name}")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()  # Of a process that was killed.
    storage = _open(aside)
    try:
        optuna.create_study(storage=storage, study_name=STUDY, direction=sampler.direction(lower_is_better))
    finally:
        storage.engine.dispose()
    os.replace(aside, path)


def _open(path: Path) -> RDBStorage:
    """Open a database by its path: in the text of an address `?`, `%` and `{` would mean something else."""
    connect = functools.partial(sqlite3.connect, path, check_same_thread=False)
    return RDBStorage("sqlite://", {"creator": connect, "poolclass": QueuePool})
