"""Runs whose process died: find them, deliver what they had kept, and end them."""

import socket
from collections.abc import Mapping
from typing import Any

import mlflow

from tasks import config, records, runs
from tasks.tracking.lifecycle import end_run
from tasks.tracking.metrics import read_metrics, send_missing
from tasks.tracking.outbox import OUTBOX, best_effort, end_twin, find_created, is_elsewhere, is_twin
from tasks.tracking.store import open_store, retried


@retried
def end_crashed(own_key: str = "", except_run_id: str | None = None) -> list[records.Ended]:
    """End the runs of this host whose process died: with the status in their folder, or as KILLED. Also deliver what
    runs have kept that no process is at work on.

    Args:
        own_key: a key that the caller holds; what was done under it before is over.
        except_run_id: the id of a run of this key that the caller is at work on.

    Raises:
        UserError: see ``open_store``; what can be known without the store is written down then.
    """
    ended = _end_folders(own_key, except_run_id)
    client = open_store()
    wanted = "attributes.status = 'RUNNING' AND tags.`mlflow.source.name` = 'stratagem'"
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for found in client.search_runs(experiments, wanted, max_results=1000) if experiments else []:
        end = _end_running(client, found, own_key, except_run_id)
        if end is not None and end.what not in {record.what for record in ended}:
            ended.append(end)
    return ended


def _end_folders(own_key: str, except_run_id: str | None) -> list[records.Ended]:
    """End the runs whose folder says that they are at work, and deliver what others have kept."""
    ended = []
    project = runs.project_id()
    for run in runs.find_not_final():
        if run.run_id == except_run_id or not (run.key == own_key or runs.is_abandoned(run)):
            continue
        put_down = runs.status(run)
        # In a copy of a project lie the runs of the original, which may be at work; the copy has a store of its own, or
        # the same server.
        shared = bool(run.store) and run.project not in ("", project)
        with best_effort():  # What is left of another user's run must not end this one.
            if shared:
                if put_down is not None and put_down.status == "RUNNING":
                    runs.set_status(run, "KILLED", "it was started in another folder, of which this one is a copy")
            elif put_down is not None and put_down.status == "RUNNING":
                with best_effort():
                    send_missing(run, read_metrics(run))
                why = put_down.reason or _died()
                end_run(run, "KILLED", why)
                ended.append(records.Ended(what=f"MLflow run {run.run_id}", status="KILLED", reason=why))
            elif OUTBOX.has_unsent(run):
                OUTBOX.flush(run)
    return ended


def _end_running(
    client: mlflow.MlflowClient, found: Any, own_key: str, except_run_id: str | None
) -> records.Ended | None:
    """End a run that MLflow lists as running, if its process died, or if it is the twin of another run."""
    tags, run_id = found.data.tags, found.info.run_id
    local_id = tags.get("local_run_id", run_id)
    run_of = runs.look_up(local_id)
    if run_of is not None and is_elsewhere(run_of):
        return None  # The copy that a sync makes, or left half-made; the next one goes on with it.
    original = run_of or _original_of(client, run_id, found.info.experiment_id, tags)
    if original is not None and not OUTBOX.has_unsent(original) and is_twin(original, run_id):
        end_twin(client, run_id, original.run_id)
        return None
    # What it is told last may still be on its way.
    owner, _, held_key = tags.get("held_by", "").rpartition(":")
    key = run_of.key if run_of is not None else held_key
    at_work = local_id == except_run_id or (key != own_key and runs.is_locked(key))
    # Runs of before are tagged with the host and the folder.
    if owner not in (runs.project_id(), f"{socket.gethostname()}:{config.project_root()}") or at_work:
        return None
    # It was killed between writing its status and telling MLflow, or before it had a folder.
    put_down = runs.status(run_of) if run_of is not None else None
    if put_down is not None and put_down.status == "RUNNING":
        return None  # It has just started.
    status, reason = (put_down.status, put_down.reason) if put_down is not None else ("KILLED", _died())
    if reason is not None:
        client.set_tag(run_id, "reason", reason)
    client.set_terminated(run_id, status)
    return records.Ended(what=f"MLflow run {local_id}", status=status, reason=reason or "")


def _died() -> str:
    return f"its process on {socket.gethostname()} died"


def _original_of(
    client: mlflow.MlflowClient, run_id: str, experiment_id: str, tags: Mapping[str, str]
) -> records.Run | None:
    """Return the run of this project that was created together with an MLflow run under another id."""
    creation_id = tags.get("creation_id")
    for other in find_created(client, [experiment_id], creation_id) if creation_id else []:
        if other != run_id:
            run = runs.look_up(client.get_run(other).data.tags.get("local_run_id", other))
            if run is not None and run.creation_id == creation_id:
                return run
    return None
