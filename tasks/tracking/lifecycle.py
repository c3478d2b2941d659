"""Starts, resumes and ends runs in MLflow, including those whose process died."""

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

import mlflow
import numpy as np
from mlflow.data.schema import TensorDatasetSchema
from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.types.schema import Schema, TensorSpec

from tasks import config, records
from tasks.runs import entries, locks, outcome, resume
from tasks.system import machine
from tasks.system.errors import UserError
from tasks.tracking import copier
from tasks.tracking.metrics import IN_FLIGHT, log_metrics, read_metrics
from tasks.tracking.registry import RUN_ID
from tasks.tracking.store import (
    SQLITE,
    find_experiment,
    find_or_none,
    is_own_store,
    open_own_store,
    open_store,
    own_uri,
    retried,
    store_uri,
)
from tasks.tracking.writing import (
    best_effort,
    log_files,
    log_params,
    log_points,
    mark_uncopied,
    mlflow_run_id,
    present,
    set_tags,
    write,
)

Uses = Mapping[str, tuple[str, int]]
"""For training, validation and test: the split, and how many of its examples are used."""
CONTEXTS = {"train": "training", "validation": "validation", "test": "test"}
MAX_DIGEST_LENGTH = 36  # MLflow's own.


class NewRun(NamedTuple):
    """The values that differ between a new training, comparison, sweep and trial."""

    label: str
    """The run's name, without the id. The experiment has the dataset's name."""
    place: str
    """The parent of the run's folder."""
    key: str
    """The key that the run's process holds, see ``locks.lock``."""
    params: Mapping[str, Any]
    tags: Mapping[str, str] = {}
    parent_run_id: str | None = None
    """MLflow's UI shows the run below its parent."""


def training(settings: config.Settings, parent_run_id: str | None = None) -> NewRun:
    """Return the MLflow run of a training, which may be part of a comparison."""
    kind, loop = settings.strategy.kind, settings.train.loop
    params = params_of(settings.to_json())
    if parent_run_id is not None:
        # The first differing parameter is the first axis in MLflow's page for comparing runs.
        params = {"comparison": f"{kind} {loop}", **params}
    label = f"{settings.model.name.replace(':', '.')}-{kind}-{loop}"
    return NewRun(label, "mlruns/runs", locks.key_of(settings), params, {"strategy": kind, "loop": loop}, parent_run_id)


def params_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings to log as MLflow parameters, without empty mappings: compared with a run that has entries
    under the same name, they would be a second difference."""
    return {key: value for key, value in config.flat(settings).items() if value != {}}


def parent(label: str, place: str, key: str, settings: config.Settings, own: Sequence[str], **tags: str) -> NewRun:
    """Return the parent run of a comparison or a sweep, with the parameters that its runs share.

    Args:
        label, place, key, tags: see ``NewRun``.
        settings: the settings of any of those runs.
        own: the settings that differ between those runs, with those below them.
    """
    below = tuple(f"{one}." for one in own)
    params = params_of(settings.to_json())
    params = {name: value for name, value in params.items() if name not in own and not name.startswith(below)}
    return NewRun(label, place, key, params, tags)


def trial(settings: config.Settings, parent: records.Run, number: int) -> NewRun:
    """Return the MLflow run of a trial, a child of its sweep's run."""
    tags = {"strategy": settings.strategy.kind, "loop": settings.train.loop, "trial": str(number)}
    params = {"comparison": f"trial {number}", **params_of(settings.to_json())}  # As in ``training``.
    return NewRun(f"trial-{number}", "mlruns/runs", f"{parent.key}-{number}", params, tags, parent.run_id)


def _datasets(
    settings: config.Settings, prepared: records.PreparedDataset, lineage: records.Lineage, uses: Uses | None
) -> list[DatasetInput]:
    """Return a run's data as MLflow datasets, each with the context that MLflow's UI shows.

    The digest of a dataset is the data version; for a part of a split, it is the start of the data version and a digest
    of the sampling.
    """
    features = [
        TensorSpec(np.dtype(feature.dtype), (-1, *feature.shape), name) for name, feature in prepared.features.items()
    ]
    target = prepared.target
    labels = TensorSpec(np.dtype(target.label_dtype), (-1, *target.label_shape), "label")
    schema = json.dumps(TensorDatasetSchema(Schema(features), Schema([labels])).to_dict())
    # MLflow requires a digest; without DVC, use that of the manifest, which has every file's sha256.
    version = lineage.data_version or hashlib.sha256(prepared.model_dump_json().encode()).hexdigest()
    drawn = hashlib.sha256(f"{settings.input.validation} {settings.train.seed}".encode()).hexdigest()[:8]
    uses = uses or {name: (name, split.num_examples) for name, split in prepared.splits.items() if name in CONTEXTS}
    found = []
    for use, context in CONTEXTS.items():
        if use in uses:
            split, count = uses[use]
            whole = count == prepared.splits[split].num_examples
            dataset = Dataset(
                # MLflow treats two inputs with the same name and digest as one input.
                name=f"{prepared.name}/{use}",
                digest=version[:MAX_DIGEST_LENGTH] if whole else f"{version[: MAX_DIGEST_LENGTH - 9]}-{drawn}",
                source_type="local",
                source=json.dumps({"uri": prepared.folder, "split": split}),
                schema=schema,
                profile=json.dumps({"num_examples": count, "num_outputs": target.num_outputs}),
            )
            found.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
    return found


def start_run(
    settings: config.Settings,
    prepared: records.PreparedDataset,
    lineage: records.Lineage,
    flow_run_id: str | None = None,
    uses: Uses | None = None,
    new: NewRun | None = None,
) -> records.Run:
    """Start an MLflow run with its settings, data and lineage, and create its folder.

    Args:
        settings: the run's settings.
        prepared: the data, logged as one dataset for each use.
        lineage: the run's lineage.
        flow_run_id: the id of the Prefect flow run.
        uses: the examples for training, validation and test; None uses each split as prepared.
        new: the kind of run; None is a training without a parent.

    Raises:
        UserError: see ``open_store``; or the experiment was deleted.
    """
    new = new or training(settings)
    experiment = settings.tracking.experiment or settings.dataset.name
    datasets = _datasets(settings, prepared, lineage, uses)
    project, start_time = locks.project_id(), int(time.time() * 1000)
    tags = {
        "dataset": prepared.name,
        **_tags_of(lineage),
        "flow_run_id": flow_run_id,
        "held_by": f"{project}:{new.key}",
        "dvc_experiment": os.environ.get("DVC_EXP_NAME"),
        **new.tags,
        "mlflow.parentRunId": new.parent_run_id,
    }
    if not is_own_store() and ("#" in store_uri() or not store_uri().startswith("http")):
        open_store()  # Refuses an address that MLflow cannot use; a server may start later.
    run_id = _create_run(experiment, start_time, present(tags))
    # With the id first, runs differ even where a UI truncates names, and a chart's legend leads to the folder.
    run = records.Run(
        run_id=run_id,
        experiment=experiment,
        name=f"{run_id[:6]}-{new.label}",
        folder=f"{new.place}/{run_id}",
        lineage=lineage,
        settings=settings.to_json(),
        flow_run_id=flow_run_id,
        parent_run_id=new.parent_run_id,
        start_time=start_time,
        key=new.key,
        store=locks.store_name(),
        **_led_from_here(),
    )
    # If one of these fails, the next start ends the run in MLflow.
    outcome.set_status(run, "RUNNING")
    outcome.save(run, run)
    write(run, lambda client, run_id: client.update_run(run_id, name=run.name))
    log_params(run, {key: config.written(value) for key, value in new.params.items()})
    write(run, lambda client, run_id: client.log_inputs(run_id, datasets))
    return run


def _led_from_here() -> dict[str, Any]:
    """Return the fields of a run's record that describe the process that starts or resumes it."""
    return {
        "number": entries.next_number(),
        "host": socket.gethostname(),
        "boot": locks.boot_id(),
        "project": locks.project_id(),
        "environment": machine.surroundings(),
    }


@retried
def _create_run(experiment: str, start_time: int, tags: Mapping[str, str]) -> str:
    client = open_own_store()
    created: str = client.create_run(find_experiment(client, experiment, own_uri()), start_time, tags).info.run_id
    return created


def _tags_of(lineage: records.Lineage) -> dict[str, str | None]:
    return {
        "data_version": lineage.data_version,
        "code_digest": lineage.code_digest,
        "stratagem_version": lineage.package_version,
        "settings_digest": lineage.settings_digest,
        "git_dirty": None if lineage.git_dirty is None else str(lineage.git_dirty).lower(),
        "mlflow.source.git.commit": lineage.git_commit,
        "mlflow.source.name": "stratagem",
        "mlflow.source.type": "LOCAL",
    }


def resume_run(
    run: records.Run,
    settings: config.Settings,
    lineage: records.Lineage,
    flow_run_id: str | None = None,
    key: str | None = None,
) -> records.Run:
    """Set a run to RUNNING again, and return its new record.

    Args:
        run: the run to resume.
        settings: the new settings.
        lineage: the new lineage.
        flow_run_id: the id of the new Prefect flow run.
        key: the key that the run's process holds; None is the key of the settings.

    Raises:
        UserError: see ``open_store``.
    """
    if find_or_create(run).info.lifecycle_stage == "deleted":
        raise UserError(
            f"the run '{run.run_id}' cannot be resumed: it was deleted in {own_uri()}. Restore it with "
            f"`mlflow runs restore --run-id {run.run_id}`, or start a new one with --fresh"
        )
    changes = {
        f"changed.{one.key}": f"{config.written(one.before)} -> {config.written(one.now)}"
        for one in resume.differences(run, settings)
    }
    key, here = key or locks.key_of(settings), _led_from_here()
    changed = resume.what_changed(run, settings, lineage, here["environment"])
    now = {"settings": settings.to_json(), "lineage": lineage, "key": key, "flow_run_id": flow_run_id}
    resume.forget_what_changed(run, settings, lineage)  # Before the new record, which hides the changes.
    run = run.model_copy(update={**now, **here, "changed": changed})
    outcome.save(run, run)
    outcome.set_status(run, "RUNNING")
    tags = present({"held_by": f"{run.project}:{key}", "flow_run_id": flow_run_id, **changes})
    write(run, lambda client, run_id: client.update_run(run_id, status="RUNNING"))
    set_tags(run, tags)
    write(run, lambda client, run_id: find_or_none(lambda: client.delete_tag(run_id, "reason")))
    return run


def find_or_create(run: records.Run) -> Any:
    """Return MLflow's run in the own store. If it is not there, because the store was replaced or another machine
    started the run, create it from the run's folder, with its settings, lineage and all metrics so far.

    Raises:
        UserError: the run is in another store.
    """
    client = open_own_store()
    if (found := find_or_none(lambda: client.get_run(mlflow_run_id(run)))) is not None:
        return found
    before, now = (one if one.startswith(SQLITE) else "" for one in (run.store, locks.store_name()))
    if before != now and run.project == locks.project_id():
        store = f"MLFLOW_TRACKING_URI = {before}: set it" if before else "its project's own store: unset it"
        raise UserError(f"run {run.run_id} is not in {own_uri()}. It was started with {store}")
    of_run = {"dataset": run.dataset, "strategy": run.strategy, "loop": run.loop, RUN_ID: run.run_id}
    tags = {**_tags_of(run.lineage), **of_run}
    run_id = _create_run(run.experiment, run.start_time, present(tags))
    (config.project_root() / run.folder / "mlflow_run_id").write_text(run_id, encoding="utf-8")
    write(run, lambda client, run_id: client.update_run(run_id, name=run.name))
    log_params(run, {key: config.written(value) for key, value in params_of(run.settings).items()})
    log_points(run, read_metrics(run))
    if (evaluated := outcome.load_readable(run, records.EvaluationResult)) is not None:
        log_metrics(run, evaluated.metrics)
    if (ended := outcome.status(run)).status != "RUNNING":
        client.set_terminated(run_id, ended.status, int(datetime.fromisoformat(ended.at).timestamp() * 1000))
    return client.get_run(run_id)


def end_run(run: records.Run, status: Literal["FINISHED", "FAILED", "KILLED"], reason: str | None = None) -> None:
    """End a run, and copy it to the server of MLFLOW_TRACKING_URI. The reason for a failure becomes a tag."""
    _end(run, status, reason)
    if copier.copy_run(run, whole=True) is not None:
        copier.copy_pending(run.run_id)


def _end(run: records.Run, status: str, reason: str | None) -> None:
    with best_effort():
        outcome.set_status(run, status, reason)
    if reason is not None:
        set_tags(run, {"reason": reason})
    end_time = int(time.time() * 1000)
    write(run, lambda client, run_id: client.set_terminated(run_id, status, end_time))


@retried
def end_crashed(own_key: str = "", except_run_id: str | None = None) -> list[records.Ended]:
    """End the runs of this host whose process died, with the status in their folder or as KILLED.

    Args:
        own_key: a key that the caller holds, so that no other process works under it.
        except_run_id: the id of the caller's current run with this key.

    Raises:
        UserError: see ``open_store``; the statuses in the folders are already updated then.
    """
    _mark_killed(own_key, except_run_id)
    client = open_own_store()
    wanted = "attributes.status = 'RUNNING' AND tags.`mlflow.source.name` = 'stratagem'"
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    running = client.search_runs(experiments, wanted, max_results=1000) if experiments else []
    return [end for found in running if (end := _end_running(client, found, own_key)) is not None]


def _mark_killed(own_key: str, except_run_id: str | None) -> None:
    """Set the status of runs whose process died, but whose folder says RUNNING."""
    for run in filter(outcome.is_running, entries.find_runs(*entries.PLACES)):
        if run.run_id == except_run_id or not (run.key == own_key or locks.is_abandoned(run)):
            continue
        with best_effort():  # Another user's unwritable run must not end this one.
            if _is_of_original(run):
                why = "it was started in another folder, and this folder is a copy of it"
            else:
                why = outcome.status(run).reason or _died()
                log_points(run, read_metrics(run)[-IN_FLIGHT:])
            outcome.set_status(run, "KILLED", why)


def _is_of_original(run: records.Run) -> bool:
    """Return whether a run in a copy of a project belongs to the original project, which may still be training it in a
    store that both use."""
    return bool(run.store) and run.project != locks.project_id()


def _end_running(client: mlflow.MlflowClient, found: Any, own_key: str) -> records.Ended | None:
    """End a run that is RUNNING in MLflow, with the status in its folder, or as KILLED if its process died before it
    created the folder."""
    tags, run_id = found.data.tags, found.info.run_id
    local_id = tags.get(RUN_ID, run_id)
    status: str = "KILLED"
    reason: str | None = _died()
    if (run := entries.look_up(local_id)) is not None:
        recorded = outcome.status(run)
        if mlflow_run_id(run) != run_id or _is_of_original(run) or recorded.status == "RUNNING":
            return None  # It is a copy by `runs sync`, or a process is using it.
        status, reason = recorded.status, recorded.reason
        mark_uncopied(run)
    else:
        owner, _, key = tags.get("held_by", "").rpartition(":")
        if owner != locks.project_id() or local_id != run_id or (key != own_key and locks.is_locked(key)):
            return None
    if reason is not None:
        client.set_tag(run_id, "reason", reason)
    client.set_terminated(run_id, status)
    return records.Ended(what=f"MLflow run {local_id}", status=status, reason=reason or "")


def _died() -> str:
    return f"its process on {socket.gethostname()} died"


def reconcile() -> list[records.Ended]:
    """End the runs whose process died, and copy what the server of MLFLOW_TRACKING_URI lacks."""
    ended = end_crashed()
    copier.copy_pending()
    return ended


def log_reproduction(run_id: str) -> None:
    """Tag a run in MLflow with the run that it reproduces, the outcome and the commit."""
    run = entries.find_run(run_id)
    path = outcome.file_of(run, records.Reproduction)
    done = records.load(records.Reproduction, path)
    said = {"reproduces": done.run_id, "reproduction": done.reason}
    set_tags(run, {**said, **present(_tags_of(run.lineage))})
    log_files(run, [path], "source")
    copier.copy_run(run, whole=True)
