"""Runs of another store, brought to the one that MLFLOW_TRACKING_URI names: parameters, metrics, tags, files, data,
models, versions.

A run has its id of before as the tag ``local_run_id``, by which it is found again: what is there is not made twice, and
what an interrupted sync left half done is done. The tag ``sync_digest`` comes last; it says what the run looked like.
"""

import contextlib
import hashlib
import json
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlflow
from filelock import FileLock, Timeout
from mlflow.entities import LoggedModelStatus, Metric, Param, RunStatus, RunTag, ViewType
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from tasks import config, records, runs
from tasks.records import Synced
from tasks.system import network
from tasks.system.errors import UserError
from tasks.tracking.copied_models import (
    SourceStore,
    copy_aliases,
    copy_model,
    copy_version,
    known_versions,
    model_of,
)
from tasks.tracking.outbox import MAX_METRICS_PER_BATCH, MAX_PARAMS_PER_BATCH, OUTBOX, batches
from tasks.tracking.store import (
    SQLITE,
    Unavailable,
    find_experiment,
    open_store,
    pages,
    retried,
    store_uri,
)

R = TypeVar("R", bound=Any)

LOCAL_ID, DIGEST = "local_run_id", "sync_digest"
# Of the copy alone; and what the other store says by itself.
OWN_TAGS = (LOCAL_ID, DIGEST, "mlflow.runName")
OURS = "tags.`mlflow.source.name` = 'stratagem'"


def sync(folder: Path | None) -> records.Sync:
    """Bring the runs of a store to the one that MLFLOW_TRACKING_URI names, and say what became of each.

    Args:
        folder: the mlruns/ of another machine, or the project that holds it; None is this project's own, with what it
            could not tell a server.

    Raises:
        UserError: it holds no store, or one that cannot be read; or the other store cannot be used.
        Unavailable: the other store stopped answering. What was brought is there; the next sync goes on.
    """
    own = config.project_root() / "mlruns"
    place = own if folder is None else _mlruns(folder)
    done: list[Synced] = []
    notes: list[str] = []
    open_store()
    with _alone(place):
        if folder is None:
            done += map(_tell, _deliver_kept())
        if (place / "mlflow.db").exists():
            source = _open(place, is_own=place.resolve() == own.resolve())
            done += _copy_runs(source)
            notes = copy_aliases(source)
    return records.Sync(to=store_uri(), runs=tuple(done), notes=tuple(notes))


def _mlruns(folder: Path) -> Path:
    for place in (folder, folder / "mlruns"):
        if (place / "mlflow.db").is_file():
            return place.resolve()
    raise UserError(
        f"--from {folder}: there is no mlflow.db in it. Give the mlruns/ of the other machine, copied whole: rsync -a "
        "HOST:PROJECT/mlruns/ FOLDER/"
    )


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Let no other process deliver from a folder within the block: two would make each run twice."""
    lock = FileLock(place / ".sync.lock", timeout=1)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"another sync delivers {lock.lock_file} now: wait for its end") from None
    except OSError as error:
        raise UserError(f"{lock.lock_file} cannot be written ({error.strerror}): copy the folder") from None
    try:
        yield
    finally:
        lock.release()


def _open(place: Path, is_own: bool) -> SourceStore:
    path = place / "mlflow.db"
    uri = f"{SQLITE}{path}"
    to = store_uri()
    if to.startswith(SQLITE) and Path(to.removeprefix(SQLITE)).resolve() == path.resolve():
        raise UserError(f"{uri} is where these runs are already: give another store")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=20)) as connection:
            (whole,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if whole != "ok":
            raise sqlite3.DatabaseError(whole)
        return SourceStore(mlflow.MlflowClient(uri, registry_uri=uri), place, is_own)
    except (sqlite3.Error, MlflowException, SQLAlchemyError) as error:
        raise UserError(
            f"{path} cannot be read ({' '.join(str(error).split())}). A store that was copied while a run wrote to it "
            "is torn: copy it again when none does; one of an older MLflow needs `mlflow db upgrade` on its machine"
        ) from None


def _tell(synced: Synced) -> Synced:
    """Say on standard error what became of a run, as it becomes."""
    more = f" ({synced.reason})" if synced.reason else ""
    print(f"run {synced.run_id[:8]}, {synced.name}: {synced.outcome}{more}", file=sys.stderr, flush=True)
    return synced


# What a server could not be told.


def _deliver_kept() -> Iterator[Synced]:
    """Deliver the runs of which a server knows nothing, or not all, because it did not answer."""
    found = [run for run_id in runs.undelivered() if (run := runs.look_up(run_id)) is not None and run.store]
    for run in _parents_first(found, {run.run_id: run.parent_run_id for run in found}):
        there = runs.store_name()
        known: dict[str, Any] = {"run_id": run.run_id, "name": run.name}
        if runs.is_locked(run.key):
            yield Synced(**known, outcome="left out", reason="a process is at work on it")
            continue
        if run.store != there and not _knows_nothing(run):
            why = f"{run.store} knows a part of it already: give --to {run.store}"
            yield Synced(**known, outcome="left out", reason=why)
            continue
        if run.store != there:
            run = run.model_copy(update={"store": there})
            records.save(run, config.project_root() / run.folder / "records" / "run.json")
        OUTBOX.retry_now()
        OUTBOX.flush(run)
        if OUTBOX.has_unsent(run):
            yield Synced(**known, outcome="left out", reason="the store did not take all of it: give the command again")
        else:
            reason = None
            folder = config.project_root() / run.folder
            if run.folder.startswith("mlruns/runs/") and not (folder / "records" / "registration.json").exists():
                reason = f"its model is no version yet: stratagem register --run {run.run_id[:8]}"
            yield Synced(**known, outcome="delivered", reason=reason)


def _knows_nothing(run: records.Run) -> bool:
    """Return whether a run's store was never told of it: the first that is kept is its creation."""
    lines = (config.project_root() / run.folder / "unsent.jsonl").read_text(encoding="utf-8").splitlines()
    try:
        return bool(lines) and "create" in json.loads(lines[0])
    except ValueError:
        return False


def _parents_first(found: Sequence[R], parents: Mapping[str, str | None]) -> list[R]:
    """Return runs, in their order otherwise, so that each comes after the comparison or sweep that it names.

    Args:
        found: the runs, of MLflow or of here.
        parents: the id of the run above, by the id of each.
    """

    def depth(run: R) -> int:
        above: list[str] = []
        name: str | None = run.run_id if isinstance(run, records.Run) else run.info.run_id
        while (name := parents.get(name or "")) is not None and name not in above:  # A tag may say anything.
            above.append(name)
        return len(above)

    return sorted(found, key=depth)


# Runs.


def _copy_runs(source: SourceStore) -> list[Synced]:
    experiments = list(pages(source.client.search_experiments))
    names = {experiment.experiment_id: experiment.name for experiment in experiments}
    found = list(pages(source.client.search_runs, list(names), OURS)) if names else []
    found.sort(key=lambda run: run.info.start_time)
    parents = {run.info.run_id: run.data.tags.get("mlflow.parentRunId") for run in found}
    done = []
    for run in _parents_first(found, parents):
        known = _named(run)
        if (reason := _why_not(source, run)) is not None:
            done.append(_tell(Synced(**known, outcome="left out", reason=reason)))
            continue
        try:
            done.append(_tell(_copy_run(source, run, names[run.info.experiment_id])))
        except Unavailable:
            raise
        except (UserError, MlflowException) as error:  # Of this run alone: the others are brought all the same.
            why = network.without_secrets(" ".join(str(error).split()))
            done.append(_tell(Synced(**known, outcome="left out", reason=why)))
    return done


def _why_not(source: SourceStore, run: Any) -> str | None:
    local = runs.look_up(run.data.tags.get(LOCAL_ID, run.info.run_id)) if source.is_own else None
    if local is not None and runs.is_locked(local.key):
        return "a process is at work on it"
    if not RunStatus.is_terminated(RunStatus.from_string(run.info.status)):
        return "it has not ended; if its process died, `stratagem reconcile` on its machine ends it"
    if local is not None and OUTBOX.has_unsent(local):
        return "its own store does not know all of it: `stratagem reconcile`, then sync again"
    return None


class _Seen(NamedTuple):
    """What a store has of a run beside what the run says."""

    models: list[Any]
    versions: list[Any]
    digest: str


def _see(source: SourceStore, run: Any) -> _Seen:
    run_id = run.info.run_id
    models = list(pages(source.client.search_logged_models, [run.info.experiment_id], f"source_run_id = '{run_id}'"))
    models = [one for one in models if one.status == LoggedModelStatus.READY]
    versions = list(pages(source.client.search_model_versions, filter_string=f"run_id = '{run_id}'"))
    return _Seen(models, versions, _digest(source, run, models, versions))


def _judge(client: mlflow.MlflowClient, experiment_id: str, run: Any, digest: str) -> tuple[Any, Synced]:
    """Return the copy of a run, None where there is none, and what is to become of it."""
    found = client.search_runs([experiment_id], f"tags.{LOCAL_ID} = '{run.info.run_id}'", ViewType.ALL)
    if not found:
        return None, Synced(**_named(run), outcome="delivered")
    copy, there = found[0], found[0].info.run_id
    if copy.info.lifecycle_stage == "deleted":
        why = f"it was deleted there: mlflow runs restore --run-id {there}"
        return copy, Synced(**_named(run), outcome="left out", there=there, reason=why)
    if copy.data.tags.get(DIGEST) == digest:
        made = known_versions(client, there)
        return copy, Synced(**_named(run), outcome="there already", there=there, versions=made)
    outcome: Any = "updated" if DIGEST in copy.data.tags else "delivered"
    return copy, Synced(**_named(run), outcome=outcome, there=there)


def _named(run: Any) -> dict[str, Any]:
    return {"run_id": run.info.run_id, "name": run.info.run_name or run.info.run_id}


@retried
def _copy_run(source: SourceStore, run: Any, experiment: str) -> Synced:
    """Bring one run with its models; twice done is as once."""
    client, run_id = open_store(), run.info.run_id
    models, versions, digest = _see(source, run)
    experiment_id = find_experiment(client, experiment)
    copy, judged = _judge(client, experiment_id, run, digest)
    if judged.outcome in ("left out", "there already"):
        return judged
    tags = {key: text for key, text in run.data.tags.items() if key not in OWN_TAGS}
    if (parent := tags.get("mlflow.parentRunId")) is not None:
        above = client.search_runs([experiment_id], f"tags.{LOCAL_ID} = '{parent}'")
        tags["mlflow.parentRunId"] = above[0].info.run_id if above else parent
    if copy is not None:
        there = copy.info.run_id
    else:
        there = client.create_run(
            experiment_id, run.info.start_time, tags | {LOCAL_ID: run_id}, run.info.run_name
        ).info.run_id
    _log_values(source, client, run, there, tags)
    if copy is not None and "reason" in copy.data.tags and "reason" not in tags:  # It failed, and was resumed since.
        client.delete_tag(there, "reason")
    files = source.place(run.info.artifact_uri)
    if files.is_dir() and any(files.iterdir()):
        client.log_artifacts(there, str(files))
    copied = {one.model_id: copy_model(source, client, run, there, one) for one in models}
    made = tuple(copy_version(client, one, there, copied) for one in versions if model_of(one) in copied)
    if made:
        client.set_tag(there, "model_version", made[-1])
    client.set_terminated(there, run.info.status, run.info.end_time)
    client.set_tag(there, DIGEST, digest)
    return judged.model_copy(update={"there": there, "versions": made})


def _digest(source: SourceStore, run: Any, models: Sequence[Any], versions: Sequence[Any]) -> str:
    """Return what is another one when anything of a run has changed."""
    files = source.place(run.info.artifact_uri)
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
    source: SourceStore, client: mlflow.MlflowClient, run: Any, there: str, tags: Mapping[str, str]
) -> None:
    for part in batches([Param(key, text) for key, text in run.data.params.items()], MAX_PARAMS_PER_BATCH):
        client.log_batch(there, params=part)
    for part in batches([RunTag(key, text) for key, text in tags.items()], MAX_PARAMS_PER_BATCH):
        client.log_batch(there, tags=part)
    for key in run.data.metrics:
        history = source.client.get_metric_history(run.info.run_id, key)
        points = [Metric(one.key, one.value, one.timestamp, one.step) for one in history]
        for part in batches(points, MAX_METRICS_PER_BATCH):
            client.log_batch(there, metrics=part)
    if run.inputs and run.inputs.dataset_inputs:
        client.log_inputs(there, run.inputs.dataset_inputs)
