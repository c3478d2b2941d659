"""A run's page, of made-up records: its figures against scikit-learn and by hand, and what it says of a partial run."""

import base64
import dataclasses
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import sklearn.metrics
from PIL import Image

from tasks import config, records
from tasks.data import prepared_data
from tasks.data.kinds import Metadata
from tasks.evaluation.predictions import bins
from tasks.evaluation.slices import every, quarters
from tasks.modeling import metrics
from tasks.records import EvaluationResult, RunStatus
from tasks.reports import charts, intervals, page, sections
from tasks.reports.material import load
from tasks.runs import listing, outcome
from tests.tasks import made_up

EMPTY = {"meta", "img", "br"}


class Parsed(HTMLParser):
    """A page whose elements all end where they should."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.said = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said += data


@pytest.fixture(autouse=True)
def in_project(tmp_path, monkeypatch):
    monkeypatch.chdir(made_up.project(tmp_path / "project"))


def regression(count=300, seed=0):
    random = np.random.default_rng(seed)
    labels = random.normal(size=(count, 1)).astype(np.float32) * 10 + 50
    return labels, (labels + random.normal(size=(count, 1)) * 3).astype(np.float32)


def multilabel(count=300, seed=0):
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, (count, 3)).astype(np.uint8)
    return labels, (random.normal(size=(count, 3)) + 2.0 * labels - 1).astype(np.float32)


TASKS = {"classification": made_up.classification, "multilabel": multilabel, "regression": regression}


def cells(table):
    return [[str(cell) for cell in row] for row in table.rows]


def tables(section):
    return [block for block in section.blocks if block.kind == "table"]


def test_an_interval_is_what_measuring_each_resample_gives():
    labels, outputs = made_up.classification(200, 7)
    made = load(made_up.run(labels, outputs))
    for name, metric in metrics.of_task("classification").items():
        found = intervals.of_metric(made, name)
        low, high = made_up.bootstrap(metric.of_predictions, labels, outputs)
        assert found == pytest.approx((low, high), abs=0.15 * (high - low)), name
        assert found.low < made.evaluation.metrics[f"test/{name}"] < found.high


def test_equal_scores_count_half_in_the_interval_of_an_auc():
    labels, logits = made_up.classification(200, 2)
    logits = np.round(logits)
    area = metrics.find_metric("auc").of_predictions
    low, high = made_up.bootstrap(area, labels, logits)
    found = intervals.of_metric(load(made_up.run(labels, logits)), "auc")
    assert found == pytest.approx((low, high), abs=0.15 * (high - low))


def test_a_share_of_all_or_none_has_the_exact_interval():
    # The bound is the share of which 10 of 10 have a chance of 2.5%.
    low, high = intervals.of_share(np.ones(10))
    assert (low**10, high) == (pytest.approx(0.025), 1)
    low, high = intervals.of_share(np.zeros(10))
    assert (low, (1 - high) ** 10) == (0, pytest.approx(0.025))


def test_a_loss_has_an_interval_where_it_is_the_mean_of_its_examples():
    labels, logits = made_up.classification()
    made = load(made_up.run(labels, logits))
    assert intervals.of_metric(made, "loss") is None, "1.5 is not a mean of theirs"
    mean = sklearn.metrics.log_loss(labels, made.probabilities)
    path = made.folder / "records" / "evaluation.json"
    measured = {**made.evaluation.metrics, "test/loss": mean}
    records.save(made.evaluation.model_copy(update={"metrics": measured}), path)
    found = intervals.of_metric(load(made.run), "loss")
    assert found.low < mean < found.high


def test_calibration_is_that_of_the_definition():
    confidence = np.array([0.05, 0.6, 0.62, 0.9, 0.95, 1.0])
    right = np.array([0, 1, 0, 1, 1, 0])
    found = bins(confidence, right)
    # Of 15, (8/15, 9/15] has 0.6, and (9/15, 10/15] has 0.62.
    assert {place: count for place, count in enumerate(found.counts.tolist()) if count} == {
        0: 1, 8: 1, 9: 1, 13: 1, 14: 2,
    }  # fmt: skip
    assert found.error == pytest.approx((0.05 + 0.4 + 0.62 + 0.1 + 2 * abs(0.975 - 0.5)) / 6)
    always_right = bins(np.ones(10), np.ones(10))
    assert always_right.error == 0


def test_classes_are_the_worst_first_and_the_largest_confusion_is_named():
    labels, logits = np.repeat([0, 1, 2], 50), np.zeros((150, 3), np.float32)
    logits[np.arange(150), labels] = 5
    logits[100:140] = [0, 9, 0]
    made = load(made_up.run(labels, logits, class_names=("dog", "cat", "wolf")))
    (by_class,) = tables(sections.by_class(made))
    report = sklearn.metrics.classification_report(labels, logits.argmax(1), output_dict=True)
    assert [row[0] for row in cells(by_class)] == ["wolf", "cat", "dog"]
    assert cells(by_class)[0][1:] == [f"{report['2'][key]:.4f}" for key in ("precision", "recall", "f1-score")] + ["50"]
    (pairs,) = tables(sections.confusion(made))
    assert cells(pairs) == [["wolf", "cat", "40", "80.0%"]]


@pytest.mark.parametrize("num", [21, 300])
def test_a_matrix_of_many_classes_is_no_wider_than_a_page_and_its_names_do_not_overlap(num):
    labels, logits = made_up.classification(2 * num, num)
    names = tuple(f"a rather long name of the class {place}" for place in range(num))
    drawn = str(sections.confusion(load(made_up.run(labels, logits, {}, names))).blocks[0].charts[0].svg())
    width = float(re.search(r'width="(\d+)"', drawn)[1])
    assert width <= 1160
    rows = [float(y) for y in re.findall(r'text-anchor: end[^>]* y="([\d.]+)"[^>]*>a rather', drawn)]
    assert len(rows) > min(num, 100) / 3
    assert np.diff(rows).min() >= 9, "a name is 9 pixels tall"


def test_the_most_confident_mistake_is_the_first_picture():
    labels, logits = np.zeros(40, np.int64), np.tile(np.float32([2, 0, 0]), (40, 1))
    logits[7], logits[9] = [0, 3, 0], [0, 0, 9]
    features = made_up.arrays(40)
    section = sections.mistakes(load(made_up.run(labels, logits, features)))
    shown, table = section.blocks
    assert [picture.caption for picture in shown.pictures] == [
        ("true: class 0", "predicted: class 2, 100.0%"), ("true: class 0", "predicted: class 1, 90.9%"),
    ]  # fmt: skip
    assert shown.pictures[0].alt.startswith("test example 9, true: class 0; predicted: ")
    kind, _, coded = shown.pictures[0].uri.partition(",")
    assert kind == "data:image/png;base64"
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(base64.b64decode(coded)))), features["image"][9])
    assert table.header == ("row", "true", "predicted", "age", "day", "town", "text")
    words = {0: "", 1: "…", 2: "good", 3: "bad", 4: "film"}
    town = {0: "missing", 1: "unknown", 2: "Bern", 3: "Basel"}[int(features["categories"][9, 0])]
    text = " ".join(words[int(place)] for place in features["text"][9] if place)
    age, day = features["numbers"][9, :2]
    shown = str(np.datetime64("1970-01-01") + int(np.floor(day)))
    assert cells(table)[0] == ["9", "class 0", "class 2, 100.0%", f"{age:.6g}", shown, town, text]


def test_the_largest_errors_and_the_most_wrong_labels_come_first():
    labels, outputs = regression(50)
    outputs[17] = labels[17] + 1000
    (table,) = sections.mistakes(load(made_up.run(labels, outputs, made_up.arrays(50, ("numbers",))))).blocks
    assert cells(table)[0][:3] == ["17", f"{labels[17, 0]:.6g}", f"{outputs[17, 0]:.6g}"]
    labels, outputs = multilabel(50)
    labels[3], outputs[3] = [1, 0, 1], [9, -9, -9]
    (table,) = sections.mistakes(load(made_up.run(labels, outputs, made_up.arrays(50, ("numbers",))))).blocks
    assert cells(table)[0][:3] == ["3", "class 2", "0.0% for class 2"]


def test_a_part_on_which_a_model_fails_is_the_first_slice_with_its_interval():
    count = 400
    labels, logits = np.zeros(count, np.int64), np.tile(np.float32([5, 0]), (count, 1))
    labels[::2], logits[::2] = 1, [0, 5]
    features = made_up.arrays(count)
    in_basel = features["categories"][:, 0] == 3
    wrong = np.flatnonzero(in_basel)[: int(in_basel.sum() * 0.75)]
    logits[wrong] = logits[wrong][:, ::-1]
    (table, *others) = tables(sections.by_slice(load(made_up.run(labels, logits, features))))
    name, count_shown, accuracy, interval = cells(table)[0]
    right = in_basel.copy()
    right[wrong] = False
    low, high = intervals.of_share(right[in_basel])
    assert (name, count_shown) == ("town: Basel", str(int(in_basel.sum())))
    assert accuracy == f"{right.sum() / in_basel.sum():.4f}"
    assert interval == f"{low:.4f} to {high:.4f}"
    known = {row[0].partition(":")[0] for one in (table, *others) for row in cells(one)}
    assert known == {"class", "brightness of image", "age", "day", "town", "words of text"}


def test_a_category_that_is_spelled_as_a_slice_of_no_category_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setitem(made_up.VOCABULARIES, "categories", [["unknown", "'missing'"]])
    labels, logits = made_up.classification()
    features = made_up.arrays(len(labels))
    made = load(made_up.run(labels, logits, features))
    found = {one.name: one.rows for one in every(made.task, made.class_names, labels, made.test) if one.by == "town"}
    assert found.keys() == {"missing", "unknown", "'unknown'", "''missing''"}
    for place, name in enumerate(("missing", "unknown", "'unknown'", "''missing''")):
        assert (found[name] == (features["categories"][:, 0] == place)).all()
    values = ["missing", None, "unknown"] * 100
    test = dataclasses.replace(made.test, metadata={"clinic": Metadata("category", values)})
    found = {one.name: one.rows for one in every(made.task, made.class_names, labels, test) if one.by == "clinic"}
    assert {name: np.flatnonzero(rows)[0] for name, rows in found.items()} == {
        "'missing'": 0,
        "missing": 1,
        "unknown": 2,
    }


def test_small_images_of_which_a_model_is_unsure_are_a_slice():
    labels, logits = made_up.classification(200, 2)
    run = made_up.run(labels, logits, made_up.arrays(200, ("image",)))
    sizes = np.stack([np.full(200, 10), np.arange(200) + 1], axis=1).astype(np.int32)

    def named(kept, arrays):
        """Return the slices by size, where `prepare` kept these."""
        quality = records.DataQuality(arrays=arrays, looked_at={"test": 200}, checks={}, pictures=())
        records.save(quality, load(run).folder.parents[2] / "data/made/report" / prepared_data.QUALITY)
        np.save(load(run).folder.parents[2] / "data/made/report" / prepared_data.SIZES, kept)
        found = [row[0] for table in tables(sections.by_slice(load(run))) for row in cells(table)]
        return sorted(name for name in found if name.startswith("original pixels of image"))

    own = prepared_data.arrays_of(load(run).prepared)
    ends = ("highest quarter (1502 to 2000)", "lowest quarter (10 to 507.5)", "second quarter (507.5 to 1005)",
            "third quarter (1005 to 1502)")  # fmt: skip
    assert named(sizes, own) == [f"original pixels of image: {end}" for end in ends]
    assert named(sizes, "of other data") == []
    assert named(sizes[1:], own) == []
    assert named(np.full((200, 2), 7, np.int32), own) == [], "all were of one size"


def test_numbers_are_cut_at_their_quartiles_and_few_values_each_by_itself():
    values = np.arange(100.0)
    parts = list(quarters("x", values))
    assert [one.rows.sum() for one in parts] == [25, 25, 25, 25]
    assert [one.name for one in parts] == ["lowest quarter", "second quarter", "third quarter", "highest quarter"]
    assert [one.ends for one in parts] == ["0 to 24.75", "24.75 to 49.5", "49.5 to 74.25", "74.25 to 99"]
    assert parts[0].shown == "x: lowest quarter (0 to 24.75)"
    more = list(quarters("x", values + 1))
    assert [one.full_name for one in more] == [one.full_name for one in parts], "a floor outlives new test rows"
    assert [one.name for one in quarters("x", np.repeat([0.0, 1.0], 20))] == ["0", "1"]
    assert list(quarters("x", np.full(20, 3.0))) == []
    codes = np.repeat([10001.5, 10002.5, 10003.5], 20)
    assert [one.name for one in quarters("x", codes)] == ["10001.5", "10002.5", "10003.5"], "each has a name of its own"
    mostly = np.concatenate([np.zeros(90), np.arange(1.0, 11.0)])
    assert [one.shown for one in quarters("x", mostly)] == ["x: 0 to 10"], "there are no quarters"
    assert sum(one.rows.sum() for one in quarters("x", mostly)) == 100, "each is in one part"


def test_of_a_regression_the_worst_slice_has_the_largest_error():
    labels, outputs = regression(400)
    old = made_up.arrays(400, ("numbers",))
    worst = old["numbers"][:, 0] >= np.quantile(old["numbers"][:, 0], 0.75)
    outputs[worst] += 40
    table = tables(sections.by_slice(load(made_up.run(labels, outputs, old))))[0]
    assert cells(table)[0][0].startswith("age: ")
    assert cells(table)[0][2] == f"{np.abs(outputs - labels)[worst].astype(np.float64).mean():.4f}"


@pytest.mark.parametrize(("shift", "scale"), [(400_000, 50_000), (20_000, -500)])
def test_large_numbers_are_written_as_people_write_them(shift, scale):
    labels, outputs = (shift + scale * values for values in regression(400))
    made = load(made_up.run(labels, outputs, made_up.arrays(400, ("numbers",))))
    (row, *_) = [row for row in cells(tables(sections.by_slice(made))[0]) if row[0].startswith("target: ")]
    assert re.fullmatch(r"target: \w+ quarter \(-?[\d,]+ to -?[\d,]+\)", row[0])
    assert re.fullmatch(r"[\d,]+\.\d", row[2])
    assert re.fullmatch(r"[\d,]+\.\d \(95% interval: .+", sections.headline(made).brief["test mae"])
    (figure,) = sections.parity(made).blocks
    drawn = figure.charts[0].figure
    drawn.canvas.draw()
    axes = drawn.axes[0]
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        for place, tick in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True):
            assert re.fullmatch(r"\u2212?[\d.]+[kM]?", tick.get_text()), "one minus, as matplotlib writes it"
            box = tick.get_window_extent()
            assert not low <= place <= high or (box.x0 >= 0 and box.x1 <= drawn.bbox.width)


def test_predicted_and_true_values_are_drawn_for_a_sample_of_many():
    labels, outputs = regression(3000)
    (figure,) = sections.parity(load(made_up.run(labels, outputs, {}))).blocks
    (chart,) = figure.charts
    assert len(chart.figure.axes[0].lines[0].get_xdata()) == 1000
    assert "The plot shows 1,000 of 3,000" in figure.caption


def test_the_name_of_a_checkpoint_is_where_the_curves_are_not():
    rising, falling = [0.1, 0.8, 0.9], [0.9, 0.3, 0.1]
    marks = {"best": 2.0, "latest": 3.0}
    for values, side in ((rising, "bottom"), (falling, "top")):
        axes = charts.curves("accuracy", {"train": values}, marks).figure.axes[0]
        assert [text.get_va() for text in axes.texts] == [side, side]


def test_the_curves_have_their_checkpoints_and_a_gap_where_there_is_no_number():
    section = sections.curves(load(made_up.run(*made_up.classification())))
    (figure,) = section.blocks
    assert "A dashed line is a checkpoint: evaluated, latest at step 30; best at step 20." in figure.caption
    train, validation, *marks = figure.charts[0].figure.axes[0].lines
    np.testing.assert_array_equal(train.get_ydata(), [2, np.nan, 0.5])
    # 20 steps of 10 an epoch: at the second of three epochs.
    assert [line.get_xdata()[0] for line in marks] == [3, 2]
    assert train.get_color() != validation.get_color()
    assert train.get_marker() != validation.get_marker()
    assert train.get_linestyle() != validation.get_linestyle()
    assert figure.charts[1].alt == "learning rate by epoch: train"


@pytest.mark.parametrize(
    "values", [(1e308, -1e308), (np.inf, 1.0), (np.nan, np.nan), (7.0, 7.0), (1e-9, 5e9), (0.001, 0.0012), ()]
)
def test_any_number_can_be_drawn(values):
    many = charts.Series(range(1000), np.full(1000, values[0] if values else 1.0), "many", kind="dots")
    assert "</svg>" in charts.plot("x", "y", [many], "any").svg()
    drawn = charts.plot("x", "y", [charts.Series(range(len(values)), values)], "any", reference=[(0, 0), (1, 1)])
    assert "</svg>" in drawn.svg()


@pytest.mark.parametrize("task", TASKS)
def test_the_page_is_whole_and_holds_all_that_it_shows(task):
    run = made_up.run(*TASKS[task]())
    path, title, metrics, pictures = page.write(run, {"train": 2.0, "evaluate": 1.0, "total": 4.0})
    assert path == config.project_root() / run.folder / "report" / "report.html"
    text = path.read_text(encoding="utf-8")
    found = Parsed(text)
    headings = [tag for tag, _ in found.found].count("h2")
    assert headings == {"classification": 11, "multilabel": 10, "regression": 9}[task]
    for tag, attributes in found.found:
        assert tag not in ("script", "link", "iframe", "object", "embed")
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/"))
        assert tag != "img" or attributes["alt"]
        assert tag != "svg" or attributes["aria-label"]
    assert "url(" not in text
    assert "//" not in re.sub(r"data:image/[^\"]+", "", text)
    assert "Partial report" not in found.said
    assert "train.epochs" in found.said, "a setting that is not that of params.yaml"
    assert "Seconds by stage, 4.0 in all" in text
    made = load(run)
    for name, value in made.evaluation.metrics.items():
        interval = name.replace("test/", "test_interval/")
        if f"{interval}/low" in metrics:
            assert metrics[f"{interval}/low"] <= value <= metrics[f"{interval}/high"]
    assert f"test_interval/{made.headline}/low" in metrics
    assert min([*metrics, "test/loss"]) == "test/loss", "in MLflow's alphabetical lists nothing comes before test/"
    told = {"classification": "confusion matrix of ", "multilabel": "F1 of each label"}.get(
        task, "predicted against true"
    )
    drawn = pictures["confusion_matrix.png" if task == "classification" else "predictions.png"]
    assert (drawn.alt.startswith(told), "learning_curve.png" in pictures) == (True, True)
    assert drawn.svg() in text, "each figure is built once"
    if task == "regression":
        assert [name for name in [*metrics, *pictures] if "calibration" in name or "reliability" in name] == []
        return
    assert metrics["test_calibration/expected_calibration_error"] == made.binned.error
    with Image.open(pictures["reliability.png"].save(path.with_name("drawn.png"), title)) as picture:
        assert min(picture.size) > 500


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        (
            "classification",
            "most frequent mistake",
            r"class \d predicted as class \d: \d+ examples?, [\d.]+% of the class",
        ),
        ("multilabel", "most frequent mistake", r"the label class \d: wrong for \d+ of 300 examples"),
        ("regression", "largest error", r"test example \d+: predicted [\d.]+, true [\d.]+"),
    ],
)
def test_the_first_section_is_what_one_decides_by(task, row, said):
    run = made_up.run(*TASKS[task]())
    registered = outcome.load(run, records.RegisteredModel)
    judgement = records.Judgement(promoted=False, reason="it is no better", against="2")
    outcome.save(run, registered.model_copy(update={"judgement": judgement}))
    made, span = load(run), r"\(95% interval: [\d.]+ to [\d.]+\)"
    first, _, _ = page.write(run).page.read_text(encoding="utf-8").partition("<nav")
    told = dict(re.findall(r"<td>(.*?)</td><td>(.*?)</td>", first))
    value, count = made.evaluation.metrics[f"test/{made.headline}"], made.evaluation.num_examples
    assert re.fullmatch(rf"{value:.4f} {span} on {count} test examples", told[f"test {made.headline}"])
    assert told["champion"] == "version 2: it is no better"
    assert re.search(rf".*: .* [\d.]+ {span} on \d+ examples, [\d.]+ on all", told["worst slice"])
    assert re.fullmatch(said, told[row])


def test_what_a_user_named_is_text_and_no_element():
    labels, logits = made_up.classification()
    run = made_up.run(labels, logits, class_names=("<script>alert(1)</script>", 'a"b', "c&d\x1b[1m\u202e"))
    found = Parsed(page.write(run).page.read_text(encoding="utf-8"))
    assert "script" not in {tag for tag, _ in found.found}
    assert "<script>alert(1)</script>" in found.said
    assert r"c&d\x1b[1m\u202e" in found.said


def test_a_run_that_was_not_evaluated_has_a_partial_report_that_says_why():
    run = made_up.run(*made_up.classification())
    folder = config.project_root() / run.folder
    outcome.forget_results(run, EvaluationResult, records.RegisteredModel)
    records.save(RunStatus(status="FAILED", reason="the disk <is> full", at="now"), folder / "status.json")
    said = Parsed(page.write(run).page.read_text(encoding="utf-8")).said
    assert "Partial report: the run is FAILED (the disk <is> full); it was not evaluated, registered. " in said
    assert f"`stratagem report {run.run_id}`" in said
    assert "Learning curves" in said
    assert "Test metrics" not in said


def test_the_gates_judgement_is_in_the_report_and_in_what_is_shown_of_the_run():
    run = made_up.run(*made_up.classification())
    registered = outcome.load(run, records.RegisteredModel)
    judgement = records.Judgement(promoted=False, reason="differs by <-0.0083>: it is no better", against="2")
    outcome.save(run, registered.model_copy(update={"judgement": judgement}))
    told = "version 2: differs by <-0.0083>: it is no better"
    assert told in Parsed(page.write(run).page.read_text(encoding="utf-8")).said
    assert listing.show(run).registered.judgement.told == told


def test_a_report_without_predictions_says_what_it_cannot_show():
    run = made_up.run(*made_up.classification())
    (config.project_root() / run.folder / "evaluation" / "30.npz").unlink()
    said = Parsed(page.write(run).page.read_text(encoding="utf-8")).said
    assert "The model's outputs for the test examples are missing" in said
    assert "Confusion matrix" in said
    assert "Slices" not in said
    assert "Partial report" not in said


def test_other_data_than_those_of_the_evaluation_are_not_shown_as_its_mistakes():
    labels, logits = made_up.classification()
    run = made_up.run(labels, logits)
    manifest = config.project_root() / "data" / "made" / "prepared" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('test_labels.npy": "data', 'test_labels.npy": "other'))
    made = load(run)
    assert made.test is None
    assert "The test rows have changed" in sections.mistakes(made).blocks[0].text
    assert {row[0].partition(":")[0] for row in cells(tables(sections.by_slice(made))[0])} == {"class"}
    manifest.unlink()
    said = Parsed(page.write(run).page.read_text(encoding="utf-8")).said
    assert "The data are missing" in said
