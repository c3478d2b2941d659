"""Files of a run that DVC plots and spreadsheets open; and how a table is written."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from tasks.records import EvaluationResult, TrainingResult


def history_table(training: TrainingResult, path: Path) -> Path:
    """Write one CSV row an epoch, a column a metric."""
    names = sorted(training.history)
    rows = zip(*(training.history[name] for name in names), strict=True)
    return write_csv(path, ["epoch", *names], [[epoch, *row] for epoch, row in enumerate(rows, start=1)])


def predictions_table(evaluation: EvaluationResult, path: Path) -> Path:
    """Write one CSV row (actual, predicted) an example, as DVC's confusion template reads it; none of labels."""
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
