"""What a person opens after a run: the confusion matrix as a picture, and the tables that DVC plots."""

import csv
import json
import math
from pathlib import Path

import matplotlib
import numpy as np

from tasks.records import EvaluationResult, TrainingResult

matplotlib.use("agg")


def confusion_matrix(evaluation: EvaluationResult, title: str, path: Path) -> Path:
    """Draw the confusion matrix as a PNG: rows are true classes, shades are shares of a row, numbers are counts."""
    from matplotlib.figure import Figure

    counts = np.array(evaluation.confusion_matrix)
    names = [entry.name for entry in evaluation.classes]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    num_classes = len(names)
    readable = num_classes <= 30  # With more, squares are too small for numbers, and from 100 on not each has a name.
    side = max(5.0, 0.55 * num_classes + 2.0) if readable else min(0.14 * num_classes + 4.0, 20.0)
    figure = Figure(figsize=(side + 1.2, side), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", fraction=0.046)
    named = range(0, num_classes, math.ceil(num_classes / 100))
    labels, size = [names[i] for i in named], 10 if readable else 7
    short = max(map(len, labels)) <= 2
    rotation = 0 if short and readable else 45 if readable else 90
    axes.set_xticks(named, labels, fontsize=size, rotation=rotation, ha="right" if rotation == 45 else "center")
    axes.set_yticks(named, labels, fontsize=size)
    axes.set(xlabel="predicted", ylabel="true", title=title)
    if readable:
        for row, column in np.argwhere(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=color, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def history_table(training: TrainingResult, path: Path) -> Path:
    """Write one CSV row an epoch, a column a metric."""
    names = sorted(training.history)
    rows = zip(*(training.history[name] for name in names), strict=True)
    return _write(path, ["epoch", *names], [[epoch, *row] for epoch, row in enumerate(rows, start=1)])


def confusion_table(evaluation: EvaluationResult, path: Path) -> Path:
    """Write one CSV row (actual, predicted) an example, as DVC's confusion template reads it."""
    names = [entry.name for entry in evaluation.classes]
    rows = [
        [names[actual], names[predicted]]
        for actual, line in enumerate(evaluation.confusion_matrix)
        for predicted, count in enumerate(line)
        for _ in range(count)
    ]
    return _write(path, ["actual", "predicted"], rows)


def metrics_table(evaluation: EvaluationResult, path: Path) -> Path:
    """Write the test metrics as JSON, nested as DVC shows them: {"test": {"accuracy": ...}}."""
    nested: dict[str, dict[str, float]] = {}
    for name, value in evaluation.metrics.items():
        split, _, metric = name.partition("/")
        nested.setdefault(split, {})[metric] = value
    path.write_text(json.dumps(nested, indent=2) + "\n", encoding="utf-8")
    return path


def _write(path: Path, header: list[str], rows: list[list[object]] | list[list[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return path
