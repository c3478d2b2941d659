"""Optuna's suggestions, the storage of a sweep's trials, pruning, the importance of parameters, and resuming sweeps.

A suggestion is a function of the space, the seed, the trial's number and the earlier trials: each trial has its own
sampler with a seed derived from both numbers. A shared sampler would have another state after a restart, so a killed
sweep would have other trials than an uninterrupted one.

The trials are in an Optuna database, ``optuna.db`` in the sweep's folder, on SQLite instead of Optuna's journal: a
process that is killed while it appends to the journal leaves an incomplete line, after which Optuna 5.0.0 cannot append
again. SQLite's writes are atomic. Only the process that holds the sweep's lock writes; others, such as Optuna's
dashboard, may read.

Trials are pruned by successive halving (ASHA; Li et al., 2020) with the brackets of Hyperband (Li et al., 2018).
Optuna's own pruners query their study during a training, so their decisions depend on the progress of other trainings,
and differ after a kill. Here, the limits of a trial follow from earlier trials and are known before it begins: the
training ends at the end of an epoch, in any process.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

import optuna
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from tasks import config
from tasks.records import Limits, PreparedDataset, Run, SweepPlan, Trial
from tasks.runs import entries, lineage, outcome, resume
from tasks.sweeps.space import Halving, Range, Space
from tasks.system.errors import UserError, listed, one_line, shown

FILE = "optuna.db"
STUDY = "sweep"
WHOLE = "trial"
"""The user attribute with the whole record of a trial that has ended; Optuna's own fields are for its dashboard."""
SAMPLER = f"TPE of Optuna {version('optuna')}"
RANDOM_TRIALS = 10
"""The number of random trials before TPE's suggestions."""
LEAST_FOR_IMPORTANCE = 10
"""The minimum number of complete trials: with fewer, importances are noise."""
STATES = {
    "running": TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}

optuna.logging.set_verbosity(optuna.logging.ERROR)


def next_batch(known: Sequence[Trial], number: int, parallel: int) -> range | None:
    """Return the trials to train next in parallel; None if all trials exist.

    Batches always begin at multiples of ``parallel``: a sweep that is extended has the same trials as one that had the
    larger number from the beginning.

    Args:
        known: the trials so far.
        number: the total number of trials.
        parallel: the number of parallel trainings.
    """
    waiting = next((one.number for one in known if one.state == "running"), None)
    if waiting is None and len(known) >= number:
        return None
    first = (len(known) if waiting is None else waiting) // parallel * parallel
    return range(first, max(min(first + parallel, number), len(known[: first + parallel])))


def next_params(space: Space, known: Sequence[Trial], first: int) -> dict[str, Any]:
    """Return the parameters of the next trial, in the spelling of ``--set``.

    A running trial counts as a bad one, so that parallel trials differ (constant liar). So does each trial in the batch
    of the next trial, even if it has ended.

    Args:
        space: uses its parameters and its seed.
        known: the trials so far.
        first: the first trial of the batch.
    """
    seen = [
        one if one.number < first else Trial(number=one.number, state="running", params=one.params) for one in known
    ]
    own = int.from_bytes(hashlib.sha256(f"{space.file.seed} {len(known)}".encode()).digest()[:4], "big")
    sampler = TPESampler(seed=own, n_startup_trials=RANDOM_TRIALS, constant_liar=True, multivariate=True)
    return _decode(space, _study(space, seen, sampler).ask(space.distributions).params)


def rungs(pruner: Halving, epochs: int) -> list[int]:
    """Return the epochs at which trials are compared: ``min_epochs``, and ``factor`` times as many each time."""
    found, epoch = [], pruner.min_epochs
    while epoch < epochs:
        found.append(epoch)
        epoch *= pruner.factor
    return found


def limits(space: Space, trial: Trial, before: Sequence[Trial]) -> Limits:
    """Return the limits that a trial must reach, from the trials of earlier batches.

    Trial 0 is compared from the first rung on, trial 1 from the second, and so on in turn, so that some trials with a
    slow start continue.
    """
    found, pruner, lower = {}, space.pruner, space.lower_is_better
    judged_at = []
    with contextlib.suppress(UserError):  # Of wrong settings: the trial then fails with this message.
        judged_at = rungs(pruner, space.settings(trial.params).train.epochs) if pruner is not None else []
    earlier = [one.values for one in before if one.same_as is None]
    for epoch in judged_at[trial.number % len(judged_at) :] if judged_at else []:
        there = sorted((values[epoch - 1] for values in earlier if len(values) >= epoch), reverse=not lower)
        if pruner is not None and len(there) >= pruner.min_trials:
            found[epoch] = there[max((len(there) + 1) // pruner.factor, 1) - 1]  # The trial itself counts, too.
    return Limits(metric=space.metric, lower_is_better=lower, by_epoch=found)


class Trials:
    """The trials of a sweep; each is saved when it begins and when it has ended."""

    def __init__(self, folder: Path, space: Space) -> None:
        """
        Raises:
            UserError: the database is damaged, or another version of Optuna wrote it.
        """
        self._space, path = space, folder / FILE
        try:  # A killed process leaves an incomplete database, which the next process completes.
            self._storage = RDBStorage(f"sqlite:///{path}")
            self._study = optuna.create_study(
                storage=self._storage, study_name=STUDY, direction=_direction(space), load_if_exists=True
            )
        except Exception as error:  # SQLAlchemy's, sqlite3's, Optuna's own, KeyError.
            raise UserError(f"{path} cannot be read ({one_line(error)[:200]}): use --fresh for a new sweep") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._storage.engine.dispose()

    def all(self) -> list[Trial]:
        """Return the trials so far, in the order of their numbers."""
        return [self._trial(one) for one in self._study.get_trials(deepcopy=False)]

    def begin(self, params: Mapping[str, Any]) -> Trial:
        """Add a trial with these parameters."""
        trial = Trial(number=len(self._study.get_trials(deepcopy=False)), state="running", params=dict(params))
        self._study.add_trial(_frozen(self._space, trial))
        return trial

    def end(self, trial: Trial) -> None:
        """Save the outcome of a trial. If the process dies in between, the next one writes the same values again."""
        study_id = self._storage.get_study_id_from_name(STUDY)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        for epoch, value in enumerate(trial.values, start=1):
            self._storage.set_trial_intermediate_value(trial_id, epoch, value)
        self._storage.set_trial_user_attr(trial_id, WHOLE, trial.model_dump_json())
        values = [trial.value] if trial.value is not None and trial.state != "failed" else None
        self._storage.set_trial_state_values(trial_id, STATES[trial.state], values)

    def _trial(self, kept: FrozenTrial) -> Trial:
        if kept.state.is_finished():
            return Trial.model_validate_json(kept.user_attrs[WHOLE])
        return Trial(number=kept.number, state="running", params=_decode(self._space, kept.params))


def importance(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Return the share of the variance between complete trials that each parameter explains, largest first (fANOVA;
    Hutter et al., 2014); empty if they are too few, or all have the same value."""
    whole = [one for one in trials if one.state == "complete" and one.same_as is None and one.value is not None]
    if len(whole) < LEAST_FOR_IMPORTANCE or len({one.value for one in whole}) < 2:
        return {}
    found = get_param_importances(_study(space, whole), evaluator=FanovaImportanceEvaluator(seed=0))
    return {name: float(share) for name, share in found.items()}


def _study(space: Space, trials: Sequence[Trial], sampler: TPESampler | None = None) -> optuna.Study:
    study = optuna.create_study(direction=_direction(space), sampler=sampler)
    study.add_trials([_frozen(space, one) for one in trials])
    return study


def _frozen(space: Space, trial: Trial) -> FrozenTrial:
    return create_trial(
        state=STATES[trial.state],
        value=trial.value if trial.state in ("complete", "pruned") else None,
        params={
            key: value if isinstance(space.parameters[key], Range) else json.dumps(value, sort_keys=True)
            for key, value in trial.params.items()
        },
        distributions=space.distributions,
        intermediate_values=dict(enumerate(trial.values, start=1)),
    )


def _decode(space: Space, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's parameters in the spelling of ``--set``, in the order of the space."""
    return {
        key: params[key] if isinstance(one, Range) else json.loads(params[key]) for key, one in space.parameters.items()
    }


def _direction(space: Space) -> Literal["minimize", "maximize"]:
    return "minimize" if space.lower_is_better else "maximize"


def plan_of(space: Space, parallel: int) -> SweepPlan:
    """Return the plan that identifies a sweep."""
    return SweepPlan(
        name=space.name,
        space={**space.file.model_dump(mode="json"), "set": space.fixed},
        metric=space.metric,
        lower_is_better=space.lower_is_better,
        parallel=parallel,
        sampler=SAMPLER,
    )


def find_sweep(plan: SweepPlan, settings: config.Settings, prepared: PreparedDataset) -> Run | None:
    """Return the newest sweep with a space's name if its plan is the same, None if no sweep can be continued.

    Args:
        plan: the plan of the new sweep.
        settings: the settings of the trials, without the swept ones.
        prepared: their data.

    Raises:
        UserError: the sweep is unfinished and its plan differs; names the differences.
    """
    for run in entries.find_runs("sweeps"):
        before = outcome.load_readable(run, SweepPlan)
        if before is None or before.name != plan.name:  # None: killed before it had one, or damaged.
            continue
        then, now = map(_searched, (before, plan))
        other = [
            f"{key} was {shown(then.get(key))} and is now {shown(now.get(key))}"
            for key in dict.fromkeys([*then, *now])
            if then.get(key) != now.get(key)
        ]
        other += resume.other_result(run, settings, lineage.collect(settings, prepared.data_version))
        if not other:
            return run
        if outcome.status(run).status == "FINISHED":
            return None
        raise UserError(
            f"sweep {run.run_id} of {plan.name} is unfinished, and this command differs from it: "
            f"{listed(other, 3, '; ')}. Use the same values to continue it, or --fresh to start a new one"
        )
    return None


def key_of(space: Space) -> str:
    """Return the lock key of a space's name: only one command may work on a sweep of that name."""
    return f"sweep-{hashlib.sha256(space.name.encode()).hexdigest()[:16]}"


def best_of(trials: Iterable[Trial], lower_is_better: bool) -> Trial | None:
    """Return the best complete trial; if several are equally good, the first."""
    whole = [one for one in trials if one.state == "complete" and one.value is not None]
    sign = 1 if lower_is_better else -1
    return min(whole, key=lambda one: (sign * (one.value or 0.0), one.number), default=None)


def run_of(parent: Run, settings: config.Settings) -> Run | None:
    """Return the run of a trial that began earlier. Its settings are the same, except those that affect no result, such
    as tracking."""
    wanted = settings.digest()
    return next((run for run in entries.children(parent.run_id) if run.lineage.settings_digest == wanted), None)


def _searched(plan: SweepPlan) -> dict[str, Any]:
    """Return a plan's values that define the search, by key; the settings of its trials define the rest."""
    found = {f"space.{key}": one for key, one in plan.space["space"].items()}
    found |= {key: plan.space[key] for key in ("direction", "seed", "pruner")}
    return found | plan.model_dump(include={"metric", "parallel", "sampler"})
