"""What Optuna says: which parameters a trial is to have, and which of them mattered.

A suggestion is a function of the space, the seed, the trial's number and the trials before it: each trial has a sampler
of its own, whose seed is drawn of both. One sampler for all would be in another state after a restart, and the trials
of a sweep that was killed would be others than those of one that was not.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Literal, TypeAlias

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from tasks.records import Trial
from tasks.sweeps.space import Parameter, Range, Space

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


def suggest(
    parameters: Mapping[str, Parameter], seed: int, number: int, before: Sequence[Trial], lower_is_better: bool
) -> dict[str, Any]:
    """Return the parameters of a trial, in the spelling of ``--set``.

    Args:
        parameters: of the space.
        seed: of the space.
        number: of the trial.
        before: the trials before it; one that is still running counts as a bad one, so that trials side by side are
            not all of them the same (the constant liar).
        lower_is_better: of the trials' values.
    """
    own = int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")
    sampler = TPESampler(seed=own, n_startup_trials=RANDOM_TRIALS, constant_liar=True, multivariate=True)
    with _quiet():
        study = _study(parameters, before, lower_is_better, sampler)
        asked = study.ask(distributions(parameters))
    return decode(parameters, asked.params)


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
    """Return the parameters of the next trial. Of those in its batch, which begins at ``first``, it knows no more than
    their parameters, whether they have ended by now or not."""
    seen = [
        one if one.number < first else Trial(number=one.number, state="running", params=one.params) for one in known
    ]
    return suggest(space.parameters, space.file.seed, len(known), seen, lower_is_better)


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


def distributions(parameters: Mapping[str, Parameter]) -> dict[str, BaseDistribution]:
    """Return the parameters as Optuna has them; a choice is its JSON, because it may be a list."""
    return {key: _distribution(one) for key, one in parameters.items()}


def _distribution(parameter: Parameter) -> BaseDistribution:
    if not isinstance(parameter, Range):
        return CategoricalDistribution([json.dumps(one, sort_keys=True) for one in parameter])
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.whole:
        return IntDistribution(int(low), int(high), log=parameter.log, step=int(step or 1))
    return FloatDistribution(float(low), float(high), log=parameter.log, step=None if step is None else float(step))


def encode(parameters: Mapping[str, Parameter], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's parameters as Optuna has them."""
    return {
        key: value if isinstance(parameters[key], Range) else json.dumps(value, sort_keys=True)
        for key, value in params.items()
    }


def decode(parameters: Mapping[str, Parameter], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's parameters in the spelling of ``--set``, in the order of the space."""
    return {key: params[key] if isinstance(one, Range) else json.loads(params[key]) for key, one in parameters.items()}


def frozen(parameters: Mapping[str, Parameter], trial: Trial) -> FrozenTrial:
    """Return a trial as Optuna has it."""
    return create_trial(
        state=STATES[trial.state],
        value=trial.value if trial.state in ("complete", "pruned") else None,
        params=encode(parameters, trial.params),
        distributions=distributions(parameters),
        intermediate_values=dict(enumerate(trial.values, start=1)),
    )


def direction(lower_is_better: bool) -> Literal["minimize", "maximize"]:
    """Return it as Optuna has it."""
    return "minimize" if lower_is_better else "maximize"


def _study(
    parameters: Mapping[str, Parameter], trials: Sequence[Trial], lower_is_better: bool, sampler: TPESampler | None
) -> optuna.Study:
    study = optuna.create_study(direction=direction(lower_is_better), sampler=sampler)
    study.add_trials([frozen(parameters, one) for one in trials])
    return study


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence that an argument is called experimental: the lock has one version, and a test its suggestions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
