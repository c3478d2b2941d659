"""What a person opens: the confusion matrix as a picture, the tables that DVC plots, and those of the strategies."""

import csv
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import config
from tasks.records import HEADLINES, Comparison, ComparisonRow, EvaluationResult, TrainingResult

MAX_LABELS = 60
"""That a picture shows."""


def predictions(evaluation: EvaluationResult, title: str, folder: Path) -> Path:
    """Draw what was predicted for what is true: a confusion matrix of classes, precision and recall of labels, or the
    numbers of a regression against each other. Return the picture's path."""
    if evaluation.confusion_matrix:
        return confusion_matrix(evaluation, title, folder / "confusion_matrix.png")
    draw = _draw_labels if evaluation.classes else _draw_numbers
    return draw(evaluation, title, folder / "predictions.png")


def _draw_numbers(evaluation: EvaluationResult, title: str, path: Path) -> Path:
    from matplotlib.figure import Figure

    wanted, given = zip(*evaluation.predictions, strict=True)
    figure = Figure(figsize=(5.6, 5.2), layout="constrained")
    axes = figure.add_subplot()
    ends = min(*wanted, *given), max(*wanted, *given)
    axes.plot(ends, ends, color="0.6", linewidth=1, label="as it is")
    axes.scatter(wanted, given, s=12, alpha=0.6, linewidths=0)
    axes.set(xlabel="true", ylabel="predicted")
    axes.set_title(title, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend()
    return _saved(figure, path)


def _draw_labels(evaluation: EvaluationResult, title: str, path: Path) -> Path:
    from matplotlib.figure import Figure

    shown = evaluation.classes[:MAX_LABELS]
    figure = Figure(figsize=(6.4, 1.6 + 0.34 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    for offset, name in ((-0.2, "precision"), (0.2, "recall")):
        places = [place + offset for place in range(len(shown))]
        axes.barh(places, [getattr(entry, name) for entry in shown], height=0.38, label=name)
    axes.set_yticks(range(len(shown)), [f"{entry.name} ({entry.support:,})" for entry in shown])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share")
    axes.set_title(title, wrap=True)
    axes.legend()
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def confusion_matrix(evaluation: EvaluationResult, title: str, path: Path) -> Path:
    """Draw the confusion matrix as a PNG: rows are true classes, shades are shares of a row, numbers are counts."""
    # Here and not above: the tables are also printed by commands that answer in half a second.
    import numpy as np
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
    return _saved(figure, path)


def learning_curve(training: TrainingResult, title: str, path: Path) -> Path:
    """Draw what each epoch gave as a PNG: a panel a metric, a line a split."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels: dict[str, dict[str, tuple[float, ...]]] = {}
    for name, values in training.history.items():
        split, _, metric = name.partition("/")
        panels.setdefault(metric, {})[split] = values
    # Margins by hand: a layout that measures the text takes twice as long to draw, at the end of every run.
    figure = Figure(figsize=(4.2 * len(panels), 3.6))
    figure.subplots_adjust(left=0.2 / len(panels), right=1 - 0.06 / len(panels), bottom=0.14, top=0.82, wspace=0.3)
    figure.suptitle(title, wrap=True)
    for place, (metric, splits) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), place)
        for split, values in splits.items():
            epochs = range(1, len(values) + 1)
            axes.plot(epochs, values, label=split, marker=".")  # A line alone does not show a single epoch.
        axes.set(xlabel="epoch", title=metric.replace("_", " "))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    return _saved(figure, path)


def augmented_examples(images: Any, augmentation: config.Augmentation, title: str, path: Path) -> Path:
    """Draw training images as a PNG, a row each: as they are, then as they may be trained on.

    Args:
        images: uint8 (images, 1 + versions, height, width, channels).
        augmentation: the title says what is on.
        title: what it begins with.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    rows, columns, height, width, channels = images.shape
    shown = images[..., :3] if channels in (3, 4) else images[..., 0]
    tall, gap, top = height / width, 0.06, 0.85  # Beside a width of 1.
    right, bottom = columns + gap * columns + 0.25, rows * (tall + gap)
    figure = Figure(figsize=(1.1 * right, 1.1 * (bottom + top)), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    for row in range(rows):
        for column in range(columns):
            left, upper = gap + column * (1 + gap) + 0.15 * (column > 0), row * (tall + gap)
            extent = (left, left + 1, upper + tall, upper)
            axes.imshow(shown[row, column], cmap="gray", vmin=0, vmax=255, extent=extent)
    axes.set(xlim=(0, right), ylim=(bottom, -top))
    axes.set_axis_off()
    axes.text(right / 2, -0.58, title, ha="center", va="center", fontsize=12)
    axes.text(gap + 0.5, -0.18, "original", ha="center", va="center", fontsize=10)
    on = ", ".join(_augmentation(key, value) for key, value in augmentation.changes.items())
    axes.text((right + 1.2) / 2, -0.18, textwrap.fill(on, 100), ha="center", va="center", fontsize=10)
    return _saved(figure, path)


def _augmentation(key: str, value: Any) -> str:
    if isinstance(value, config.RandAugment):
        return f"RandAugment (N = {value.num_layers}, M = {value.magnitude:g})"
    return f"{key.replace('_', ' ')}{'' if value is True else f' {value:g}'}"


def history_table(training: TrainingResult, path: Path) -> Path:
    """Write one CSV row an epoch, a column a metric."""
    names = sorted(training.history)
    rows = zip(*(training.history[name] for name in names), strict=True)
    return _write(path, ["epoch", *names], [[epoch, *row] for epoch, row in enumerate(rows, start=1)])


def predictions_table(evaluation: EvaluationResult, path: Path) -> Path:
    """Write one CSV row (actual, predicted) an example, as DVC's confusion template reads it; none of labels."""
    if evaluation.predictions:
        return _write(path, ["actual", "predicted"], evaluation.predictions)
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


@dataclass(frozen=True)
class Column:
    """One figure of a comparison's rows."""

    heading: str
    narrow: str
    """The same in two short lines: ten columns fit a terminal of 80. Without it the column is not shown there."""
    text: Callable[[ComparisonRow], str]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _seconds(value: float | None) -> str:
    decimals = 2 if (value or 0) < 9.995 else 1 if (value or 0) < 99.95 else 0
    return _number(value, f",.{decimals}f")


def _replicas(row: ComparisonRow) -> str:
    # A replica of model_parallel has several devices; each worker of parameter_server does steps of its own.
    on = f" on {len(row.devices)}" if row.num_replicas != len(row.devices) else ""
    return "-" if row.num_replicas is None else f"{row.num_replicas}{on}"


def _start_up(row: ComparisonRow) -> float | None:
    parts = [seconds for seconds in (row.start_seconds, row.setup_seconds) if seconds is not None]
    return sum(parts) if parts else None


def _speed_up(row: ComparisonRow) -> str:
    # What rounds disagree about is no gain and no loss.
    same = row.speed_up_range is not None and not row.differs
    return "~1" if same else _number(row.speed_up, ".2f")


def _efficiency(row: ComparisonRow) -> str:
    same = row.speed_up_range is not None and not row.differs
    return f"~{1 / len(row.devices):.0%}" if same else _number(row.efficiency, ".0%")


RELATIVE = (
    Column("speed-up", "speed\nup", _speed_up),
    Column("efficiency", "effi.", _efficiency),
)


def _test_column(metric: str) -> Column:
    return Column(
        f"test {metric}", f"test\n{metric[:3]}.", lambda row: _number(row.metrics.get(f"test/{metric}"), ".4f")
    )


COLUMNS = (
    Column("replicas (on devices)", "repli-\ncas", _replicas),
    Column("examples/s", "examples\n/s", lambda row: _number(row.examples_per_second, ",.0f")),
    Column("seconds per epoch", "s per\nepoch", lambda row: _seconds(row.seconds_per_epoch)),
    *RELATIVE,
    Column("total, s", "total\ns", lambda row: _seconds(row.total_seconds)),
    *map(_test_column, HEADLINES.values()),
    Column("start-up, s", "start\nup s", lambda row: _seconds(_start_up(row))),
    Column("tracing, s", "", lambda row: _seconds(row.tracing_seconds)),
)


def comparison_cells(comparison: Comparison, narrow: bool = False) -> tuple[list[Column], list[list[str]]]:
    """Return the columns of figures that a comparison has, and the text of each row: strategy, loop, then those.

    ``narrow`` leaves out what a terminal of 80 has no room for. Speed-up and efficiency are there when a row can be
    held against ``one_device``.
    """
    relative = any(row.speed_up is not None for row in comparison.rows)
    measured = {name for row in comparison.rows for name in row.metrics}
    others = [_test_column(name) for name in HEADLINES.values() if f"test/{name}" not in measured]
    left_out = {column.heading for column in (*others, *(() if relative else RELATIVE))}
    columns = [column for column in COLUMNS if column.heading not in left_out]
    columns = [column for column in columns if column.narrow or not narrow]
    return columns, [
        [row.strategy, row.loop or "-", *(column.text(row) for column in columns)] for row in comparison.rows
    ]


def comparison_remarks(comparison: Comparison) -> list[str]:
    """Return what is said under a comparison's table: what failed and why, what was left out, what to keep in mind."""
    failed: dict[tuple[str, str], list[str]] = {}
    for row in comparison.rows:
        if row.reason is not None:
            failed.setdefault((row.strategy, row.reason), []).append(row.loop or "no loop")
    return [
        *(f"{kind}, {' and '.join(loops)}: {reason}" for (kind, reason), loops in failed.items()),
        *(f"{row.strategy}, {row.loop}: a later round: {why}" for row in comparison.rows for why in row.failures),
        *(f"{row.strategy}, {row.loop}: started again: {why}" for row in comparison.rows for why in row.restarts),
        *_spreads(comparison),
        *(f"left out: {pair}" for pair in comparison.left_out),
        *([comparison.note] if comparison.note else []),
    ]


def _spreads(comparison: Comparison) -> list[str]:
    """Return what the rounds say of how far the speed-ups can be trusted."""
    if all(row.speed_up is None for row in comparison.rows):
        return []
    if comparison.rounds == 1:
        return ["Each was measured once, so nobody knows which part of a speed-up is chance: give --repeats 2 or more."]
    spreads = [
        f"{row.strategy}, {row.loop}: {row.speed_up_range[0]:.2f} to {row.speed_up_range[1]:.2f}"
        for row in comparison.rows
        if row.speed_up_range is not None
    ]
    if not spreads:
        return []
    said = f"Speed-up in {comparison.rounds} rounds: {'; '.join(spreads)}"
    return [f"{said}. Where they span 1 it is ~1: no difference was measured."]


def comparison_table(comparison: Comparison, path: Path) -> Path:
    """Write a comparison as CSV: a line a row, every field of its record, numbers as they are."""
    rows = []
    for row in comparison.rows:
        values = row.model_dump(mode="json", exclude={"metrics", "devices", "restarts", "repeats", "failures"})
        kept = {"devices": " ".join(row.devices), "restarts": len(row.restarts), "repeats": len(row.repeats)}
        load = max((repeat.load for repeat in row.repeats), default=None)
        rows.append({**values, **kept, "load": load, **row.metrics})
    header = list(dict.fromkeys(name for row in rows for name in row))
    return _write(path, header, [[row.get(name) for name in header] for row in rows])


def comparison_page(comparison: Comparison, path: Path) -> Path:
    """Write a comparison as a Markdown page."""
    columns, cells = comparison_cells(comparison)
    names = ", ".join(dict.fromkeys(row.strategy for row in comparison.rows))
    times = "once" if comparison.rounds == 1 else f"{comparison.rounds} times, and figures are medians"
    lines = [
        f"# {comparison.model} on {comparison.dataset}: {names}",
        "",
        *_markdown(["strategy", "loop", *(column.heading for column in columns)], cells, num_texts=2),
        *(line for remark in comparison_remarks(comparison) for line in ("", remark)),
        "",
        f"{comparison.epochs} epochs, {comparison.global_batch_size} examples in a step of all replicas, seed "
        f"{comparison.seed}, data version `{comparison.data_version}`, commit `{comparison.git_commit}`, "
        f"{comparison.num_cores} processor cores; each was measured {times}.",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def offers() -> dict[str, dict[str, str | None]]:
    """Return what each strategy offers, by feature and kind: None when it does, else the reason why not."""
    kinds = config.strategy_kinds()
    loops = dict.fromkeys(loop for section in kinds.values() for loop in section.loops)
    table = {
        f"train.loop={loop}": {
            kind: None if loop in section.loops else f"its only loop is {' and '.join(section.loops)}"
            for kind, section in kinds.items()
        }
        for loop in loops
    }
    for feature in dict.fromkeys(["train.steps_per_execution", *config.FEATURES]):
        table[feature] = {kind: section.refuses.get(feature) for kind, section in kinds.items()}
    return table


def offers_cells() -> tuple[list[list[str]], dict[str, str]]:
    """Return a row a feature (its name, then a cell a strategy), and the reasons by the number in a cell."""
    reasons: dict[str, int] = {}
    rows = []
    for feature, by_kind in offers().items():
        marks = [
            "yes" if reason is None else f"no ({reasons.setdefault(reason, len(reasons) + 1)})"
            for reason in by_kind.values()
        ]
        rows.append([feature, *marks])
    return rows, {f"({number})": reason for reason, number in reasons.items()}


def offers_page() -> str:
    """Return what each strategy offers in Markdown, as docs/strategies.md shows it."""
    rows, reasons = offers_cells()
    kinds = config.strategy_kinds()
    header = ["", *(f"`{kind}`" for kind in kinds)]
    backends = ["Keras backend", *(section.backend for section in kinds.values())]
    rows = [[f"`{feature}`", *marks] for feature, *marks in rows]
    lines = [*_markdown(header, [backends, *rows], num_texts=len(header)), ""]
    lines += [f"- {number} {reason}" for number, reason in reasons.items()]
    return "\n".join(lines) + "\n"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int) -> list[str]:
    """Return the lines of a table whose columns after ``num_texts`` are numbers."""
    rule = ["---" if i < num_texts else "---:" for i in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def _write(path: Path, header: list[str], rows: Sequence[Sequence[object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return path
