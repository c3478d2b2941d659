"""Runs of another store, brought to the one that MLFLOW_TRACKING_URI names: parameters, metrics, tags, files, data,
models, versions.

The tag ``local_run_id`` holds a run's original id. The next sync finds the run by it, so nothing is made twice, and an
interrupted sync is completed. The tag ``sync_digest`` is written last; it says what the run looked like.
"""

import contextlib
import hashlib
import json
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import mlflow
from filelock import FileLock, Timeout
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric, Param, RunStatus, RunTag, ViewType
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from tasks import config, records, runs
from tasks.records import Synced
from tasks.system import network
from tasks.system.errors import UserError
from tasks.tracking.champion import HISTORY
from tasks.tracking.outbox import MAX_METRICS_PER_BATCH, MAX_PARAMS_PER_BATCH, OUTBOX, batches
from tasks.tracking.store import (
    SQLITE,
    Unavailable,
    find_experiment,
    is_own_store,
    open_store,
    pages,
    retried,
    store_uri,
)

LOCAL_ID, DIGEST = "local_run_id", "sync_digest"
# Of the copy alone; and what the other store says by itself.
OWN_TAGS = (LOCAL_ID, DIGEST, "mlflow.runName")
OURS = "tags.`mlflow.source.name` = 'stratagem'"
FROM_MODEL, FROM_PROJECT = "synced_model_id", "synced_from"
# What MLflow's pages link a model to its version with.
VERSIONS_TAG = "mlflow.modelVersions"
MODEL_ID = re.compile(r"m-[0-9a-f]{32}")


class SourceStore(NamedTuple):
    """A store that is copied from."""

    client: mlflow.MlflowClient
    folder: Path
    """mlruns/, where its database and its files lie now."""
    is_own: bool
    """Whether it is that of this project, whose processes may be at work in it."""

    def place(self, uri: str) -> Path:
        """Return where files lie that the store names by the place where they were written.

        Raises:
            UserError: another machine's have a link among them.
        """
        written = unquote(uri.removeprefix("file://"))
        _, found, rest = written.rpartition("/mlruns/artifacts/")
        own = (self.folder / "artifacts").resolve()
        here = (own / rest).resolve()
        if self.is_own:
            return here if found and here.is_relative_to(own) and here.exists() else Path(written)
        # Another machine's database may name any file of this one, which is not to be brought to anybody, and so may a
        # link that was copied with it.
        if not (found and here.is_relative_to(own)):
            return own / "elsewhere"
        if (link := next((path for path in here.rglob("*") if path.is_symlink()), None)) is not None:
            raise UserError(f"{link} is a link, which may lead to any file of this machine: copy what it leads to")
        return here


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
            notes = _copy_aliases(source)
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
    found = [run for run in runs.find_not_final() if OUTBOX.has_unsent(run) and run.store]
    for run in sorted(found, key=lambda run: run.start_time):  # A comparison or a sweep comes before its runs.
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
                reason = f"its model is not a version yet: stratagem register --run {run.run_id[:8]}"
            yield Synced(**known, outcome="delivered", reason=reason)


def _knows_nothing(run: records.Run) -> bool:
    """Return whether a run's store was never told of it: the first that is kept is its creation."""
    with (config.project_root() / run.folder / "unsent.jsonl").open(encoding="utf-8") as file:
        return "create" in json.loads(file.readline())


# Runs.


def _copy_runs(source: SourceStore) -> list[Synced]:
    experiments = list(pages(source.client.search_experiments))
    names = {experiment.experiment_id: experiment.name for experiment in experiments}
    found = list(pages(source.client.search_runs, list(names), OURS)) if names else []
    done = []
    for run in sorted(found, key=lambda run: run.info.start_time):  # A comparison or a sweep comes before its runs.
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
        made = _known_versions(client, there)
        return copy, Synced(**_named(run), outcome="there already", there=there, versions=made)
    outcome: Any = "updated" if DIGEST in copy.data.tags else "delivered"
    return copy, Synced(**_named(run), outcome=outcome, there=there)


def _named(run: Any) -> dict[str, Any]:
    return {"run_id": run.info.run_id, "name": run.info.run_name or run.info.run_id}


@retried
def _copy_run(source: SourceStore, run: Any, experiment: str) -> Synced:
    """Bring one run with its models; twice done is as once."""
    client, run_id = open_store(), run.info.run_id
    models = list(pages(source.client.search_logged_models, [run.info.experiment_id], f"source_run_id = '{run_id}'"))
    models = [one for one in models if one.status == LoggedModelStatus.READY]
    versions = list(pages(source.client.search_model_versions, filter_string=f"run_id = '{run_id}'"))
    digest = _digest(source, run, models, versions)
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
    copied = {one.model_id: _copy_model(source, client, run, there, one) for one in models}
    made = tuple(_copy_version(client, one, there, copied) for one in versions if _model_of(one) in copied)
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


# Models, versions and aliases.


def _copy_model(source: SourceStore, client: mlflow.MlflowClient, run: Any, there: str, model: Any) -> str:
    """Bring a logged model, which names its run and itself; return its id."""
    experiment_id = client.get_run(there).info.experiment_id
    same = list(pages(client.search_logged_models, [experiment_id], f"source_run_id = '{there}'"))
    made = next((one for one in same if one.tags.get(FROM_MODEL) == model.model_id), None)
    tags = {key: text for key, text in model.tags.items() if key != VERSIONS_TAG} | {FROM_MODEL: model.model_id}
    if made is None:
        made = client.create_logged_model(
            experiment_id, model.name, there, tags=tags, params=model.params, model_type=model.model_type
        )
    if made.status != LoggedModelStatus.READY:
        place = source.place(model.artifact_location)
        if not (place / "MLmodel").is_file():
            raise UserError(f"run {run.info.run_id}: its model {model.model_id} is not in {place}: copy it, too")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "model")
            shutil.copytree(place, folder)
            text = (folder / "MLmodel").read_text(encoding="utf-8")
            text = text.replace(model.model_id, made.model_id).replace(run.info.run_id, there)
            (folder / "MLmodel").write_text(text, encoding="utf-8")
            client.log_model_artifacts(made.model_id, str(folder))
        steps = {one.model_id: one.step for one in (run.outputs.model_outputs if run.outputs else [])}
        client.log_outputs(there, [LoggedModelOutput(made.model_id, steps.get(model.model_id, 0))])
        _log_model_metrics(client, there, model, made)
        client.finalize_logged_model(made.model_id, "READY")
    else:  # What was said of it since it was brought.
        _log_model_metrics(client, there, model, made)
        if changed := {key: text for key, text in tags.items() if made.tags.get(key) != text}:
            client.set_logged_model_tags(made.model_id, changed)
    made_id: str = made.model_id
    return made_id


def _log_model_metrics(client: mlflow.MlflowClient, there: str, model: Any, made: Any) -> None:
    """Bring the metrics of a model that its copy does not have."""
    known = {(one.key, one.value, one.step, one.timestamp) for one in made.metrics or []}
    points = [
        Metric(one.key, one.value, one.timestamp, one.step, made.model_id, one.dataset_name, one.dataset_digest)
        for one in model.metrics or []
        if (one.key, one.value, one.step, one.timestamp) not in known
    ]
    if points:
        client.log_batch(there, metrics=points)


def _model_of(version: Any) -> str | None:
    """Return the id of the logged model that a version was made of; a store of SQLite says it by the place alone."""
    found = MODEL_ID.search(version.source or "")
    return version.model_id or (found[0] if found else None)


def _copy_version(client: mlflow.MlflowClient, version: Any, there: str, copied: Mapping[str, str]) -> str:
    """Bring a version, under the next number that is free there, unless it is there; return NAME/VERSION."""
    name, model_id = version.name, copied[_model_of(version) or ""]
    if not list(client.search_registered_models(f"name = '{name}'")):
        client.create_registered_model(name)
    found = list(pages(client.search_model_versions, filter_string=f"name = '{name}'"))
    digest = version.tags.get("model_digest")
    made = next((one for one in found if _model_of(one) == model_id), None) or next(
        (one for one in found if digest and one.tags.get("model_digest") == digest), None
    )
    tags = {**version.tags, FROM_PROJECT: _project_of(client, there)}
    if made is None:
        at = client.get_logged_model(model_id).artifact_location
        address = at if is_own_store() else f"models:/{model_id}"
        made = client.create_model_version(name, address, there, tags=tags, model_id=model_id)
    elif made.run_id == there:  # One of somebody else's that is the same model is left as it is.
        for key, text in tags.items():
            if made.tags.get(key) != text:
                client.set_model_version_tag(name, made.version, key, text)
    links = json.dumps([{"name": name, "version": made.version}])
    client.set_logged_model_tags(model_id, {VERSIONS_TAG: links})
    return f"{name}/{made.version}"


def _project_of(client: mlflow.MlflowClient, there: str) -> str:
    """Return what a run says of the project that it is of, which is the same in each copy."""
    held: str = client.get_run(there).data.tags.get("held_by", "")
    return held.partition(":")[0].partition(".")[0]


def _known_versions(client: mlflow.MlflowClient, there: str) -> tuple[str, ...]:
    """Return the versions that were made of a run, as NAME/VERSION."""
    found = pages(client.search_model_versions, filter_string=f"run_id = '{there}'")
    return tuple(sorted(f"{one.name}/{one.version}" for one in found))


@retried
def _copy_aliases(source: SourceStore) -> list[str]:
    """Give the versions their aliases, where these are free there, or at an older version of the same project; return
    a sentence for each that stays where it is."""
    client = open_store()
    notes = []
    for model in list(pages(source.client.search_registered_models)):
        there = list(client.search_registered_models(f"name = '{model.name}'"))
        if not there:
            continue
        numbers = _numbers(source, client, model.name)
        for alias, version in model.aliases.items():
            wanted, present = numbers.get(str(version)), there[0].aliases.get(alias)
            if wanted is None or str(present) == wanted:
                continue
            if present is not None and not _is_of_same(client, model.name, str(present), wanted):
                notes.append(
                    f"{model.name}@{alias} stays at version {present}, which came from elsewhere; version {wanted} has "
                    "it here"
                )
                continue
            client.set_registered_model_alias(model.name, alias, wanted)
            if alias == config.CHAMPION and HISTORY in model.tags:
                history = [numbers[one] for one in model.tags[HISTORY].split(", ") if one in numbers]
                client.set_registered_model_tag(model.name, HISTORY, ", ".join(history))
    return notes


def _numbers(source: SourceStore, client: mlflow.MlflowClient, name: str) -> dict[str, str]:
    """Return the number there of each version here that was brought."""
    wanted = f"name = '{name}'"
    there = {
        one.tags.get("model_digest"): str(one.version)
        for one in pages(client.search_model_versions, filter_string=wanted)
    }
    found = pages(source.client.search_model_versions, filter_string=wanted)
    digests = {str(one.version): one.tags.get("model_digest") for one in found}
    return {version: there[digest] for version, digest in digests.items() if digest is not None and digest in there}


def _is_of_same(client: mlflow.MlflowClient, name: str, present: str, wanted: str) -> bool:
    """Return whether both versions were brought from one project: then the alias is that project's to move."""
    of_both = [client.get_model_version(name, version).tags.get(FROM_PROJECT) for version in (present, wanted)]
    return bool(of_both[0]) and of_both[0] == of_both[1]
