"""Runs in MLflow: start, resume, describe and end them, also those whose process died."""

import contextlib
import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlflow
import numpy as np
from mlflow.data.schema import TensorDatasetSchema
from mlflow.entities import Dataset
from mlflow.exceptions import MlflowException
from mlflow.types.schema import Schema, TensorSpec

from tasks import config, records, runs
from tasks.system import machine
from tasks.system.errors import UserError
from tasks.tracking.metrics import read_metrics, send_missing
from tasks.tracking.outbox import (
    OUTBOX,
    Event,
    best_effort,
    create_run,
    find_created,
    is_elsewhere,
    is_twin,
    mlflow_run_id,
    present,
    text_of,
)
from tasks.tracking.store import Unavailable, is_own_store, open_store, retried, store_uri

Uses = Mapping[str, tuple[str, int]]
"""What a run trains, validates and tests on: the split of each, and how many of its examples are used."""
CONTEXTS = {"train": "training", "validation": "validation", "test": "test"}
MAX_DIGEST_LENGTH = 36  # MLflow's own.


class NewRun(NamedTuple):
    """What differs between the runs of a training, a comparison, a sweep and a trial when they start."""

    label: str
    """The run's name, without the id. The experiment has the dataset's name."""
    place: str
    """The folder of mlruns/ in which the run's folder is made."""
    key: str
    """What the process at work on it holds, see ``runs.lock``."""
    params: Mapping[str, Any]
    tags: Mapping[str, str] = {}
    parent_run_id: str | None = None


def start_run(
    settings: config.Settings,
    prepared: records.PreparedDataset,
    lineage: records.Lineage,
    flow_run_id: str | None = None,
    parent_run_id: str | None = None,
    uses: Uses | None = None,
) -> records.Run:
    """Start an MLflow run with its settings, its data and where it comes from, and its folder mlruns/runs/<run_id>.

    Args:
        settings: become the run's parameters.
        prepared: becomes the run's datasets, one for each use.
        lineage: where the run comes from.
        flow_run_id: the run of Prefect's flow.
        parent_run_id: of the comparison that the run belongs to; MLflow's pages show it under that one.
        uses: what is trained, validated and tested on; None is each split as it was prepared.

    Raises:
        UserError: see ``open_store``; or the experiment was deleted.
    """
    kind, loop = settings.strategy.kind, settings.train.loop
    params = params_of(settings)
    if parent_run_id is not None:
        # The first parameter that differs, so the one that MLflow's page for comparing runs draws first.
        params = {"comparison": f"{kind} {loop}", **params}
    label = f"{settings.model.name.replace(':', '.')}-{kind}-{loop}"
    tags = {"strategy": kind, "loop": loop}
    new = NewRun(label, "mlruns/runs", runs.key_of(settings), params, tags, parent_run_id)
    return start_new(new, settings, prepared, lineage, flow_run_id, uses)


def params_of(settings: config.Settings) -> dict[str, Any]:
    """Return the settings that MLflow gets as parameters. Empty mappings are left out: another run has entries below
    the same name, and the two runs would differ twice."""
    return {key: value for key, value in settings.flat().items() if value != {}}


def _datasets(
    settings: config.Settings, prepared: records.PreparedDataset, lineage: records.Lineage, uses: Uses | None
) -> list[dict[str, Any]]:
    """Return a run's data as MLflow's datasets, each with the context in which MLflow's pages show it.

    A dataset's digest is the data version; of a part of a split the data version's beginning, and a digest of how it is
    drawn.
    """
    features = [
        TensorSpec(np.dtype(feature.dtype), (-1, *feature.shape), name) for name, feature in prepared.features.items()
    ]
    target = prepared.target
    labels = TensorSpec(np.dtype(target.label_dtype), (-1, *target.label_shape), "label")
    schema = json.dumps(TensorDatasetSchema(Schema(features), Schema([labels])).to_dict())
    # Without DVC there is no version, and MLflow wants a digest: that of the manifest, which holds every file's sha256.
    version = lineage.data_version or hashlib.sha256(prepared.model_dump_json().encode()).hexdigest()
    drawn = hashlib.sha256(f"{settings.input.validation} {settings.train.seed}".encode()).hexdigest()[:8]
    uses = uses or {name: (name, split.num_examples) for name, split in prepared.splits.items() if name in CONTEXTS}
    found = []
    for use, context in CONTEXTS.items():
        if use in uses:
            split, count = uses[use]
            whole = count == prepared.splits[split].num_examples
            dataset = Dataset(
                # MLflow takes two inputs of one name and digest for one.
                name=f"{prepared.name}/{use}",
                digest=version[:MAX_DIGEST_LENGTH] if whole else f"{version[: MAX_DIGEST_LENGTH - 9]}-{drawn}",
                source_type="local",
                source=json.dumps({"uri": prepared.folder, "split": split}),
                schema=schema,
                profile=json.dumps({"num_examples": count, "num_outputs": target.num_outputs}),
            )
            found.append({"dataset": dataset.to_dictionary(), "context": context})
    return found


def start_new(
    new: NewRun,
    settings: config.Settings,
    prepared: records.PreparedDataset,
    lineage: records.Lineage,
    flow_run_id: str | None,
    uses: Uses | None,
) -> records.Run:
    """Start an MLflow run and make its folder; see ``start_run``."""
    experiment = settings.tracking.experiment or settings.dataset.name
    datasets = _datasets(settings, prepared, lineage, uses)
    creation_id, project, start_time = uuid.uuid4().hex, runs.project_id(), int(time.time() * 1000)
    tags = {
        "dataset": prepared.name,
        **_tags_of(lineage),
        "flow_run_id": flow_run_id,
        "held_by": f"{project}:{new.key}",
        "creation_id": creation_id,
        "dvc_experiment": os.environ.get("DVC_EXP_NAME"),
        **new.tags,
        "mlflow.parentRunId": new.parent_run_id,
    }
    creation: Event = {"experiment": experiment, "start_time": start_time, "tags": present(tags)}
    try:
        run_id, created = create_run(creation), True
    except (Unavailable, MlflowException) as error:
        if is_own_store():
            raise
        # MLflow makes the run later, under an id of its own, with this one as a tag.
        run_id, created = uuid.uuid4().hex, False
        OUTBOX.warn(run_id, error)
    # The id's first letters tell runs of one name apart, and show the folder of a line in a chart's legend.
    run = records.Run(
        run_id=run_id,
        experiment=experiment,
        name=f"{new.label}-{run_id[:6]}",
        folder=f"{new.place}/{run_id}",
        lineage=lineage,
        settings=settings.to_json(),
        flow_run_id=flow_run_id,
        parent_run_id=new.parent_run_id,
        number=runs.next_number(),
        start_time=start_time,
        key=new.key,
        host=socket.gethostname(),
        boot=runs.boot_id(),
        project=project,
        store=runs.store_name(),
        environment=machine.surroundings(),
        creation_id=creation_id,
    )
    # If one of these fails, the next start ends the run in MLflow.
    runs.set_status(run, "RUNNING")
    records.save(run, _run_file(run))
    told: list[Event] = [] if created else [{"create": creation}]
    texts = {key: text_of(value) for key, value in new.params.items()}
    OUTBOX.deliver(run, *told, {"name": run.name}, {"params": texts}, {"inputs": datasets})
    return run


def _tags_of(lineage: records.Lineage) -> dict[str, str | None]:
    """Return the tags that say where a run comes from."""
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
    """Set a run to RUNNING again, and return it as it is from now on.

    Args:
        settings: from now on.
        lineage: from now on.
        flow_run_id: the run of Prefect's flow, from now on.
        key: what the process at work on it holds, where that is not the settings' own.

    Raises:
        UserError: see ``open_store``.
    """
    with contextlib.suppress(Unavailable):
        try:
            deleted = open_store().get_run(mlflow_run_id(run)).info.lifecycle_stage == "deleted"
        except MlflowException as error:
            # A run that was started while the server did not answer is created when its events are delivered.
            deleted = error.error_code == "RESOURCE_DOES_NOT_EXIST" and not OUTBOX.has_unsent(run)
            if deleted and run.project != runs.project_id() and not run.store and not runs.store_name():
                _create_again(run)  # It was brought here from another machine, whose own store had it.
                deleted = False
        if deleted:
            raise UserError(
                f"the run '{run.run_id}' cannot be resumed: it is no longer in {store_uri()}. Bring it back with "
                f"`mlflow runs restore --run-id {run.run_id}`, or start a new one with --fresh"
            )
    before, now = config.flat(run.settings), settings.flat()
    changes = {
        f"changed.{name}": f"{text_of(before.get(name))} -> {text_of(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    }
    key, project, environment = key or runs.key_of(settings), runs.project_id(), machine.surroundings()
    now_of = {
        "settings": settings.to_json(),
        "lineage": lineage,
        "key": key,
        "host": socket.gethostname(),
        "boot": runs.boot_id(),
        "project": project,
        "number": runs.next_number(),
        "flow_run_id": flow_run_id,
        "environment": environment,
        "changed": runs.what_changed(run, settings, lineage, environment),
    }
    runs.forget_what_changed(run, settings, lineage)  # Before the run says that it is another one.
    run = run.model_copy(update=now_of)
    records.save(run, _run_file(run))
    runs.set_status(run, "RUNNING")
    tags = present({"held_by": f"{project}:{key}", "flow_run_id": flow_run_id, **changes})
    OUTBOX.deliver(run, {"status": "RUNNING"}, {"tags": tags}, {"no_tag": "reason"})
    return run


def _create_again(run: records.Run) -> None:
    """Create a run in MLflow from its folder: settings, lineage and all metrics so far."""
    of_run = {"strategy": run.settings["strategy"]["kind"], "loop": run.settings["train"]["loop"]}
    tags = {
        "dataset": run.settings["dataset"]["name"],
        **_tags_of(run.lineage),
        **of_run,
        "creation_id": run.creation_id,
    }
    creation: Event = {"experiment": run.experiment, "start_time": run.start_time, "tags": present(tags)}
    params = {key: text_of(value) for key, value in config.flat(run.settings).items() if value != {}}
    told: list[Event] = [{"create": creation}, {"name": run.name}, {"params": params}]
    OUTBOX.deliver(run, *told, {"metrics": read_metrics(run)})


def end_run(run: records.Run, status: Literal["FINISHED", "FAILED", "KILLED"], reason: str | None = None) -> None:
    """End a run. The reason of a failure becomes a tag."""
    with best_effort():
        runs.set_status(run, status, reason)
    OUTBOX.retry_now()  # It may be back, and this is the last chance of this process.
    OUTBOX.deliver(
        run,
        *([{"tags": {"reason": reason}}] if reason is not None else []),
        {"status": status, "end_time": int(time.time() * 1000)},
    )


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
        shared = bool(run.store) and run.project != project
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
        # A request made it of which the reply was lost: it holds nothing.
        client.set_tag(run_id, "reason", f"a twin of run {original.run_id}: the reply to its creation was lost")
        client.set_terminated(run_id, "KILLED")
        client.delete_run(run_id)
        return None
    # The last request may still be on its way.
    owner, _, held_key = tags.get("held_by", "").rpartition(":")
    key = run_of.key if run_of is not None else held_key
    at_work = local_id == except_run_id or (key != own_key and runs.is_locked(key))
    if owner != runs.project_id() or at_work:
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
    for other in find_created(client, experiment_id, creation_id) if creation_id else []:
        if other != run_id:
            run = runs.look_up(client.get_run(other).data.tags.get("local_run_id", other))
            if run is not None and run.creation_id == creation_id:
                return run
    return None


def set_tags(run: records.Run, tags: Mapping[str, str]) -> None:
    """Add short texts to a run, such as where its checkpoint lies."""
    OUTBOX.deliver(run, {"tags": dict(tags)})


def log_files(run: records.Run, paths: Iterable[str | Path], folder: str) -> None:
    """Copy files, named from the project's folder, into a folder of the run's artifacts."""
    root = config.project_root()
    OUTBOX.deliver(run, *({"file": str((root / path).relative_to(root)), "folder": folder} for path in paths))


def log_reproduction(run_id: str) -> None:
    """Tag a run in MLflow with the run that it reproduces, the outcome, and the commit."""
    run = runs.find_run(run_id)
    path = config.project_root() / run.folder / "records" / "reproduction.json"
    done = records.load(records.Reproduction, path)
    said = {"reproduces": done.run_id, "reproduction": done.reason}
    set_tags(run, {**said, **present(_tags_of(run.lineage))})
    log_files(run, [path], "source")


def _run_file(run: records.Run) -> Path:
    return config.project_root() / run.folder / "records" / "run.json"
