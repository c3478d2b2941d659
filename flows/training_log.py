"""Prefect's log of a training: a line for each epoch, as the run's metrics come. The stage process has its own terminal
lines; here its file of metrics is read, so that a flow's log shows the same wherever the stage runs."""

import contextlib
import json
import logging
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger
from prefect.settings import get_current_settings

from flows.operate.prefect_server import answers
from tasks import config
from tasks.records import Run

LOOK_SECONDS = 1.0

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


@contextlib.contextmanager
def epochs_logged(run: Run, num_epochs: int, look_seconds: float = LOOK_SECONDS) -> Iterator[None]:
    """Write what a run's training measures into Prefect's log of this task, and how far it is into a bar beside it,
    within the block.

    Args:
        run: that trains.
        num_epochs: how many epochs it is to have in the end.
        look_seconds: how often the run's file is looked at.
    """
    path = config.project_root() / run.folder / "metrics.jsonl"
    logger: Logger = get_run_logger()
    ended = threading.Event()
    # What a process before this one measured is in the log of its own flow run.
    begin = path.stat().st_size if path.exists() else 0
    done = {epoch[0] for line in _lines(path, 0) if (epoch := describe(line))}
    progress = ProgressArtifact(num_epochs, len(done))

    def look(place: int) -> int:
        for line in _lines(path, place):
            place += len(line)
            if epoch := describe(line):
                step, said = epoch
                logger.info(said)
                done.add(step)
        progress.show(len(done))
        return place

    def follow() -> None:
        place = begin
        while not ended.wait(look_seconds):
            place = look(place)
        look(place)

    thread = threading.Thread(target=follow, name="training-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class ProgressArtifact:
    """A bar at the flow run: the share of the epochs that are done, where there is a server to show it."""

    def __init__(self, num_epochs: int, num_done: int) -> None:
        """Show it; to be called where Prefect knows the task."""
        self._num_epochs, self._shown = num_epochs, num_done
        self._artifact: uuid.UUID | None = None
        url = get_current_settings().api.url
        if url is None or not answers(url, 0.0):
            return
        with contextlib.suppress(httpx.HTTPError):
            made: Any = create_progress_artifact(self._percent(num_done), key="training", description="epochs done")
            self._artifact = made

    def show(self, num_done: int) -> None:
        """Move the bar; after the first answer that does not come it stays where it is."""
        if self._artifact is None or num_done == self._shown:
            return
        self._shown = num_done
        try:
            update_progress_artifact(self._artifact, self._percent(num_done))
        except httpx.HTTPError:
            self._artifact = None

    def _percent(self, num_done: int) -> float:
        return min(100.0, 100.0 * num_done / self._num_epochs)


def _lines(path: Path, place: int) -> list[bytes]:
    """Return the whole lines of a file from a place on."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(place)
        return [line for line in file if line.endswith(b"\n")]
    return []


def describe(line: bytes) -> tuple[int, str] | None:
    """Return the step at which an epoch ended, and a sentence about it, from a line of metrics.jsonl; None for a line
    with other numbers, or half a line."""
    try:
        points: list[Any] = json.loads(line)
        values = {name: value for name, value, _, _ in points}
        step = points[0][3] if points else 0
    except (ValueError, TypeError):
        return None
    if "train/loss" not in values:
        return None
    return step, f"step {step:,}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
