"""A comparison: its tables, remarks and charts, once for the terminal and for its pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.records import HEADLINES, Comparison, ComparisonRow
from tasks.reports import charts
from tasks.reports.blocks import Block, Figure, ReportSection, TableBlock, Text, as_markdown, facts, write
from tasks.reports.charts import Chart
from tasks.reports.tables import write_csv
from tasks.system import files


@dataclass(frozen=True)
class ComparisonColumn:
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


def _speed_up(row: ComparisonRow) -> str:
    # What rounds disagree about is no gain and no loss.
    same = row.speed_up_range is not None and not row.differs
    return "~1" if same else _number(row.speed_up, ".2f")


def _efficiency(row: ComparisonRow) -> str:
    same = row.speed_up_range is not None and not row.differs
    return f"~{1 / len(row.devices):.0%}" if same else _number(row.efficiency, ".0%")


RELATIVE = (
    ComparisonColumn("speed-up", "speed\nup", _speed_up),
    ComparisonColumn("efficiency", "effi.", _efficiency),
)


def _test_column(metric: str) -> ComparisonColumn:
    return ComparisonColumn(
        f"test {metric}", f"test\n{metric[:3]}.", lambda row: _number(row.metrics.get(f"test/{metric}"), ".4f")
    )


COLUMNS = (
    ComparisonColumn("replicas", "repli-\ncas", _replicas),
    ComparisonColumn("examples/s", "examples\n/s", lambda row: _number(row.examples_per_second, ",.0f")),
    ComparisonColumn("s per epoch", "s per\nepoch", lambda row: _seconds(row.seconds_per_epoch)),
    *RELATIVE,
    ComparisonColumn("total, s", "total\ns", lambda row: _seconds(row.total_seconds)),
    *map(_test_column, HEADLINES.values()),
    ComparisonColumn("start-up, s", "start\nup s", lambda row: _seconds(row.start_up_seconds)),
    ComparisonColumn("tracing, s", "", lambda row: _seconds(row.tracing_seconds)),
)


def comparison_cells(comparison: Comparison, narrow: bool = False) -> tuple[list[ComparisonColumn], list[list[str]]]:
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


PARTS = {"compute": "compute", "collectives": "collectives", "input_wait": "input wait", "host": "host"}


NARROW = {
    "ms a step": "ms a\nstep", "compute": "com-\npute", "collectives": "collec-\ntives", "input wait": "input\nwait",
    "peak MB": "peak\nMB", "95 % interval": "95 %\ninterval",
}  # fmt: skip


def step_cells(comparison: Comparison, narrow: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the text of each row that worked: strategy, loop, then where a step's time goes, the peak
    memory, and the interval of the headline metric. Columns that no row has are left out; ``narrow`` folds headings."""
    headings = ["strategy", "loop", "ms a step", *PARTS.values(), "peak MB", "95 % interval"]
    rows = []
    for row in comparison.rows:
        if row.reason is not None:
            continue
        step = row.step_time
        total = step.total_ms if step is not None else 0.0
        shares = [f"{value / total:.0%}" for value in step.parts.values()] if step is not None and total else ["-"] * 4
        memory = "-" if row.peak_memory_bytes is None else _megabytes(row.peak_memory_bytes / 1e6)
        rows.append(
            [
                row.strategy,
                row.loop or "-",
                _number(total or None, ",.0f" if total >= 100 else ".3g"),
                *shares,
                memory,
                _interval_of(row),
            ]
        )
    shown = [place for place in range(len(headings)) if place < 2 or any(row[place] != "-" for row in rows)]
    headings = [NARROW.get(heading, heading) if narrow else heading for heading in headings]
    return [headings[place] for place in shown], [[row[place] for place in shown] for row in rows]


def _interval_of(row: ComparisonRow) -> str:
    names = (f"test/{metric}" for metric in HEADLINES.values())
    found = next((row.intervals[name] for name in names if name in row.intervals), None)
    return "-" if found is None else f"{found[0]:.3f}-{found[1]:.3f}"


def comparison_remarks(comparison: Comparison) -> list[str]:
    """Return what is said under a comparison's table: what failed and why, what was left out, what to keep in mind."""
    failed: dict[tuple[str, str], list[str]] = {}
    for row in comparison.rows:
        if row.reason is not None:
            failed.setdefault((row.strategy, row.reason), []).append(row.loop or "no loop")
    return [
        *(f"{kind}, {' and '.join(loops)}: {reason}" for (kind, reason), loops in failed.items()),
        *(f"{row.name}: a later round: {why}" for row in comparison.rows for why in row.failures),
        *(f"{row.name}: started again: {why}" for row in comparison.rows for why in row.restarts),
        *_spreads(comparison),
        *(f"left out: {pair}" for pair in comparison.left_out),
        *([comparison.note] if comparison.note else []),
    ]


def _spreads(comparison: Comparison) -> list[str]:
    """Return what the rounds span."""
    return [
        *_speed_ups(comparison),
        *_spread(comparison, "Start-up", "s", {row.name: row.start_up_range for row in comparison.rows}, _seconds),
        *_spread(comparison, "Peak memory", "MB", {row.name: memory_range(row) for row in comparison.rows}, _megabytes),
    ]


def memory_range(row: ComparisonRow) -> tuple[float, float] | None:
    """Return what the rounds span of the peak memory, in MB."""
    span = row.peak_memory_range
    return None if span is None else (span[0] / 1e6, span[1] / 1e6)


def _megabytes(value: float) -> str:
    return f"{value:,.0f}"


def _spread(
    comparison: Comparison,
    what: str,
    unit: str,
    spans: Mapping[str, tuple[float, float] | None],
    text: Callable[[float], str],
) -> list[str]:
    """Return a sentence of what the rounds of each row span of a figure; none where there was one round."""
    told = [f"{name}: {text(span[0])} to {text(span[1])}" for name, span in spans.items() if span is not None]
    return [f"{what} in {comparison.rounds} rounds, {unit}: {'; '.join(told)}."] if told else []


def _speed_ups(comparison: Comparison) -> list[str]:
    """Return what the rounds say of how far the speed-ups can be trusted."""
    if all(row.speed_up is None for row in comparison.rows):
        return []
    if comparison.rounds == 1:
        return ["Each was measured once, so nobody knows which part of a speed-up is chance: give --repeats 2 or more."]
    spreads = [
        f"{row.name}: {row.speed_up_range[0]:.2f} to {row.speed_up_range[1]:.2f}"
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
    columns, cells = comparison_cells(comparison)
    header = ("strategy", "loop", *(column.heading for column in columns))
    worked = [row for row in comparison.rows if row.reason is None]
    found = Text("Nothing follows from the figures.")
    return [
        ReportSection("What came of it", [*map(Text, comparison.finding)] or [found]),
        ReportSection(
            "Figures",
            [TableBlock(header, cells, 2), *_charts(worked), *map(Text, comparison_remarks(comparison))],
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
        _medians("peak memory, MB", [(row, _memory(row), memory_range(row)) for row in rows]),
    ]
    found = [chart for chart in drawn if chart is not None]
    return [Figure(found)] if found else []


def _speed_range(row: ComparisonRow) -> tuple[float, float] | None:
    speeds = [repeat.examples_per_second for repeat in row.repeats if repeat.examples_per_second]
    return (min(speeds), max(speeds)) if speeds else None


def _memory(row: ComparisonRow) -> float | None:
    return row.peak_memory_bytes / 1e6 if row.peak_memory_bytes else None


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
    headings, cells = step_cells(comparison)
    blocks: list[Block] = []
    if parts:
        blocks.append(Figure([charts.stacked("ms a step", parts)]))
    if len(headings) > 2:
        blocks.append(TableBlock(tuple(headings), cells, 2))
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
