"""Predicts a training on many machines: the time of a step, the network's part of it, the best interval between
checkpoints, and the goodput if machines fail.

In each step, a worker first computes, and then a ring all-reduce sums all gradients: 2(n-1) hops of 1/n of the bytes
each (Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009). The prediction hides no part of the sum behind the
computation. Failures are as in Daly 2006 (Young 1974 is its first term): they come at random, and each costs a restart
and the work since the last checkpoint.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.records import ScalingPlan
from tasks.system.errors import UserError

BACKPROP_SHARE = 2 / 3
"""The share of a step's computation during which a library can send gradients."""

# TensorFlow's ring (ring_alg.cc) sends larger chunks in two parallel streams.
CHUNK_BYTES, MAX_STREAMS = 4 * 2**20, 2

BITS_PER_SECOND = {
    f"{prefix}{unit}": factor * bits
    for prefix, factor in {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
    for unit, bits in {"bps": 1, "bit": 1, "bit/s": 1, "b/s": 1, "B/s": 8}.items()
}
SECONDS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
    "days": 86400.0, "y": 365.25 * 86400.0,
}  # fmt: skip
COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}
A_TIME = f"a time with its unit ({', '.join(SECONDS)}), such as"
QUANTITIES: dict[str, tuple[Mapping[str, float], str]] = {
    "--bandwidth": (
        BITS_PER_SECOND, "bits per second, such as 25Gbps or 100Mbit/s, or bytes per second, such as 3GB/s",
    ),
    "--latency": (SECONDS, f"{A_TIME} 50us"),
    "--step-seconds": (SECONDS, f"{A_TIME} 180ms; more than 0"),
    "--parameters": (COUNTS, "a whole number above 0, such as 25600000 or 25.6M"),
    "--mtbf": (SECONDS, f"{A_TIME} 30d; more than 0"),
    "--restart": (SECONDS, f"{A_TIME} 2min"),
    "--checkpoint": (SECONDS, f"{A_TIME} 1s; more than 0"),
}  # fmt: skip
"""The units of an option's value, and what is allowed."""


@dataclass(frozen=True)
class Interconnect:
    """The network between the machines of a cluster."""

    bandwidth: float
    """The bits per second that each machine can send."""
    latency_seconds: float
    """The time of a packet, one way."""


@dataclass(frozen=True)
class AllReduce:
    """The factors of the terms of ``network_terms``, for one way to sum all gradients."""

    bandwidth: float
    latency: float
    """Latencies per hop."""
    step_latency: float
    """Further latencies per step, for any number of workers."""
    seconds_a_hop: float
    window_bytes: float
    """The maximum number of bytes that a stream sends in one round trip, even in a fast network."""

    def send_seconds(self, workers: int, gradient_bytes: float, network: Interconnect) -> tuple[float, float]:
        """Return the seconds of sending if only the bandwidth limits it, and if only the window does."""
        sent = 2 * (workers - 1) / workers * gradient_bytes
        streams = MAX_STREAMS if gradient_bytes / workers > CHUNK_BYTES else 1
        return sent * 8 / network.bandwidth, sent * 2 * network.latency_seconds / (streams * self.window_bytes)


TEXTBOOK = AllReduce(bandwidth=1.0, latency=1.0, step_latency=0.0, seconds_a_hop=0.0, window_bytes=math.inf)
"""A ring whose software costs nothing; NCCL comes near it."""
# Fitted by `python -m benchmarks network` to every second point of benchmarks/network.csv; a test fits them again.
FITTED = AllReduce(bandwidth=0.9915, latency=3.553, step_latency=5.996, seconds_a_hop=1.762e-3, window_bytes=158.9e3)
"""TensorFlow's ring over gRPC: several collectives per step, in which each hop is a round trip."""
FITTED_SPREAD = 0.173
"""The predictions for 90% of the other points are off by less than this share of the step."""
FITTED_WORKERS = 4
"""The largest measured number of workers."""
TEXTBOOK_SPREAD = 1.0
"""As a share of the network's part: half of the bandwidth doubles it."""


def network_terms(allreduce: AllReduce, workers: int, gradient_bytes: float, network: Interconnect) -> dict[str, float]:
    """Return the seconds that the sum of all gradients takes in a step, by their cause."""
    if workers == 1:
        return {"bandwidth": 0.0, "latency": 0.0, "software": 0.0}
    hops = 2 * (workers - 1)
    by_bandwidth, by_window = allreduce.send_seconds(workers, gradient_bytes, network)
    latencies = allreduce.latency * hops + allreduce.step_latency
    waiting = allreduce.bandwidth * max(0.0, by_window - by_bandwidth)
    return {
        "bandwidth": allreduce.bandwidth * by_bandwidth,
        "latency": latencies * network.latency_seconds + waiting,
        "software": allreduce.seconds_a_hop * hops,
    }


def step_seconds(
    allreduce: AllReduce, compute_seconds: float, workers: int, gradient_bytes: float, network: Interconnect
) -> float:
    """Return the seconds of a step in which the network waits for the whole computation; see ``network_terms``."""
    return compute_seconds + sum(network_terms(allreduce, workers, gradient_bytes, network).values())


def best_interval_seconds(checkpoint_seconds: float, mtbf_seconds: float) -> float:
    """Return the best time between two checkpoints (Daly 2006; Young 1974 has only the square root).

    Args:
        checkpoint_seconds: the cost of a checkpoint.
        mtbf_seconds: the mean time between failures of the whole cluster.
    """
    if checkpoint_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = checkpoint_seconds / (2 * mtbf_seconds)
    return (
        math.sqrt(2 * checkpoint_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_seconds
    )


def goodput(interval_seconds: float, checkpoint_seconds: float, restart_seconds: float, mtbf_seconds: float) -> float:
    """Return the share of all time that is spent on steps that count in the end (Daly 2006).

    Args:
        interval_seconds: the time between two checkpoints.
        checkpoint_seconds: the time that a training waits for a checkpoint.
        restart_seconds: the time from a failure to the next step.
        mtbf_seconds: the mean time between failures of the whole cluster, because one failed machine stops all.
    """
    exponent = (interval_seconds + checkpoint_seconds) / mtbf_seconds
    if exponent > 500 or restart_seconds / mtbf_seconds > 500:
        return 0.0
    return interval_seconds / (mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * math.expm1(exponent))


def plan(
    *,
    workers: int,
    devices: int,
    network: Interconnect,
    communication: str,
    parameters: int,
    examples_a_device: int,
    compute_seconds: Sequence[float],
    mtbf_seconds: float | None = None,
    restart_seconds: float = 0.0,
    interval_steps: int | None = None,
    interval_seconds: float | None = None,
    checkpoint_seconds: float | None = None,
) -> ScalingPlan:
    """Return the prediction for a training.

    Ranges come from the fastest and the slowest step, and from half and twice the time between failures, which is
    rarely known better.

    Args:
        workers: the number of machines.
        devices: the number of devices of each machine; sums inside a machine count as free.
        network: between the machines.
        communication: `ring` (gRPC) or `nccl`.
        parameters: the number of trained parameters, in float32.
        examples_a_device: in a step.
        compute_seconds: measured or given times of a step on one device: the median counts, their range is an error.
        mtbf_seconds: the mean time between failures of a machine; None if none fails.
        restart_seconds: the time from a failure to the next step.
        interval_steps: the number of steps between two checkpoints, if it is given in steps.
        interval_seconds: the same in seconds; the shorter one counts.
        checkpoint_seconds: the time that a training waits for a checkpoint, if it is known.
    """
    gradient_bytes = 4 * parameters
    ordered = sorted(compute_seconds)
    least, compute, most = ordered[0], ordered[len(ordered) // 2], ordered[-1]
    terms = network_terms(FITTED if communication == "ring" else TEXTBOOK, workers, gradient_bytes, network)
    summing = sum(terms.values())
    step = compute + summing
    if workers == 1:
        fastest, slowest = least, most
    elif communication == "nccl":
        # The network sums as many gradients as possible during the computation.
        fastest = least + max(0.0, summing - BACKPROP_SHARE * least)
        slowest = most + (1 + TEXTBOOK_SPREAD) * summing
    else:
        slowest = (most + summing) * (1 + FITTED_SPREAD)
        fastest = (least + summing) * (1 - FITTED_SPREAD)
        if workers > FITTED_WORKERS:  # So many were not measured: a hop may cost nothing.
            fastest = min(fastest, step_seconds(TEXTBOOK, least, workers, gradient_bytes, network))
        fastest = max(fastest, min(least, step))
    examples = workers * devices * examples_a_device
    cost, mtbf = checkpoint_seconds, mtbf_seconds and mtbf_seconds / workers
    best = max(step, best_interval_seconds(cost, mtbf)) if cost is not None and mtbf else None

    def interval(step: float) -> float | None:
        given = [interval_seconds, None if interval_steps is None else interval_steps * step]
        return min((one for one in given if one is not None), default=None) if cost is not None else None

    def figures(step: float, factor: float) -> dict[str, float]:
        """Return the figures for these seconds of a step, with the time between failures times a factor."""
        found = {"step_seconds": step, "examples_per_second": examples / step, "efficiency": min(1.0, compute / step)}
        every = interval(step)
        if cost is not None and every is not None:
            found["checkpoint_share"] = cost / (every + cost)
        if cost is not None and mtbf and best is not None:
            found["best_goodput"] = goodput(best, cost, restart_seconds, mtbf * factor)
            if every is not None:
                found["goodput"] = goodput(every, cost, restart_seconds, mtbf * factor)
        return found

    bounds = [figures(one, factor) for one in (fastest, slowest) for factor in (0.5, 2)]
    found: dict[str, Any] = figures(step, 1)
    values = {name: [one[name] for one in bounds] for name in found}
    parts = {"computing": compute, **terms}
    return ScalingPlan(
        workers=workers,
        devices=devices,
        communication=communication,
        bandwidth=network.bandwidth,
        latency_seconds=network.latency_seconds,
        parameters=parameters,
        gradient_bytes=gradient_bytes,
        global_batch_size=examples,
        parts_seconds=parts,
        bottleneck=max(parts, key=lambda name: parts[name]),
        checkpoint_seconds=cost,
        interval_seconds=interval(step),
        failures_a_day=SECONDS["d"] / mtbf if mtbf else None,
        restart_seconds=restart_seconds if mtbf else None,
        best_interval_seconds=best,
        ranges={name: (min(some), max(some)) for name, some in values.items()},
        **found,
    )


def read(option: str, text: str) -> float:
    """Return the value of an option in its basic unit: `25Gbps`, `1.5ms`, `30d` or `25.6M`.

    Raises:
        UserError: the message says what is allowed.
    """
    units, allowed = QUANTITIES[option]
    names = "|".join(sorted(units, key=len, reverse=True))
    found = re.fullmatch(rf"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*({names})", text.strip())
    value = float(found[1]) * units[found[2]] if found else math.nan
    if found and units is COUNTS:
        value = round(min(value, 1e18))
    if not (0 < value < 1e18 or (option in ("--latency", "--restart") and value == 0)):
        raise UserError(f"{option} = '{text}': use {allowed}")
    return value
