"""A run's numbers on their way to MLflow: of each step, of the whole run, of the machine."""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from tasks import config, records
from tasks.tracking.outbox import MAX_METRICS_PER_BATCH, OUTBOX, best_effort
from tasks.tracking.store import store_uri

SYSTEM_METRICS_EVERY_SECONDS = 5.0

# How long a training that was stopped waits for metrics that are on their way.
STOPPING_SECONDS = 5.0


class MetricWriter:
    """Delivers a run's metrics from a thread of its own: no training step waits for the store, or fails with it.

    What is written is in the run's metrics.jsonl at once. So what a killed process had not delivered yet is delivered
    by the next one, and what both do (the rest of an epoch after the last checkpoint) is sent once.
    """

    def __init__(self, run: records.Run) -> None:
        self.run = run
        self._known: dict[str, int] = {}
        """The last step that a process before this one wrote, by metric."""
        self._file: IO[str] | None = None
        self._queue: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver_all, name="metric-writer", daemon=True)

    def __enter__(self) -> Self:
        points = read_metrics(self.run)
        for name, _, _, step in points:
            self._known[name] = max(step, self._known.get(name, step))
        send_missing(self.run, points)
        with best_effort():
            self._file = _metrics_file(self.run).open("a", encoding="utf-8")
            self._file.write("\n")  # A process killed while it wrote left half a line.
        self._thread.start()
        return self

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics for delivery; returns at once."""
        new = {name: value for name, value in metrics.items() if step > self._known.get(name, -1)}
        if not new:
            return
        points = points_of(new, step)
        with best_effort():
            if self._file is not None:
                self._file.write(json.dumps(points) + "\n")
                self._file.flush()
        self._queue.put(points)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Wait until everything is delivered or kept; not for long where the training was stopped or failed."""
        self._queue.put(None)
        self._thread.join(None if error_type is None else STOPPING_SECONDS)
        if self._file is not None:
            with best_effort():  # It writes what a full disk did not take before.
                self._file.close()

    def _deliver_all(self) -> None:
        closing = False
        while not closing:
            taken = [self._queue.get()]
            while not self._queue.empty():
                taken.append(self._queue.get())
            closing = None in taken
            points = [metric for metrics in taken if metrics is not None for metric in metrics]
            if points:
                OUTBOX.deliver(self.run, {"metrics": points})


def log_metrics(run: records.Run, metrics: Mapping[str, float]) -> None:
    """Deliver metrics that a run has once, such as its test accuracy."""
    # MLflow's pages compare runs in bars where the step is 0; at any other step each run is a dot in a line chart.
    OUTBOX.deliver(run, {"metrics": points_of(metrics, 0)})


@contextlib.contextmanager
def system_metrics(writer: MetricWriter, settings: config.Settings) -> Iterator[None]:
    """Write processor, memory, disk, network and GPU use every 5 seconds and at the end, unless the settings say no.

    The step of these metrics is the number of seconds since the run began.
    """
    if not settings.tracking.system_metrics:
        yield
        return
    began = writer.run.start_time / 1000
    monitor = SystemMetricsMonitor(writer.run.run_id, tracking_uri=store_uri())
    stop = threading.Event()

    # Not monitor.start(): its first sample is over no time at all, so 0 %, and what it has at the end it drops.
    def sample() -> None:
        monitor.collect_metrics()  # psutil measures from one call to the next of the same thread.
        stopping = sampled = False
        while not stopping:
            for part in monitor.monitors:
                part.clear_metrics()
            since = time.monotonic()
            stopping = stop.wait(SYSTEM_METRICS_EVERY_SECONDS)
            if sampled and time.monotonic() - since < 1:
                return  # Too short: processor time comes in ticks.
            monitor.collect_metrics()
            values = {f"system/{name}": value for name, value in monitor.aggregate_metrics().items()}
            writer.write(int(time.time() - began), values)
            sampled = True

    thread = threading.Thread(target=sample, name="system-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def read_metrics(run: records.Run) -> list[list[Any]]:
    """Return all points that the processes of a run have written so far."""
    path = _metrics_file(run)
    points = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError):  # An empty line, or half of one; or a disk's damage.
            points += [list(point) for point in json.loads(line)]
    return points


def send_missing(run: records.Run, points: Sequence[list[Any]]) -> None:
    """Deliver the last points of a run whose process died: it may have had them on their way."""
    if points:
        OUTBOX.deliver(run, {"metrics": points[-MAX_METRICS_PER_BATCH:]})


def points_of(metrics: Mapping[str, float], step: int) -> list[list[Any]]:
    """Return metrics as the fields of MLflow's ``Metric``, measured now."""
    now = int(time.time() * 1000)
    return [[name, float(value), now, step] for name, value in metrics.items()]


def _metrics_file(run: records.Run) -> Path:
    return config.project_root() / run.folder / "metrics.jsonl"
