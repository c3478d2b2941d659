"""Sections on how good the model is: test metrics, learning curves, classes, calibration, errors of a regression."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.evaluation.predictions import BINS
from tasks.reports import charts, intervals
from tasks.reports.blocks import Block, Figure, ReportSection, TableBlock, Text
from tasks.reports.charts import Series
from tasks.reports.material import Material

SHOWN = 20
"""A table shows so many classes; it folds the others."""
MAX_PAIRS = 20
MAX_POINTS = 2000
"""A drawing of errors shows a sample of so many test examples."""
MAX_NUMBERS = 4
ERROR_BARS = 30


def headline(material: Material) -> ReportSection | None:
    """Return the test metrics with their intervals."""
    if material.evaluation is None:
        return None
    rows: list[list[str]] = []
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
    _, value, interval = rows[0]
    on = f"on {material.evaluation.num_examples:,} test examples"
    sure = f" (95 % interval: {interval})" if interval != "-" else ""
    return ReportSection(
        "Test metrics",
        [TableBlock(("metric", "value", "95 % interval"), rows), Text(said)],
        metrics,
        {first.replace("/", " "): f"{value}{sure} {on}"},
    )


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
    drawn = [charts.curves(metric, lines, marks) for metric, lines in panels.items()]
    told = "; ".join(f"{name} at step {step:,}" for step, name in named.items())
    early = " The training stopped early." if training.stopped_early else ""
    return ReportSection("Learning curves", [Figure(drawn, f"A dashed line is a checkpoint: {told}.{early}")])


def by_class(material: Material) -> ReportSection | None:
    """Return precision, recall, F1 and support of each class or label, the worst F1 first."""
    if material.evaluation is None or not material.evaluation.classes:
        return None
    entries = sorted(material.evaluation.classes, key=lambda entry: entry.f1)
    one, word = ("label", "labels") if material.task == "multilabel" else ("class", "classes")
    rows = [
        [
            entry.name,
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
            rows.append([names[true], names[given], f"{count:,}", f"{share:.1%}"])
    caption = "A row is a true class, a column the predicted class; the darker, the larger the share of the row."
    blocks: list[Block] = [Figure([charts.confusion_matrix(material.evaluation)], caption, wide=True)]
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
    return ReportSection("Confusion matrix", blocks, brief={"most frequent mistake": said})


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
    edges, alt = np.linspace(0, 1, BINS + 1), f"reliability diagram: {found.means} by probability"
    diagram = charts.histogram(found.accuracy, edges, "probability", found.means, alt, share=True)
    alt = "how many predictions have which probability"
    counts = charts.histogram(found.counts, edges, "probability", "predictions", alt)
    return ReportSection(
        "Calibration",
        [
            TableBlock(("measure", "value", "95 % interval"), rows),
            Figure([diagram, counts], caption),
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
        pictures={"reliability.png": diagram},
    )


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
        name = columns[place] if place < len(columns) else "target"
        true, predicted = labels[:, place].astype(np.float64), outputs[:, place].astype(np.float64)
        errors = true - predicted
        counts, edges = np.histogram(errors, ERROR_BARS)
        drawn = [
            charts.parity(true[shown], predicted[shown], name),
            charts.plot(
                f"predicted {name}", f"residual of {name}", [Series(predicted[shown], errors[shown], kind="dots")],
                f"residuals by predicted {name}, {len(shown)} points",
                reference=[(predicted[shown].min(), 0), (predicted[shown].max(), 0)],
            ),
            charts.histogram(
                counts, edges, f"residual of {name}", "examples",
                f"how many examples have a residual of {name} of each size",
            ),
        ]  # fmt: skip
        figures.append(Figure(drawn, caption if place == 0 else ""))
    return ReportSection("Residuals", [*figures])
