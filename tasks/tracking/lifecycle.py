"""Runs in MLflow: started, resumed, described, ended."""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mlflow.exceptions import MlflowException

from tasks import config, records, runs
from tasks.system import machine
from tasks.system.errors import UserError
from tasks.tracking.metrics import read_metrics
from tasks.tracking.outbox import (
    OUTBOX,
    Event,
    best_effort,
    create_run,
    mlflow_run_id,
    present,
    text_of,
)
from tasks.tracking.store import Unavailable, datasets_of, is_own_store, open_store, store_uri

Uses = Mapping[str, tuple[str, int]]
"""What a run trains, validates and tests on: the split of each, and how many of its examples are used."""
CONTEXTS = {"train": "training", "validation": "validation", "test": "test"}


class NewRun(NamedTuple):
    """What a training's run, a comparison's, a sweep's and a trial's have of their own when they start."""

    label: str
    """Its name, without the id. The experiment has the dataset's."""
    place: str
    """Where its folder is made."""
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
    """Return the settings that MLflow is told. An empty mapping is none: a run that has something in it has that under
    other names, and the two would differ twice."""
    return {key: value for key, value in settings.flat().items() if value != {}}


def _datasets(
    settings: config.Settings, prepared: records.PreparedDataset, lineage: records.Lineage, uses: Uses | None
) -> list[dict[str, Any]]:
    """Return what MLflow is told of a run's data, with the context in which its pages show each."""
    whole = {name: (name, split.num_examples) for name, split in prepared.splits.items() if name in CONTEXTS}
    found = datasets_of(settings, prepared, lineage, uses or whole)
    order = sorted(found, key=list(CONTEXTS).index)
    return [{"dataset": found[use].to_dictionary(), "context": CONTEXTS[use]} for use in order]


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
    run_id, created = _create(creation)
    run: records.Run | None = None
    try:
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
        runs.set_status(run, "RUNNING")
        records.save(run, _run_file(run))
        told: list[Event] = [] if created else [{"create": creation}]
        texts = {key: text_of(value) for key, value in new.params.items()}
        OUTBOX.deliver(run, *told, {"name": run.name}, {"params": texts}, {"inputs": datasets})
    except BaseException as error:
        status = "FAILED" if isinstance(error, Exception) else "KILLED"
        if run is not None:
            with best_effort():
                runs.set_status(run, status, str(error) or type(error).__name__)
        if created:
            open_store().set_terminated(run_id, status)
        raise
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


def _create(creation: Event) -> tuple[str, bool]:
    """Return the id of a new run, and whether MLflow has made it: a server that does not answer makes it later, under
    another id, with this one as a tag."""
    try:
        return create_run(creation), True
    except (Unavailable, MlflowException) as error:
        if is_own_store():
            raise
        run_id = uuid.uuid4().hex
        OUTBOX.warn(run_id, error)
        return run_id, False


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
    if is_lost(run):
        _create_again(run)
    with contextlib.suppress(Unavailable):
        try:
            deleted = open_store().get_run(mlflow_run_id(run)).info.lifecycle_stage == "deleted"
        except MlflowException as error:
            # Unless it was started while the server did not answer.
            deleted = error.error_code == "RESOURCE_DOES_NOT_EXIST" and not OUTBOX.has_unsent(run)
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


def is_lost(run: records.Run) -> bool:
    """Return whether a run was brought here from another machine whose own MLflow store had it."""
    return bool(
        run.project != runs.project_id()
        and not run.store
        and not runs.store_name()
        and not OUTBOX.has_unsent(run)
        and _is_unknown(run)
    )


def _is_unknown(run: records.Run) -> bool:
    with contextlib.suppress(Unavailable):
        try:
            open_store().get_run(mlflow_run_id(run))
        except MlflowException as error:
            return bool(error.error_code == "RESOURCE_DOES_NOT_EXIST")
    return False


def _create_again(run: records.Run) -> None:
    """Let MLflow have a run as its folder has it: settings, where it comes from, and all its metrics so far."""
    creation_id = run.creation_id or run.run_id
    of_run = {"strategy": run.settings["strategy"]["kind"], "loop": run.settings["train"]["loop"]}
    tags = {"dataset": run.settings["dataset"]["name"], **_tags_of(run.lineage), **of_run, "creation_id": creation_id}
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
        *([] if is_own_store() else [{"twins": run.creation_id}]),
    )


def set_tags(run: records.Run, tags: Mapping[str, str]) -> None:
    """Add short texts to a run, such as where its checkpoint lies."""
    OUTBOX.deliver(run, {"tags": dict(tags)})


def log_files(run: records.Run, paths: Iterable[str | Path], folder: str) -> None:
    """Copy files, named from the project's folder, into a folder of the run's artifacts."""
    root = config.project_root()
    OUTBOX.deliver(run, *({"file": str((root / path).relative_to(root)), "folder": folder} for path in paths))


def log_reproduction(run_id: str) -> None:
    """Tell MLflow which run another one was trained to reproduce, and what came of it; of which commit it is, too."""
    run = runs.find(run_id)
    path = config.project_root() / run.folder / "records" / "reproduction.json"
    done = records.load(records.Reproduction, path)
    said = {"reproduces": done.run_id, "reproduction": done.reason}
    set_tags(run, {**said, **present(_tags_of(run.lineage))})
    log_files(run, [path], "source")


def _run_file(run: records.Run) -> Path:
    return config.project_root() / run.folder / "records" / "run.json"
