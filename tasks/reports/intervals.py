"""The 95 % interval of each metric of an evaluation, and how much each test example moves a metric.

Intervals are found by the bootstrap, for all resamples at once: one by one, an AUC of 360 examples would take half a
second. Where even that takes too long, and for differences of metrics that are not means, the interval follows from the
influence of the examples: the derivative of the metric by the weight of each example, where all weigh 1. The variance
of a metric is the sum of their squares, and that of a difference of two models on the same examples the sum of the
squares of their differences (the infinitesimal jackknife: Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
section 21.4; of one AUC it is nearly what DeLong et al., Biometrics 44, 1988, give). It costs a sort of each class and
no resample: of an AUC of 10 classes and 100,000 examples 0.2 s, where each resample takes 0.14 s.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.evaluation import evidence
from tasks.evaluation.evidence import RESAMPLES, Interval
from tasks.reports.material import Material

CONFIDENCE = 0.95
MOST_DRAWS = 10_000_000
"""Draws up to which a metric that is not a mean is resampled: 0.3 s at worst on one core. Beyond that, and for the mean
average precision, the interval comes from ``influence_on``, which is close to it for so many examples."""
GROUPS = 100
DEVIATIONS = 1.959964
"""Of the normal distribution, on each side of 95 %."""

Numbers: TypeAlias = npt.NDArray[np.float64]
"""Of each example, (n,), or of each resample."""


def of_metric(material: Material, name: str) -> Interval | None:
    """Return the interval of a test metric; None where there are no predictions, or of a metric that this does not
    know."""
    if material.predictions is None:
        return None
    found = _resampled(material, name)
    if found is not None or material.evaluation is None or f"test/{name}" not in material.evaluation.metrics:
        return found
    moved = influence_on(material, name)
    if moved is None:
        return None
    low, high = interval_by_influence(material.evaluation.metrics[f"test/{name}"], moved)
    # A normal interval knows nothing of the ends: all of these are 1 at best, and but for an R2 none is below 0.
    return Interval(low if name == "r2" else max(low, 0.0), high if name == "rmse" else min(high, 1.0))


def each(material: Material, name: str) -> Numbers | None:
    """Return the number of each test example, (n,), of which a metric is the mean; None for a metric that is not a mean
    or is unknown here."""
    labels, outputs = material.predicted
    if name == "loss":
        return _losses(material)
    if name == "accuracy" and material.task == "classification":
        return material.scores
    if material.task == "classification" and (k := config.top_k_of(name)):
        k = min(k, outputs.shape[1])
        best = np.argpartition(outputs, -k, axis=1)[:, -k:]
        found: Numbers = (best == labels[:, None]).any(axis=1).astype(np.float64)
        return found
    return material.scores if name == "mae" and material.task == "regression" else None


def _resampled(material: Material, name: str) -> Interval | None:
    labels, outputs = material.predicted
    if (values := each(material, name)) is not None:
        return of_share(values) if name.endswith("accuracy") else of_scores(values)
    if name == "auc":
        scores = outputs if labels.ndim == 2 else material.probabilities
        return auc(labels, scores)
    if material.task == "classification":
        return _macro_f1(labels, outputs) if name == "macro_f1" else None
    return _of_labels(name, labels, outputs) if material.task == "multilabel" else _of_numbers(name, labels, outputs)


def of_scores(scores: npt.NDArray[Any]) -> Interval:
    """Return the interval of a mean, (n,).

    Of more than 2,000 different numbers, each counts as the mean of its hundredth of them in order, which keeps the
    mean of all, and all of their spread but a small part.
    """
    scores = np.asarray(scores, np.float64)
    if len(scores) > 2000 and len(np.unique(scores)) > GROUPS:
        scores = np.concatenate([np.full(len(part), part.mean()) for part in np.array_split(np.sort(scores), GROUPS)])
    return evidence.interval_of_mean(scores, CONFIDENCE)


def of_share(right: npt.NDArray[Any]) -> Interval:
    """Return the interval of the share of examples that are right, (n,).

    Where all are, or none is, each resample is alike, and the bootstrap would be sure of what 10 examples cannot show:
    then it is the exact one of a binomial share (Clopper and Pearson, Biometrika 26, 1934).
    """
    tail, share = (1 - CONFIDENCE) / 2, float(np.mean(right))
    if share in (0.0, 1.0):
        far = float(tail ** (1 / len(right)))
        return Interval(far, 1.0) if share else Interval(0.0, 1 - far)
    return of_scores(right)


def of_sums(values: npt.NDArray[Any], measure: Callable[[Numbers], npt.NDArray[Any]]) -> Interval | None:
    """Return the interval of what follows from sums over the examples; None where it would take too long.

    Args:
        values: what each example adds, (n, k).
        measure: takes the sums of each resample, (RESAMPLES, k), and returns its number, (RESAMPLES,); NaN where there
            is none.
    """
    # How often each different row is drawn is multinomial.
    rows, counts = np.unique(np.asarray(values, np.float64), axis=0, return_counts=True)
    if len(rows) * RESAMPLES > MOST_DRAWS:
        return None
    drawn = np.random.default_rng(0).multinomial(len(values), counts / len(values), RESAMPLES)
    with np.errstate(invalid="ignore", divide="ignore"):
        return _of_resamples(measure(drawn @ rows))


def auc(labels: npt.NDArray[Any], scores: npt.NDArray[Any]) -> Interval | None:
    """Return the interval of the AUC of classes (n,), or labels (n, labels): see ``tasks/modeling/metrics/auc.py``."""
    if scores.size * RESAMPLES > MOST_DRAWS:
        return None
    num = len(labels)
    drawn = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), RESAMPLES).astype(np.float32)
    classes = range(1, 2) if labels.ndim == 1 and scores.shape[1] == 2 else range(scores.shape[1])
    areas = []
    for number in classes:
        own = labels == number if labels.ndim == 1 else labels[:, number] == 1
        # Of each example of the class, how many others have a lower score, those of the same one counting half.
        _, place = np.unique(scores[:, number], return_inverse=True)
        num_others = np.zeros((place.max() + 1, RESAMPLES), np.float32)
        if len(num_others) == num:
            num_others[place[~own]] = drawn.T[~own]
        else:  # Some are equal; it takes four times as long.
            np.add.at(num_others, place[~own], drawn.T[~own])
        below = np.cumsum(num_others, axis=0) - num_others / 2
        own_drawn = drawn.T[own]
        with np.errstate(invalid="ignore"):
            pairs = own_drawn.sum(axis=0) * num_others.sum(axis=0)
            areas.append((own_drawn * below[place[own]]).sum(axis=0) / pairs)
    known = np.ma.masked_invalid(np.stack(areas))
    return _of_resamples(known.mean(axis=0).filled(np.nan))


def _losses(material: Material) -> Numbers | None:
    """Return the loss of each example, (n,), where the loss is the mean of the task's usual one: there are others, and
    losses of the model's own."""
    labels, outputs = material.predicted
    if material.task == "classification":
        each = -np.log(np.maximum(material.probabilities[np.arange(len(labels)), labels], 1e-300))
    elif material.task == "multilabel":
        logits = outputs.astype(np.float64)
        each = (np.maximum(logits, 0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))).mean(axis=1)
    else:
        # In units of the target's deviation, in which a model of a table learns it.
        deviation = material.prepared.target.deviation if material.prepared is not None else ()
        scale = np.array(deviation or [1.0] * labels.shape[1])
        each = np.square((outputs.astype(np.float64) - labels) / scale).mean(axis=1)
    measured = material.evaluation.metrics["test/loss"] if material.evaluation else float("nan")
    return each if np.isclose(each.mean(), measured, rtol=1e-5) else None


def _of_labels(name: str, labels: npt.NDArray[Any], logits: npt.NDArray[Any]) -> Interval | None:
    taken, own = logits > 0, labels == 1
    right, both = taken & own, taken.astype(np.int64) + own
    num = labels.shape[1]
    if name == "micro_f1":
        sums = np.column_stack([right.sum(axis=1), both.sum(axis=1)])
        return of_sums(sums, lambda found: 2 * found[:, 0] / np.maximum(found[:, 1], 1))
    if name == "macro_f1":
        return of_sums(
            np.column_stack([right, both]),
            lambda found: (2 * found[:, :num] / np.maximum(found[:, num:], 1)).mean(axis=1),
        )
    return None


def _of_numbers(name: str, labels: npt.NDArray[Any], outputs: npt.NDArray[Any]) -> Interval | None:
    errors = outputs.astype(np.float64) - labels
    num = labels.shape[1]
    if name == "rmse":
        low, high = of_scores(np.square(errors).mean(axis=1))
        return Interval(low**0.5, high**0.5)
    if name == "r2":
        apart = labels.astype(np.float64) - labels.mean(axis=0)  # Else float64 would lose the digits of large numbers.

        def measure(found: Numbers) -> Numbers:
            squares = found[:, num : 2 * num] - np.square(found[:, 2 * num :]) / len(labels)
            means: Numbers = (1 - found[:, :num] / squares).mean(axis=1)
            return means

        return of_sums(np.column_stack([np.square(errors), np.square(apart), apart]), measure)
    return None


def _macro_f1(labels: npt.NDArray[Any], outputs: npt.NDArray[Any]) -> Interval | None:
    """Return the interval of the mean F1 of the classes, from how often each class is taken for each."""
    num_classes = outputs.shape[1]
    pairs, counts = np.unique(labels * num_classes + outputs.argmax(axis=1), return_counts=True)
    if len(pairs) * RESAMPLES > MOST_DRAWS:
        return None
    drawn = np.random.default_rng(0).multinomial(len(labels), counts / len(labels), RESAMPLES)
    own, taken = np.divmod(pairs, num_classes)
    right, both = np.zeros((num_classes, RESAMPLES)), np.zeros((num_classes, RESAMPLES))
    for numbers, true, given in zip(drawn.T, own, taken, strict=True):
        both[true] += numbers
        both[given] += numbers
        if true == given:
            right[true] += numbers
    return _of_resamples((2 * right / np.maximum(both, 1)).mean(axis=0))


def _of_resamples(found: npt.NDArray[Any]) -> Interval | None:
    found = found[np.isfinite(found)]
    return evidence.percentiles(found, CONFIDENCE) if len(found) else None


def influence_on(material: Material, name: str) -> Numbers | None:
    """Return the influence of each test example on a metric, (n,); None of one that this does not know."""
    labels, outputs = material.predicted
    if name == "auc":
        return _mean_influence(_auc_influence, labels, outputs if labels.ndim == 2 else material.probabilities)
    if name == "mean_average_precision" and labels.ndim == 2:
        return _mean_influence(_average_precision_influence, labels, outputs)
    if name in ("macro_f1", "micro_f1"):
        return _f1_influence(labels, outputs, name == "macro_f1")
    errors = outputs.astype(np.float64) - labels if material.task == "regression" else None
    if name == "r2" and errors is not None:
        return _r2_influence(errors, labels.astype(np.float64))
    if name == "rmse" and errors is not None:
        squares = np.square(errors).mean(axis=1)
        mean = float(squares.mean())
        return (squares - mean) / (2 * len(squares) * mean**0.5) if mean else np.zeros(len(squares))
    return None


def interval_by_influence(value: float, influence: Numbers) -> Interval:
    """Return the 95 % interval of a metric, or of a difference, from its examples' influence."""
    far = DEVIATIONS * float(np.sqrt(np.square(influence).sum()))
    return Interval(value - far, value + far)


def _mean_influence(
    of_one: Callable[[Any, Any], Numbers | None], labels: npt.NDArray[Any], scores: npt.NDArray[Any]
) -> Numbers | None:
    """Return the influence on a mean over classes, (n,), or over labels, (n, labels): of those that have a value."""
    classes = range(1, 2) if labels.ndim == 1 and scores.shape[1] == 2 else range(scores.shape[1])
    found = [
        of_one(labels == number if labels.ndim == 1 else labels[:, number] == 1, scores[:, number])
        for number in classes
    ]
    known = [one for one in found if one is not None]
    total = np.zeros(len(labels))
    for one in known:
        total += one
    return total / len(known) if known else None


def _auc_influence(own: npt.NDArray[np.bool_], scores: npt.NDArray[Any]) -> Numbers | None:
    num_own, num_others = int(own.sum()), int((~own).sum())
    if not num_own or not num_others:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    own_at = np.bincount(place[own], minlength=len(counts))
    others_at = counts - own_at
    # Of an example of the class the share of the others below it, of another one that of the class above it: ties half.
    below = (np.cumsum(others_at) - others_at / 2)[place] / num_others
    above = 1 - (np.cumsum(own_at) - own_at / 2)[place] / num_own
    area = float(below[own].mean())
    return np.where(own, (below - area) / num_own, (above - area) / num_others)


def _average_precision_influence(own: npt.NDArray[np.bool_], scores: npt.NDArray[Any]) -> Numbers | None:
    num_own = int(own.sum())
    if not num_own:
        return None
    _, place, counts = np.unique(-scores.astype(np.float64), return_inverse=True, return_counts=True)
    own_at = np.bincount(place[own], minlength=len(counts))
    hits, ranked = np.cumsum(own_at), np.cumsum(counts)
    precision = hits / ranked
    average = float((own_at * precision).sum() / num_own)
    # An example moves the precision at its own place and at all after it.
    after = np.cumsum((own_at / ranked)[::-1])[::-1]
    lost = np.cumsum((own_at * hits / ranked**2)[::-1])[::-1]
    return np.where(own, precision[place] - average + after[place], 0.0) / num_own - lost[place] / num_own


def _f1_influence(labels: npt.NDArray[Any], outputs: npt.NDArray[Any], macro: bool) -> Numbers:
    num = outputs.shape[1]
    if labels.ndim == 1:
        taken, own = np.eye(num)[outputs.argmax(axis=1)], np.eye(num)[labels]
    else:
        taken, own = (outputs > 0).astype(np.float64), (labels == 1).astype(np.float64)
    right, both = taken * own, taken + own
    if not macro:
        right, both = right.sum(axis=1, keepdims=True), both.sum(axis=1, keepdims=True)
    sums = np.maximum(both.sum(axis=0), 1)
    moved: Numbers = (2 * right / sums - both * (2 * right.sum(axis=0) / sums**2)).mean(axis=1)
    return moved


def _r2_influence(errors: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> Numbers | None:
    apart = np.square(wanted - wanted.mean(axis=0))
    total, lost = apart.sum(axis=0), np.square(errors).sum(axis=0)
    if not total.all():
        return None
    moved: Numbers = (apart * (lost / total**2) - np.square(errors) / total).mean(axis=1)
    return moved
