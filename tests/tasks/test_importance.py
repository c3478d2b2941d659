"""How much a model depends on each column: of made-up tables on which it is known."""

import numpy as np
import pytest

from tasks import config, records
from tasks.evaluation import gate, importance
from tasks.modeling import metrics
from tasks.records import ColumnImportance, EvaluationResult
from tasks.reports import page, sections
from tasks.reports.material import load
from tasks.runs import outcome
from tests.tasks import made_up

TABLE = ("numbers", "categories", "text")


@pytest.fixture(autouse=True)
def in_project(tmp_path, monkeypatch):
    monkeypatch.chdir(made_up.project(tmp_path / "project"))


def by_age(features):
    """The logits of a model that reads one column of three numbers."""
    age = np.asarray(features["numbers"], np.float64)[:, 0]
    return np.stack([-age, age], axis=1)


def measured(count, predict=by_age, labels=None, **settings):
    """The importance of the columns of a table of so many test rows, of which the age decides."""
    arrays = made_up.arrays(count, TABLE)
    labels = (arrays["numbers"][:, 0] > 0).astype(np.int64) if labels is None else labels
    made = load(made_up.run(labels, np.zeros((count, 2), np.float32), arrays, **settings))
    metric, of_predictions = gate.metric_of(config.parse(made.run.settings), made.prepared)
    assert importance.is_measured(made.prepared)
    return importance.measure(made.test, labels, predict, metric, of_predictions, metrics.better(metric))


@pytest.mark.parametrize("metric", ["test/accuracy", "test/loss", "test/auc"])
def test_the_column_that_decides_is_first_and_the_others_count_nothing(metric):
    first, *others = measured(400, **{"register.metric": metric})
    assert (first.column, first.metric) == ("age", metric)
    low, high = first.interval
    assert 0 < low < first.value < high
    if metric != "test/loss":  # A shuffled age is right as often as a coin.
        assert first.value == pytest.approx(0.5, abs=0.05)
        assert low < 0.5 < high
    assert {one.column: (one.value, one.interval) for one in others} == dict.fromkeys(
        ("day", "town", "words"), (0.0, (0.0, 0.0))
    )


def test_it_is_the_same_again_and_of_a_bounded_number_of_rows():
    calls = []

    def predict(features):
        calls.append(len(features["numbers"]))
        return by_age(features)

    assert measured(1500, predict) == measured(1500)
    assert calls == [importance.ROWS] * importance.REPEATS * (1 + 4), "the table itself, then each column"


def test_a_regression_gets_worse_by_its_error_and_a_metric_of_another_task_is_its_own():
    labels = made_up.arrays(300, TABLE)["numbers"][:, :1]
    first, *_ = measured(300, lambda features: features["numbers"][:, :1], labels, **{"register.enabled": False})
    error = np.abs(labels - np.random.default_rng(0).permutation(labels)).mean()
    assert (first.column, first.metric) == ("age", "test/mae")
    assert first.value == pytest.approx(error, rel=0.2)


def test_a_repeat_that_draws_no_example_of_a_rare_class_is_left_out():
    labels = np.zeros(300, np.int64)
    labels[0] = 1  # One repeat in three does not draw it.
    assert len(measured(300, labels=labels, **{"register.metric": "test/auc"})) == 4


def test_it_is_of_tables_of_several_columns_without_images():
    labels, logits = made_up.classification(50)
    for names, said in ((TABLE, True), (("text",), False), (("image", "numbers"), False)):
        assert importance.is_measured(load(made_up.run(labels, logits, made_up.arrays(50, names))).prepared) == said


def test_the_report_of_a_table_shows_it():
    run = made_up.run(*made_up.classification())
    assert sections.importance(load(run)) is None
    found = tuple(
        ColumnImportance(column=name, metric="test/accuracy", value=value, interval=(value - 0.01, value + 0.02))
        for name, value in (("<age>", 0.31), ("town", 0.0))
    )
    evaluated = outcome.load(run, EvaluationResult)
    records.save(evaluated.model_copy(update={"importance": found}), load(run).folder / "records" / "evaluation.json")
    said = page.write(run).page.read_text(encoding="utf-8")
    assert "Which columns matter" in said
    assert 'aria-label="how much worse test accuracy gets: &lt;age&gt; 0.3100; town 0.0000"' in said
    (figure,) = sections.importance(load(run)).blocks
    long, dot, *_ = figure.charts[0].figure.axes[0].lines
    assert tuple(long.get_xdata()) == (0.3, 0.33)
    assert list(dot.get_xdata()) == [0.31]
