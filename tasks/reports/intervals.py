"""The 95% interval of each metric of an evaluation.

A proportion has the exact interval (Clopper and Pearson, Biometrika 26, 1934), another mean Student's. Any other metric
uses the grouped jackknife: the examples are divided at random into g groups, and the metric is computed without each
group in turn. Its variance is (g - 1) / g times the sum of the squared deviations of these g values from their mean
(Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11; Shao and Tu, The Jackknife and Bootstrap,
1995, section 2.3). The same applies to the difference between two models on the same examples.

Predictions of two runs for the same test rows are compared example by example: most rows are easy for both, so the
difference is more certain than the intervals of the runs suggest.
"""

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.evaluation import evidence
from tasks.evaluation.evidence import Interval
from tasks.modeling import metrics
from tasks.records import Comparison, ComparisonRow, MetricPair, Run
from tasks.reports.comparison import metric_base
from tasks.reports.material import Material, load
from tasks.runs import entries
from tasks.system.errors import UserError

TEST = "test/"

CONFIDENCE = 0.95
GROUPS = 100

Numbers: TypeAlias = npt.NDArray[np.float64]
"""One number for each example, (n,)."""


def of_metric(material: Material, name: str) -> Interval | None:
    """Return the interval of a test metric; None without predictions or for an unsupported metric."""
    if material.predictions is None:
        return None
    if (values := each(material, name)) is not None:
        return of_share(values) if name.endswith("accuracy") else of_scores(values)
    found = without_groups(material, name)
    if found is None or material.evaluation is None or f"test/{name}" not in material.evaluation.metrics:
        return None
    low, high = interval_by_groups(material.evaluation.metrics[f"test/{name}"], found)
    # A normal interval ignores the range of a metric: except RMSE, none exceeds 1; except R2, none is below 0.
    return Interval(low if name == "r2" else max(low, 0.0), high if name == "rmse" else min(high, 1.0))


def each(material: Material, name: str) -> Numbers | None:
    """Return the values of the test examples, (n,), whose mean is the metric; None if it is not such a mean."""
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


def of_scores(scores: npt.NDArray[Any]) -> Interval:
    """Return Student's interval of the mean of n scores, (n,)."""
    from scipy.special import stdtrit

    scores = np.asarray(scores, np.float64)
    count = len(scores)
    if count < 2:
        return Interval(float("nan"), float("nan"))
    far = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2) * scores.std(ddof=1)) / count**0.5
    return Interval(float(scores.mean()) - far, float(scores.mean()) + far)


def of_share(right: npt.NDArray[Any]) -> Interval:
    """Return the exact interval of the share of correct examples, (n,), by Clopper and Pearson."""
    from scipy.special import betaincinv

    count, num_right, tail = len(right), int(np.sum(right)), (1 - CONFIDENCE) / 2
    low = float(betaincinv(num_right, count - num_right + 1, tail)) if num_right else 0.0
    high = float(betaincinv(num_right + 1, count - num_right, 1 - tail)) if num_right < count else 1.0
    return Interval(low, high)


def _losses(material: Material) -> Numbers | None:
    """Return the default loss of the task for each example, (n,); None if their mean is not the measured loss."""
    labels, outputs = material.predicted
    if material.task == "classification":
        each = -np.log(np.maximum(material.probabilities[np.arange(len(labels)), labels], 1e-300))
    elif material.task == "multilabel":
        logits = outputs.astype(np.float64)
        each = (np.maximum(logits, 0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))).mean(axis=1)
    else:
        # In units of the target's standard deviation, as in the training of a table's model.
        deviation = material.prepared.target.deviation if material.prepared is not None else ()
        scale = np.array(deviation or [1.0] * labels.shape[1])
        each = np.square((outputs.astype(np.float64) - labels) / scale).mean(axis=1)
    measured = material.evaluation.metrics["test/loss"] if material.evaluation else float("nan")
    return each if np.isclose(each.mean(), measured, rtol=1e-5) else None


def without_groups(material: Material, name: str) -> Numbers | None:
    """Return the metric without each group of test examples, (groups,); None for a user-defined metric or another
    task's. Two models with the same number of examples have the same groups."""
    known, (labels, outputs) = metrics.of_task(material.task), material.predicted
    if name not in known:
        return None
    count = len(labels)
    # Ranking metrics of 10,000 examples and 1,000 classes take 0.6 s each time.
    groups = min(int(np.clip(4e7 / outputs.size, 20, GROUPS)), count)
    group_of, outputs = np.random.default_rng(0).permutation(count) % groups, outputs.astype(np.float64)
    kept = [group_of != group for group in range(groups)]
    return np.array([evidence.number(known[name].of_predictions(labels[rows], outputs[rows])) for rows in kept])


def interval_by_groups(value: float, without: Numbers) -> Interval:
    """Return the 95% interval of a metric, or of a difference, from its values without each group."""
    from scipy.special import stdtrit

    without = without[~np.isnan(without)]  # A class may be in only one group.
    groups = len(without)
    if groups < 2:
        return Interval(float("nan"), float("nan"))
    error = float(np.sqrt((groups - 1) * without.var()))
    far = float(stdtrit(groups - 1, (1 + CONFIDENCE) / 2)) * error
    return Interval(value - far, value + far)


def compare(first: Run, second: Run) -> tuple[dict[str, MetricPair], bool]:
    """Return each test metric of two runs, and whether both have predictions for the same test rows.

    A run that was not evaluated has no metrics.
    """
    sides = [load(run) for run in (first, second)]
    same = _same_rows(*sides)
    measured = [_measured(one) for one in sides]
    names = dict.fromkeys(name for metrics in measured for name in metrics)
    return {name: _pair(name, sides, [metrics.get(name) for metrics in measured], same) for name in names}, same


def with_intervals(comparison: Comparison) -> Comparison:
    """Add the interval of each row's headline metric, and of its difference from ``metric_base``, if the predictions of
    the first trainings exist."""
    rows = list(map(_with_interval, comparison.rows))
    base = metric_base(rows)
    first = _material_of(base) if base is not None else None
    if base is not None and first is not None:
        rows = [row if row is base else _with_difference(row, first, *base.intervals) for row in rows]
    return comparison.model_copy(update={"rows": tuple(rows)})


def _with_interval(row: ComparisonRow) -> ComparisonRow:
    side = _material_of(row)
    found = of_metric(side, side.headline) if side is not None else None
    known = {f"{TEST}{side.headline}": tuple(found)} if side is not None and found is not None else {}
    return row.model_copy(update={"intervals": known})


def _with_difference(row: ComparisonRow, first: Material, name: str) -> ComparisonRow:
    side = _material_of(row) if name in row.intervals else None
    if side is None or not _same_rows(first, side):
        return row
    paired = _paired(name.removeprefix(TEST), first, side, _measured(side)[name] - _measured(first)[name])
    return row.model_copy(update={"differences": {name: tuple(paired)}}) if paired is not None else row


def _material_of(row: ComparisonRow) -> Material | None:
    """Return the data of a row's first training; None if it failed."""
    if row.reason is not None or row.run_id is None:
        return None
    try:
        return load(entries.find_run(row.run_id))
    except UserError:  # A record cannot be read; the row keeps its figures.
        return None


def _measured(one: Material) -> dict[str, float]:
    return one.evaluation.metrics if one.evaluation is not None else {}


def _same_rows(first: Material, second: Material) -> bool:
    if first.evaluation is None or second.evaluation is None or first.predictions is None or second.predictions is None:
        return False
    rows = {first.evaluation.test_rows, second.evaluation.test_rows}
    return len(rows) == 1 and None not in rows and np.array_equal(first.predictions.labels, second.predictions.labels)


def _pair(name: str, sides: list[Material], values: list[float | None], same: bool) -> MetricPair:
    short, (before, after) = name.removeprefix(TEST), values
    found = [of_metric(one, short) if name in _measured(one) else None for one in sides]
    paired = None
    if same and before is not None and after is not None:
        paired = _paired(short, sides[0], sides[1], after - before)
    return MetricPair(
        first=before,
        second=after,
        first_interval=found[0],
        second_interval=found[1],
        difference=after - before if before is not None and after is not None else None,
        difference_interval=paired,
    )


def _paired(name: str, first: Material, second: Material, difference: float) -> evidence.Interval | None:
    """Return the interval of a difference on the same rows; see this module."""
    before, after = each(first, name), each(second, name)
    if before is not None and after is not None:
        return of_scores(after - before)
    was, now = without_groups(first, name), without_groups(second, name)
    if was is None or now is None or not math.isfinite(difference):
        return None
    return interval_by_groups(difference, now - was)
