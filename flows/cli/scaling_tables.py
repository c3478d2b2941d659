"""What `stratagem plan` prints for a person."""

from collections.abc import Callable

from tasks.records import Pace, ScalingPlan

SUMMED = {
    "ring": "a ring over gRPC, as fitted to 2 to 4 workers",
    "nccl": "a ring by the textbook; nothing of it was measured here",
}


def print_scaling(found: ScalingPlan, measured: Pace | None) -> None:
    """Print what a training would do on many machines.

    Args:
        found: the prediction.
        measured: what it is of, where something was measured.
    """
    lines = {
        "workers": f"{found.workers} of {found.devices} devices, {found.bandwidth / 1e9:g} Gbit/s, "
        f"{found.latency_seconds * 1e6:g} us",
        "sums": SUMMED[found.communication],
        "model": f"{found.parameters:,} parameters, {found.gradient_bytes / 1e6:,.2f} MB of gradients",
        "batch": f"{found.global_batch_size:,} examples a step",
        "a step": f"{duration(found.step_seconds)} ({_range(found.step_seconds_range, duration)})",
    }
    lines |= {
        f"  {name}": f"{duration(seconds)}, {seconds / found.step_seconds:.0%}"
        for name, seconds in found.parts_seconds.items()
    }
    lines |= {
        "bottleneck": found.bottleneck,
        "examples/s": f"{found.examples_per_second:,.0f} ({_range(found.examples_per_second_range, '{:,.0f}'.format)})",
        "efficiency": f"{found.efficiency:.0%} ({_range(found.efficiency_range, '{:.0%}'.format)})",
    }
    share = "{:.1%}".format
    if found.checkpoint_seconds is not None:
        often = "the settings do not say how often, or not as far as shows here"
        if found.interval_seconds is not None and found.checkpoint_share_range is not None:
            often = f"every {duration(found.interval_seconds)}, which takes {found.checkpoint_share:.1%} of the time"
            often += f" ({_range(found.checkpoint_share_range, share)})"
        lines["checkpoints"] = f"{duration(found.checkpoint_seconds)} each; {often}"
    if found.best_interval_seconds is not None and found.best_goodput_range is not None:
        best = (
            f"a checkpoint every {duration(found.best_interval_seconds)}: {found.best_goodput:.1%} of the time counts"
        )
        best += f" ({_range(found.best_goodput_range, share)})"
        own = "not known without how often they save"
        if found.interval_seconds is not None and found.goodput_range is not None:
            own = (
                f"every {duration(found.interval_seconds)}: {found.goodput:.1%} ({_range(found.goodput_range, share)})"
            )
        lines |= {
            "failures": f"{found.failures_a_day:,.3g} a day; a restart {duration(found.restart_seconds or 0.0)}",
            "best": best,
            "settings": own,
        }
    if measured is not None:
        lines["measured"] = f"{len(measured.step_seconds)} calls on {measured.device}"
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name:{width}}  {text}")


def _range(pair: tuple[float, float], write: Callable[[float], str]) -> str:
    return f"{write(pair[0])} to {write(pair[1])}"


def duration(seconds: float) -> str:
    """Return a time with three digits and the unit that fits it."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
