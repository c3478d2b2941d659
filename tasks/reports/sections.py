"""The sections of a run's report: the quality of the model, its origin, the time, the data, test examples, slices."""

import base64
import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.evaluation import slices
from tasks.evaluation.importance import COLUMNS, REPEATS, ROWS
from tasks.evaluation.predictions import BINS
from tasks.evaluation.slices import FEWEST, MEASURES, TestExamples, day, is_image
from tasks.records import PreparedDataset
from tasks.reports import charts, intervals
from tasks.reports.blocks import Block, Figure, Picture, Pictures, ReportSection, TableBlock, Text, facts
from tasks.reports.material import Material
from tasks.reports.tables import class_rows, outputs_in_words, run_rows
from tasks.runs import listing
from tasks.system import units
from tasks.system.errors import UserError

PICTURES = 24
TABLE_ROWS = 12
"""The maximum number of examples in a table."""
SIDE = 128
"""The longest side of an image, in pixels."""
TABLE_COLUMNS = 8
WORDS = 60
SHOWN_SLICES = 20
CLASSES = 20
"""The number of classes that are not folded."""
MAX_LABELS = 60
MAX_PAIRS = 20
MAX_POINTS = 1000
"""The number of test examples in the sample for a chart of errors."""
MAX_NUMBERS = 4


def headline(material: Material) -> ReportSection | None:
    """Return the test metrics with their intervals."""
    if material.evaluation is None:
        return None
    measured = material.evaluation.metrics
    rows: list[list[str]] = []
    metrics: dict[str, float] = {}
    first = f"test/{material.headline}"
    for name in sorted(measured, key=lambda name: (name != first, name)):
        own = name.removeprefix("test/")
        found = intervals.of_metric(material, own)
        rows.append([name, units.metric(measured[name]), units.interval(found.low, found.high) if found else "-"])
        if found is not None:
            metrics |= {f"test_interval/{own}/low": found.low, f"test_interval/{own}/high": found.high}
    said = (
        "The interval of a proportion, such as accuracy, is exact (Clopper and Pearson, 1934). Other means use "
        f"Student's t, and all other metrics the grouped jackknife with up to {intervals.GROUPS} groups of examples "
        "(Efron and Tibshirani, 1993). An interval shows how much the metric depends on the choice of test examples, "
        "not how much it would vary between trainings."
    )
    if material.predictions is None:
        said = (
            "The model's outputs for the test examples are missing, and with them intervals, calibration, mistakes and "
            f"slices. `stratagem evaluate {material.run.run_id}` computes them again."
        )
    elif any(row[2] == "-" for row in rows):
        said += " A loss has no interval (-) if it is not the mean of the examples' default losses."
    _, value, interval = rows[0]
    on = f"on {material.evaluation.num_examples:,} test examples"
    sure = f" (95% interval: {interval})" if interval != "-" else ""
    return ReportSection(
        "Test metrics",
        [TableBlock(("metric", "value", "95% interval"), rows), Text(said)],
        metrics,
        {first.replace("/", " "): f"{value}{sure} {on}"},
    )


def curves(material: Material) -> ReportSection | None:
    """Return the learning curves: one chart per metric, one line per split."""
    training = material.training
    if training is None:
        return None
    panels = training.curves
    if not any(len(values) for lines in panels.values() for values in lines.values()):
        return ReportSection("Learning curves", [Text("No epoch was completed.")])
    steps = training.steps / max(training.epochs, 1)
    used = {"latest": training.checkpoint, "best": training.best_checkpoint}
    if material.evaluation is not None:
        used = {"evaluated": material.evaluation.checkpoint, **used}
    by_step: dict[int, list[str]] = {}
    for name, path in used.items():
        if (step := path.rpartition("/")[2]).isdigit():
            by_step.setdefault(int(step), []).append(name)
    named = {step: ", ".join(names) for step, names in by_step.items()}
    marks = {name: step / steps for step, name in named.items()} if steps else {}
    drawn = [charts.curves(metric, lines, marks) for metric, lines in panels.items()]
    told = "; ".join(f"{name} at step {step:,}" for step, name in named.items())
    early = " The training stopped early." if training.stopped_early else ""
    figure = Figure(drawn, f"A dashed line is a checkpoint: {told}.{early}")
    return ReportSection("Learning curves", [figure], pictures={"learning_curve.png": charts.learning_curve(training)})


def importance(material: Material) -> ReportSection | None:
    """Return how much worse the metric is without each column of a table."""
    if material.evaluation is None or not (found := material.evaluation.importance):
        return None
    metric = found[0].metric.replace("/", " ")
    lines = [(one.column, one.interval[0], one.value, one.interval[1]) for one in found]
    drawn = charts.ranges(f"how much worse {metric} gets", lines, from_zero=False, shown=units.metric)
    caption = (
        f"How much worse {metric} gets if the values of one column are shuffled among the test rows: the mean and the "
        f"95% interval of {REPEATS} shuffles, each of up to {ROWS:,} newly drawn test rows. If an interval contains "
        "0, there is no evidence that the model uses the column. If two columns carry the same information, each can "
        f"look unimportant, because the model still has the other one. Only the first {COLUMNS} columns of a table "
        "are measured."
    )
    return ReportSection("Which columns matter", [Figure([drawn], caption)])


def by_class(material: Material) -> ReportSection | None:
    """Return precision, recall, F1 and support of each class or label, the worst F1 first."""
    if material.evaluation is None or not material.evaluation.classes:
        return None
    entries = sorted(material.evaluation.classes, key=lambda entry: entry.f1)
    one, word = ("label", "labels") if material.task == "multilabel" else ("class", "classes")
    rows = class_rows(entries)
    header = (one, "precision", "recall", "F1", "examples")
    blocks: list[Block] = [TableBlock(header, rows[:CLASSES], title=f"The worst F1 first, of {len(rows):,} {word}")]
    if len(rows) > CLASSES:
        blocks.append(TableBlock(header, rows[CLASSES:], title=f"The other {len(rows) - CLASSES:,}", folded=True))
    if material.task == "classification":  # The confusion matrix shows the classes.
        return ReportSection(f"By {one}", blocks)
    drawn = charts.bars("F1 of each label", {entry.name: entry.f1 for entry in entries[:MAX_LABELS]}, ".4f")
    return ReportSection(f"By {one}", [Figure([drawn]), *blocks], pictures={"predictions.png": drawn})


def confusion(material: Material) -> ReportSection | None:
    """Return the confusion matrix, and the most frequent mistakes by name."""
    if material.evaluation is None or not material.evaluation.confusion_matrix:
        return None
    counts = np.array(material.evaluation.confusion_matrix)
    names = material.class_names
    wrong = counts * (1 - np.eye(len(counts), dtype=np.int64))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_PAIRS]
    rows = []
    for place in order:
        true, given = divmod(int(place), len(counts))
        if count := int(wrong[true, given]):
            share = count / max(int(counts[true].sum()), 1)
            rows.append([names[true], names[given], f"{count:,}", f"{share:.1%}"])
    caption = "Rows are true classes, columns predicted classes; a stronger colour is a larger share of the row."
    drawn = charts.confusion_matrix(material.evaluation)
    blocks: list[Block] = [Figure([drawn], caption, wide=True)]
    if rows:
        blocks.append(
            TableBlock(("true", "predicted", "examples", "share of the class"), rows, 2, "The most frequent mistakes")
        )
    else:
        blocks.append(Text("Every test example is predicted correctly."))
    said = "none: every test example is predicted correctly"
    if rows:
        mistake, predicted, number, of_class = rows[0]
        examples = "example" if number == "1" else "examples"
        said = f"{mistake} predicted as {predicted}: {number} {examples}, {of_class} of the class"
    return ReportSection(
        "Confusion matrix", blocks, brief={"most frequent mistake": said}, pictures={"confusion_matrix.png": drawn}
    )


def calibration(material: Material) -> ReportSection | None:
    """Return the reliability diagram and the expected calibration error."""
    found = material.binned
    if found is None:
        return None
    what = "predicted class" if material.task == "classification" else "label"
    caption = (
        f"Predictions by the probability that the model gives to the {what}. A dot should be on the dashed line: "
        "of the predictions with 80%, 80% should be correct. Above the line, the model is too cautious; below it, "
        "too confident."
    )
    dots = charts.Series(found.confidence[found.counts > 0], found.accuracy[found.counts > 0])
    alt = f"reliability diagram: {found.means} by probability"
    diagram = charts.plot("probability", found.means, [dots], alt, reference=((0, 0), (1, 1)))
    said = (
        f"The expected calibration error is {found.error:.4f}: the distance of the dots of {BINS} equal bins from the "
        "line, averaged over the predictions (Guo et al., 2017). 0 is best."
    )
    return ReportSection(
        "Calibration",
        [Text(said), Figure([diagram], caption)],
        {"test_calibration/expected_calibration_error": found.error},
        pictures={"reliability.png": diagram},
    )


def parity(material: Material) -> ReportSection | None:
    """Return a plot of predicted against true values for each number of a regression."""
    if material.task != "regression" or material.predictions is None:
        return None
    labels, outputs = material.predictions
    columns = material.prepared.target.columns if material.prepared is not None else ()
    shown = np.arange(len(labels))
    if len(shown) > MAX_POINTS:
        shown = np.sort(np.random.default_rng(0).choice(len(labels), MAX_POINTS, replace=False))
    sampled = f" The plot shows {MAX_POINTS:,} of {len(labels):,} test examples." if len(labels) > MAX_POINTS else ""
    caption = f"Each point is a test example; on the dashed line, the predicted and the true value are equal.{sampled}"
    true, predicted = labels[shown].astype(np.float64), outputs[shown].astype(np.float64)
    drawn = [
        charts.parity(true[:, place], predicted[:, place], columns[place] if place < len(columns) else "target")
        for place in range(min(labels.shape[1], MAX_NUMBERS))
    ]
    return ReportSection("Predicted and true values", [Figure(drawn, caption)], pictures={"predictions.png": drawn[0]})


def origin(material: Material) -> ReportSection:
    """Return the model, its data, and the settings that differ from params.yaml."""
    run, evaluation = material.run, material.evaluation
    evaluated = evaluation.checkpoint if evaluation is not None else None
    rows = run_rows(run, material.training, evaluated, material.registered)
    every = [[key, config.written(value)] for key, value in sorted(config.flat(run.settings).items())]
    folded = TableBlock(("setting", "value"), every, 2, f"All {len(every)} settings", folded=True)
    blocks: list[Block] = [facts(rows)]
    with contextlib.suppress(UserError):  # params.yaml cannot be read.
        differing = listing.different(run.settings, config.load().to_json())
        lines = [[key, *map(config.written, values)] for key, values in sorted(differing.items())]
        title = "Settings that differ from params.yaml (as it was when this page was written)"
        table = TableBlock(("setting", "this run", "params.yaml"), lines, 3, title)
        blocks.append(table if lines else Text("All settings are as in params.yaml."))
    judged = {name: text for name, text in rows.items() if name in ("champion", "registered")}
    brief = dict([*judged.items()][-1:]) or {"champion": "not judged: the run registered no model yet"}
    return ReportSection("Model, data and settings", [*blocks, folded], brief=brief)


def time(material: Material) -> ReportSection | None:
    """Return the time of each stage."""
    training = material.training
    blocks: list[Block] = []
    parts = {name: seconds for name, seconds in material.seconds.items() if name != "total"}
    if parts:
        title = f"Seconds by stage, {material.seconds['total']:,.1f} in all"
        told = "Others: starting processes and the MLflow run, and the time of Prefect and DVC between the stages."
        blocks.append(Figure([charts.bars(title, parts, ",.2f")], told))
    if training is not None:
        rows = {"building the model and the input, and restoring a checkpoint": units.duration(training.setup_seconds)}
        if training.first_call_seconds is not None:
            rows["first training step, which traces and compiles"] = units.duration(training.first_call_seconds)
        if training.epoch_seconds:
            mean = sum(training.epoch_seconds) / len(training.epoch_seconds)
            rows["each epoch, on average, with its validation"] = units.duration(mean)
        if training.examples_per_second is not None:
            rows["training examples per second, after the first step"] = f"{training.examples_per_second:,.0f}"
        blocks.append(facts(rows))
    return ReportSection("Where the time went", blocks) if blocks else None


def augmented(material: Material) -> ReportSection | None:
    """Return the image of augmented training examples, if it exists."""
    path = material.folder / "report" / "augmented_examples.png"
    if not path.is_file():
        return None
    uri = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    alt = "each row shows an image and augmented versions of it"
    return ReportSection("Augmented examples", [Pictures([Picture(uri, alt)], large=True)])


def data(material: Material) -> ReportSection:
    """Return the source of the data, and the sizes of the splits."""
    prepared = material.prepared
    if prepared is None:
        return ReportSection("Data", [Text("The prepared data are missing.")])
    facts_of = {
        "kind": f"{prepared.kind}, version {prepared.version}",
        "task": outputs_in_words(prepared.target),
        "licence": prepared.licence or "not known",
    }
    if prepared.held_out is not None:
        held = prepared.held_out
        facts_of["test split"] = f"{held.num_examples:,} examples drawn from the training split with seed {held.seed}"
    blocks: list[Block] = []
    if material.evaluation is not None and material.test is None:
        blocks.append(Text("These data differ from those that this run was evaluated on."))
    blocks += [
        facts(facts_of),
        _splits(prepared),
        Text(f"`stratagem data show {prepared.name}` lists its columns and classes."),
    ]
    return ReportSection("Data", blocks)


def _splits(prepared: PreparedDataset) -> TableBlock:
    what = "label" if prepared.target.task == "multilabel" else "class"
    ends = [f"smallest {what}", f"largest {what}"] if prepared.target.class_names else []
    rows: list[list[str]] = []
    for name, split in prepared.splits.items():
        counts = split.class_counts
        known = [f"{min(counts):,}", f"{max(counts):,}"] if counts else ["-", "-"]
        rows.append([name, f"{split.num_examples:,}", *known[: len(ends)]])
    return TableBlock(("split", "examples", *ends), rows)


def mistakes(material: Material) -> ReportSection | None:
    """Return the worst examples: the most confident wrong classes, the most probable wrong labels, or the largest
    errors of a regression."""
    if material.predictions is None:
        return None
    title = "Largest errors" if material.task == "regression" else "Most confident mistakes"
    if material.test is None:
        data = "The data are missing" if material.prepared is None else "The test rows have changed"
        return ReportSection(title, [Text(f"{data}, so the examples cannot be shown.")])
    worst = _worst(material)
    if not worst:
        return ReportSection(title, [Text("None: every prediction is correct.")])
    brief = {}
    if material.task == "regression":
        row, true, predicted = worst[0]
        brief = {"largest error": f"test example {row}: predicted {predicted}, true {true}"}
    elif material.task == "multilabel":
        labels, outputs = material.predicted
        wrong = ((outputs > 0) != (labels == 1)).sum(axis=0)
        name = material.class_names[int(wrong.argmax())]
        brief = {"most frequent mistake": f"the label {name}: wrong for {wrong.max():,} of {len(labels):,} examples"}
    blocks: list[Block] = []
    features = material.test.prepared.features
    for name, feature in features.items():
        if is_image(feature):
            blocks.append(Pictures([_picture(material.test, name, *one) for one in worst]))
    if len(features) > len(blocks):
        header, lines = _rows(material.test, worst[:TABLE_ROWS])
        label = ", of the label that is most wrong" if material.task == "multilabel" else ""
        meaning = (
            f"Row of the test split, counted from 0; true and predicted value{label}; then the model's input, up to "
            f"{TABLE_COLUMNS} columns of a kind"
        )
        blocks.append(TableBlock(header, lines, len(header), meaning))
    return ReportSection(title, blocks, brief=brief)


def _worst(material: Material) -> list[tuple[int, str, str]]:
    """Return the row, true and predicted value of each of the worst examples, the worst first."""
    labels, outputs = material.predicted
    if material.task == "regression":
        rows = _largest(np.nan_to_num(material.scores, nan=np.inf), above=-1)
        return [(row, _numbers(labels[row]), _numbers(outputs[row])) for row in rows]
    names, shares = material.class_names, material.probabilities
    if material.task == "multilabel":
        gaps = np.abs(shares - labels)
        found = []
        for row in _largest(gaps.max(axis=1), above=0.5):
            label = int(gaps[row].argmax())
            true = names[label] if labels[row, label] else f"not {names[label]}"
            found.append((row, true, f"{shares[row, label]:.1%} for {names[label]}"))
        return found
    taken = outputs.argmax(axis=1)
    sure = np.where(taken == labels, 0, shares.max(axis=1))
    return [(row, names[labels[row]], f"{names[taken[row]]}, {sure[row]:.1%}") for row in _largest(sure, above=0)]


def _largest(values: npt.NDArray[np.float64], above: float) -> list[int]:
    """Return the rows with the largest values above a bound, the largest first."""
    rows = np.flatnonzero(values > above)
    found: list[int] = rows[np.argsort(-values[rows], kind="stable")][:PICTURES].tolist()
    return found


def _numbers(values: npt.NDArray[Any]) -> str:
    return ", ".join(map(units.number, np.atleast_1d(values)[:4]))


def _picture(test: TestExamples, name: str, row: int, true: str, predicted: str) -> Picture:
    lines = (f"true: {true}", f"predicted: {predicted}")
    return Picture(data_uri(np.asarray(test.arrays[name][row])), f"test example {row}, {'; '.join(lines)}", lines)


def data_uri(pixels: npt.NDArray[np.uint8]) -> str:
    """Return an image, uint8 (height, width, channels), as a data: URI of a PNG, or of a JPEG if it is large."""
    from PIL import Image

    shown = pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., 0]
    image = Image.fromarray(np.ascontiguousarray(shown))
    image.thumbnail((SIDE, SIDE))
    large = max(image.size) > 64
    buffer = io.BytesIO()
    image.save(buffer, **({"format": "JPEG", "quality": 85} if large else {"format": "PNG"}))
    kind = "jpeg" if large else "png"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _rows(test: TestExamples, worst: list[tuple[int, str, str]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the header and lines of a table of examples: true value, predicted value, and features."""
    names: list[str] = []
    lines = [[str(row), *told] for row, *told in worst]
    for name, feature in test.prepared.features.items():
        if feature.kind == "text":
            names.append(name)
            for line, (row, *_) in zip(lines, worst, strict=True):
                line.append(text_of(test, name, row))
        elif feature.kind in ("number", "category") and len(feature.shape) == 1:
            for place, (column, first, _) in enumerate(test.columns(name)[:TABLE_COLUMNS]):
                names.append(column)
                for line, (row, *_) in zip(lines, worst, strict=True):
                    line.append(_value(test, name, place, test.arrays[name][row, first]))
    return ("row", "true", "predicted", *names), lines


def _value(test: TestExamples, name: str, place: int, value: Any) -> str:
    feature = test.prepared.features[name]
    if feature.kind == "category":
        return test.category(name, place, int(value))
    return day(value) if feature.columns and feature.columns[place].kind == "datetime" else units.number(value)


def text_of(test: TestExamples, name: str, row: int) -> str:
    """Return the words of a text, with … for each word that is not in the vocabulary."""
    places = [int(place) for place in test.arrays[name][row].ravel() if place]
    words = ["…" if place == 1 else test.word(name, 0, place) for place in places[:WORDS]]
    return " ".join(words) + (" …" if len(places) > WORDS else "")


def by_slice(material: Material) -> ReportSection | None:
    """Return the headline metric of each slice: by class, by column, by brightness and original size of an image."""
    if material.predictions is None:
        return None
    scores = material.scores
    known = slices.every(material.task, material.class_names, material.predicted.labels, material.test)
    found = [one for one in known if one.rows.sum() >= FEWEST]
    worst_is_high = material.task == "regression"
    found.sort(key=lambda one: float(scores[one.rows].mean()) * (-1 if worst_is_high else 1))
    blocks: list[Block] = []
    if material.test is None:
        blocks.append(Text("The test rows of this evaluation are missing, so there are only slices by class."))
    if not found:
        blocks.append(Text(f"No part of the test split has {FEWEST} examples."))
        return ReportSection("Slices", blocks)
    overall = float(scores.mean())
    interval_of = intervals.of_share if material.task == "classification" else intervals.of_scores
    rows = []
    for one in found:
        low, high = interval_of(scores[one.rows])
        mean = float(scores[one.rows].mean())
        rows.append([one.shown, f"{int(one.rows.sum()):,}", units.metric(mean), units.interval(low, high)])
    header = ("slice", "examples", MEASURES[material.task], "95% interval")
    title = f"The worst first. All test examples: {units.metric(overall)}"
    blocks.append(TableBlock(header, rows[:SHOWN_SLICES], 1, title))
    if len(rows) > SHOWN_SLICES:
        blocks.append(TableBlock(header, rows[SHOWN_SLICES:], 1, f"The other {len(rows) - SHOWN_SLICES}", folded=True))
    said = (
        f"A slice is a part of the test split with at least {FEWEST} examples. Among many slices, some look bad by "
        "chance: ignore a slice whose interval contains the value of all test examples."
    )
    blocks.append(Text(said))
    name, count, value, interval = rows[0]
    sure = f"{value} (95% interval: {interval}) on {count} examples, {units.metric(overall)} on all"
    return ReportSection("Slices", blocks, brief={"worst slice": f"{name}: {MEASURES[material.task]} {sure}"})


SECTIONS: tuple[Callable[[Material], ReportSection | None], ...] = (
    headline,
    origin,
    curves,
    importance,
    by_class,
    confusion,
    calibration,
    parity,
    mistakes,
    by_slice,
    time,
    augmented,
    data,
)
"""The sections in the order of the page, after the short summary; a section returns None if it does not apply."""
