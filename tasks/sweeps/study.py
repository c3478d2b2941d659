"""What Optuna suggests, where a sweep's trials are kept, which of them are given up, and which parameters mattered.

A suggestion is a function of the space, the seed, the trial's number and the trials before it: each trial has a sampler
of its own, whose seed is drawn from both numbers. One sampler for all would be in another state after a restart, and a
sweep that was killed would have other trials than one that was not.

The trials are in a database as Optuna makes it, ``optuna.db`` in the sweep's folder. SQLite and not Optuna's journal: a
process that is killed while it appends to the journal leaves half a line, after which Optuna 5.0.0 cannot add another
one. SQLite writes a change whole or not at all. Only the process that holds the sweep's lock writes; others, such as
Optuna's dashboard, may read.

Trials are given up by successive halving (ASHA; Li et al., 2020) with the brackets of Hyperband (Li et al., 2018).
Optuna's own pruners ask their study in the middle of a training, so their decisions depend on what other trainings have
reported by then, and differ after a kill. Here the limits of a trial follow from the trials before it, and are known
before it begins: the training ends itself, at an epoch's end, in whatever process it runs.
"""

import contextlib
import functools
import hashlib
import json
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.pool import QueuePool

from tasks.records import Limits, Trial
from tasks.sweeps.space import Halving, Parameter, Range, Space
from tasks.system.errors import UserError, one_line

FILE = "optuna.db"
STUDY = "sweep"
REST = "trial"
"""The attribute that has what Optuna has no place for."""
SAMPLER = f"TPE of Optuna {version('optuna')}"
RANDOM_TRIALS = 10
"""Trials that TPE draws at random before it has seen enough."""
LEAST_FOR_IMPORTANCE = 4
State: TypeAlias = Literal["running", "complete", "pruned", "failed"]
STATES: dict[State, TrialState] = {
    "running": TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}

optuna.logging.set_verbosity(optuna.logging.ERROR)


def next_batch(known: Sequence[Trial], number: int, parallel: int) -> range | None:
    """Return the trials that are to be trained next, side by side; None where there are as many as wanted.

    Batches begin at multiples of ``parallel``, also where there were fewer trials to do before: a sweep that goes on
    has the trials of one that was to have as many from the beginning.

    Args:
        known: the trials so far.
        number: how many there are to be.
        parallel: how many train side by side.
    """
    waiting = next((one.number for one in known if one.state == "running"), None)
    if waiting is None and len(known) >= number:
        return None
    first = (len(known) if waiting is None else waiting) // parallel * parallel
    return range(first, max(min(first + parallel, number), len(known[: first + parallel])))


def next_params(space: Space, known: Sequence[Trial], first: int, lower_is_better: bool) -> dict[str, Any]:
    """Return the parameters of the next trial, in the spelling of ``--set``.

    A trial that is still running counts as a bad one, so that trials side by side are not all the same (the constant
    liar). So does each trial of the next trial's own batch, whether it has ended by now or not.

    Args:
        space: its parameters and its seed are read.
        known: the trials so far.
        first: the first trial of the batch.
        lower_is_better: of the trials' values.
    """
    seen = [
        one if one.number < first else Trial(number=one.number, state="running", params=one.params) for one in known
    ]
    own = int.from_bytes(hashlib.sha256(f"{space.file.seed} {len(known)}".encode()).digest()[:4], "big")
    sampler = TPESampler(seed=own, n_startup_trials=RANDOM_TRIALS, constant_liar=True, multivariate=True)
    with _quiet():
        study = _study(space.parameters, seen, lower_is_better, sampler)
        asked = study.ask(_distributions(space.parameters))
    return _decode(space.parameters, asked.params)


def rungs(pruner: Halving, epochs: int) -> list[int]:
    """Return after how many epochs trials are held against each other: ``min_epochs``, and ``factor`` times that."""
    found, epoch = [], pruner.min_epochs
    while epoch < epochs:
        found.append(epoch)
        epoch *= pruner.factor
    return found


def limits(
    pruner: Halving | None, number: int, epochs: int, earlier: Sequence[Sequence[float]], metric: str, lower: bool
) -> Limits:
    """Return what a trial must reach.

    Args:
        pruner: None prunes nothing.
        number: of the trial. Its bracket says at which rung it is judged first: trial 0 at the first, trial 1 at the
            second, and so on, again from the first after the last: some slow beginners get their time.
        epochs: that it is to train.
        earlier: the metric after each epoch of the trials before it.
        metric: its name.
        lower: whether less of it is better.
    """
    found = {}
    judged_at = rungs(pruner, epochs) if pruner is not None else []
    for epoch in judged_at[number % len(judged_at) :] if judged_at else []:
        there = sorted((values[epoch - 1] for values in earlier if len(values) >= epoch), reverse=not lower)
        if pruner is not None and len(there) >= pruner.min_trials:
            found[epoch] = there[max((len(there) + 1) // pruner.factor, 1) - 1]  # The trial itself counts, too.
    return Limits(metric=metric, lower_is_better=lower, by_epoch=found)


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
        self._study.add_trial(_frozen(self._parameters, trial))
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
        self._storage.set_trial_state_values(trial_id, STATES[trial.state], values)

    def _trial(self, kept: FrozenTrial) -> Trial:
        state = next(name for name, one in STATES.items() if one == kept.state)
        values = [kept.intermediate_values[epoch] for epoch in sorted(kept.intermediate_values)]
        return Trial(
            number=kept.number,
            state=state,
            params=_decode(self._parameters, kept.params),
            value=kept.value if kept.state in (TrialState.COMPLETE, TrialState.PRUNED) else None,
            values=tuple(values) if kept.state.is_finished() else (),
            **json.loads(kept.user_attrs.get(REST, "{}")) if kept.state.is_finished() else {},
        )


def importance(parameters: Mapping[str, Parameter], trials: Sequence[Trial], lower_is_better: bool) -> dict[str, float]:
    """Return what part of the differences between the values of whole trials each parameter explains, the largest
    first (fANOVA; Hutter et al., 2014); nothing where there are too few, or all have one value."""
    whole = [one for one in trials if one.state == "complete" and one.same_as is None and one.value is not None]
    if len(whole) < LEAST_FOR_IMPORTANCE or len({one.value for one in whole}) < 2:
        return {}
    with _quiet():
        study = _study(parameters, whole, lower_is_better, None)
        found = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))
    return {name: float(share) for name, share in found.items()}


def _make(path: Path, lower_is_better: bool) -> None:
    """Make the database under another name, and rename it: a process that is killed meanwhile leaves none."""
    aside = path.with_name(f".{path.name}")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()  # Of a process that was killed.
    storage = _open(aside)
    try:
        optuna.create_study(storage=storage, study_name=STUDY, direction=_direction(lower_is_better))
    finally:
        storage.engine.dispose()
    os.replace(aside, path)


def _open(path: Path) -> RDBStorage:
    """Open a database by its path: in the text of an address `?`, `%` and `{` would mean something else."""
    connect = functools.partial(sqlite3.connect, path, check_same_thread=False)
    return RDBStorage("sqlite://", {"creator": connect, "poolclass": QueuePool})


def _study(
    parameters: Mapping[str, Parameter], trials: Sequence[Trial], lower_is_better: bool, sampler: TPESampler | None
) -> optuna.Study:
    study = optuna.create_study(direction=_direction(lower_is_better), sampler=sampler)
    study.add_trials([_frozen(parameters, one) for one in trials])
    return study


def _frozen(parameters: Mapping[str, Parameter], trial: Trial) -> FrozenTrial:
    """Return a trial as Optuna has it."""
    return create_trial(
        state=STATES[trial.state],
        value=trial.value if trial.state in ("complete", "pruned") else None,
        params={
            key: value if isinstance(parameters[key], Range) else json.dumps(value, sort_keys=True)
            for key, value in trial.params.items()
        },
        distributions=_distributions(parameters),
        intermediate_values=dict(enumerate(trial.values, start=1)),
    )


def _decode(parameters: Mapping[str, Parameter], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's parameters in the spelling of ``--set``, in the order of the space."""
    return {key: params[key] if isinstance(one, Range) else json.loads(params[key]) for key, one in parameters.items()}


def _distributions(parameters: Mapping[str, Parameter]) -> dict[str, BaseDistribution]:
    """Return the parameters as Optuna has them; a choice is its JSON, because it may be a list."""
    return {key: _distribution(one) for key, one in parameters.items()}


def _distribution(parameter: Parameter) -> BaseDistribution:
    if not isinstance(parameter, Range):
        return CategoricalDistribution([json.dumps(one, sort_keys=True) for one in parameter])
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.whole:
        return IntDistribution(int(low), int(high), log=parameter.log, step=int(step or 1))
    return FloatDistribution(float(low), float(high), log=parameter.log, step=None if step is None else float(step))


def _direction(lower_is_better: bool) -> Literal["minimize", "maximize"]:
    return "minimize" if lower_is_better else "maximize"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence that an argument is called experimental: the lock has one version, and a test its suggestions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
