"""Tables without charts: CSV and JSON files of a run, Markdown, and rows for the terminal."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tasks.records import (
    HEADLINES,
    ClassMetrics,
    EvaluationResult,
    Feature,
    Record,
    RegisteredModel,
    Run,
    RunSummary,
    Target,
    TrainingResult,
)
from tasks.system import units

MAX_MOMENTS = 4
"""The maximum number of means and deviations in a line: enough for an image's channels."""


def history_table(training: TrainingResult, path: Path) -> Path:
    """Write a CSV file with one row per epoch and one column per metric."""
    names = sorted(training.history)
    rows = zip(*(training.history[name] for name in names), strict=True)
    return write_csv(path, ["epoch", *names], [[epoch, *row] for epoch, row in enumerate(rows, start=1)])


def predictions_table(evaluation: EvaluationResult, path: Path) -> Path:
    """Write a CSV file with one row (actual, predicted) per example, for DVC's confusion template; labels have none."""
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


def class_rows(classes: Iterable[ClassMetrics]) -> list[list[str]]:
    """Return name, precision, recall, F1 and the number of examples of each class or label."""
    return [
        [one.name, *(f"{v:.4f}" for v in (one.precision, one.recall, one.f1)), f"{one.support:,}"] for one in classes
    ]


def outputs_in_words(target: Target) -> str:
    """Return the task and the number of outputs, such as ``classification, 10 classes``."""
    count, one = target.num_outputs, "label" if target.task == "multilabel" else "number"
    return f"{target.task}, " + (f"{count:,} classes" if target.task == "classification" else units.count(count, one))


def write_csv(path: Path, header: list[str], rows: Sequence[Sequence[object]]) -> Path:
    """Write a table as CSV; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return path


def records_table(entries: Sequence[Record], path: Path) -> Path:
    """Write records as CSV, one per line, with unrounded numbers and columns such as ``metrics.test/accuracy``; return
    the path."""
    import pandas

    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.json_normalize([entry.model_dump(mode="json") for entry in entries]).to_csv(path, index=False)
    return path


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int) -> list[str]:
    """Return the lines of a Markdown table whose columns after ``num_texts`` are numbers."""
    rule = ["---" if i < num_texts else "---:" for i in range(len(header))]
    lines = [[cell.replace("|", r"\|").replace("\n", " ") for cell in cells] for cells in (header, rule, *rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def describe_columns(name: str, feature: Feature) -> list[tuple[str, str, str]]:
    """Return the name, kind and statistics of each column of a feature, or of a feature without columns."""
    if not feature.columns:
        return [(name, feature.kind, moments(feature.mean, feature.deviation))]
    rows: list[tuple[str, str, str]] = []
    place = 0
    for number, column in enumerate(feature.columns):
        told = ""
        if feature.vocabulary_sizes:
            count = feature.vocabulary_sizes[number] - 2  # Without the indices for missing and unknown values.
            what = "word" if column.kind == "text" else "value"
            told = f"one {what} alone" if count == 1 else f"{count:,} different {what}s"
        elif column.quantiles:  # Its mean is one of quantiles.
            told = f"from {_numbers(column.quantiles[:1])} to {_numbers(column.quantiles[-1:])}, scaled by quantiles"
        elif column.kind != "datetime":
            last = place + (column.width if feature.kind == "number" else len(feature.mean))
            told = moments(feature.mean[place:last], feature.deviation[place:last])
        place += column.width
        rows.append((column.name, column.kind, told))
    return rows


def moments(means: Sequence[float], deviations: Sequence[float]) -> str:
    """Return means and deviations as text; empty for none, and for more than ``MAX_MOMENTS``."""
    if not 0 < len(means) <= MAX_MOMENTS:
        return ""
    return f"mean {_numbers(means)}, deviation {_numbers(deviations)}"


def _numbers(values: Sequence[float]) -> str:
    return " ".join(units.number(value, 4) for value in values)


def run_rows(
    run: Run, training: TrainingResult | None, evaluated: str | None, registered: RegisteredModel | None
) -> dict[str, str]:
    """Return the known facts about a run's origin, training and model, by name; ``evaluated`` is a checkpoint."""
    lineage = run.lineage
    package = f" (stratagem {lineage.package_version})" if lineage.package_version else ""
    rows = {
        "dataset": f"{run.dataset}, data version {lineage.data_version or 'not under DVC'}",
        "model": run.model,
        "strategy": f"{run.strategy}, loop {run.loop}",
        "seed": str(run.settings["train"]["seed"]),
        "git commit": lineage.commit,
        "code": f"{lineage.code_digest}{package}",
        "settings": lineage.settings_digest,
        "host": run.host,
        "resumed with": "; ".join(f"{one.what} {one.values}" for one in run.changed),
    }
    if training is not None:
        replicas = units.count(training.num_replicas, "replica")
        rows |= {
            "strategy": f"{rows['strategy']}, {replicas} on {', '.join(training.devices)}",
            "trained": f"{units.count(training.epochs, 'epoch')}, {units.count(training.steps, 'step')} "
            f"of {units.count(training.global_batch_size, 'example')}",
            "optimizer": training.optimizer,
            "parameters": f"{training.num_parameters:,}, including those that are not trained",
            "restarts": "; ".join(training.restarts),
            "weights": training.weights_digest,
        }
    rows["evaluated"] = evaluated or ""
    if registered is not None:
        version = f"{registered.model_name}/{registered.model_version}"
        rows |= {
            "registered": " ".join([version, *(f"@{alias}" for alias in registered.aliases)])
            if registered.model_version
            else f"no: {registered.reason}",
            "champion": registered.judgement.told if registered.judgement is not None else "",
            "note": "; ".join(registered.notes),
        }
    return {name: text for name, text in rows.items() if text} | {"run": run.run_id, "experiment": run.experiment}


def result_rows(summary: RunSummary) -> dict[str, str]:
    """Return the headline metric of a run, its other metrics, and whether its model was registered."""
    measured = {key.removeprefix("test/"): units.metric(value) for key, value in summary.metrics.items()}
    measured.pop("loss", None)
    headline = next(name for name in HEADLINES.values() if name in measured)
    version = " ".join([summary.model_version or "", *(f"@{alias}" for alias in summary.aliases)])
    rows = {
        f"test {headline}": measured.pop(headline),
        "others": ", ".join(map(" ".join, measured.items())),
        "champion": summary.judgement.told if summary.judgement else "",
        "model": version if summary.model_version else f"not registered: {summary.reason}",
        "note": "; ".join(summary.notes),
    }
    return {name: text for name, text in rows.items() if text}


def summary_rows(summary: RunSummary, restarts: Iterable[str] = ()) -> dict[str, str]:
    """Return the facts about a finished run, by name; ``restarts`` are the reasons why its workers restarted."""
    speed = f", {summary.examples_per_second:,.0f} examples/s" if summary.examples_per_second is not None else ""
    replicas = units.count(summary.num_replicas, "replica")
    return {
        **result_rows(summary),
        "dataset": f"{summary.dataset}, data version {(summary.data_version or 'not under DVC')[:12]}",
        "strategy": f"{summary.strategy}, {replicas}, loop {summary.loop}",
        "trained": f"{units.count(summary.epochs, 'epoch')}, {units.count(summary.steps, 'step')}{speed}",
        **{f"restart {number}": reason for number, reason in enumerate(restarts, start=1)},
        "checkpoint": summary.checkpoint,
        "run": summary.run_id,
    }
