"""Tables without drawings: CSV and JSON files of a run, Markdown, and rows for the terminal."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from tasks.records import EvaluationResult, Feature, TrainingResult

MAX_MOMENTS = 4
"""More means and deviations are not shown: an image has no more channels, and thousands do not fit a line."""


def history_table(training: TrainingResult, path: Path) -> Path:
    """Write a CSV file with one row per epoch and one column per metric."""
    names = sorted(training.history)
    rows = zip(*(training.history[name] for name in names), strict=True)
    return write_csv(path, ["epoch", *names], [[epoch, *row] for epoch, row in enumerate(rows, start=1)])


def predictions_table(evaluation: EvaluationResult, path: Path) -> Path:
    """Write a CSV file with one row (actual, predicted) per example, for DVC's confusion template; none for labels."""
    if evaluation.predictions:
        return write_csv(path, ["actual", "predicted"], evaluation.predictions)
    names = [entry.name for entry in evaluation.classes]
    rows = [
        [names[actual], names[predicted]]
        for actual, line in enumerate(evaluation.confusion_matrix)
        for predicted, count in enumerate(line)
        for _ in range(count)
    ]
    return write_csv(path, ["actual", "predicted"], rows)


def metrics_table(evaluation: EvaluationResult, path: Path) -> Path:
    """Write the test metrics as JSON, nested as DVC shows them: {"test": {"accuracy": ...}}."""
    nested: dict[str, dict[str, float]] = {}
    for name, value in evaluation.metrics.items():
        split, _, metric = name.partition("/")
        nested.setdefault(split, {})[metric] = value
    path.write_text(json.dumps(nested, indent=2) + "\n", encoding="utf-8")
    return path


def write_csv(path: Path, header: list[str], rows: Sequence[Sequence[object]]) -> Path:
    """Write a table as CSV; return where to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return path


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int) -> list[str]:
    """Return the lines of a Markdown table whose columns after ``num_texts`` are numbers."""
    rule = ["---" if i < num_texts else "---:" for i in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def describe_columns(name: str, feature: Feature) -> list[tuple[str, str, str]]:
    """Return name, kind and statistics of each column of a feature, or of a feature without columns.

    Args:
        name: of the feature.
        feature: with what was fitted on the training split.
    """
    if not feature.columns:
        return [(name, feature.kind, moments(feature.mean, feature.deviation))]
    rows: list[tuple[str, str, str]] = []
    place = 0
    for number, column in enumerate(feature.columns):
        told = ""
        if feature.vocabulary_sizes:
            count = feature.vocabulary_sizes[number] - 2  # Without the missing and the unknown.
            what = "word" if column.kind == "text" else "value"
            told = f"one {what} alone" if count == 1 else f"{count:,} different {what}s"
        elif column.quantiles:  # The mean is of its places among them.
            told = f"from {column.quantiles[0]:.4g} to {column.quantiles[-1]:.4g}, scaled by quantiles"
        elif column.kind != "datetime":
            last = place + (column.width if feature.kind == "number" else len(feature.mean))
            told = moments(feature.mean[place:last], feature.deviation[place:last])
        place += column.width
        rows.append((column.name, column.kind, told))
    return rows


def moments(means: Sequence[float], deviations: Sequence[float]) -> str:
    """Return means and deviations in words; an empty text for none, and for more than ``MAX_MOMENTS``."""
    if not 0 < len(means) <= MAX_MOMENTS:
        return ""
    return f"mean {' '.join(f'{one:.4g}' for one in means)}, deviation {' '.join(f'{one:.4g}' for one in deviations)}"
