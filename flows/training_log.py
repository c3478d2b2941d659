"""Prefect's log of a training: a line for each epoch, as the run's metrics come. The stage process has its own terminal
lines; here its file of metrics is read, so that a flow's log shows the same wherever the stage runs."""

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from tasks import config
from tasks.records import Run

LOOK_SECONDS = 1.0

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


@contextlib.contextmanager
def epochs_logged(run: Run, look_seconds: float = LOOK_SECONDS) -> Iterator[None]:
    """Write what a run's training measures into Prefect's log of this task, within the block, looking so often."""
    path = config.project_root() / run.folder / "metrics.jsonl"
    logger: Logger = get_run_logger()
    ended = threading.Event()
    # What a process before this one measured is in the log of its own flow run.
    begin = path.stat().st_size if path.exists() else 0

    def follow() -> None:
        place = begin
        while not ended.wait(look_seconds):
            place = _log_from(path, place, logger)
        _log_from(path, place, logger)

    thread = threading.Thread(target=follow, name="training-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _log_from(path: Path, place: int, logger: Logger) -> int:
    """Log the whole lines of a file from a place on; return where they end."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(place)
        for line in file:
            if not line.endswith(b"\n"):
                break
            place += len(line)
            if said := describe(line):
                logger.info(said)
    return place


def describe(line: bytes) -> str | None:
    """Return what a line of metrics.jsonl says of an epoch; None for one that holds other numbers, or half of any."""
    try:
        points: list[Any] = json.loads(line)
        values = {name: value for name, value, _, _ in points}
        step = points[0][3] if points else 0
    except (ValueError, TypeError):
        return None
    if "train/loss" not in values:
        return None
    return f"step {step:,}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
