"""The gate of the alias `champion`: decides whether a model is demonstrably better than the current champion.

A model becomes the champion if it meets these conditions, which are checked in this order:

1. `register.enabled` is true, and the loss was finite in each training step (``tasks/register.py``).
2. Its evaluation has `register.metric`, which reaches `register.minimum` (``tasks/register.py``).
3. Its evaluation stored the outputs for the current test rows of the dataset (``tasks/register.py``).
4. No class and no other slice of the test split is below its floor in `register.floors` or, for a regression, above its
   ceiling in `register.ceilings` (``judge``).
5. There is no champion yet; or `register.metric` is better than the champion's on the same test rows by at least
   `register.min_improvement`, and the p-value of this improvement is at most 1 - `register.confidence` (``judge``).
6. Loaded through MLflow, it reproduces the outputs of its evaluation (``tasks/register.py``).

`--force` replaces conditions 4 and 5 (``forced``).
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.evaluation import evidence, slices
from tasks.evaluation.predictions import Predictions
from tasks.modeling import losses, metrics
from tasks.records import HEADLINES, EvaluationResult, Judgement, PreparedDataset, Task
from tasks.system import units
from tasks.system.errors import UserError, listed, one_of

ROUNDING = 1e-12
"""The tolerance for differences of shares in floating point: 0.95 - 0.94 is more than 0.01, and 0.96 - 0.95 is less."""
FLOORS, CEILINGS = "register.floors", "register.ceilings"
HAS = {
    "recall": "a recall of {}",
    "accuracy": "an accuracy of {}",
    "labels right": "{} of its labels right",
    "mae": "a mean absolute error of {}",
}
"""Phrases for a value measured on a part of the test split, by measure."""


class Champion(NamedTuple):
    """The version that has the alias."""

    version: str
    predictions: Predictions | None
    """For the current test rows; None if unavailable."""
    why_not: str | None = None
    """A sentence with the reason why there are no predictions."""
    scored_again: bool = False


def check(settings: config.Settings, prepared: PreparedDataset) -> None:
    """Refuse gate settings that do not fit the data.

    Raises:
        UserError: the evaluation does not compute the metric; or limits do not fit the task, or name classes or slices
            that do not exist or have too few examples.
    """
    metrics.check_gate(settings, prepared)
    target, (key, limits) = prepared.target, _limits(settings.register_, prepared.target.task)
    named = [name for name in limits if name not in target.class_names]
    unknown = [name for name in named if ": " not in name]
    if unknown and target.class_names:
        raise UserError(one_of(f"class in {key}", unknown[0], target.class_names))
    if not named:
        return  # There is no need to read the test rows.
    labels = np.load(config.project_root() / prepared.splits["test"].labels, mmap_mode="r", allow_pickle=False)
    counts = {one.full_name: int(one.rows.sum()) for one in _slices(prepared, labels)}
    for name in named:
        if name not in counts:
            raise UserError(one_of(f"slice in {key}", name, counts, see=_near(name, counts)))
        if counts[name] < slices.FEWEST:
            raise UserError(
                f"{key} = '{name}': the slice has {counts[name]} test examples, but needs {slices.FEWEST} to have a "
                f"{'ceiling' if key == CEILINGS else 'floor'}. Leave it out, or use a larger test split"
            )


def _limits(section: config.Register, task: Task) -> tuple[str, Mapping[str, float]]:
    """Return the key that sets limits for parts of the test split, and the limits by name; refuse the key of another
    task."""
    if task == "regression":
        if section.floors:
            raise UserError(
                f"{FLOORS} = {section.floors}: a regression has no share of correct answers. Set {CEILINGS} "
                "instead: the largest mean absolute error that a slice may have"
            )
        return CEILINGS, section.ceilings
    if section.ceilings:
        raise UserError(
            f"{CEILINGS} = {section.ceilings}: a {task} has no mean absolute error. Set {FLOORS} instead: the "
            "least share of correct answers in a slice, or the least recall of a class"
        )
    return FLOORS, section.floors


def _near(name: str, known: Collection[str]) -> str:
    """Return a hint with similar names of slices, or else with some names."""
    near = get_close_matches(name, known, n=10, cutoff=0.3) or sorted(known)
    return f"There are {listed([repr(one) for one in near], most=10)}; a run's report shows the names of all slices"


def _slices(prepared: PreparedDataset, labels: npt.NDArray[Any]) -> list[slices.Slice]:
    target = prepared.target
    return list(slices.every(target.task, target.class_names, labels, slices.load(prepared)))


def metric_of(settings: config.Settings, prepared: PreparedDataset) -> tuple[str, evidence.Measure]:
    """Return the name of the gate's metric and its function; those of the task's default metric if the gate is off and
    its metric does not fit the task."""
    task, metric = prepared.target.task, settings.register_.metric
    if metric == "test/loss":
        loss = losses.find_loss(settings.train, prepared)
        return metric, lambda labels, outputs: float(losses.of_examples(loss, labels, outputs).mean())
    known = metrics.of_task(task, metrics.without_file(settings))
    name = metric.removeprefix("test/")
    name = name if name in known else HEADLINES[task]
    return f"test/{name}", known[name].of_predictions


def judge(
    settings: config.Settings,
    prepared: PreparedDataset,
    evaluation: EvaluationResult,
    candidate: Predictions,
    champion: Champion | None,
) -> Judgement:
    """Return whether the model with these predictions for the test rows becomes the champion, and the reason.

    ``register`` is read, ``train.loss`` if the metric is the loss, and the recall of the evaluation's classes.
    """
    missed = _limits_missed(settings.register_, prepared, evaluation, candidate)
    if champion is None:
        return Judgement(promoted=not missed, reason=missed or "the first model that passes the gate")
    if champion.predictions is None:
        return Judgement(promoted=False, reason=champion.why_not or "", against=champion.version)
    found = _compare(settings, prepared, candidate, champion, champion.predictions)
    refused = missed or _not_better(settings.register_, found)
    figures = _figures(settings.register_, found)
    return found.model_copy(
        update={"promoted": refused is None, "reason": figures if refused is None else f"{figures}: {refused}"}
    )


def forced(judgement: Judgement) -> Judgement:
    """Return the judgement of a model that becomes the champion because of `--force`."""
    if judgement.promoted:
        return judgement
    return judgement.model_copy(
        update={"promoted": True, "forced": True, "reason": f"--force, against the evidence: {judgement.reason}"}
    )


def _limits_missed(
    section: config.Register, prepared: PreparedDataset, evaluation: EvaluationResult, candidate: Predictions
) -> str | None:
    """Return the classes whose recall is below their floor, and the slices that miss their floor or ceiling, as text;
    None if the model meets all limits."""
    task, class_names = prepared.target.task, prepared.target.class_names
    key, limits = _limits(section, task)
    measured = [("recall", one.name, one.recall, one.support) for one in evaluation.classes if one.name in limits]
    named = [name for name in limits if name not in class_names]
    found = [one for one in _slices(prepared, candidate.labels) if one.full_name in named] if named else []
    scores = slices.scores(task, *candidate)
    measured += [
        (slices.MEASURES[task], one.full_name, float(scores[one.rows].mean()), int(one.rows.sum())) for one in found
    ]
    said = []
    for measure, name, value, count in measured:
        within = value <= limits[name] if key == CEILINGS else value >= limits[name]
        if not within:  # NaN is not, either.
            may = "may have at most" if key == CEILINGS else "needs"
            has = HAS[measure].format(units.number(value, 4) if measure == "mae" else units.metric(value))
            said.append(f"'{name}' has {has} among {count:,} examples and {may} {limits[name]:g}")
    known = {one.full_name for one in found}
    said += [f"these test rows have no slice '{name}'" for name in named if name not in known]
    return f"{key}: {'; '.join(said)}" if said else None


def _mean(_: object, each: npt.NDArray[Any]) -> float:
    return float(each.mean())


def _compare(
    settings: config.Settings,
    prepared: PreparedDataset,
    candidate: Predictions,
    champion: Champion,
    before: Predictions,
) -> Judgement:
    """Return the results of both models, without a decision."""
    name, confidence = settings.register_.metric.removeprefix("test/"), settings.register_.confidence
    better = metrics.better(settings.register_.metric)
    labels = candidate.labels
    now, was = (one.outputs.astype(np.float64) for one in (candidate, before))
    measure: evidence.Measure = _mean
    if name == "accuracy":
        now, was = (outputs.argmax(axis=1) == labels for outputs in (now, was))
    elif name == "loss":
        # From predictions only: additional losses of a model do not depend on examples.
        loss = losses.find_loss(settings.train, prepared)
        now, was = (losses.of_examples(loss, labels, outputs) for outputs in (now, was))
    else:
        measure = metrics.find_metric(name).of_predictions
    found = evidence.paired_bootstrap(measure, labels, was, now, better, confidence)
    return Judgement(
        promoted=False,
        reason="",
        against=champion.version,
        scored_again=champion.scored_again,
        metric=settings.register_.metric,
        candidate=evidence.number(measure(labels, now)),
        champion=evidence.number(measure(labels, was)),
        difference=found.value,
        interval=found.interval,
        test="McNemar" if name == "accuracy" else "paired bootstrap",
        p_value=evidence.mcnemar(was, now) if name == "accuracy" else found.p_value,
        num_examples=len(labels),
    )


def _not_better(section: config.Register, found: Judgement) -> str | None:
    difference, p_value, chance = found.difference or 0.0, found.p_value or 0.0, 1 - section.confidence
    if not difference > 0:
        return "it is no better"
    if difference < section.min_improvement - ROUNDING:
        return f"register.min_improvement = {section.min_improvement:g} is not reached"
    if not p_value <= chance:
        return f"this could be chance: p must be at most {chance:.2g} (register.confidence = {section.confidence:g})"
    return None


def _figures(section: config.Register, found: Judgement) -> str:
    low, high = found.interval or (0.0, 0.0)
    again = ", scored again," if found.scored_again else ""
    candidate, champion = units.metric(found.candidate), units.metric(found.champion)
    both = f"{found.metric} {candidate} against {champion} of version {found.against}{again}"
    interval = f"{section.confidence:.0%} interval {units.interval(low, high, '+')}"
    test = f"{found.test} p = {found.p_value:.2g}, {found.num_examples:,} test rows"
    how = "is better by" if (found.difference or 0.0) > 0 else "differs by"
    return f"{both} {how} {units.metric(found.difference, '+')} ({interval}, {test})"
