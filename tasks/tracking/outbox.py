"""Delivers the events of a run to MLflow, in order, at once or later.

No training waits for the store or fails with it. An event that cannot be delivered, from the start of a run to its end,
is appended to the run's unsent.jsonl, and delivered with the run's next event, by the next command, or by
`stratagem reconcile`. Delivering an event twice changes nothing.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow
from filelock import FileLock, Timeout
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException

from tasks import config, records, runs
from tasks.system import files, network
from tasks.system.errors import UserError
from tasks.tracking.store import (
    REFUSALS,
    SQLITE,
    Unavailable,
    find_experiment,
    open_store,
    retried,
    store_uri,
)

logger = logging.getLogger(__name__)

# MLflow's own limits.
MAX_METRICS_PER_BATCH = 1000
MAX_PARAMS_PER_BATCH = 100
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 8000

# A store that did not answer is asked again after so long.
PAUSE_SECONDS = 15.0

Event = dict[str, Any]


class Outbox:
    """The events of this process' runs. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._retry_at = 0.0
        self._warned: set[str] = set()

    def deliver(self, run: records.Run, *events: Event) -> None:
        """Send events of a run to the store, or keep them; the store gets them in the order of these calls."""
        with self._lock, best_effort(), FileLock(_outbox(run).with_suffix(".lock")):
            path = _outbox(run)
            if not path.exists() and self._send(run, list(events)) == len(events):
                return
            with path.open("a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read() != b"\n":  # A process killed while it wrote left half a line.
                        file.write(b"\n")
                file.write("".join(json.dumps(event) + "\n" for event in events).encode())
            self._send_kept(run)

    def flush(self, run: records.Run) -> None:
        """Deliver what is kept, as far as the store takes it now; nothing while another process does that."""
        with contextlib.suppress(Timeout), self._lock, FileLock(_outbox(run).with_suffix(".lock"), blocking=False):
            self._send_kept(run)

    def warn(self, run_id: str, error: Exception) -> None:
        """Tell once that a run's events are kept."""
        if run_id not in self._warned:
            self._warned.add(run_id)
            why = files.find_full_disk(error, store_uri().removeprefix(SQLITE)) or error
            logger.warning(
                "MLflow cannot be told of this run now (%s): it goes on, and what there is to tell is kept and "
                "delivered later, also by `stratagem reconcile`",
                network.without_secrets(" ".join(str(why).split())),
            )

    def has_unsent(self, run: records.Run) -> bool:
        """Return whether something of a run is kept."""
        return _outbox(run).exists()

    def retry_now(self) -> None:
        """Let the store be asked at once, and not after the pause that follows a failure."""
        self._retry_at = 0.0

    def _send_kept(self, run: records.Run) -> None:
        path = _outbox(run)
        if not path.exists() or self._is_unreachable(run):
            return  # After a day without its server this would be seconds of reading, every few seconds.
        events: list[Event] = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if not isinstance(event, dict):
                    continue  # A damaged file.
                if "metrics" in event and events and "metrics" in events[-1]:
                    events[-1]["metrics"] += event["metrics"]  # A request for a thousand points, not one for each line.
                else:
                    events.append(event)
        sent = self._send(run, events)
        if sent == len(events):
            path.unlink()
        elif sent:
            with files.replacing(path) as rest:
                rest.write_text("".join(json.dumps(event) + "\n" for event in events[sent:]), encoding="utf-8")

    def _send(self, run: records.Run, events: Sequence[Event]) -> int:
        """Return how many of the events were delivered; all others come after them."""
        sent = 0
        if self._is_unreachable(run):
            return 0
        try:
            client = open_store()
            for event in events:
                try:
                    _send_one(client, run, event)
                except (MlflowException, FileNotFoundError) as error:
                    if isinstance(error, MlflowException) and error.error_code not in REFUSALS:
                        raise
                    logger.warning(
                        "MLflow rejects a record of run %s: %s",
                        run.run_id,
                        network.without_secrets(str(error)),
                    )
                sent += 1
        except Exception as error:  # Whatever ails the store, the training goes on.
            self._retry_at = time.monotonic() + PAUSE_SECONDS
            self.warn(run.run_id, error)
        return sent

    def _is_unreachable(self, run: records.Run) -> bool:
        """Return whether a run's store is another one than this process's, or did not answer a moment ago."""
        return is_elsewhere(run) or time.monotonic() < self._retry_at


OUTBOX = Outbox()


def is_elsewhere(run: records.Run) -> bool:
    """Return whether a run was started in another store than this process's."""
    return network.without_userinfo(run.store) != runs.store_name()


def _send_one(client: mlflow.MlflowClient, run: records.Run, event: Event) -> None:
    place = config.project_root() / run.folder / "mlflow_run_id"
    if "create" in event:
        place.write_text(create_run(event["create"], run.run_id), encoding="utf-8")
        return
    run_id = mlflow_run_id(run)
    if "name" in event:
        client.update_run(run_id, name=event["name"])
    elif "params" in event:
        params = [Param(key, text[:MAX_PARAM_LENGTH]) for key, text in event["params"].items()]
        for batch in batches(params, MAX_PARAMS_PER_BATCH):
            client.log_batch(run_id, params=batch)
    elif "inputs" in event:
        client.log_inputs(
            run_id,
            [
                DatasetInput(Dataset(**given["dataset"]), [InputTag("mlflow.data.context", given["context"])])
                for given in event["inputs"]
            ],
        )
    elif "metrics" in event:
        for batch in batches([Metric(*values) for values in event["metrics"]], MAX_METRICS_PER_BATCH):
            client.log_batch(run_id, metrics=batch)
    elif "tags" in event:
        tags = [RunTag(key, text[:MAX_TAG_LENGTH]) for key, text in event["tags"].items()]
        client.log_batch(run_id, tags=tags)
    elif "file" in event:
        client.log_artifact(run_id, str(config.project_root() / event["file"]), event["folder"])
    elif "no_tag" in event:
        with contextlib.suppress(MlflowException):  # There is none.
            client.delete_tag(run_id, event["no_tag"])
    elif event["status"] == "RUNNING":
        client.update_run(run_id, status="RUNNING")
    else:
        client.set_terminated(run_id, event["status"], event["end_time"])


def await_told(run: records.Run) -> None:
    """Deliver what is kept of a run before something is logged that cannot be kept.

    Raises:
        Unavailable: the tracking server does not answer.
    """
    if is_elsewhere(run):
        own = f"MLFLOW_TRACKING_URI = {run.store}" if run.store else "no MLFLOW_TRACKING_URI"
        now = runs.store_name() or "not set"
        raise UserError(f"run {run.run_id} was started with {own}, and it is {now} now: set it as it was then")
    open_store()
    OUTBOX.retry_now()
    OUTBOX.flush(run)
    if OUTBOX.has_unsent(run):
        raise Unavailable(f"{store_uri()}: MLflow cannot be told of run {run.run_id} now: see to it")


@retried
def create_run(creation: Event, local_id: str | None = None) -> str:
    """Return the id of an MLflow run, which is made if no request before this one has made it.

    Args:
        creation: experiment, start time and tags, of which ``creation_id`` is this run's alone: the reply to a request
            may be lost, or late, after the server has made the run.
        local_id: the id that the run has here, when it was started while the server did not answer.

    Raises:
        Unavailable: the tracking server does not answer.
    """
    client = open_store()
    experiment_id = find_experiment(client, creation["experiment"])
    tags = dict(creation["tags"])
    if (parent := tags.get("mlflow.parentRunId")) is not None:
        tags["mlflow.parentRunId"] = _mlflow_id_of_parent(parent)
    if local_id is not None:
        tags["local_run_id"] = local_id
    if found := find_created(client, experiment_id, tags["creation_id"]):
        if local_id is not None:
            client.set_tag(found[0], "local_run_id", local_id)
        return found[0]
    created: str = client.create_run(experiment_id, creation["start_time"], tags).info.run_id
    return created


def find_created(client: mlflow.MlflowClient, experiment_id: str, creation_id: str) -> list[str]:
    """Return the ids of the MLflow runs that the requests of one creation made, those that were deleted last."""
    found = client.search_runs([experiment_id], f"tags.creation_id = '{creation_id}'", ViewType.ALL)
    return [run.info.run_id for run in sorted(found, key=lambda run: (run.info.lifecycle_stage, run.info.run_id))]


def _mlflow_id_of_parent(run_id: str) -> str:
    """Return the id that MLflow knows a comparison or a sweep by; one that was started without the server is sent to it
    first."""
    if (parent := runs.look_up_parent(run_id)) is None:
        return run_id
    OUTBOX.flush(parent)
    return mlflow_run_id(parent)


def mlflow_run_id(run: records.Run) -> str:
    """Return the id that MLflow knows a run by: its own, unless it was started while the server did not answer."""
    place = config.project_root() / run.folder / "mlflow_run_id"
    return place.read_text(encoding="utf-8") if place.exists() else run.run_id


def is_twin(run: records.Run, run_id: str) -> bool:
    """Return whether MLflow knows a run by another id than this one; False where a damaged file has to say it."""
    with contextlib.suppress(OSError, ValueError):
        known = mlflow_run_id(run)
        return known != run_id and runs.is_id(known)
    return False


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Log what cannot be written, and go on: a full disk must not end a training, nor hide why one ended."""
    try:
        yield
    except OSError as error:
        # What fails in the middle of a file names none.
        place = error.filename or config.project_root() / "mlruns"
        logger.warning("cannot store MLflow updates: %s", files.unwritable(place, error))


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield items in parts that MLflow takes in one request."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def present(texts: Mapping[str, str | None]) -> dict[str, str]:
    """Return the texts that are there."""
    return {key: text for key, text in texts.items() if text is not None}


def text_of(value: object) -> str:
    """Return a setting in the spelling of ``--set``."""
    return value if isinstance(value, str) else json.dumps(value)


def _outbox(run: records.Run) -> Path:
    return config.project_root() / run.folder / "unsent.jsonl"
