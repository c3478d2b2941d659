"""A comparison as one self-contained page with drawings: comparison.html."""

from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from tasks import runs
from tasks.records import HEADLINES, Comparison, ComparisonRow
from tasks.reports import intervals, svg
from tasks.reports.blocks import Block, Cell, Figure, ReportSection, TableBlock, Text, facts, render
from tasks.reports.comparison import PARTS, comparison_cells, comparison_remarks, memory_range, step_cells
from tasks.reports.material import load
from tasks.system import files
from tasks.system.errors import UserError

SHORT = {"replicas (on devices)": "replicas", "seconds per epoch": "s per epoch"}
"""Headings with which all columns fit a page of 1,200 pixels."""
LEFT, STEP, RIGHT = 190, 24, 70
"""Of a drawing with one line per row, in its units."""


def with_intervals(comparison: Comparison) -> Comparison:
    """Return a comparison with the bootstrap interval of each row's headline metric, from the predictions of its first
    training; without one where these are missing."""
    rows = []
    for row in comparison.rows:
        found = {}
        if row.reason is None and row.run_id is not None:
            try:
                material = load(runs.find_run(row.run_id))
                span = intervals.of_metric(material, material.headline)
            except UserError:  # A record of it cannot be read; the figures stand without it.
                span = None
            if span is not None:
                found = {f"test/{material.headline}": (span.low, span.high)}
        rows.append(row.model_copy(update={"intervals": found}))
    return comparison.model_copy(update={"rows": tuple(rows)})


def write(comparison: Comparison, path: Path) -> Path:
    """Write the page; return where to."""
    with files.replacing(path) as temporary:
        temporary.write_text(page(comparison), encoding="utf-8")
    return path


def page(comparison: Comparison) -> str:
    """Return the page."""
    names = ", ".join(dict.fromkeys(row.strategy for row in comparison.rows))
    sections = [
        _finding(comparison),
        _figures(comparison),
        *_steps(comparison),
        _rounds(comparison),
        _origin(comparison),
    ]
    return render(f"{comparison.model} on {comparison.dataset}: {names}", sections)


def _finding(comparison: Comparison) -> ReportSection:
    blocks: list[Block] = [Text(sentence) for sentence in comparison.finding]
    return ReportSection("What came of it", blocks or [Text("Nothing follows from the figures.")])


def _figures(comparison: Comparison) -> ReportSection:
    columns, cells = comparison_cells(comparison)
    rows: list[list[Cell]] = [list(row) for row in cells]
    headings = (SHORT.get(column.heading, column.heading) for column in columns)
    blocks: list[Block] = [TableBlock(("strategy", "loop", *headings), rows, num_texts=2)]
    worked = [row for row in comparison.rows if row.reason is None]
    drawings = [
        _medians("examples/s", worked, lambda row: row.examples_per_second or None, _speed_range),
        _metric(worked),
        _medians("start-up, s", worked, lambda row: row.start_up_seconds, lambda row: row.start_up_range),
        _medians("peak memory, MB", worked, _megabytes, memory_range),
    ]
    if any(drawings):
        blocks.append(Figure([drawing for drawing in drawings if drawing]))
    return ReportSection("Figures", [*blocks, *map(Text, comparison_remarks(comparison))])


def _steps(comparison: Comparison) -> list[ReportSection]:
    worked = [row for row in comparison.rows if row.reason is None]
    measured = [row for row in worked if row.step_time is not None]
    unknown = [row.name for row in worked if row.step_time is None]
    missing = Text(
        f"Not measured: {'; '.join(unknown)}. Either train.traced_steps is null, or the steps after the training that "
        "are traced were stopped."
    )
    if not measured:
        return [ReportSection("Where a step goes", [missing])] if unknown else []
    headings, cells = step_cells(comparison)
    rows: list[list[Cell]] = [list(row) for row in cells]
    said = (
        "Measured on a few steps after the training, so that none of its own was slowed. A moment is compute where any "
        "operation runs in the chief's process; else collectives, where gradients are summed or shards are "
        "passed, which is mostly the wait for the other devices; else input wait, where the next batch is not there "
        "yet; the rest is host: Python, and what starts operations. Under parameter_server the workers' own clocks "
        "tell, and collectives are the traffic with the servers."
    )
    blocks: list[Block] = [Figure([_stacked(measured)]), TableBlock(tuple(headings), rows, 2), Text(said)]
    return [ReportSection("Where a step goes", [*blocks, missing] if unknown else blocks)]


def _rounds(comparison: Comparison) -> ReportSection:
    rows: list[list[Cell]] = []
    for row in comparison.rows:
        for repeat in row.repeats:
            speed = "-" if repeat.examples_per_second is None else f"{repeat.examples_per_second:,.0f}"
            start = f"{repeat.start_up_seconds:,.1f}"
            memory = "-" if repeat.peak_memory_bytes is None else f"{repeat.peak_memory_bytes / 1e6:,.0f}"
            figures = [f"{repeat.round}", speed, f"{repeat.total_seconds:,.1f}", start, memory, f"{repeat.load:.2f}"]
            rows.append([row.strategy, row.loop or "-", repeat.run_id, *figures])
    header = ("strategy", "loop", "run", "round", "examples/s", "total, s", "start-up, s", "peak MB", "load of others")
    return ReportSection("Rounds", [TableBlock(header, rows, num_texts=3)])


def _origin(comparison: Comparison) -> ReportSection:
    rows: dict[str, Cell] = {
        "dataset": comparison.dataset,
        "data version": comparison.data_version or "not under DVC",
        "git commit": comparison.git_commit or "none",
        "model": comparison.model,
        "seed": str(comparison.seed),
        "trained": f"{comparison.epochs} epochs, {comparison.global_batch_size:,} examples a step of all replicas",
        "processor cores": str(comparison.num_cores),
        "rounds": str(comparison.rounds),
        "comparison": comparison.run_id,
        "finished": comparison.finished_at,
        "seconds": f"{comparison.seconds:,.0f}",
    }
    return ReportSection(
        "Model, data and settings", [facts({name: escape(str(value)) for name, value in rows.items()})]
    )


def _speed_range(row: ComparisonRow) -> tuple[float, float]:
    speeds = [repeat.examples_per_second for repeat in row.repeats if repeat.examples_per_second]
    return min(speeds), max(speeds)


def _megabytes(row: ComparisonRow) -> float | None:
    return row.peak_memory_bytes / 1e6 if row.peak_memory_bytes else None


def _medians(
    what: str,
    rows: Sequence[ComparisonRow],
    value_of: Callable[[ComparisonRow], float | None],
    range_of: Callable[[ComparisonRow], tuple[float, float] | None],
) -> Markup:
    """Draw the median of each row that has one, with the range of its rounds; nothing where no row has one."""
    lines = []
    for row in rows:
        if (value := value_of(row)) is not None:
            low, high = range_of(row) or (value, value)
            lines.append((row.name, low, value, high))
    return _ranges(f"{what}: the median, and what the rounds span", lines)


def _metric(rows: Sequence[ComparisonRow]) -> Markup:
    """Draw the headline metric of the rows that have an interval of it."""
    for metric in HEADLINES.values():
        name = f"test/{metric}"
        found = [(row, row.intervals[name]) for row in rows if name in row.intervals]
        lines = [(row.name, low, row.metrics[name], high) for row, (low, high) in found]
        if lines:
            return _ranges(f"test {metric}, with its 95 % interval", lines, from_zero=False, shown="{:.4f}".format)
    return Markup("")


def _four_digits(value: float) -> str:
    return svg.number(float(f"{value:.4g}"))


def _ranges(
    title: str,
    lines: Sequence[tuple[str, float, float, float]],
    from_zero: bool = True,
    shown: Callable[[float], str] = _four_digits,
) -> Markup:
    """Draw one line per name: from the lowest to the highest, with a dot at the value."""
    if not lines:
        return Markup("")
    low, high = svg.limits(value for _, *values in lines for value in values)
    low = 0.0 if from_zero else low
    if high <= low:
        low, high = low - 0.5, high + 0.5

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (svg.WIDTH - LEFT - RIGHT)

    parts = [Markup('<text x="4" y="14">{}</text>').format(title)]
    for place, (name, least, value, most) in enumerate(lines):
        y = 34 + place * STEP
        parts += [
            Markup('<text x="{}" y="{}" class="end">{}</text>').format(LEFT - 8, y + 4, svg.short(name, 26)),
            Markup('<path class="grid" d="M{} {}H{}"/>').format(LEFT, y, svg.WIDTH - RIGHT),
            Markup('<path class="line c0" d="M{:.1f} {}H{:.1f}"/>').format(x(least), y, x(most)),
            Markup('<path class="dots c0" d="M{:.1f} {}h0"/>').format(x(value), y),
            Markup('<text x="{}" y="{}" class="end">{}</text>').format(svg.WIDTH - 4, y + 4, shown(value)),
        ]
    told = "; ".join(f"{name} {shown(value)}" for name, _, value, _ in lines)
    return svg.svg(svg.WIDTH, 34 + STEP * len(lines), f"{title}: {told}", parts)


def _stacked(rows: Sequence[ComparisonRow]) -> Markup:
    """Draw one bar per row, as long as its step, divided into the parts of the step."""
    width, wide = svg.WIDTH, svg.WIDTH - LEFT - RIGHT + 20  # Its texts are as large as the others' on a telephone.
    most = max(row.step_time.total_ms for row in rows if row.step_time is not None) or 1.0
    parts = [Markup('<text x="4" y="14">ms a step</text>')]
    right = float(width - 4)
    for place, name in reversed(list(enumerate(PARTS.values()))):
        parts.append(Markup('<text x="{:.1f}" y="14" class="end c{} named">{}</text>').format(right, place, name))
        right -= 7.2 * len(name) + 14
    told = []
    for number, row in enumerate(rows):
        if row.step_time is None:
            continue
        y, x = 30 + number * STEP, float(LEFT)
        parts.append(
            Markup('<text x="{}" y="{}" class="end">{}</text>').format(LEFT - 8, y + 12, svg.short(row.name, 26))
        )
        for place, value in enumerate(row.step_time.parts.values()):
            length = value / most * wide
            parts.append(
                Markup('<rect class="p{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
                    place, x, y, length, STEP - 8
                )
            )
            x += length
        parts.append(Markup('<text x="{:.1f}" y="{}">{:.3g}</text>').format(x + 5, y + 12, row.step_time.total_ms))
        shares = ", ".join(f"{PARTS[name]} {value:.3g}" for name, value in row.step_time.parts.items())
        told.append(f"{row.name}: {shares}")
    return svg.svg(width, 34 + STEP * len(rows), f"Where a step goes, in milliseconds. {'; '.join(told)}", parts)
