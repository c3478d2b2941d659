"""The tables, remarks, charts and conclusions of a comparison, for the terminal and for its pages.

A conclusion claims only what the figures support: no difference if the rounds disagree about it, and no reason from a
part of a step that was not measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tasks import config
from tasks.records import HEADLINES, Comparison, ComparisonRow, Repeat, StepTime
from tasks.reports import charts
from tasks.reports.blocks import Block, Figure, ReportSection, TableBlock, Text, as_markdown, facts, write
from tasks.reports.charts import Chart
from tasks.system import files, units

NOISY = 1.5
"""If the largest speed-up of the rounds is this many times the smallest, the measurement is too noisy."""
SMALL = 0.05
"""An excess that takes a larger share of a step is a reason."""
NOTHING = 0.005
"""The same for collectives, the usual reason for slower training on several devices."""
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow"}
WORDS = {"input_wait": "the wait for input", "host": "Python, launching and copies"}


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


def _seconds(value: float | None) -> str:
    decimals = 2 if (value or 0) < 9.995 else 1 if (value or 0) < 99.95 else 0
    return _number(value, f",.{decimals}f")


def _replicas(row: ComparisonRow) -> str:
    # A replica of model_parallel has several devices; each worker of parameter_server runs its own steps.
    on = f" on {len(row.devices)}" if row.num_replicas != len(row.devices) else ""
    return "-" if row.num_replicas is None else f"{row.num_replicas}{on}"


def _relative(row: ComparisonRow, value: float | None, form: str, same: float) -> str:
    """Return a speed-up or an efficiency as text, with ~ if the rounds disagree on whether it is a gain."""
    unsure = row.speed_up_range is not None and not row.differs
    return f"~{same:{'.0%' if form == '.0%' else '.0f'}}" if unsure else _number(value, form)


def _metric_text(name: str) -> Callable[[ComparisonRow], str]:
    return lambda row: units.metric(row.metrics.get(name))


def _share_text(part: str) -> Callable[[ComparisonRow], str]:
    return lambda row: _number(row.step_time.parts[part] / _step_ms(row), ".0%") if row.step_time else "-"


def _step_ms(row: ComparisonRow) -> float:
    """Return the milliseconds of a step, NaN if they were not measured."""
    return (row.step_time.total_ms if row.step_time is not None else 0.0) or math.nan


def _memory(row: ComparisonRow | Repeat) -> float | None:
    return row.peak_memory_bytes / 1e6 if row.peak_memory_bytes else None


def _interval_of(row: ComparisonRow) -> str:
    for low, high in row.intervals.values():
        return f"{low:,.3f}-{high:,.3f}" if high < 100 else f"{low:,.0f}-{high:,.0f}"
    return "-"


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
    "95% interval": _interval_of,
}


def figures_table(comparison: Comparison) -> TableBlock:
    """Return the figures of all rows."""
    return _table(FIGURES, comparison.rows)


def steps_table(comparison: Comparison) -> TableBlock:
    """Return the parts of a step's time, the peak memory and the interval of the headline metric for the successful
    rows."""
    return _table(STEPS, [row for row in comparison.rows if row.reason is None])


def _table(columns: Mapping[str, Callable[[ComparisonRow], str]], rows: Sequence[ComparisonRow]) -> TableBlock:
    """Return a table with strategy, loop and these columns, without columns that are empty in all rows."""
    cells = {heading: [text(row) for row in rows] for heading, text in columns.items()}
    shown = {heading: texts for heading, texts in cells.items() if set(texts) != {"-"}}
    lines = [
        [row.strategy, row.loop or "-", *(texts[place] for texts in shown.values())] for place, row in enumerate(rows)
    ]
    return TableBlock(("strategy", "loop", *shown), lines, num_texts=2)


def comparison_remarks(comparison: Comparison) -> list[str]:
    """Return the remarks under a comparison's table: failures with reasons, omissions and caveats."""
    rows = comparison.rows
    failed: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason is not None:
            failed.setdefault((row.strategy, row.reason), []).append(row.loop or "no loop")
    remarks = [f"{kind}, {' and '.join(loops)}: {reason}" for (kind, reason), loops in failed.items()]
    remarks += [f"{row.name}: a later round: {why}" for row in rows for why in row.failures]
    remarks += [f"{row.name}: restarted: {why}" for row in rows for why in row.restarts]
    remarks += [f"left out: {pair}" for pair in comparison.left_out]
    return [*remarks, comparison.note] if comparison.note else remarks


def comparison_pages(comparison: Comparison, folder: Path) -> tuple[Path, Path]:
    """Write a comparison as comparison.html and, for MLflow's and Prefect's own pages, as comparison.md."""
    names = ", ".join(dict.fromkeys(row.strategy for row in comparison.rows))
    title, parts = f"{comparison.model} on {comparison.dataset}: {names}", sections(comparison)
    with files.replacing(folder / "comparison.md") as temporary:
        temporary.write_text(as_markdown(title, parts), encoding="utf-8")
    return write(folder / "comparison.html", title, parts), folder / "comparison.md"


def sections(comparison: Comparison) -> list[ReportSection]:
    """Return the sections of a comparison's page, starting with the findings."""
    worked = [row for row in comparison.rows if row.reason is None]
    found = Text("The figures allow no conclusion.")
    return [
        ReportSection("Conclusions", [*map(Text, comparison.finding)] or [found]),
        ReportSection(
            "Figures", [figures_table(comparison), *_charts(worked), *map(Text, comparison_remarks(comparison))]
        ),
        *_steps(comparison, worked),
        ReportSection("Rounds", [_rounds(comparison)]),
        ReportSection("Model, data and settings", [_origin(comparison)]),
    ]


def _charts(rows: Sequence[ComparisonRow]) -> list[Block]:
    """Return a chart for each figure of the rows: the median and the range of the rounds, or the interval."""
    drawn = [
        _medians("examples/s", rows, lambda one: one.examples_per_second or None),
        _metric_chart(rows),
        _medians("start-up, s", rows, lambda one: one.start_up_seconds),
        _medians("peak memory, MB", rows, _memory),
    ]
    found = [chart for chart in drawn if chart is not None]
    return [Figure(found)] if found else []


def _medians(
    what: str, rows: Sequence[ComparisonRow], figure: Callable[[ComparisonRow | Repeat], float | None]
) -> Chart | None:
    lines = []
    for row in rows:
        if (value := figure(row)) is not None:
            rounds = [one for repeat in row.repeats if (one := figure(repeat)) is not None] or [value]
            lines.append((row.name, min(rounds), value, max(rounds)))
    title = f"{what}: median and range of the rounds"
    return charts.ranges(title, lines, shown=lambda value: f"{float(f'{value:.4g}'):,.15g}") if lines else None


def _metric_chart(rows: Sequence[ComparisonRow]) -> Chart | None:
    found = [(row, name, span) for row in rows for name, span in row.intervals.items()]
    if not found:
        return None
    lines = [(row.name, low, row.metrics[name], high) for row, name, (low, high) in found]
    title = f"{found[0][1].replace('/', ' ')}, with its 95% interval"
    return charts.ranges(title, lines, from_zero=False, shown=units.metric)


def _steps(comparison: Comparison, worked: Sequence[ComparisonRow]) -> list[ReportSection]:
    unknown = [row.name for row in worked if row.step_time is None]
    table = steps_table(comparison)
    blocks: list[Block] = []
    if len(table.header) > 2:
        blocks.append(table)
    if len(unknown) < len(worked):
        blocks.append(
            Text(
                "Measured on a few extra steps after the training, so tracing slows no training step. Time counts as "
                "compute while an operation runs in the chief's process; otherwise as collectives while devices sum "
                "gradients or exchange shards, which is mostly waiting for each other; otherwise as input wait while "
                "the next batch is missing; the rest is host: Python and launching operations."
            )
        )
    if unknown:
        blocks.append(
            Text(
                f"Not measured: {'; '.join(unknown)}. Either train.traced_steps is null, the strategy is "
                "parameter_server, or the traced steps after the training were interrupted."
            )
        )
    return [ReportSection("Where a step goes", blocks)] if blocks else []


def _rounds(comparison: Comparison) -> TableBlock:
    rows = []
    for row in comparison.rows:
        for one in row.repeats:
            memory = _number(_memory(one), ",.0f")
            speed, seconds = _number(one.examples_per_second, ",.0f"), (one.total_seconds, one.start_up_seconds)
            figures = [str(one.round), speed, *(f"{value:,.1f}" for value in seconds), memory, f"{one.load:.2f}"]
            rows.append([row.strategy, row.loop or "-", one.run_id, *figures])
    header = ("strategy", "loop", "run", "round", "examples/s", "total, s", "start-up, s", "peak MB", "load of others")
    return TableBlock(header, rows, num_texts=3)


def _origin(comparison: Comparison) -> TableBlock:
    measured, seeds = "one each", str(comparison.seed)
    if comparison.rounds > 1:
        measured = f"{comparison.rounds} each; figures are medians, metrics are those of the first round"
        seeds = f"{comparison.seed}, and the next number in each further round"
    return facts(
        {
            "dataset": comparison.dataset,
            "data version": comparison.data_version or "not under DVC",
            "git commit": comparison.git_commit or "none",
            "model": comparison.model,
            "seed": seeds,
            "trained": f"{units.count(comparison.epochs, 'epoch')}, {comparison.global_batch_size:,} examples per step",
            "processor cores": str(comparison.num_cores),
            "measurements": measured,
            "comparison": comparison.run_id,
            "finished": comparison.finished_at,
            "seconds": f"{comparison.seconds:,.0f}",
        }
    )


def findings(comparison: Comparison) -> tuple[str, ...]:
    """Return the sentences about each row compared with one device, then about all speeds, then about the metric."""
    rows = [row for row in comparison.rows if row.reason is None]
    if len(rows) < 2:
        return ("Only one row has figures, so there is nothing to compare.",)
    said = []
    for row in rows:
        base = base_of(row, rows)
        if base is not None and base is not row and row.speed_up is not None:
            said.append(_sentence_of(row, base, comparison))
    return (*said, *_fastest(rows), *_metric_findings(rows))


def base_of(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the baseline for a row: the one with the same loop, or else with another."""
    base = [other for other in rows if _strategy(other).is_baseline and other.examples_per_second]
    base.sort(key=lambda other: other.loop != row.loop)
    return base[0] if base else None


def _sentence_of(row: ComparisonRow, base: ComparisonRow, comparison: Comparison) -> str:
    name, against = row.name, base.strategy if row.loop == base.loop else base.name
    span = row.speed_up_range
    if span is not None and span[1] > NOISY * span[0]:
        return (
            f"{name}: too noisy to judge. The rounds measured {span[0]:.2f} to {span[1]:.2f} times the speed of "
            f"{against}: measure more rounds (--repeats) on a quieter machine."
        )
    if span is None:
        told = (
            f"{name} was measured once, at {row.speed_up:.2f} times the speed of {against}, which may be chance: use "
            "--repeats 2 or more"
        )
    elif not row.differs:
        told = f"{name} is as fast as {against}: the rounds measured {span[0]:.2f} to {span[1]:.2f} times its speed"
    else:
        word = "faster" if (row.speed_up or 0) > 1 else "slower"
        told = f"{name} is {word} than {against}: {row.speed_up:.2f} times its speed ({span[0]:.2f} to {span[1]:.2f})"
    return f"{told}. {_reason_for(row, base, comparison)}"


def _reason_for(row: ComparisonRow, base: ComparisonRow, comparison: Comparison) -> str:
    """Return the reason for a difference in speed, from the parts of a step."""
    if row.step_time is None or base.step_time is None:
        return "The parts of its steps were not measured, so the reason is unknown."
    devices = len(row.devices)
    # Replicas divide a batch. Each device of a replica fully computes what its layout does not divide.
    ideal = row.num_replicas or devices
    step, alone = row.step_time, base.step_time
    growth = step.compute_ms * ideal / alone.compute_ms if alone.compute_ms else 1.0
    too_long = {
        "compute": step.compute_ms - alone.compute_ms / ideal,
        "collectives": step.collectives_ms,
        "input_wait": step.input_wait_ms - alone.input_wait_ms / ideal,
        "host": step.host_ms - alone.host_ms / ideal,
    }
    # The reason first, then other relevant parts.
    least = {"collectives": NOTHING}
    parts = [name for name, excess in too_long.items() if excess > least.get(name, SMALL) * step.total_ms]
    parts.sort(key=lambda name: -too_long[name])
    told = [_part(name, row, base, growth, comparison.num_cores) for name in parts]
    if not told:
        told = [f"compute x{growth:.1f}, and the other parts of a step are negligible"]
    told[0] = f"{told[0][:1].upper()}{told[0][1:]}"
    return "; ".join(told) + "."


def _part(name: str, row: ComparisonRow, base: ComparisonRow, growth: float, num_cores: int) -> str:
    """Return the sentence about one part of a step, with its figure."""
    devices, step = len(row.devices), row.step_time or StepTime.model_construct()
    share = f"{getattr(step, f'{name}_ms') / step.total_ms:.0%} of a step"
    if name == "compute":
        what = _strategy(row).unit
        each = f"compute per {what} x{growth:.1f}"
        if (backend := _strategy(row).backend) != (other := _strategy(base).backend):
            each += f", on {BACKENDS[backend]} in place of {BACKENDS[other]}"
        on_cpu = all("cpu" in device.lower() for device in row.devices)
        if devices > 1 and on_cpu:
            return f"{units.count(devices, what)} share {units.count(num_cores, 'core')}: {each}"
        return f"{each}, compared with its share on one device"
    if name == "collectives":
        return f"{_strategy(row).exchange} takes {share}"
    if name == "host" and step.compute_ms < step.host_ms:
        return f"{WORDS[name]} take {share}, more than the {step.compute_ms:.2g} ms that it computes"
    return f"{WORDS[name]} {'takes' if name == 'input_wait' else 'take'} {share}"


def _fastest(rows: Sequence[ComparisonRow]) -> list[str]:
    known = sorted((row for row in rows if row.examples_per_second), key=lambda row: -(row.examples_per_second or 0))
    if len(known) < 2:
        return []
    best, *others = known
    near = [row for row in others if _overlaps(row, best)]
    if near:
        return [f"{best.name} is the fastest. Not measurably slower: {'; '.join(row.name for row in near)}."]
    return [f"{best.name} is the fastest, with {best.examples_per_second:,.0f} examples/s."]


def _overlaps(row: ComparisonRow, best: ComparisonRow) -> bool:
    """Return whether a row was as fast as the best row in some round; True if they share fewer than two rounds."""
    speeds = {repeat.round: repeat.examples_per_second or 0.0 for repeat in best.repeats}
    pairs = [
        (repeat.examples_per_second or 0.0, speeds[repeat.round]) for repeat in row.repeats if repeat.round in speeds
    ]
    return len(pairs) < 2 or any(own >= bests for own, bests in pairs)


def metric_base(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the row with which the metrics of the others are compared: the baseline, else the first with metrics."""
    known = [row for row in rows if row.intervals]
    known.sort(key=lambda row: not _strategy(row).is_baseline)
    return known[0] if known else None


def _metric_findings(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return whether the rows' headline metrics differ, by the intervals of their differences on the same examples.

    A difference can be certain even if the intervals of two rows overlap.
    """
    base = metric_base(rows)
    found = [row for row in rows if row.differences]
    if base is None or not found:
        return []
    (name,) = base.intervals
    metric, against = name.replace("/", " "), f"that of {base.name}"
    apart = [row for row in found if not row.differences[name][0] <= 0 <= row.differences[name][1]]
    if not apart:
        return [
            f"No row's {metric} differs measurably from {against}: on the same test examples, the 95% interval of "
            "each difference contains 0."
        ]
    spans = [f"{row.name} by {units.interval(*row.differences[name], '+')}" for row in apart]
    causes = [
        "each replica sums its own part of a batch, and draws its own Dropout if the model has it"
        if any((row.num_replicas or 1) > 1 for row in apart)
        else "",
        "JAX draws different random numbers"
        if any(_strategy(row).backend != _strategy(base).backend for row in apart)
        else "",
    ]
    known = f" This is to be expected: {' and '.join(filter(None, causes))}." if any(causes) else ""
    by_seed = [row.metric_ranges[name] for row in rows if name in row.metric_ranges]
    chance = "Use --repeats 2 or more to see how much another seed alone changes it."
    if by_seed:
        most = max(high - low for low, high in by_seed)
        chance = f"Another seed alone changes it by up to {units.metric(most)} (range within a row)."
    return [f"The {metric} differs from {against}, on the same test examples: {'; '.join(spans)}.{known} {chance}"]


def _strategy(row: ComparisonRow) -> type[config.StrategySection]:
    return config.strategy_kinds()[row.strategy]
