"""What a step of `multi_worker` takes over networks of many kinds, beside what `stratagem plan` says of it.

The workers are on hosts of this machine (`benchmarks.hosts`), each with one thread: their cores are shared, so what a
step computes is measured beside each step, on all workers at once, and only the rest is the network's.
"""

import csv
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from benchmarks import hosts, measure
from tasks import config
from tasks.operations import scaling
from tasks.strategies.environment import stage_environment

HEADING = "## Network\n"
POINTS = Path(__file__).with_name("network.csv")
"""What was measured last: `tasks.operations.scaling` has what was fitted to it, and a test fits it again."""
OTHER_POINTS = Path(__file__).with_name("network_others.csv")
"""Of other models over other networks, measured when the formula was there."""
# 0.02, 1.2, 4.5 and 13.2 MB of gradients.
MODELS = [[64], [512, 512], [1024, 1024], [2048, 1536]]
WORKERS = (2, 3, 4)
BANDWIDTHS = (50e6, 100e6, 200e6, 400e6)
LATENCIES = (0.0, 1e-3, 4e-3)
CONDITIONS = list(itertools.product(BANDWIDTHS, LATENCIES))
"""Bits a second, and seconds one way."""
SHOWN = [(bandwidth, latency) for bandwidth in (50e6, 400e6) for latency in (0.0, 4e-3)]
SHOWN_WORKERS = (2, 4)
"""What the page shows; ``POINTS`` has all."""
# 0.3 and 5.2 MB.
OTHER_MODELS = [[256, 224], [1536, 768]]
OTHER_CONDITIONS = list(itertools.product((75e6, 150e6, 300e6), (5e-4, 2e-3)))
PORT = 2222

Point = Mapping[str, float]


@dataclass(frozen=True)
class Published:
    """A training that others measured on many machines, as far as they say of what."""

    what: str
    parameters: float
    workers: int
    bandwidth: float
    """Bits a second of a machine, at its best."""
    compute_seconds: float
    """Of a step on one device."""
    efficiency: float
    source: str


GOYAL, HOROVOD, DGX1, DAINT = "Goyal", "Horovod", "TensorFlow", "Bugliarello"
SOURCES = {
    GOYAL: "Goyal et al. 2017: 8 to 256 P100 with 50 Gbit/s a machine; back-propagation takes 120 ms, taken as 2/3",
    HOROVOD: "Horovod's benchmarks: 4 Pascal a machine, RoCE 25 Gbit/s; a step as TensorFlow's on a P100, 64 images",
    DGX1: "TensorFlow's benchmarks of May 2017: one DGX-1, 64 images a P100 (AlexNet 512; ResNet-50 summed on the "
    "CPU); a link of NVLink, 20 GB/s",
    DAINT: "Bugliarello 2017: parameter servers over gRPC on Aries, whose peak is 10 GB/s a node, 64 images a P100",
}
PUBLISHED = [
    Published("ResNet-50, 32 machines of 8", 25.6e6, 32, 50e9, 0.120 * 3 / 2, 0.90, GOYAL),
    Published("Inception V3, 128 machines of 4", 23.8e6, 128, 25e9, 64 / 142, 0.90, HOROVOD),
    Published("VGG-16, 128 machines of 4", 138.4e6, 128, 25e9, 64 / 154, 0.68, HOROVOD),
    Published("ResNet-50, 8 GPUs", 25.6e6, 8, 160e9, 64 / 219, 1734 / 219 / 8, DGX1),
    Published("VGG-16, 4 GPUs", 138.4e6, 4, 160e9, 64 / 154, 584 / 154 / 4, DGX1),
    Published("VGG-16, 8 GPUs", 138.4e6, 8, 160e9, 64 / 154, 1081 / 154 / 8, DGX1),
    Published("AlexNet, 8 GPUs", 61.1e6, 8, 160e9, 512 / 2987, 17822 / 2987 / 8, DGX1),
    Published("Inception V3, 8 nodes", 23.8e6, 8, 80e9, 64 / 138.23, 1018.18 / 138.23 / 8, DAINT),
    Published("Inception V3, 64 nodes", 23.8e6, 64, 80e9, 64 / 138.23, 7118.31 / 138.23 / 64, DAINT),
    Published("Inception V3, 128 nodes", 23.8e6, 128, 80e9, 64 / 138.23, 9219.70 / 138.23 / 128, DAINT),
]
PUBLISHED_LATENCY = 10e-6
"""None of them says it; it counts for little."""


def predicted(one: Published) -> tuple[float, float, float]:
    """Return the efficiency that `stratagem plan --communication nccl` predicts, and its range."""
    found = scaling.plan(
        workers=one.workers,
        devices=1,
        network=scaling.Interconnect(one.bandwidth, PUBLISHED_LATENCY),
        communication="nccl",
        parameters=int(one.parameters),
        examples_a_device=1,
        compute_seconds=[one.compute_seconds],
    )
    return found.efficiency, *found.ranges["efficiency"]


def divided(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Return the points that are fitted and those that the fit is checked on: every second one."""
    return list(points[::2]), list(points[1::2])


def load(path: Path = POINTS) -> list[Point]:
    """Return the points that were measured last."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def save(points: Sequence[Point], path: Path = POINTS) -> None:
    """Keep the points."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(points[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: f"{value:.6g}" for name, value in row.items()} for row in points)


def measured(
    workers: int, calls: int, models: Sequence[Sequence[int]], conditions: Sequence[tuple[float, float]]
) -> list[dict[str, float]]:
    """Measure all models under all conditions with so many workers; return a row of ``POINTS`` each."""
    values = {"dataset.name": "digits", "train.per_replica_batch_size": 64, "train.global_batch_size": None}
    environment = stage_environment(config.load(overrides={**values, "strategy.kind": "multi_worker"}))
    rows = []
    with hosts.made(workers) as made:
        cluster = {"worker": [f"{address}:{PORT}" for address in made.addresses]}
        words = [sys.executable, "-m", "benchmarks.over_network", json.dumps(values), json.dumps(models)]
        started = []
        for index in range(workers):
            place = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            own = {"TF_CONFIG": place, "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
            started.append(
                subprocess.Popen(
                    made.command(index, *words, str(len(conditions)), str(calls)),
                    cwd=measure.ROOT,
                    env=environment | own | {"TF_NUM_INTEROP_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""},
                    stdin=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
                    stderr=None if os.environ.get("DEBUG") else subprocess.DEVNULL,
                    text=True,
                )
            )
        try:
            chief = started[0]
            for _, (bandwidth, latency) in itertools.product(models, conditions):
                made.shape(bandwidth=bandwidth, latency_seconds=latency)
                chief.stdin.write("go\n")
                chief.stdin.flush()
                line = chief.stdout.readline()
                if not line:
                    sys.exit(f"a worker of {workers} ended: DEBUG=1 shows what it said")
                found = json.loads(line)
                rows.append(
                    {
                        "workers": workers,
                        "parameters": found["parameters"],
                        "bandwidth": bandwidth,
                        "latency_seconds": latency,
                        # The fastest: what else this machine does only ever adds to a step.
                        "compute_seconds": min(found["compute_seconds"]),
                        "step_seconds": min(found["step_seconds"]),
                        "median_step_seconds": statistics.median(found["step_seconds"]),
                        "load": os.getloadavg()[0],
                    }
                )
                print(f"network: {rows[-1]}", file=sys.stderr)
            for process in started:
                process.wait(60)
        finally:
            for process in started:
                process.kill()
                process.wait()
    return rows


def lines(points: Sequence[Point], others: Sequence[Point]) -> list[str]:
    """Return the section's tables."""
    fitting, checking = divided(points)
    fitted = fit(fitting)
    off = relative_errors(fitted, checking)
    few = [point for point in points if point["workers"] < max(WORKERS)]
    many = [point for point in points if point["workers"] == max(WORKERS)]
    fresh = relative_errors(fitted, others)
    beyond = statistics.mean(relative_errors(fit(few), many))
    loads = [point["load"] for point in (*points, *others)]
    found = [
        f"The columns give a host's bandwidth and the latency one way; [network.csv](../benchmarks/network.csv) has "
        f"all {len(points)} points. All workers share {os.cpu_count()} cores, with a thread each; between "
        f"{min(loads):.0f} and {max(loads):.0f} processes competed for them.",
        "",
        "| workers | gradients | " + " | ".join(_condition(*one) for one in SHOWN) + " |",
        "|---" * (2 + len(SHOWN)) + "|",
    ]
    shown = [one for one in points if (one["bandwidth"], one["latency_seconds"]) in SHOWN]
    shown = [one for one in shown if one["workers"] in SHOWN_WORKERS]
    for workers, parameters in dict.fromkeys((int(one["workers"]), int(one["parameters"])) for one in shown):
        cells = []
        for one in (one for one in shown if (one["workers"], one["parameters"]) == (workers, parameters)):
            network = scaling.Interconnect(one["bandwidth"], one["latency_seconds"])
            told = scaling.step_seconds(fitted, one["compute_seconds"], workers, 4 * parameters, network)
            cells.append(f"{one['step_seconds']:.3g} ({told:.2g})")
        found.append(f"| {workers} | {4 * parameters / 1e6:.2f} MB | " + " | ".join(cells) + " |")
    found += [
        "",
        f"Fitted to {len(fitting)} of the {len(points)} points (every second one): {fitted.bandwidth:.2f} times the "
        f"bytes of a ring by the bandwidth; {fitted.latency:.1f} latencies and {fitted.seconds_a_hop * 1e3:.1f} ms of "
        f"software for each of its 2(n-1) hops, and {fitted.step_latency:.1f} more latencies per step; at most "
        f"{fitted.window_bytes / 1e3:.0f} kB of a stream in flight per round trip. **On the other {len(checking)} "
        f"points the mean error is {statistics.mean(off):.1%}**, nine of ten are within {_ninth(off):.0%}, the worst "
        f"is off by {max(off):.0%}. We chose the form of the formula with these points; on "
        f"{len(others)} later points with other models and networks, the mean error is "
        f"{statistics.mean(fresh):.1%}, the worst {max(fresh):.0%}. Fitted only to 2 and 3 workers, the mean error on "
        f"{max(WORKERS)} is {beyond:.1%}.",
        "",
        "Published trainings overlap the sums with the computation as far as possible. The prediction "
        "(`--communication nccl`) is a textbook ring without overlap; its range extends from full overlap to half of "
        "the bandwidth:",
        "",
        "| training | predicted efficiency | measured | |",
        "|---|---|---|---|",
    ]
    for one in PUBLISHED:
        middle, low, high = predicted(one)
        where = "" if low <= one.efficiency <= high else "**outside** "
        found.append(
            f"| {one.what} | {middle:.0%} ({low:.0%} to {high:.0%}) | {one.efficiency:.0%} | {where}{one.source} |"
        )
    return [*found, "", *(f"- {source}" for source in SOURCES.values())]


def _ninth(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]


def _condition(bandwidth: float, latency: float) -> str:
    return f"{bandwidth / 1e6:.0f} Mbit/s, {latency * 1e3:g} ms"


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    if reason := hosts.missing():
        print(f"network: left out: {reason}", file=sys.stderr)
        return measure.kept(HEADING)
    load = measure.Load()
    points = [point for workers in WORKERS for point in measured(workers, repeats, MODELS, CONDITIONS)]
    save(points)
    others = [point for workers in WORKERS for point in measured(workers, repeats, OTHER_MODELS, OTHER_CONDITIONS)]
    save(others, OTHER_POINTS)
    about = "Seconds of a step: the fastest of several calls, and the fit in brackets."
    return measure.section(HEADING, ("tensorflow", "keras"), load.others(), about, lines(points, others))


def fit(points: Sequence[Mapping[str, float]]) -> scaling.AllReduce:
    """Return the factors that fit measured steps, by least squares of their relative errors; none is below 0.

    Args:
        points: with ``workers``, ``parameters``, ``bandwidth``, ``latency_seconds``, ``compute_seconds`` and
            ``step_seconds``.
    """
    seconds = np.array([point["step_seconds"] for point in points])
    rest = np.array([point["step_seconds"] - point["compute_seconds"] for point in points])
    best, least = scaling.TEXTBOOK, math.inf
    for window in np.geomspace(20e3, 2e6, 41):
        columns = []
        for point in points:
            workers, latency = int(point["workers"]), point["latency_seconds"]
            network = scaling.Interconnect(point["bandwidth"], latency)
            sending = replace(scaling.TEXTBOOK, window_bytes=float(window)).send_seconds(
                workers, 4 * point["parameters"], network
            )
            hops = 2 * (workers - 1)
            columns.append([max(sending), hops * latency, latency, hops])
        factors, _ = nnls(np.array(columns) / seconds[:, None], rest / seconds)
        error = float(np.square((np.array(columns) @ factors - rest) / seconds).sum())
        if error < least:
            least = error
            best = scaling.AllReduce(*map(float, (*factors, window)))
    return best


def relative_errors(allreduce: scaling.AllReduce, points: Sequence[Mapping[str, float]]) -> list[float]:
    """Return by what share of the measured step each prediction is off; see ``fit``."""
    found = []
    for point in points:
        network = scaling.Interconnect(point["bandwidth"], point["latency_seconds"])
        num_bytes = 4 * point["parameters"]
        predicted = scaling.step_seconds(allreduce, point["compute_seconds"], int(point["workers"]), num_bytes, network)
        found.append(abs(predicted - point["step_seconds"]) / point["step_seconds"])
    return found
