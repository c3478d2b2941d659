"""What a training would do on many machines, by arithmetic: how long a step takes, which part of it is the network's,
how often to save, and how much of the time is left when machines fail.

A step is what a worker computes, and then a ring all-reduce of all gradients: 2(n-1) hops of 1/n of the bytes each
(Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009). Nothing of it is taken to be hidden behind computing.
Failures are as in Daly 2006 (Young 1974 is its first term): they come at random, and each costs a restart and what was
trained since the last checkpoint.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.records import ScalingPlan
from tasks.system.errors import UserError

BACKPROP_SHARE = 2 / 3
"""Of the computing of a step; what a library that overlaps the two can hide the network behind."""

# Of TensorFlow's ring (ring_alg.cc): what is larger goes in two streams side by side.
CHUNK_BYTES, MAX_STREAMS = 4 * 2**20, 2

BITS = {"b": 1, "B": 8}
PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SECONDS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
    "days": 86400.0, "y": 365.25 * 86400.0,
}  # fmt: skip
COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}
NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*"


@dataclass(frozen=True)
class Interconnect:
    """What lies between the machines of a cluster."""

    bandwidth: float
    """Bits a second that each machine can send."""
    latency_seconds: float
    """Of a packet, one way."""


@dataclass(frozen=True)
class AllReduce:
    """How the sum of all gradients takes its time: factors of the terms of ``network_terms``."""

    bandwidth: float
    latency: float
    """Of each hop."""
    step_latency: float
    """Of each step beside, however many workers there are."""
    seconds_a_hop: float
    window_bytes: float
    """What a stream has under way at most: so much is sent in a round trip, however wide the network is."""

    def send_seconds(self, workers: int, gradient_bytes: float, network: "Interconnect") -> tuple[float, float]:
        """Return what sending takes by the bandwidth alone, and by the window alone."""
        sent = 2 * (workers - 1) / workers * gradient_bytes
        streams = MAX_STREAMS if gradient_bytes / workers > CHUNK_BYTES else 1
        return sent * 8 / network.bandwidth, sent * 2 * network.latency_seconds / (streams * self.window_bytes)


@dataclass(frozen=True)
class Failures:
    """What a long training pays for machines that fail."""

    mtbf_seconds: float
    """The mean time between failures of one machine."""
    restart_seconds: float
    """From a failure until the next step is trained."""
    checkpoint_seconds: float
    """What a training waits for one checkpoint."""


TEXTBOOK = AllReduce(bandwidth=1.0, latency=1.0, step_latency=0.0, seconds_a_hop=0.0, window_bytes=math.inf)
"""A ring whose software costs nothing; NCCL comes near it."""
# Fitted by `python -m benchmarks network` to every second point of benchmarks/network.csv; a test fits them again.
FITTED = AllReduce(bandwidth=0.9915, latency=3.553, step_latency=5.996, seconds_a_hop=1.762e-3, window_bytes=158.9e3)
"""TensorFlow's ring over gRPC: several collectives a step, each of whose hops is a round trip."""
FITTED_SPREAD = 0.173
"""Nine of ten of the other points differ by less from what is predicted, as a share of the step."""
FITTED_WORKERS = 4
"""The most that were measured."""
TEXTBOOK_SPREAD = 1.0
"""Of the network's part: half of the bandwidth, or twice."""


def network_terms(allreduce: AllReduce, workers: int, gradient_bytes: float, network: Interconnect) -> dict[str, float]:
    """Return the seconds that the sum of all gradients takes in a step, by what takes them.

    Args:
        allreduce: how the ring is made.
        workers: machines.
        gradient_bytes: of one worker.
        network: between them.
    """
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
    """Return the seconds of a step, in which the network waits until all is computed; see ``network_terms``."""
    return compute_seconds + sum(network_terms(allreduce, workers, gradient_bytes, network).values())


def hidden_step_seconds(compute_seconds: float, workers: int, gradient_bytes: float, network: Interconnect) -> float:
    """Return the seconds of a step whose network works while the gradients are computed, as well as can be."""
    summing = sum(network_terms(TEXTBOOK, workers, gradient_bytes, network).values())
    return compute_seconds + max(0.0, summing - BACKPROP_SHARE * compute_seconds)


def best_interval_seconds(checkpoint_seconds: float, mtbf_seconds: float) -> float:
    """Return how long to train between two checkpoints (Daly 2006; Young 1974 has the square root alone).

    Args:
        checkpoint_seconds: what one costs.
        mtbf_seconds: of the whole cluster.
    """
    if checkpoint_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = checkpoint_seconds / (2 * mtbf_seconds)
    return (
        math.sqrt(2 * checkpoint_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_seconds
    )


def goodput(interval_seconds: float, failures: Failures, workers: int) -> float:
    """Return the share of all time whose steps count in the end (Daly 2006).

    Args:
        interval_seconds: between two checkpoints.
        failures: of one machine.
        workers: machines; the first that fails stops all.
    """
    mtbf = failures.mtbf_seconds / workers
    exponent = (interval_seconds + failures.checkpoint_seconds) / mtbf
    if exponent > 500 or failures.restart_seconds / mtbf > 500:
        return 0.0
    return interval_seconds / (mtbf * math.exp(failures.restart_seconds / mtbf) * math.expm1(exponent))


def plan(
    *,
    workers: int,
    devices: int,
    network: Interconnect,
    communication: str,
    parameters: int,
    examples_a_device: int,
    compute_seconds: Sequence[float],
    failures: Failures | None,
    interval_steps: int | None = None,
    interval_seconds: float | None = None,
    checkpoint_seconds: float | None = None,
) -> ScalingPlan:
    """Return what a training would do.

    The range of a goodput is what half and twice the time between failures give, which is rarely known better, and with
    an interval in steps the range of the step, too; that of the checkpoints' share is the step's alone.

    It takes eleven, each by its name: the facts that a prediction is made of, which a user gives one by one.

    Args:
        workers: machines.
        devices: of each; they sum their gradients inside the machine, which counts as nothing.
        network: between the machines.
        communication: `ring` (gRPC) or `nccl`.
        parameters: that are trained, in float32.
        examples_a_device: in a step.
        compute_seconds: what a step took on one device, measured or given: the median counts, the range is an error.
        failures: of a machine, and what they cost; None leaves them out.
        interval_steps: between two checkpoints, None where nothing says it in steps.
        interval_seconds: the same in seconds; the shorter one counts.
        checkpoint_seconds: what a training waits for one checkpoint, where ``failures`` does not say it; None where
            that is not known.
    """
    gradient_bytes = 4 * parameters
    ordered = sorted(compute_seconds)
    least, compute, most = ordered[0], ordered[len(ordered) // 2], ordered[-1]
    allreduce = FITTED if communication == "ring" else TEXTBOOK
    terms = network_terms(allreduce, workers, gradient_bytes, network)
    summing = sum(terms.values())
    step = compute + summing
    if workers == 1:
        fastest, slowest = least, most
    elif communication == "nccl":
        fastest = hidden_step_seconds(least, workers, gradient_bytes, network)
        slowest = most + (1 + TEXTBOOK_SPREAD) * summing
    else:
        slowest = (step - compute + most) * (1 + FITTED_SPREAD)
        fastest = (step - compute + least) * (1 - FITTED_SPREAD)
        if workers > FITTED_WORKERS:  # What so many take was not measured: a hop may cost nothing on other machines.
            fastest = min(fastest, step_seconds(TEXTBOOK, least, workers, gradient_bytes, network))
        fastest = max(fastest, min(least, step))
    examples = workers * devices * examples_a_device
    parts = {"computing": compute, **terms}
    if failures is not None:
        checkpoint_seconds = failures.checkpoint_seconds
    intervals = [_interval(interval_seconds, interval_steps, one) for one in (step, fastest, slowest)]
    return ScalingPlan(
        workers=workers,
        devices=devices,
        communication=communication,
        bandwidth=network.bandwidth,
        latency_seconds=network.latency_seconds,
        parameters=parameters,
        gradient_bytes=gradient_bytes,
        global_batch_size=examples,
        step_seconds=step,
        step_seconds_range=(fastest, slowest),
        parts_seconds=parts,
        bottleneck=max(parts, key=lambda name: parts[name]),
        examples_per_second=examples / step,
        examples_per_second_range=(examples / slowest, examples / fastest),
        efficiency=compute / step,
        efficiency_range=(min(1.0, compute / slowest), min(1.0, compute / fastest)),
        **_checkpoint_costs(checkpoint_seconds, intervals, failures, workers, step),
    )


def _checkpoint_costs(
    checkpoint_seconds: float | None,
    intervals: Sequence[float | None],
    failures: Failures | None,
    workers: int,
    step: float,
) -> dict[str, Any]:
    """Return the fields of ``ScalingPlan`` that say what checkpoints and failures cost, as far as that is known.

    Args:
        checkpoint_seconds: what a training waits for one.
        intervals: between two of them, in seconds: as predicted, and where a step takes least and most.
        failures: of a machine.
        workers: machines.
        step: seconds of one.
    """
    costs: dict[str, Any] = {"checkpoint_seconds": checkpoint_seconds}
    known = [one for one in intervals if one is not None]
    interval = intervals[0]
    if checkpoint_seconds is not None:
        shares = [checkpoint_seconds / (one + checkpoint_seconds) for one in known]
        costs |= {
            "interval_seconds": interval,
            "checkpoint_share": shares[0] if shares else None,
            "checkpoint_share_range": _range(shares),
        }
    if failures is not None:
        mtbf = failures.mtbf_seconds / workers
        halved, doubled = (replace(failures, mtbf_seconds=failures.mtbf_seconds * factor) for factor in (0.5, 2))
        best = max(step, best_interval_seconds(failures.checkpoint_seconds, mtbf))
        costs |= {
            "failures_a_day": SECONDS["d"] / mtbf,
            "restart_seconds": failures.restart_seconds,
            "goodput": None if interval is None else goodput(interval, failures, workers),
            "goodput_range": _range([goodput(one, each, workers) for one in known for each in (halved, doubled)]),
            "best_interval_seconds": best,
            "best_goodput": goodput(best, failures, workers),
            "best_goodput_range": _range([goodput(best, each, workers) for each in (halved, doubled)]),
        }
    return costs


def _interval(seconds: float | None, steps: int | None, step: float) -> float | None:
    """Return the shorter one of an interval in seconds and one in steps."""
    given = [seconds, None if steps is None else steps * step]
    return min((one for one in given if one is not None), default=None)


def _range(values: Sequence[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


def read_bandwidth(text: str) -> float:
    """Return the bits a second of `25Gbps`, `100Mbit/s` or `3GB/s`.

    Raises:
        UserError: it is none.
    """
    found = re.fullmatch(NUMBER + r"([kKMGT]?)(?:(b)(?:ps|it|it/s|/s)|(B)/s)", text.strip())
    value = float(found[1]) * PREFIXES[found[2]] * BITS[found[3] or found[4]] if found else 0.0
    if not 0 < value < 1e18:
        raise UserError(
            f"--bandwidth = '{text}': give bits a second, such as 25Gbps or 100Mbit/s, or bytes, such as 3GB/s"
        )
    return value


def read_seconds(option: str, text: str, example: str, zero: bool = False) -> float:
    """Return the seconds of `50us`, `1.5ms`, `90s`, `20min`, `6h` or `30d`.

    Args:
        option: for the message.
        text: what the user wrote.
        example: for the message.
        zero: whether none at all is allowed.

    Raises:
        UserError: it is none.
    """
    units = "|".join(sorted(SECONDS, key=len, reverse=True))
    found = re.fullmatch(f"{NUMBER}({units})", text.strip())
    value = float(found[1]) * SECONDS[found[2]] if found else math.nan
    if not (0 < value < 1e12 or (zero and value == 0)):
        raise UserError(
            f"{option} = '{text}': give a time with its unit ({', '.join(SECONDS)}), such as {example}"
            + ("" if zero else "; more than 0")
        )
    return value


def read_count(option: str, text: str) -> int:
    """Return the whole number of `25600000`, `25.6M` or `1.5B`.

    Raises:
        UserError: it is none.
    """
    found = re.fullmatch(NUMBER + "([kKMB]?)", text.strip())
    value = round(float(found[1]) * COUNTS[found[2]]) if found else 0
    if not 0 < value < 1e15:
        raise UserError(f"{option} = '{text}': give a whole number above 0, such as 25600000 or 25.6M")
    return value
