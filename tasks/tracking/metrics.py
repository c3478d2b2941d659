"""Writes a run's metrics to MLflow: per step, per run, and of the machine."""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from tasks import config, records
from tasks.tracking import copier
from tasks.tracking.store import is_own_store, own_uri
from tasks.tracking.writing import best_effort, log_points, mlflow_run_id

SYSTEM_METRICS_EVERY_SECONDS = 5.0

# How long a stopped training waits until its queued metrics are written.
STOPPING_SECONDS = 5.0

COPY_EVERY_SECONDS = 10.0

IN_FLIGHT = 1000
"""How many of the last points of a process that died may not have reached the store."""


class MetricWriter:
    """Writes a run's metrics to its own store in a thread, so that no training step waits for the store or fails
    because of it. Another thread copies them to the server of MLFLOW_TRACKING_URI, if set.

    The metrics are first written to the run's metrics.jsonl. So a resume can write to the store what a killed process
    did not write, and steps that run twice (after the last checkpoint) are logged only once.
    """

    def __init__(self, run: records.Run) -> None:
        self.run = run
        self._known: dict[str, int] = {}
        """The last step that an earlier process has written, by metric."""
        self._file: IO[str] | None = None
        self._queue: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="metric-writer", daemon=True)
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        points = read_metrics(self.run)
        for name, _, _, step in points:
            self._known[name] = max(step, self._known.get(name, step))
        log_points(self.run, points[-IN_FLIGHT:])
        with best_effort():
            self._file = _metrics_file(self.run).open("a", encoding="utf-8")
            self._file.write("\n")  # A process that was killed while it wrote left half a line.
        self._thread.start()
        if not is_own_store():
            # Never joined, because a server may not answer.
            threading.Thread(target=self._copy_all, name="metric-copier", daemon=True).start()
        return self

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue metrics for writing, and return immediately."""
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
        """Wait until the store has all metrics; only ``STOPPING_SECONDS`` if the training was stopped or failed."""
        self._ended.set()
        self._queue.put(None)
        self._thread.join(None if error_type is None else STOPPING_SECONDS)
        if self._file is not None:
            with best_effort():  # Closing the file writes the text that did not fit on a full disk before.
                self._file.close()

    def _write_all(self) -> None:
        closing, taken = False, True
        while not closing:
            given = [self._queue.get()]
            while not self._queue.empty():
                given.append(self._queue.get())
            closing = None in given
            points = [metric for metrics in given if metrics is not None for metric in metrics]
            if points:
                taken &= log_points(self.run, points)
        if not taken:  # Perhaps the store works again.
            log_points(self.run, read_metrics(self.run))

    def _copy_all(self) -> None:
        """Copy what the server lacks of the run, again and again; the end of the run completes the copy."""
        while not self._ended.wait(COPY_EVERY_SECONDS):
            copier.copy_run(self.run, whole=False, seconds=0)


def log_metrics(run: records.Run, metrics: Mapping[str, float]) -> None:
    """Write metrics with one value per run, such as the test accuracy."""
    # MLflow's UI draws bar charts only for metrics at step 0; at any other step, each run is a dot in a line chart.
    log_points(run, points_of(metrics, 0))


@contextlib.contextmanager
def system_metrics(run: records.Run, settings: config.Settings) -> Iterator[None]:
    """Let MLflow log the use of CPU, memory, disk, network and GPU every 5 seconds, if the settings enable it."""
    if not settings.tracking.system_metrics:
        yield
        return
    every = SYSTEM_METRICS_EVERY_SECONDS
    monitor = SystemMetricsMonitor(mlflow_run_id(run), every, resume_logging=True, tracking_uri=own_uri())
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()


def read_metrics(run: records.Run) -> list[list[Any]]:
    """Return all points that a run has written so far."""
    path = _metrics_file(run)
    points = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError):  # An empty or incomplete line.
            points += [list(point) for point in json.loads(line)]
    return points


def points_of(metrics: Mapping[str, float], step: int) -> list[list[Any]]:
    """Return metrics as the fields of MLflow's ``Metric``, with the current time."""
    now = int(time.time() * 1000)
    return [[name, float(value), now, step] for name, value in metrics.items()]


def _metrics_file(run: records.Run) -> Path:
    return config.project_root() / run.folder / "metrics.jsonl"
