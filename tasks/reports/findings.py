"""What follows from a comparison's figures, in words: which row is how much faster or slower, and why.

A pure function of the record. It says no more than the figures carry: what rounds disagree about is no difference, and
a part of a step that was not measured is no reason.
"""

from collections.abc import Sequence
from statistics import median

from tasks import config
from tasks.records import Comparison, ComparisonRow, StepTime

NOISY = 1.5
"""Where the largest speed-up of the rounds is so many times the smallest, the machine was measured, not the row."""
SMALL = 0.05
"""A part of what a step takes too long that is smaller than this share of the step is no reason."""
NOTHING = 0.005
"""The same of collectives, which are why several devices may be slower: their share is named from 1 % on."""
ROUGH = 1.5
"""Where a traced step takes so many times as long as a timed one, or the other way round, its parts are rough; so they
are where the traced steps of two rows differ by so much more than their speeds."""
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow"}
WORDS = {"input_wait": "the wait for input", "host": "Python, launching and copies"}


def concluded(comparison: Comparison) -> Comparison:
    """Return a comparison with what follows from its figures."""
    return comparison.model_copy(update={"finding": findings(comparison)})


def findings(comparison: Comparison) -> tuple[str, ...]:
    """Return the sentences: of each row that is held against one device, then of all speeds, then of the metric."""
    rows = [row for row in comparison.rows if row.reason is None]
    if len(rows) < 2:
        return ("There is one row with figures, so nothing is compared.",)
    said = []
    for row in rows:
        base = base_of(row, rows)
        if base is not None and base is not row and row.speed_up is not None:
            said.append(_sentence_of(row, base, comparison))
    return (*said, *_fastest(rows), *_metric(rows))


def base_of(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the row of the baseline that a row is held against: under the same loop, or under another."""
    base = [other for other in rows if _strategy(other).is_baseline and other.examples_per_second]
    base.sort(key=lambda other: other.loop != row.loop)
    return base[0] if base else None


def _sentence_of(row: ComparisonRow, base: ComparisonRow, comparison: Comparison) -> str:
    """Return what a row's speed says of its strategy, beside the row that it is compared with."""
    name, against = row.name, base.strategy if row.loop == base.loop else base.name
    span = row.speed_up_range
    if span is not None and span[1] > NOISY * span[0]:
        return (
            f"{name}: too noisy to tell. The rounds say {span[0]:.2f} to {span[1]:.2f} times the speed of {against}: "
            "measure more rounds (--repeats) on a quieter machine."
        )
    if span is None:
        told = f"{name} was measured once, at {row.speed_up:.2f} times the speed of {against}, which may be chance"
    elif not row.differs:
        told = f"{name} is as fast as {against}: rounds say {span[0]:.2f} to {span[1]:.2f} times its speed"
    else:
        word = "faster" if (row.speed_up or 0) > 1 else "slower"
        told = f"{name} is {word} than {against}: {row.speed_up:.2f} times its speed"
    return f"{told}. {_reason_for(row, base, comparison)}"


def _reason_for(row: ComparisonRow, base: ComparisonRow, comparison: Comparison) -> str:
    """Return what a step's parts say of it."""
    if row.step_time is None or base.step_time is None:
        return "Where its steps' time goes was not measured, so nothing is said of the reason."
    devices = len(row.devices)
    # Replicas cut a batch between them. What a layout has not cut, each device of one replica computes as a whole.
    ideal = 1 if _strategy(row).steps_side_by_side else row.num_replicas or devices
    step, alone = row.step_time, base.step_time
    growth = _growth(row, base, ideal)
    too_long = {
        "compute": step.compute_ms - alone.compute_ms / ideal,
        "collectives": step.collectives_ms,
        "input_wait": step.input_wait_ms - alone.input_wait_ms / ideal,
        "host": step.host_ms - alone.host_ms / ideal,
    }
    # The reason first, then whatever else counts.
    least = {"collectives": NOTHING}
    parts = [name for name, excess in too_long.items() if excess > least.get(name, SMALL) * step.total_ms]
    parts.sort(key=lambda name: -too_long[name])
    told = [_part(name, row, base, growth, comparison.num_cores) for name in parts]
    if not told:
        told = [f"compute x{growth:.1f}, and no other part of a step counts"]
    told[0] = f"{told[0][:1].upper()}{told[0][1:]}"
    beside = devices if _strategy(row).steps_side_by_side else 1
    traced_speed_up = beside * alone.total_ms / step.total_ms if step.total_ms else 0.0
    rough = (
        _is_rough(step, row, comparison)
        or _is_rough(alone, base, comparison)
        or not 1 / ROUGH < traced_speed_up / (row.speed_up or 1.0) < ROUGH
    )
    return "; ".join(told) + (
        "; the traced steps were not as fast as the timed ones, so this is rough." if rough else "."
    )


def _growth(row: ComparisonRow, base: ComparisonRow, ideal: int) -> float:
    """Return how many times as long a step computes as its share of the step of one device does: the median of the
    rounds, because what else the machine does differs between them."""
    alone = {one.round: one.step_time.compute_ms for one in base.repeats if one.step_time is not None}
    pairs = [
        (one.step_time.compute_ms, alone[one.round])
        for one in row.repeats
        if one.step_time is not None and alone.get(one.round)
    ]
    if not pairs and row.step_time is not None and base.step_time is not None and base.step_time.compute_ms:
        pairs = [(row.step_time.compute_ms, base.step_time.compute_ms)]
    return median(own * ideal / other for own, other in pairs) if pairs else 1.0


def _part(name: str, row: ComparisonRow, base: ComparisonRow, growth: float, num_cores: int) -> str:
    """Return what one part of a step says, with its figure."""
    devices, step = len(row.devices), row.step_time or StepTime.model_construct()
    share = f"{getattr(step, f'{name}_ms') / step.total_ms:.0%} of a step"
    if name == "compute":
        what = _strategy(row).unit
        each = f"compute per {what} x{growth:.1f}"
        if (backend := _strategy(row).backend) != (other := _strategy(base).backend):
            each += f", on {BACKENDS[backend]} in place of {BACKENDS[other]}"
        on_cpu = all("cpu" in device.lower() for device in row.devices)
        if devices > 1 and on_cpu:
            return f"{_count(devices, what)} share {_count(num_cores, 'core')}: {each}"
        return f"{each}, against its share on one device"
    if name == "collectives":
        return f"{_strategy(row).exchange} takes {share}"
    if name == "host" and step.compute_ms < step.host_ms:
        return f"{WORDS[name]} take {share}, more than the {step.compute_ms:.2g} ms that it computes"
    return f"{WORDS[name]} {'takes' if name == 'input_wait' else 'take'} {share}"


def timed_step_ms(row: ComparisonRow, comparison: Comparison) -> float | None:
    """Return what a step took in the training itself; where devices do theirs side by side, one device's."""
    if not row.examples_per_second:
        return None
    beside = len(row.devices) if _strategy(row).steps_side_by_side else 1
    return 1e3 * beside * comparison.global_batch_size / row.examples_per_second


def _is_rough(step: StepTime, row: ComparisonRow, comparison: Comparison) -> bool:
    timed = timed_step_ms(row, comparison)
    return timed is not None and not 1 / ROUGH < step.total_ms / timed < ROUGH


def _fastest(rows: Sequence[ComparisonRow]) -> list[str]:
    known = sorted((row for row in rows if row.examples_per_second), key=lambda row: -(row.examples_per_second or 0))
    if len(known) < 2:
        return []
    best, *others = known
    near = [row for row in others if _overlaps(row, best)]
    if near:
        return [f"The fastest here is {best.name}. Not shown to be slower: {'; '.join(row.name for row in near)}."]
    return [f"The fastest here is {best.name}, with {best.examples_per_second:,.0f} examples/s."]


def _overlaps(row: ComparisonRow, best: ComparisonRow) -> bool:
    """Return whether some round of a row was as fast as the best row in it; without a second round nobody knows."""
    speeds = {repeat.round: repeat.examples_per_second or 0.0 for repeat in best.repeats}
    pairs = [
        (repeat.examples_per_second or 0.0, speeds[repeat.round]) for repeat in row.repeats if repeat.round in speeds
    ]
    return len(pairs) < 2 or any(own >= bests for own, bests in pairs)


def metric_base(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the row that the metrics of the others are held against: of the baseline, else the first that has any."""
    known = [row for row in rows if row.intervals]
    known.sort(key=lambda row: not _strategy(row).is_baseline)
    return known[0] if known else None


def _metric(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return whether the rows differ by the headline metric of their task, beyond what the test examples can show.

    By the intervals of the differences on the same examples: where those of two rows overlap, the difference may still
    be sure.
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
            f"No row's {metric} is shown to differ from {against}: on the same test examples, the 95 % interval of "
            "each difference holds 0."
        ]
    spans = [f"{row.name} by {row.differences[name][0]:+.4f} to {row.differences[name][1]:+.4f}" for row in apart]
    return [
        f"The {metric} differs from {against}, on the same test examples: {'; '.join(spans)}, so they did not learn "
        "the same."
    ]


def _strategy(row: ComparisonRow) -> type[config.StrategySection]:
    return config.strategy_kinds()[row.strategy]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
