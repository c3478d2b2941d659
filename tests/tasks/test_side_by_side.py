"""Metrics of two runs side by side: their intervals against resampling."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tasks import records
from tasks.evaluation import evidence
from tasks.modeling import metrics
from tasks.reports import intervals
from tasks.reports.material import load
from tests.tasks import made_up
from tests.tasks import test_findings as comparisons
from tests.tasks.test_run_report import TASKS

FIRST = "b" * 32


@pytest.fixture(autouse=True)
def in_project(tmp_path, monkeypatch):
    monkeypatch.chdir(made_up.project(tmp_path / "project"))


def two(labels, before, after, other_labels=None):
    """Return two runs that were evaluated on these test rows."""
    made_up.run(labels, before)
    folder = Path("mlruns/runs", FIRST)
    shutil.copytree(made_up.FOLDER, folder)
    for path in [*folder.rglob("*.json")]:
        path.write_text(path.read_text().replace(made_up.RUN_ID, FIRST))
    second = made_up.run(labels if other_labels is None else other_labels, after)
    return records.load(records.Run, folder / "records" / "run.json"), second


def of_task(task, count=400):
    """Return labels, the outputs of a model, and those of a better one that is right where the other is."""
    labels, before = made_up.classification(count, 7) if task == "classification" else TASKS[task](count)
    random = np.random.default_rng(1)
    if task == "regression":
        return labels, before, (labels + 0.7 * (before - labels)).astype(np.float32)
    own = np.eye(before.shape[1])[labels] if labels.ndim == 1 else 2.0 * labels - 1
    return labels, before, (before + random.normal(size=before.shape) * 0.5 + 0.4 * own).astype(np.float32)


def test_a_difference_is_as_sure_as_resampling_the_same_rows_says():
    for task in TASKS:
        labels, before, after = of_task(task)
        found, same = intervals.compare(*two(labels, before, after))
        assert same
        assert found["test/loss"].difference_interval is None, "1.5 is not a mean of the examples' losses"
        for name, metric in metrics.of_task(task).items():
            pair = found[f"test/{name}"]
            measure = metric.of_predictions
            given = labels, before.astype(float), after.astype(float)
            resampled = evidence.paired_bootstrap(measure, *given, seed=3, num_resamples=400)
            assert pair.difference == pytest.approx(resampled.value, abs=1e-6), name
            width = resampled.interval.high - resampled.interval.low
            assert pair.difference_interval == pytest.approx(tuple(resampled.interval), abs=0.25 * width), name
            assert pair.first_interval[0] < pair.first < pair.first_interval[1]
            both = sum(high - low for low, high in (pair.first_interval, pair.second_interval))
            assert width < both, f"{name}: a paired difference is surer than the intervals of both look"
        shutil.rmtree("mlruns")


def test_runs_on_other_rows_have_an_interval_each_and_none_of_the_difference():
    labels, before, after = of_task("classification")
    runs = two(labels, before, after, np.roll(labels, 1))
    found, same = intervals.compare(*runs)
    assert not same
    pair = found["test/accuracy"]
    assert pair.difference == pytest.approx(pair.second - pair.first)
    assert (pair.difference_interval, pair.first_interval is None, pair.second_interval is None) == (None, False, False)


def test_what_one_run_does_not_have_is_none():
    labels, before, after = of_task("classification")
    first, second = two(labels, before, after)
    path = Path(second.folder, "records", "evaluation.json")
    evaluated = json.loads(path.read_text())
    del evaluated["metrics"]["test/auc"]
    path.write_text(json.dumps(evaluated))
    Path(first.folder, "evaluation", "30.npz").unlink()
    found, same = intervals.compare(first, second)
    assert not same, "what the first one gave is gone"
    assert (found["test/auc"].second, found["test/auc"].difference) == (None, None)
    assert found["test/accuracy"].first_interval is None
    path.unlink()
    found, _ = intervals.compare(first, second)
    assert {one.second for one in found.values()} == {None}


def test_an_interval_ends_where_the_metric_does():
    labels = np.repeat(np.array([[1, 0], [0, 1]], np.uint8), 20, axis=0)
    made = load(made_up.run(labels, (4.0 * labels - 2).astype(np.float32)))
    assert intervals.of_metric(made, "mean_average_precision") == (1, 1)
    swapped = (4.0 * labels - 2).astype(np.float32)
    swapped[0] = swapped[0, ::-1]
    low, high = intervals.of_metric(load(made_up.run(labels, swapped)), "mean_average_precision")
    assert low < 1
    assert high == 1


def test_a_comparison_says_as_much_of_its_rows_as_runs_diff():
    labels, before, after = of_task("classification")
    runs = two(labels, before, after)
    known, _ = intervals.compare(*runs)
    rows = [
        comparisons.row(name, comparisons.ONE).model_copy(update={"run_id": run.run_id})
        for name, run in zip(("one_device", "mirrored"), runs, strict=True)
    ]
    lost = comparisons.row("parameter_server", comparisons.ONE).model_copy(update={"run_id": "f" * 32})
    found = intervals.with_intervals(comparisons.compared(*rows, lost)).rows
    assert [one.differences for one in found] == [{}, {"test/accuracy": known["test/accuracy"].difference_interval}, {}]
