import csv
import itertools
import json
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest

from tasks import config
from tasks.records import ClassMetrics, Comparison, ComparisonRow, EvaluationResult, TrainingResult
from tasks.reports import charts
from tasks.reports.comparison import comparison_pages, figures_table
from tasks.reports.tables import history_table, markdown_table, metrics_table, predictions_table, records_table


def evaluation(matrix, names=None, metrics=None):
    names = names or [str(i) for i in range(len(matrix))]
    return EvaluationResult(
        run_id="r",
        checkpoint="c/1",
        step=1,
        num_examples=int(np.sum(matrix)),
        metrics=metrics or {"test/loss": 0.5, "test/accuracy": 0.75, "test/top_5_accuracy": 1.0},
        classes=tuple(ClassMetrics(name=name, precision=0, recall=0, f1=0, support=0) for name in names),
        confusion_matrix=tuple(map(tuple, np.asarray(matrix).tolist())),
        strategy="one_device",
        lower_is_better=(),
        outputs="mlruns/runs/r/evaluation/1.npz",
        outputs_sha256="",
        test_rows="",
    )


LONG = [f"species number {i} of a long name" for i in range(26)]


@pytest.mark.parametrize(("num_classes", "names"), [(10, None), (26, LONG)], ids=["10", "26 long"])
def test_the_picture_has_a_sensible_size_and_nothing_is_cut_off(tmp_path, num_classes, names):
    matrix = np.eye(num_classes, dtype=int) * 40
    drawn = charts.confusion_matrix(evaluation(matrix, names))
    path = drawn.save(tmp_path / "new.png", "digits, a-run: test accuracy 0.97")
    picture = matplotlib.image.imread(path)
    height, width, channels = picture.shape
    assert channels == 4
    assert 500 <= height <= 2500
    assert 500 <= width <= 2700
    # As dark as one square in each row is, and the scale beside the matrix.
    assert 0.15 / num_classes < (picture[..., 0] < 0.1).mean() < 0.75 / num_classes + 0.05
    for border in (picture[:3], picture[-3:], picture[:, :3], picture[:, -3:]):
        assert (border > 0.98).all(), "nothing is cut off at the edge"


def test_a_class_without_examples_is_no_warning(tmp_path):
    assert charts.confusion_matrix(evaluation([[0, 0], [1, 2]])).save(tmp_path / "p.png", "t").stat().st_size > 1000


HISTORY = {
    "train/loss": (2.0, float("nan"), 0.5), "validation/loss": (1.5, 1.0, 0.75), "train/accuracy": (0.2, 0.5, 0.9),
    "train/learning_rate": (0.1, 0.1, 0.01),
}  # fmt: skip


def test_the_learning_curve_has_a_panel_a_metric_and_a_line_a_split(tmp_path):
    def draw(name, **changes):
        history = {metric: values for metric, values in (HISTORY | changes).items() if values}
        drawn = charts.learning_curve(TrainingResult.model_construct(history=history)).save(tmp_path / name, "a run")
        return matplotlib.image.imread(drawn)

    whole, changed = draw("whole.png"), draw("changed.png", **{"train/accuracy": (0.9, 0.5, 0.2)})
    height, width, _ = whole.shape
    assert 2.5 < width / height < 4.5, "three panels beside each other"
    assert (whole[:, :3] > 0.98).all()
    assert (whole[:, -3:] > 0.98).all(), "nothing is cut off at the edge"
    _, columns = np.nonzero((whole != changed).any(2))
    assert width / 3 < columns.min() < columns.max() < 2 * width / 3, "the second panel alone"
    without = draw("without.png", **{"validation/loss": ()})
    _, columns = np.nonzero((whole != without).any(2))
    assert columns.max() < width / 3, "validation is a line of the first panel"
    narrow = draw("narrow.png", **{"train/learning_rate": ()})
    assert narrow.shape[1] < width * 0.7


def test_the_augmented_examples_are_a_row_each_with_the_original_first(tmp_path):
    height, width, channels = 20, 30, 3
    section = config.load(
        None, ["input.augmentation={rotation: 0.1, rand_augment: {num_layers: 2}}"]
    ).input.augmentation

    def draw(images):
        drawn = charts.augmented_examples(images, section).save(tmp_path / "augmented_examples.png", "a run")
        return matplotlib.image.imread(drawn)[..., :3]

    images = np.full((4, 8, height, width, channels), 128, np.uint8)
    grey = draw(images)
    assert (grey[:, :3] > 0.98).all()
    assert (grey[:, -3:] > 0.98).all(), "nothing is cut off at the edge"
    places = {}
    for row, column in [(0, 0), (0, 1), (3, 0), (3, 7)]:
        changed = images.copy()
        changed[row, column, ..., :3] = 0
        rows, columns = np.nonzero((draw(changed) != grey).any(2))
        assert (np.ptp(rows) + 1) / (np.ptp(columns) + 1) == pytest.approx(height / width, rel=0.03)
        places[row, column] = rows.mean() / len(grey), columns.mean() / grey.shape[1]
    assert places[0, 0][0] == pytest.approx(places[0, 1][0], abs=0.01)
    assert places[0, 0][1] == pytest.approx(places[3, 0][1], abs=0.01)
    assert places[0, 0][1] < 0.1 < places[0, 1][1] < 0.25 < 0.9 < places[3, 7][1]
    assert places[0, 0][0] < 0.5 < 0.8 < places[3, 7][0]


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_the_history_is_a_line_an_epoch(tmp_path):
    result = TrainingResult.model_construct(
        history={"validation/loss": (0.5, 0.25), "train/loss": (1.5, float("nan")), "train/accuracy": (0.1, 1 / 3)}
    )
    assert read(history_table(result, tmp_path / "new" / "history.csv")) == [
        ["epoch", "train/accuracy", "train/loss", "validation/loss"],
        ["1", "0.1", "1.5", "0.5"],
        ["2", "0.3333333333333333", "nan", "0.25"],
    ]


def test_the_table_of_predictions_is_a_line_an_example(tmp_path):
    table = predictions_table(evaluation([[2, 1], [0, 1]], ["a, b", "c"]), tmp_path / "predictions.csv")
    assert read(table) == [
        ["actual", "predicted"],
        ["a, b", "a, b"],
        ["a, b", "a, b"],
        ["a, b", "c"],
        ["c", "c"],
    ]


def test_the_table_of_a_regression_has_its_numbers(tmp_path):
    numbers = evaluation([[1]]).model_copy(update={"confusion_matrix": (), "classes": (), "predictions": ((1.5, 2.0),)})
    assert read(predictions_table(numbers, tmp_path / "p.csv")) == [["actual", "predicted"], ["1.5", "2.0"]]


def test_names_are_drawn_as_they_are(tmp_path):
    """Matplotlib takes what stands between two dollars for a formula; and one name must not take the room of all."""
    names = ["$0 - $10", "$50_$100", "a_b^c", r"$\frac$", "L" * 251, "\x1b[31mr\u202eed"]
    made = evaluation(np.eye(len(names), dtype=int), names)
    for chart in (charts.confusion_matrix(made), charts.bars("t", dict.fromkeys(names, 1))):
        assert chart.save(tmp_path / "drawn.png", "a $5_$6 run").is_file()
        drawn = [element.text for element in ElementTree.fromstring(chart.svg()).iter() if element.tag.endswith("text")]
        for name in ("$0 - $10", "$50_$100", "a_b^c", r"$\frac$", r"\x1b[31mr\u202eed"):
            assert [text for text in drawn if text.startswith(name)], "as it is, without a formula"
        assert max(len(text) for text in drawn if "LLL" in text) <= 40


def test_a_letter_that_the_usual_font_lacks_is_drawn_by_another_one(tmp_path):
    made = evaluation(np.eye(2, dtype=int), ["⏜⏝", "高"])  # One that a font of Matplotlib's has, and one that none has.
    assert "STIX" in charts.confusion_matrix(made).save(tmp_path / "matrix.svg").read_text()
    charts.confusion_matrix(made).save(tmp_path / "matrix.png")  # A warning would be an error here.


def test_metrics_are_nested_as_dvc_shows_them(tmp_path):
    path = metrics_table(evaluation([[1]]), tmp_path / "test.json")
    assert json.loads(path.read_text()) == {"test": {"loss": 0.5, "accuracy": 0.75, "top_5_accuracy": 1.0}}


WORKED = ComparisonRow(
    strategy="model_parallel", loop="fit", run_id="r1", devices=("cpu:0", "cpu:1"), num_replicas=1, steps=41,
    metrics={"test/accuracy": 0.98765, "test/loss": 0.25}, examples_per_second=1234.5, seconds_per_epoch=2.25,
    total_seconds=25.25, speed_up=0.5, speed_up_range=(0.45, 0.55), efficiency=0.25,
    start_up_seconds=13.75, tracing_seconds=100.4,
    restarts=("worker 1 died (SIGKILL)",),
)  # fmt: skip
FAILED = ComparisonRow(strategy="tpu", loop="custom", reason='no TPU, "nowhere"')


def compared(*rows, **more):
    return Comparison(
        run_id="p", folder="f", flow_run_id=None, git_commit="abc", data_version="def", dataset="digits", model="mlp",
        seed=7, epochs=3, global_batch_size=64, num_cores=2, rows=rows, seconds=9.5, finished_at="now",
        **{"left_out": (), "note": None, "rounds": 2} | more,
    )  # fmt: skip


def test_a_bar_in_a_name_ends_no_cell_of_a_markdown_table():
    assert markdown_table(("a|b",), [["x\ny"]], 1)[::2] == [r"| a\|b |", "| x y |"]


def test_a_comparison_as_a_page(tmp_path):
    again = FAILED.model_copy(update={"loop": "fit"})
    made = compared(WORKED, FAILED, again, left_out=("mlp with fit: none",), note="2 devices share 2 cores.")
    _, page = comparison_pages(made, tmp_path)
    assert page == tmp_path / "comparison.md"
    assert (
        "## Figures\n\n"
        "| strategy | loop | replicas | examples/s | s per epoch | speed-up | efficiency "
        "| total, s | test accuracy | start-up, s | tracing, s |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| model_parallel | fit | 1 on 2 | 1,234 | 2.25 | 0.50 | 25% | 25.2 | 0.9877 | 13.8 | 100 |\n"
        "| tpu | custom | - | - | - | - | - | - | - | - | - |\n"
        "| tpu | fit | - | - | - | - | - | - | - | - | - |\n\n"
        'tpu, custom and fit: no TPU, "nowhere"\n\n'
        "model_parallel, fit: restarted: worker 1 died (SIGKILL)\n\n"
        "left out: mlp with fit: none\n\n"
        "2 devices share 2 cores.\n\n"
    ) in page.read_text()
    assert page.read_text().startswith("# mlp on digits: model_parallel, tpu\n\n")
    for line in (
        "| seed | 7, and the next number in each further round |",
        "| git commit | abc |",
        "| measurements | 2 each; figures are medians, metrics are those of the first round |",
    ):
        assert line in page.read_text()


def test_a_comparison_as_csv_keeps_the_numbers(tmp_path):
    first, worked, failed = read(records_table(compared(WORKED, FAILED).rows, tmp_path / "new" / "table.csv"))
    shown = dict(zip(first, worked, strict=True))
    assert (shown["examples_per_second"], shown["metrics.test/accuracy"]) == ("1234.5", "0.98765")
    assert shown["devices"] == "['cpu:0', 'cpu:1']"
    shown = dict(zip(first, failed, strict=True))
    assert (shown["strategy"], shown["reason"]) == ("tpu", 'no TPU, "nowhere"')
    assert {shown[name] for name in ("examples_per_second", "metrics.test/accuracy", "run_id")} == {""}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0.00"), (9.99, "9.99"), (9.996, "10.0"), (99.9, "99.9"), (99.96, "100"), (12345.6, "12,346")],
)
def test_seconds_take_few_letters(seconds, text):
    table = figures_table(compared(WORKED.model_copy(update={"tracing_seconds": seconds})))
    assert dict(zip(table.header, table.rows[0], strict=True)).get("tracing, s", "-") == text


def test_the_numbers_below_ranges_do_not_overlap():
    lines = [("one_device, fit", 16_758.0, 17_214.0, 17_670.0), ("mirrored, fit", 6_740.0, 7_095.0, 7_451.0)]
    figure = charts.ranges("examples/s", lines, "{:g}".format).figure
    figure.canvas.draw()
    (axes,) = figure.axes
    shown = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert len(shown) >= 2
    assert all(before.x1 + 4 < after.x0 for before, after in itertools.pairwise(shown))
