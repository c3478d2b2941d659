"""What a comparison's rows say, in a terminal, on a page and as a file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.records import HEADLINES, Comparison, ComparisonRow
from tasks.reports.tables import markdown_table, write_csv


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
    ComparisonColumn("replicas (on devices)", "repli-\ncas", _replicas),
    ComparisonColumn("examples/s", "examples\n/s", lambda row: _number(row.examples_per_second, ",.0f")),
    ComparisonColumn("seconds per epoch", "s per\nepoch", lambda row: _seconds(row.seconds_per_epoch)),
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


def _step_table(comparison: Comparison) -> list[str]:
    headings, cells = step_cells(comparison)
    if len(headings) == 2:
        return []
    return ["", "Where a step goes, what it needs, how sure the metric is:", "", *markdown_table(headings, cells, 2)]


def comparison_page(comparison: Comparison, path: Path) -> Path:
    """Write a comparison as a Markdown page."""
    columns, cells = comparison_cells(comparison)
    names = ", ".join(dict.fromkeys(row.strategy for row in comparison.rows))
    times = "once" if comparison.rounds == 1 else f"{comparison.rounds} times, and figures are medians"
    lines = [
        f"# {comparison.model} on {comparison.dataset}: {names}",
        "",
        *(f"- {sentence}" for sentence in comparison.finding),
        *([""] if comparison.finding else []),
        *markdown_table(["strategy", "loop", *(column.heading for column in columns)], cells, num_texts=2),
        *_step_table(comparison),
        *(line for remark in comparison_remarks(comparison) for line in ("", remark)),
        "",
        f"{comparison.epochs} epochs, {comparison.global_batch_size} examples in a step of all replicas, seed "
        f"{comparison.seed}, data version `{comparison.data_version}`, commit `{comparison.git_commit}`, "
        f"{comparison.num_cores} processor cores; each was measured {times}.",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
