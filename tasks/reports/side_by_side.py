"""Two runs side by side: what differs, how sure each of their test metrics is, and how sure the difference.

Where both were evaluated on the same test rows, predictions are compared example by example: most rows are easy for
both, so the difference of two runs is more certain than the intervals of both suggest.
"""

import math

import numpy as np

from tasks import runs
from tasks.evaluation import evidence
from tasks.records import Comparison, ComparisonRow, MetricPair, Run, RunDifference
from tasks.reports import intervals, material
from tasks.reports.findings import metric_base
from tasks.reports.material import Material
from tasks.system.errors import UserError

TEST = "test/"


def differences(first: Run, second: Run) -> RunDifference:
    """Return what differs between two runs, and their test metrics with intervals.

    Raises:
        UserError: params.yaml cannot be read.
    """
    metrics, same = compare(first, second)
    return runs.compare(first, second).model_copy(update={"metrics": metrics, "same_test_rows": same})


def compare(first: Run, second: Run) -> tuple[dict[str, MetricPair], bool]:
    """Return each test metric of two runs, and whether both have predictions for the same test rows.

    A run that was not evaluated has no metric.
    """
    sides = [material.load(run) for run in (first, second)]
    same = _same_rows(*sides)
    measured = [_measured(one) for one in sides]
    names = dict.fromkeys(name for metrics in measured for name in metrics)
    return {name: _pair(name, sides, [metrics.get(name) for metrics in measured], same) for name in names}, same


def with_intervals(comparison: Comparison) -> Comparison:
    """Return a comparison with the interval of each row's headline metric, and of its difference from that of
    ``findings.metric_base``, from the predictions of their first trainings; without them where these are missing."""
    rows = list(map(_with_interval, comparison.rows))
    base = metric_base(rows)
    first = _material_of(base) if base is not None else None
    if base is not None and first is not None:
        rows = [row if row is base else _with_difference(row, first, *base.intervals) for row in rows]
    return comparison.model_copy(update={"rows": tuple(rows)})


def _with_interval(row: ComparisonRow) -> ComparisonRow:
    side = _material_of(row)
    found = intervals.of_metric(side, side.headline) if side is not None else None
    known = {f"{TEST}{side.headline}": tuple(found)} if side is not None and found is not None else {}
    return row.model_copy(update={"intervals": known})


def _with_difference(row: ComparisonRow, first: Material, name: str) -> ComparisonRow:
    side = _material_of(row) if name in row.intervals else None
    if side is None or not _same_rows(first, side):
        return row
    paired = _paired(name.removeprefix(TEST), first, side, _measured(side)[name] - _measured(first)[name])
    return row.model_copy(update={"differences": {name: tuple(paired)}}) if paired is not None else row


def _material_of(row: ComparisonRow) -> Material | None:
    """Return what there is of the first training of a row that worked."""
    if row.reason is not None or row.run_id is None:
        return None
    try:
        return material.load(runs.find_run(row.run_id))
    except UserError:  # A record of it cannot be read; the figures stand without it.
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
    found = [intervals.of_metric(one, short) if name in _measured(one) else None for one in sides]
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
    """Return the interval of a difference on the same rows: by the bootstrap if the metric is a mean, else by the
    influence of the examples."""
    before, after = intervals.each(first, name), intervals.each(second, name)
    if before is not None and after is not None:
        return evidence.paired_means(before, after, confidence=intervals.CONFIDENCE).interval
    moved_before, moved_after = intervals.influence_on(first, name), intervals.influence_on(second, name)
    if moved_before is None or moved_after is None or not math.isfinite(difference):
        return None
    return intervals.interval_by_influence(difference, moved_after - moved_before)
