"""How much each test example moves a metric: its derivative by the weight of that example, where all weigh 1.

The variance of a metric is the sum of their squares, and that of a difference of two models on the same examples the
sum of the squares of their differences (the infinitesimal jackknife: Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, section 21.4; of one AUC it is nearly what DeLong et al., Biometrics 44, 1988, give). It costs a sort
of each class and no resample: of an AUC of 10 classes and 100,000 examples 0.2 s, where each resample takes 0.14 s.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tasks.evaluation.evidence import Interval
from tasks.reports.material import Material

DEVIATIONS = 1.959964
"""Of the normal distribution, on each side of 95 %."""
Values: TypeAlias = npt.NDArray[np.float64]
"""Of each example, (n,)."""


def of_metric(material: Material, name: str) -> Values | None:
    """Return the influence of each test example on a metric, (n,); None of one that this does not know."""
    labels, outputs = material.predicted
    if name == "auc":
        return _mean(_auc, labels, outputs if labels.ndim == 2 else material.probabilities)
    if name == "mean_average_precision" and labels.ndim == 2:
        return _mean(_average_precision, labels, outputs)
    if name in ("macro_f1", "micro_f1"):
        return _f1(labels, outputs, name == "macro_f1")
    errors = outputs.astype(np.float64) - labels if material.task == "regression" else None
    if name == "r2" and errors is not None:
        return _r2(errors, labels.astype(np.float64))
    if name == "rmse" and errors is not None:
        squares = np.square(errors).mean(axis=1)
        mean = float(squares.mean())
        return (squares - mean) / (2 * len(squares) * mean**0.5) if mean else np.zeros(len(squares))
    return None


def interval(value: float, influence: Values) -> Interval:
    """Return the 95 % interval of a metric, or of a difference, from its examples' influence."""
    far = DEVIATIONS * float(np.sqrt(np.square(influence).sum()))
    return Interval(value - far, value + far)


def _mean(
    of_one: Callable[[Any, Any], Values | None], labels: npt.NDArray[Any], scores: npt.NDArray[Any]
) -> Values | None:
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


def _auc(own: npt.NDArray[np.bool_], scores: npt.NDArray[Any]) -> Values | None:
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


def _average_precision(own: npt.NDArray[np.bool_], scores: npt.NDArray[Any]) -> Values | None:
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


def _f1(labels: npt.NDArray[Any], outputs: npt.NDArray[Any], macro: bool) -> Values:
    num = outputs.shape[1]
    if labels.ndim == 1:
        taken, own = np.eye(num)[outputs.argmax(axis=1)], np.eye(num)[labels]
    else:
        taken, own = (outputs > 0).astype(np.float64), (labels == 1).astype(np.float64)
    right, both = taken * own, taken + own
    if not macro:
        right, both = right.sum(axis=1, keepdims=True), both.sum(axis=1, keepdims=True)
    sums = np.maximum(both.sum(axis=0), 1)
    moved: Values = (2 * right / sums - both * (2 * right.sum(axis=0) / sums**2)).mean(axis=1)
    return moved


def _r2(errors: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> Values | None:
    apart = np.square(wanted - wanted.mean(axis=0))
    total, lost = apart.sum(axis=0), np.square(errors).sum(axis=0)
    if not total.all():
        return None
    moved: Values = (apart * (lost / total**2) - np.square(errors) / total).mean(axis=1)
    return moved
