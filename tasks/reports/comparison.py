"""A comparison: its tables, remarks and charts, once for the terminal and for its pages."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tasks.records import HEADLINES, Comparison, ComparisonRow
from tasks.reports import charts
from tasks.reports.blocks import Block, Figure, ReportSection, TableBlock, Text, as_markdown, facts, write
from tasks.reports.charts import Chart
from tasks.reports.tables import write_csv
from tasks.system import files


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


def _seconds(value: float | None) -> str:
    decimals = 2 if (value or 0) < 9.995 else 1 if (value or 0) < 99.95 else 0
    return _number(value, f",.{decimals}f")


def _replicas(row: ComparisonRow) -> str:
    # A replica of model_parallel has several devices; each worker of parameter_server does steps of its own.
    on = f" on {len(row.devices)}" if row.num_replicas != len(row.devices) else ""
    return "-" if row.num_replicas is None else f"{row.num_replicas}{on}"


def _relative(row: ComparisonRow, value: float | None, form: str, same: float) -> str:
    """Return a speed-up or an efficiency; ~ where rounds disagree on whether it is a gain or a loss."""
    unsure = row.speed_up_range is not None and not row.differs
    return f"~{same:{'.0%' if form == '.0%' else '.0f'}}" if unsure else _number(value, form)


def _metric_text(name: str) -> Callable[[ComparisonRow], str]:
    return lambda row: _number(row.metrics.get(name), ".4f")


def _share_text(part: str) -> Callable[[ComparisonRow], str]:
    return lambda row: _number(row.step_time.parts[part] / _step_ms(row), ".0%") if row.step_time else "-"


def _step_ms(row: ComparisonRow) -> float:
    """Return the milliseconds of a step, NaN if they were not measured."""
    return (row.step_time.total_ms if row.step_time is not None else 0.0) or math.nan


def _memory(row: ComparisonRow) -> float | None:
    return row.peak_memory_bytes / 1e6 if row.peak_memory_bytes else None


def _interval_of(row: ComparisonRow) -> str:
    found = next(
        (row.intervals[f"test/{name}"] for name in HEADLINES.values() if f"test/{name}" in row.intervals), None
    )
    return "-" if found is None else f"{found[0]:.3f}-{found[1]:.3f}"


FIGURES: dict[str, Callable[[ComparisonRow], str]] = {
    "replicas": _replicas,
    "examples/s": lambda row: _number(row.examples_per_second, ",.0f"),
    "s per epoch": lambda row: _seconds(row.seconds_per_epoch),
    "speed-up": lambda row: _relative(row, row.speed_up, ".2f", 1),
    "efficiency": lambda row: _relative(row, row.efficiency, ".0%", 1 / max(len(row.devices), 1)),
    "total, s": lambda row: _seconds(row.total_seconds),
    **{f"test {name}": _metric_text(f"test/{name}") for name in HEADLINES.values()},
    "start-up, s": lambda row: _seconds(row.start_up_seconds),
    "tracing, s": lambda row: _seconds(row.tracing_seconds),
}
PARTS = {"compute": "compute", "collectives": "collectives", "input_wait": "input wait", "host": "host"}
STEPS: dict[str, Callable[[ComparisonRow], str]] = {
    "ms a step": lambda row: _number(_step_ms(row), ",.0f" if _step_ms(row) >= 100 else ".3g"),
    **{heading: _share_text(part) for part, heading in PARTS.items()},
    "peak MB": lambda row: _number(_memory(row), ",.0f"),
    "95 % interval": _interval_of,
}


def figures_table(comparison: Comparison) -> TableBlock:
    """Return the figures of all rows."""
    return _table(FIGURES, comparison.rows)


def steps_table(comparison: Comparison) -> TableBlock:
    """Return where a step's time goes, the peak memory, and the interval of the headline metric, of the rows that
    worked."""
    return _table(STEPS, [row for row in comparison.rows if row.reason is None])


def _table(columns: Mapping[str, Callable[[ComparisonRow], str]], rows: Sequence[ComparisonRow]) -> TableBlock:
    """Return a table of strategy, loop and these columns, without those that no row has."""
    cells = {heading: [text(row) for row in rows] for heading, text in columns.items()}
    shown = {heading: texts for heading, texts in cells.items() if set(texts) != {"-"}}
    lines = [
        [row.strategy, row.loop or "-", *(texts[place] for texts in shown.values())] for place, row in enumerate(rows)
    ]
    return TableBlock(("strategy", "loop", *shown), lines, num_texts=2)


def comparison_remarks(comparison: Comparison) -> list[str]:
    """Return what is said under a comparison's table: what failed and why, what was left out, what to keep in mind."""
    rows, rounds = comparison.rows, comparison.rounds
    failed: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason is not None:
            failed.setdefault((row.strategy, row.reason), []).append(row.loop or "no loop")
    remarks = [f"{kind}, {' and '.join(loops)}: {reason}" for (kind, reason), loops in failed.items()]
    remarks += [f"{row.name}: a later round: {why}" for row in rows for why in row.failures]
    remarks += [f"{row.name}: restarted: {why}" for row in rows for why in row.restarts]
    if rounds == 1 and any(row.speed_up is not None for row in rows):
        remarks.append(
            "Each was measured once, so nobody knows which part of a speed-up is chance: give --repeats 2 or more."
        )
    speeds = _spans({row.name: row.speed_up_range for row in rows}, "{:.2f}".format)
    if speeds and rounds > 1:
        remarks.append(
            f"Speed-up in {rounds} rounds: {speeds}. Where they span 1 it is ~1: no difference was measured."
        )
    if starts := _spans({row.name: row.start_up_range for row in rows}, _seconds):
        remarks.append(f"Start-up in {rounds} rounds, s: {starts}.")
    if memory := _spans({row.name: _memory_range(row) for row in rows}, "{:,.0f}".format):
        remarks.append(f"Peak memory in {rounds} rounds, MB: {memory}.")
    remarks += [f"left out: {pair}" for pair in comparison.left_out]
    return [*remarks, comparison.note] if comparison.note else remarks


def _spans(spans: Mapping[str, tuple[float, float] | None], text: Callable[[float], str]) -> str:
    """Return what the rounds of each row span of a figure; an empty text where there was one round."""
    return "; ".join(f"{name}: {text(span[0])} to {text(span[1])}" for name, span in spans.items() if span is not None)


def _memory_range(row: ComparisonRow) -> tuple[float, float] | None:
    span = row.peak_memory_range
    return None if span is None else (span[0] / 1e6, span[1] / 1e6)


def comparison_table(comparison: Comparison, path: Path) -> Path:
    """Write a comparison as CSV: a line a row, every field of its record, numbers as they are."""
    rows = []
    for row in comparison.rows:
        left_out = {"metrics", "devices", "restarts", "repeats", "failures", "intervals", "differences", "step_time"}
        values = row.model_dump(mode="json", exclude=left_out)
        parts = {f"{name}_ms": value for name, value in row.step_time.parts.items()} if row.step_time else {}
        spans = {
            f"{name}{what} {end}": span[i]
            for what, known in (("", row.intervals), (" difference", row.differences))
            for name, span in known.items()
            for i, end in enumerate(("low", "high"))
        }
        kept = {"devices": " ".join(row.devices), "restarts": len(row.restarts), "repeats": len(row.repeats)}
        load = max((repeat.load for repeat in row.repeats), default=None)
        rows.append({**values, **kept, "load": load, **parts, **row.metrics, **spans})
    header = list(dict.fromkeys(name for row in rows for name in row))
    return write_csv(path, header, [[row.get(name) for name in header] for row in rows])


def comparison_pages(comparison: Comparison, folder: Path) -> tuple[Path, Path]:
    """Write a comparison as comparison.html and, for MLflow's and Prefect's own pages, as comparison.md."""
    names = ", ".join(dict.fromkeys(row.strategy for row in comparison.rows))
    title, parts = f"{comparison.model} on {comparison.dataset}: {names}", sections(comparison)
    with files.replacing(folder / "comparison.md") as temporary:
        temporary.write_text(as_markdown(title, parts), encoding="utf-8")
    return write(folder / "comparison.html", title, parts), folder / "comparison.md"


def sections(comparison: Comparison) -> list[ReportSection]:
    """Return all that a page says of a comparison, the conclusions first."""
    worked = [row for row in comparison.rows if row.reason is None]
    found = Text("Nothing follows from the figures.")
    return [
        ReportSection("What came of it", [*map(Text, comparison.finding)] or [found]),
        ReportSection(
            "Figures", [figures_table(comparison), *_charts(worked), *map(Text, comparison_remarks(comparison))]
        ),
        *_steps(comparison, worked),
        ReportSection("Rounds", [_rounds(comparison)]),
        ReportSection("Model, data and settings", [_origin(comparison)]),
    ]


def _charts(rows: Sequence[ComparisonRow]) -> list[Block]:
    """Return a chart of each figure that a row has: its median and the range of the rounds, or its interval."""
    drawn = [
        _medians("examples/s", [(row, row.examples_per_second or None, _speed_range(row)) for row in rows]),
        _metric(rows),
        _medians("start-up, s", [(row, row.start_up_seconds, row.start_up_range) for row in rows]),
        _medians("peak memory, MB", [(row, _memory(row), _memory_range(row)) for row in rows]),
    ]
    found = [chart for chart in drawn if chart is not None]
    return [Figure(found)] if found else []


def _speed_range(row: ComparisonRow) -> tuple[float, float] | None:
    speeds = [repeat.examples_per_second for repeat in row.repeats if repeat.examples_per_second]
    return (min(speeds), max(speeds)) if speeds else None


def _medians(
    what: str, values: Sequence[tuple[ComparisonRow, float | None, tuple[float, float] | None]]
) -> Chart | None:
    lines = [
        (row.name, (span or (value,))[0], value, (span or (value,))[-1])
        for row, value, span in values
        if value is not None
    ]
    title = f"{what}: the median, and what the rounds span"
    return charts.ranges(title, lines, shown=lambda value: charts.number(float(f"{value:.4g}"))) if lines else None


def _metric(rows: Sequence[ComparisonRow]) -> Chart | None:
    """Draw the headline metric of the rows that have an interval of it."""
    for name in (f"test/{metric}" for metric in HEADLINES.values()):
        found = [(row, row.intervals[name]) for row in rows if name in row.intervals]
        lines = [(row.name, low, row.metrics[name], high) for row, (low, high) in found]
        if lines:
            title = f"{name.replace('/', ' ')}, with its 95 % interval"
            return charts.ranges(title, lines, from_zero=False, shown="{:.4f}".format)
    return None


def _steps(comparison: Comparison, worked: Sequence[ComparisonRow]) -> list[ReportSection]:
    parts = {
        row.name: dict(zip(PARTS.values(), row.step_time.parts.values(), strict=True))
        for row in worked
        if row.step_time is not None
    }
    unknown = [row.name for row in worked if row.step_time is None]
    table = steps_table(comparison)
    blocks: list[Block] = []
    if parts:
        blocks.append(Figure([charts.stacked("ms a step", parts)]))
    if len(table.header) > 2:
        blocks.append(table)
    if parts:
        blocks.append(
            Text(
                "Measured on a few steps after the training, so that none of its own was slowed. A moment is compute "
                "where any operation runs in the chief's process; else collectives, where gradients are summed or "
                "shards are passed, which is mostly the wait for the other devices; else input wait, where the next "
                "batch is not there yet; the rest is host: Python, and what starts operations. Under parameter_server "
                "the workers' own clocks tell, and collectives are the traffic with the servers."
            )
        )
    if unknown:
        blocks.append(
            Text(
                f"Not measured: {'; '.join(unknown)}. Either train.traced_steps is null, or the steps after the "
                "training that are traced were stopped."
            )
        )
    return [ReportSection("Where a step goes", blocks)] if blocks else []


def _rounds(comparison: Comparison) -> TableBlock:
    rows = []
    for row in comparison.rows:
        for one in row.repeats:
            memory = _number(one.peak_memory_bytes and one.peak_memory_bytes / 1e6, ",.0f")
            speed, seconds = _number(one.examples_per_second, ",.0f"), (one.total_seconds, one.start_up_seconds)
            figures = [str(one.round), speed, *(f"{value:,.1f}" for value in seconds), memory, f"{one.load:.2f}"]
            rows.append([row.strategy, row.loop or "-", one.run_id, *figures])
    header = ("strategy", "loop", "run", "round", "examples/s", "total, s", "start-up, s", "peak MB", "load of others")
    return TableBlock(header, rows, num_texts=3)


def _origin(comparison: Comparison) -> TableBlock:
    measured = "once" if comparison.rounds == 1 else f"{comparison.rounds} times, and figures are medians"
    return facts(
        {
            "dataset": comparison.dataset,
            "data version": comparison.data_version or "not under DVC",
            "git commit": comparison.git_commit or "none",
            "model": comparison.model,
            "seed": str(comparison.seed),
            "trained": f"{comparison.epochs} epochs, {comparison.global_batch_size:,} examples a step of all replicas",
            "processor cores": str(comparison.num_cores),
            "each was measured": measured,
            "comparison": comparison.run_id,
            "finished": comparison.finished_at,
            "seconds": f"{comparison.seconds:,.0f}",
        }
    )
