"""Copies runs from one store to the one that MLFLOW_TRACKING_URI names: parameters, metrics, tags, files, data, models,
versions.

Copying is idempotent: it adds what the copy lacks, and the next one completes an interrupted copy. The tag
``stratagem.run_id`` identifies the copy by the original id. The tag ``sync_digest`` is written last and identifies the
state of the run that was copied.

A run is copied while it trains, for its registration, at its end, when the next run ends, and by `stratagem reconcile`
and `stratagem runs sync`. A server that is down, slow or faulty only causes a warning.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import mlflow
from filelock import FileLock, Timeout
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric, Param, RunStatus, RunTag, ViewType
from mlflow.exceptions import MlflowException

from tasks import config, records
from tasks.records import Synced
from tasks.runs import entries, locks, relocation
from tasks.system import network
from tasks.system.errors import UserError
from tasks.tracking import trained_models
from tasks.tracking.registry import HISTORY, RUN_ID, VERSIONS_TAG, find_versions, make_version
from tasks.tracking.store import (
    SQLITE,
    Unavailable,
    find_experiment,
    find_or_none,
    is_own_store,
    logged_models,
    open_store,
    pages,
    retried,
    store_uri,
)
from tasks.tracking.writing import mlflow_run_id

logger = logging.getLogger(__name__)

DIGEST = "sync_digest"
# Tags that only the copy has or that the other store sets.
OWN_TAGS = (RUN_ID, DIGEST, "mlflow.runName")
FROM_MODEL, FROM_PROJECT = "synced_model_id", "synced_from"
FILE = "keras_file_sha256"
LOCK_SECONDS = 60.0
"""How long the end of a run waits for another process that copies the same run."""


def open_source() -> mlflow.MlflowClient:
    """Return a client of the project's own store, the source of the copies.

    Raises:
        UserError: the store cannot be read, or it is also the target.
    """
    uri = f"{SQLITE}{relocation.own_store()}"
    if is_own_store() and Path(store_uri().removeprefix(SQLITE)).resolve() == relocation.own_store().resolve():
        raise UserError(f"{uri} already contains these runs: choose another store")
    return open_store(uri)


def _place(uri: str) -> Path:
    return Path(unquote(uri.removeprefix("file://")))


def _find_copy(client: mlflow.MlflowClient, experiment_id: str, identity: str) -> Any:
    """Return the copy of a run, None if it does not exist. Delete duplicates, which late replies may cause."""
    found = client.search_runs([experiment_id], f"tags.{RUN_ID} = '{identity}'", ViewType.ALL)
    first, *others = sorted(found, key=lambda one: (one.info.lifecycle_stage, one.info.run_id)) or [None]
    for one in others:
        if one.info.lifecycle_stage != "deleted":
            client.delete_run(one.info.run_id)
    return first


def copy(run: records.Run, whole: bool = True, seconds: float = LOCK_SECONDS) -> Synced:
    """Copy a run with its models; this is idempotent.

    Args:
        run: the run.
        whole: also copy its files and its final state, which a running run does not have yet.
        seconds: how long to wait for another process or thread that copies this run.

    Raises:
        UserError: another process is still copying the run, the copy was deleted, or a store cannot be used.
    """
    try:
        with FileLock(config.project_root() / run.folder / ".sync.lock", timeout=seconds):
            done = _copy(run, whole)
    except Timeout:
        raise UserError(f"another process is copying run {run.run_id}: wait until it ends") from None
    if whole:
        (config.project_root() / run.folder / entries.UNCOPIED).unlink(missing_ok=True)
    return done


@retried
def _copy(run: records.Run, whole: bool) -> Synced:
    source, client = open_source(), open_store()
    found = source.get_run(mlflow_run_id(run))
    own_id = found.info.run_id
    told: dict[str, Any] = {"run_id": run.run_id, "name": run.name}
    models = [one for one in logged_models(source, found) if one.status == LoggedModelStatus.READY]
    versions = list(pages(source.search_model_versions, filter_string=f"run_id = '{own_id}'"))
    digest = _digest(found, models, versions)
    experiment_id = find_experiment(client, run.experiment, store_uri())
    copy_there = _find_copy(client, experiment_id, run.run_id)
    there: Any = copy_there.info.run_id if copy_there is not None else None
    if copy_there is not None and copy_there.info.lifecycle_stage == "deleted":
        raise UserError(f"its copy was deleted: mlflow runs restore --run-id {there}")
    if copy_there is not None and copy_there.data.tags.get(DIGEST) == digest:
        known = [text for key, text in copy_there.data.tags.items() if key == "model_version"]
        return Synced(**told, outcome="up to date", there=there, versions=tuple(known))
    tags = {key: text for key, text in found.data.tags.items() if key not in OWN_TAGS}
    if (parent := entries.look_up(tags.get("mlflow.parentRunId", ""))) is not None:
        above = _find_copy(client, experiment_id, parent.run_id)
        tags["mlflow.parentRunId"] = str(above.info.run_id if above is not None else copy(parent, whole=False).there)
    if there is None:
        there = client.create_run(
            experiment_id, found.info.start_time, tags | {RUN_ID: run.run_id}, found.info.run_name
        ).info.run_id
        if store_uri().startswith("http"):
            address = network.without_userinfo(store_uri()).rstrip("/")
            logger.info("run %s is at %s/#/experiments/%s/runs/%s", run.run_id[:8], address, experiment_id, there)
    _log_values(source, client, found, there, tags)
    if copy_there is not None and "reason" in copy_there.data.tags and "reason" not in tags:
        client.delete_tag(there, "reason")  # The run failed earlier, and was resumed.
    files = _place(found.info.artifact_uri)
    if whole and files.is_dir() and any(files.iterdir()):
        client.log_artifacts(there, str(files))
    # A version in SQLite does not name its model.
    copied = {one.tags.get(FILE): _copy_model(client, found, there, one) for one in models}
    project = run.project.partition(".")[0]  # The same in each copy.
    made = tuple(
        _copy_version(client, one, there, copied[one.tags[FILE]], project)
        for one in versions
        if one.tags.get(FILE) in copied
    )
    if made:
        client.set_tag(there, "model_version", made[-1])
    outcome: Any = "updated" if copy_there is not None and DIGEST in copy_there.data.tags else "delivered"
    if whole:
        client.set_terminated(there, found.info.status, found.info.end_time)
        client.set_tag(there, DIGEST, digest)
    elif copy_there is not None and copy_there.info.status != found.info.status:
        client.update_run(there, status=found.info.status)
    return Synced(**told, outcome=outcome, there=there, versions=made)


_WARNED: set[str] = set()


def copy_run(run: records.Run, whole: bool, seconds: float = LOCK_SECONDS) -> str | None:
    """Copy a run of this project to the server that MLFLOW_TRACKING_URI names; return the id of the copy. None without
    a server, or if the copy fails, which causes a warning.

    Args:
        run: the run.
        whole: see ``copy``.
        seconds: how long to wait for another process or thread that copies this run.
    """
    if is_own_store():
        return None
    try:
        return copy(run, whole, seconds).there
    except Exception as error:  # The run continues without the server.
        if run.run_id not in _WARNED:
            _WARNED.add(run.run_id)
            logger.warning(
                "the MLflow server does not accept this run now (%s): the run stays in the project's own store, and is "
                "copied later, or by `stratagem reconcile` or `stratagem runs sync`",
                network.without_secrets(" ".join(str(error).split())),
            )
        return None


def copy_model(run: records.Run, model_uri: str) -> str:
    """Copy a run to the server with its models; return the address there, ``models:/<model_id>``, of one of them.

    Raises:
        Unavailable: the copy fails, or another process is still copying the run.
    """
    try:
        copied = str(copy(run, whole=False).there)
        there = retried(_find_model_copy)(open_store(), copied, model_uri.removeprefix("models:/"))
    except Exception as error:  # A server may give any answer.
        raise Unavailable(str(error)) from error
    if there is None:
        raise Unavailable(f"{store_uri()} does not have the model {model_uri} of run {run.run_id} any more")
    return f"models:/{there.model_id}"


def copy_pending(except_run_id: str | None = None) -> None:
    """Copy the ended runs of this project that the server lacks in part; stop if the server is unavailable."""
    if is_own_store():
        return
    project = locks.project_id()
    pending = [run for run in entries.find_uncopied() if run.project == project and run.run_id != except_run_id]
    for run in sorted(pending, key=lambda run: run.start_time):
        if locks.is_abandoned(run) and copy_run(run, whole=True) is None:
            try:
                open_store().search_experiments(max_results=1)
            except (UserError, MlflowException):
                return  # The server is down; otherwise only this run cannot be copied.


def _find_model_copy(client: mlflow.MlflowClient, there: str, model_id: str) -> Any:
    found = logged_models(client, client.get_run(there))
    return next((one for one in found if one.tags.get(FROM_MODEL) == model_id), None)


def _digest(run: Any, models: Sequence[Any], versions: Sequence[Any]) -> str:
    files = _place(run.info.artifact_uri)
    seen = {
        "run": [run.info.status, run.info.end_time, run.info.run_name],
        "params": run.data.params,
        "tags": run.data.tags,
        "metrics": run.data.metrics,
        "data": [one.dataset.digest for one in run.inputs.dataset_inputs] if run.inputs else [],
        "models": [[one.model_id, one.tags, [[m.key, m.value] for m in one.metrics or []]] for one in models],
        "versions": [[one.name, one.version, one.tags] for one in versions],
        "files": sorted([str(p.relative_to(files)), p.stat().st_size] for p in files.rglob("*") if p.is_file()),
    }
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def _log_values(
    source: mlflow.MlflowClient, client: mlflow.MlflowClient, run: Any, there: str, tags: Mapping[str, str]
) -> None:
    params = [Param(key, text) for key, text in run.data.params.items()]
    known, points = client.get_run(there).data.metrics, []
    for key in run.data.metrics:
        has = client.get_metric_history(there, key) if key in known else []
        steps = {(one.step, one.timestamp, str(one.value)) for one in has}
        points += [
            Metric(one.key, one.value, one.timestamp, one.step)
            for one in source.get_metric_history(run.info.run_id, key)
            if (one.step, one.timestamp, str(one.value)) not in steps
        ]
    client.log_batch(there, points, params, [RunTag(key, text) for key, text in tags.items()])
    if run.inputs and run.inputs.dataset_inputs:
        client.log_inputs(there, run.inputs.dataset_inputs)


def _copy_model(client: mlflow.MlflowClient, run: Any, there: str, model: Any) -> str:
    """Copy a logged model, whose files contain the ids of its run and of itself; return the id of the copy."""
    made = _find_model_copy(client, there, model.model_id)
    tags = {key: text for key, text in model.tags.items() if key != VERSIONS_TAG} | {FROM_MODEL: model.model_id}
    copy = client.get_run(there)
    if made is None:
        made = client.create_logged_model(
            copy.info.experiment_id, model.name, there, tags=tags, params=model.params, model_type=model.model_type
        )
    is_new = made.status != LoggedModelStatus.READY
    if is_new:
        _upload_model(client, run, there, model, made)
        if made.model_id not in {one.model_id for one in (copy.outputs.model_outputs if copy.outputs else [])}:
            steps = {one.model_id: one.step for one in (run.outputs.model_outputs if run.outputs else [])}
            client.log_outputs(there, [LoggedModelOutput(made.model_id, steps.get(model.model_id, 0))])
    elif changed := {key: text for key, text in tags.items() if made.tags.get(key) != text}:
        client.set_logged_model_tags(made.model_id, changed)  # Tags that were set after the copy.
    known = {(one.key, one.value, one.step, one.timestamp) for one in made.metrics or []}
    points = [
        Metric(one.key, one.value, one.timestamp, one.step, made.model_id, one.dataset_name, one.dataset_digest)
        for one in model.metrics or []
        if (one.key, one.value, one.step, one.timestamp) not in known
    ]
    if points:
        client.log_batch(there, metrics=points)
    if is_new:
        client.finalize_logged_model(made.model_id, "READY")
    made_id: str = made.model_id
    return made_id


def _upload_model(client: mlflow.MlflowClient, run: Any, there: str, model: Any, made: Any) -> None:
    """Upload the files of a logged model with the ids of the copied run and model in them."""
    place = _place(model.artifact_location)
    if not (place / "MLmodel").is_file():
        raise UserError(f"run {run.info.run_id}: its model {model.model_id} is not in {place}: copy it, too")
    trained_models.verify(f"model {model.model_id}", place / "data" / "model.keras", place / trained_models.MANIFEST)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(place, Path(temporary, "model")))
        text = (folder / "MLmodel").read_text(encoding="utf-8")
        text = text.replace(model.model_id, made.model_id).replace(run.info.run_id, there)
        (folder / "MLmodel").write_text(text, encoding="utf-8")
        trained_models.write_manifest(folder)
        client.log_model_artifacts(made.model_id, str(folder))


def _copy_version(client: mlflow.MlflowClient, version: Any, there: str, model_id: str, project: str) -> str:
    """Copy a version of a model under the next free number, unless the copy exists; return NAME/VERSION."""
    tags = {**version.tags, FROM_PROJECT: project}
    made = make_version(client, model_id, there, version.name, tags)
    if made.run_id == there:  # Another run's version of the same model stays unchanged.
        for key in [key for key, text in tags.items() if made.tags.get(key) != text]:
            client.set_model_version_tag(version.name, made.version, key, tags[key])
    return f"{version.name}/{made.version}"


def sync(to: str) -> records.Sync:
    """Copy the runs of this project and their aliases to a store, and print the outcome: `stratagem runs sync`.

    Args:
        to: the address of the store, as in MLFLOW_TRACKING_URI.

    Raises:
        UserError: the project's own store cannot be read, or the other store cannot be used.
        Unavailable: the other store stopped answering. The next sync continues where this one ended.
    """
    os.environ["MLFLOW_TRACKING_URI"] = to
    open_store()
    if not (runs := entries.find_runs(*entries.PLACES)):
        return records.Sync(to=store_uri(), runs=(), notes=())
    source, done = open_source(), []
    for run in reversed(runs):  # The oldest first.
        found = find_or_none(partial(source.get_run, mlflow_run_id(run)))
        if found is not None and found.info.lifecycle_stage == "deleted":
            continue
        try:
            if found is None:
                again = "to resume or register it writes it there again"
                raise UserError(f"it is not in {relocation.own_store()}: {again}")
            if locks.is_locked(run.key):
                raise UserError("a process is using it")
            if not RunStatus.is_terminated(RunStatus.from_string(found.info.status)):
                raise UserError("it has not ended; if its process died, run `stratagem reconcile` on its machine")
            done.append(copy(run))
        except Unavailable:
            raise
        except (UserError, MlflowException) as error:  # It concerns only this run: copy the others.
            reason = network.without_secrets(" ".join(str(error).split()))
            done.append(Synced(run_id=run.run_id, name=run.name, outcome="left out", reason=reason))
        told = done[-1]
        more = f" ({told.reason})" if told.reason else ""
        print(f"run {told.run_id[:8]}, {told.name}: {told.outcome}{more}", file=sys.stderr, flush=True)
    return records.Sync(to=store_uri(), runs=tuple(done), notes=tuple(_copy_aliases(source)))


@retried
def _copy_aliases(source: mlflow.MlflowClient) -> list[str]:
    """Set the aliases of the copied versions if they are unused or point to an older version of the same project;
    return a sentence for each alias that is not moved."""
    client = open_store()
    notes = []
    for model in list(pages(source.search_registered_models)):
        there = find_versions(model.name)
        here = pages(source.search_model_versions, filter_string=f"name = '{model.name}'")
        numbers = {str(one.version): there.find(one.tags.get("model_digest", "")) for one in here}
        for alias, version in model.aliases.items():
            wanted, present = numbers.get(str(version)), there.aliases.get(alias)
            if wanted is None or present == wanted:
                continue
            # If both versions came from the same project, that project may move the alias.
            origin = there.tags(present).get(FROM_PROJECT)
            if present is not None and (not origin or origin != there.tags(wanted).get(FROM_PROJECT)):
                notes.append(
                    f"{model.name}@{alias} stays at version {present} of another project; in this project, version "
                    f"{wanted} has the alias"
                )
                continue
            client.set_registered_model_alias(model.name, alias, wanted)
            if alias == config.CHAMPION and HISTORY in model.tags:
                history = [same for one in model.tags[HISTORY].split(", ") if (same := numbers.get(one)) is not None]
                client.set_registered_model_tag(model.name, HISTORY, ", ".join(history))
    return notes
