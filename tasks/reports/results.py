"""Sections on how good the model is: test metrics, learning curves, classes, calibration, errors of a regression."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from tasks.evaluation.predictions import BINS, Bins
from tasks.reports import intervals, svg
from tasks.reports.blocks import Block, Cell, Figure, ReportSection, TableBlock, Text
from tasks.reports.material import Material

SHOWN = 20
"""A table shows so many classes; it folds the others."""
WITH_COUNTS = 20
"""The most classes for which a square of the matrix has room for a number."""
MAX_SIDE = 1000
MAX_PAIRS = 20
SHADES = 10
MAX_POINTS = 2000
"""A drawing of errors shows a sample of so many test examples."""
MAX_NUMBERS = 4
MAX_NAME = 40
"""Letters of a number's name for which a drawing has room."""
ERROR_BARS = 30


def headline(material: Material) -> ReportSection | None:
    """Return the test metrics with their intervals."""
    if material.evaluation is None:
        return None
    rows: list[list[Cell]] = []
    measured = dict(material.evaluation.metrics)
    metrics: dict[str, float] = {}
    first = f"test/{material.headline}"
    for name in sorted(measured, key=lambda name: (name != first, name)):
        found = intervals.of_metric(material, name.removeprefix("test/"))
        rows.append([name, f"{measured[name]:.4f}", f"{found.low:.4f} to {found.high:.4f}" if found else "-"])
        if found is not None:
            metrics |= {f"interval/{name}/low": found.low, f"interval/{name}/high": found.high}
    said = (
        "How an interval is found: as many examples as the test split has are drawn from it with replacement, 1,000 "
        f"times, and the metric is measured on each draw; the interval holds the middle {intervals.CONFIDENCE:.0%} of "
        "these values (the bootstrap; Efron and Tibshirani, 1993). It says how far the metric may be off because the "
        "test split has these examples and no others, and nothing about another training."
    )
    if material.predictions is None:
        said = (
            "There are no intervals, no calibration, no mistakes and no slices: what the model gave for each example "
            f"was not kept, or is gone. `stratagem evaluate --run {material.run.run_id}` makes it again."
        )
    elif any(row[2] == "-" for row in rows):
        said += " A metric without one (-) would take too long, or is a loss of another kind."
    return ReportSection("Test metrics", [TableBlock(("metric", "value", "95 % interval"), rows), Text(said)], metrics)


def curves(material: Material) -> ReportSection | None:
    """Return the learning curves: one drawing per metric, one line per split."""
    training = material.training
    if training is None:
        return None
    panels = training.curves
    if not any(len(values) for lines in panels.values() for values in lines.values()):
        return ReportSection("Learning curves", [Text("The training did no whole epoch.")])
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
    drawings = [svg.lines(metric.replace("_", " "), "epoch", lines, marks) for metric, lines in panels.items()]
    told = "; ".join(f"{name} at step {step:,}" for step, name in named.items())
    early = " The training stopped early." if training.stopped_early else ""
    return ReportSection("Learning curves", [Figure(drawings, f"A dashed line is a checkpoint: {told}.{early}")])


def by_class(material: Material) -> ReportSection | None:
    """Return precision, recall, F1 and support of each class or label, the worst F1 first."""
    if material.evaluation is None or not material.evaluation.classes:
        return None
    entries = sorted(material.evaluation.classes, key=lambda entry: entry.f1)
    one, word = ("label", "labels") if material.task == "multilabel" else ("class", "classes")
    rows = [
        [
            escape(entry.name),
            *(f"{value:.4f}" for value in (entry.precision, entry.recall, entry.f1)),
            f"{entry.support:,}",
        ]
        for entry in entries
    ]
    header = (one, "precision", "recall", "F1", "examples")
    blocks: list[Block] = [TableBlock(header, rows[:SHOWN], title=f"The worst F1 first, of {len(rows):,} {word}")]
    if len(rows) > SHOWN:
        blocks.append(TableBlock(header, rows[SHOWN:], title=f"The other {len(rows) - SHOWN:,}", folded=True))
    return ReportSection("By label" if one == "label" else "By class", blocks)


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
            rows.append([escape(names[true]), escape(names[given]), f"{count:,}", f"{share:.1%}"])
    caption = "A row is a true class, a column what it was taken for; the darker, the larger the share of the row."
    blocks: list[Block] = [Figure([_matrix(counts, names)], caption, wide=True)]
    if rows:
        blocks.append(
            TableBlock(("true", "taken for", "examples", "share of the class"), rows, 2, "The most frequent mistakes")
        )
    else:
        blocks.append(Text("No test example is taken for another class."))
    return ReportSection("Confusion matrix", blocks)


def _matrix(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]], names: list[str]) -> Markup:
    """Draw the matrix; with many classes only some are named, and squares have no numbers."""
    num = len(names)
    with_counts = num <= WITH_COUNTS
    side = 34 if with_counts else max(MAX_SIDE / num, 1.0) if num > 100 else 10
    size = 11 if with_counts else 9
    step = max(1, math.ceil(9 / side))
    most = max(len(svg.short(name)) for name in names)
    left, top = 14 + size * 0.62 * most + 10, 14 + size * 0.62 * most + 10
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    parts = [
        Markup('<text x="{:.0f}" y="12" class="mid">predicted</text>').format(left + num * side / 2),
        Markup('<text transform="translate(12 {:.0f}) rotate(-90)" class="mid">true</text>').format(
            top + num * side / 2
        ),
        Markup('<rect class="ground" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
            left, top, num * side, num * side
        ),
    ]
    shade = np.ceil(np.minimum(shares, 1) * SHADES).astype(int)
    for level in range(1, SHADES + 1):
        squares = "".join(
            f"M{left + column * side:.1f} {top + row * side:.1f}h{side:.1f}v{side:.1f}h-{side:.1f}z"
            for row, column in np.argwhere(shade == level)
        )
        parts.append(Markup('<path class="shade{}" d="{}"/>').format(level, squares))
    for place in range(0, num, step):
        name, middle = svg.short(names[place]), (place + 0.5) * side
        parts.append(
            Markup('<text x="{:.1f}" y="{:.1f}" class="end" style="font-size:{}px">{}</text>').format(
                left - 5, top + middle + size * 0.35, size, name
            )
        )
        parts.append(
            Markup('<text transform="translate({:.1f} {:.1f}) rotate(-90)" style="font-size:{}px">{}</text>').format(
                left + middle + size * 0.35, top - 5, size, name
            )
        )
    if with_counts:
        for row, column in np.argwhere(counts):
            kind = "mid on" if shade[row, column] > SHADES // 2 else "mid"
            parts.append(
                Markup('<text x="{:.1f}" y="{:.1f}" class="{}" style="font-size:11px">{}</text>').format(
                    left + (column + 0.5) * side, top + (row + 0.5) * side + 4, kind, f"{counts[row, column]}"
                )
            )
    right, every = int(np.trace(counts)), int(counts.sum())
    alt = f"confusion matrix of {num} classes, {right:,} of {every:,} examples on its diagonal"
    return svg.svg(left + num * side + 8, top + num * side + 8, alt, parts)


def brier(probabilities: npt.NDArray[Any], labels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the Brier score of each example, (n,): for classes the sum of the squared distances to the truth, 0 to 2;
    for labels their mean, 0 to 1.

    Source: Brier, Verification of Forecasts Expressed in Terms of Probability (1950).
    """
    if labels.ndim == 2:
        of_labels: npt.NDArray[np.float64] = np.square(probabilities - labels).mean(axis=1)
        return of_labels
    own = probabilities[np.arange(len(labels)), labels]
    scores: npt.NDArray[np.float64] = np.square(probabilities).sum(axis=1) - 2 * own + 1
    return scores


def calibration(material: Material) -> ReportSection | None:
    """Return the reliability diagram, the expected calibration error and the Brier score."""
    found = material.binned
    if found is None:
        return None
    what = "predicted class" if material.task == "classification" else "label"
    scores = brier(material.probabilities, material.predicted.labels)
    low, high = intervals.of_scores(scores)
    rows = [
        ["expected calibration error", f"{found.error:.4f}", ""],
        ["Brier score", f"{scores.mean():.4f}", f"{low:.4f} to {high:.4f}"],
    ]
    caption = (
        f"Predictions by the probability that the model gives to the {what}. A bar should end at the dashed line: "
        "of the predictions that have 80 %, 80 % should be right. Where it ends above the line, the model is too "
        "careful, below it too sure."
    )
    return ReportSection(
        "Calibration",
        [
            TableBlock(("measure", "value", "95 % interval"), rows),
            Figure([_reliability(found), _counts(found)], caption),
            Text(
                f"The expected calibration error is how far the {BINS} bars are from the line, on average over the "
                "predictions (Guo et al., 2017). The Brier score is the squared distance between probabilities and "
                "truth, on average over the test examples (Brier, 1950). Of both 0 is the best."
            ),
        ],
        {
            "calibration/expected_calibration_error": found.error,
            "calibration/brier_score": float(scores.mean()),
            "interval/calibration/brier_score/low": low,
            "interval/calibration/brier_score/high": high,
        },
    )


def _reliability(found: Bins) -> Any:
    frame = svg.Frame((0, 1), (0, 1), "probability", found.means)
    for place in range(BINS):
        if found.counts[place]:
            frame.box(place / BINS, (place + 1) / BINS, float(found.accuracy[place]), "f0")
    frame.line([(0, 0), (1, 1)], "mark")
    return frame.drawing(f"reliability diagram: {found.means} by probability")


def _counts(found: Bins) -> Any:
    frame = svg.Frame((0, 1), (0, float(found.counts.max())), "probability", "predictions")
    for place in range(BINS):
        frame.box(place / BINS, (place + 1) / BINS, float(found.counts[place]), "f2")
    return frame.drawing("how many predictions have which probability")


def residuals(material: Material) -> ReportSection | None:
    """Return a parity plot, residuals by prediction, and a histogram of residuals for each number of a regression."""
    if material.task != "regression" or material.predictions is None:
        return None
    labels, outputs = material.predictions
    columns = material.prepared.target.columns if material.prepared is not None else ()
    shown = np.arange(len(labels))
    if len(shown) > MAX_POINTS:
        shown = np.sort(np.random.default_rng(0).choice(len(labels), MAX_POINTS, replace=False))
    sampled = f" Drawn are {MAX_POINTS:,} of {len(labels):,} test examples." if len(labels) > MAX_POINTS else ""
    caption = (
        "A point is a test example. Predicted against true: on the dashed line the two are equal. Residuals (true less "
        "predicted) against predicted: above the dashed line the prediction was too low. Then how many test examples "
        f"have a residual of each size.{sampled}"
    )
    figures = []
    for place in range(min(labels.shape[1], MAX_NUMBERS)):
        name = svg.short(columns[place] if place < len(columns) else "target", MAX_NAME)
        true, predicted = labels[:, place].astype(np.float64), outputs[:, place].astype(np.float64)
        drawings = [
            _parity(name, true[shown], predicted[shown]),
            _by_predicted(name, predicted[shown], (true - predicted)[shown]),
            _spread(name, true - predicted),
        ]
        figures.append(Figure(drawings, caption if place == 0 else ""))
    return ReportSection("Residuals", [*figures])


def _parity(name: str, true: npt.NDArray[Any], predicted: npt.NDArray[Any]) -> Markup:
    ends = svg.limits([*true, *predicted])
    frame = svg.Frame(ends, ends, f"true {name}", f"predicted {name}")
    frame.line([(ends[0], ends[0]), (ends[1], ends[1])], "mark")
    frame.dots(zip(true, predicted, strict=True), "c0 small")
    return frame.drawing(f"predicted against true {name}, {len(true)} points")


def _by_predicted(name: str, predicted: npt.NDArray[Any], errors: npt.NDArray[Any]) -> Markup:
    ends = svg.limits(predicted)
    frame = svg.Frame(ends, svg.limits([0, *errors]), f"predicted {name}", f"residual of {name}")
    frame.line([(ends[0], 0), (ends[1], 0)], "mark")
    frame.dots(zip(predicted, errors, strict=True), "c0 small")
    return frame.drawing(f"residuals by predicted {name}, {len(predicted)} points")


def _spread(name: str, errors: npt.NDArray[Any]) -> Markup:
    counts, edges = np.histogram(errors, ERROR_BARS)
    frame = svg.Frame((float(edges[0]), float(edges[-1])), (0, float(counts.max())), f"residual of {name}", "examples")
    for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
        frame.box(float(left), float(right), float(count), "f0")
    return frame.drawing(f"how many examples have a residual of {name} of each size")
