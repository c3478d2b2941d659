"""Runs, metrics and models in MLflow; the only importer of mlflow.

The store is mlruns/mlflow.db with its files in mlruns/artifacts, or what MLFLOW_TRACKING_URI names. A run is always
addressed by its id, never as MLflow's "active run", which does not cross threads and leaves stray runs behind.

No training waits for the store or fails with it. What cannot be delivered, from the beginning of a run to its end, is
kept in the run's unsent.jsonl in its order, and delivered with the run's next event, by the next command, or by
`stratagem reconcile`. Delivering an event twice changes nothing.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Literal, Self

import mlflow
import numpy as np
from filelock import FileLock, Timeout
from mlflow.data.schema import TensorDatasetSchema
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    RunTag,
    ViewType,
)
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.types.schema import Schema, TensorSpec

from tasks import config, records, runs
from tasks.errors import StratagemError, UserError

logger = logging.getLogger(__name__)

SQLITE = "sqlite:///"
SYSTEM_METRICS_EVERY_SECONDS = 5.0

# MLflow's own limits.
MAX_METRICS_PER_BATCH = 1000
MAX_PARAMS_PER_BATCH = 100
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 8000
MAX_DIGEST_LENGTH = 36

# How long a training that was stopped waits for metrics that are on their way.
STOPPING_SECONDS = 5.0

# A store that did not answer is asked again after so long.
PAUSE_SECONDS = 15.0

# What MLflow will not take at any other time either.
REFUSALS = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST")

Event = dict[str, Any]


class Unavailable(UserError):
    """The tracking server does not answer."""


def store_uri() -> str:
    """Return the address of the tracking store, which is the model registry too."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{config.project_root() / 'mlruns' / 'mlflow.db'}"


def open_store() -> mlflow.MlflowClient:
    """Return a client of the store. A SQLite store that does not exist yet is made, by one process only.

    Raises:
        UserError: the store cannot be written, is no MLflow store, is of another MLflow version, or does not answer.
    """
    uri = store_uri()
    if uri.startswith(SQLITE):
        path = Path(uri.removeprefix(SQLITE)).absolute()
        if not path.exists():
            _make_store(path)
        _check_schema(path)
    elif uri.startswith(("http://", "https://")):
        _check_server(uri)
    try:
        return mlflow.MlflowClient(uri, registry_uri=uri)
    except MlflowException as error:
        raise UserError(f"the MLflow store {uri} cannot be used: {error}") from None


def _make_store(path: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several first runs at once, or one that is killed inside the migration, would leave a broken store for ever.
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=120):
            if path.exists():
                return
            building = path.with_name(f".{path.name}.building")
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            store = SqlAlchemyStore(f"{SQLITE}{building / path.name}", (path.parent / "artifacts").as_uri())
            store.engine.dispose()
            os.replace(building / path.name, path)
            shutil.rmtree(building)
    except OSError as error:
        raise UserError(f"{path} cannot be made ({error}): make {path.parent} a folder that you can write to") from None


def _check_schema(path: Path) -> None:
    """Refuse what MLflow would damage or misname: to it a newer store is "out-of-date", and a broken one is empty."""
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        raise UserError(f"{path} cannot be written: give yourself write access to it and to its folder")
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=20)) as connection:
            (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise UserError(f"{path} is no MLflow store ({error}): move it away; the next run makes a new one") from None
    migrations = Path(mlflow.__file__).parent / "store" / "db_migrations" / "versions"
    if not any(migrations.glob(f"{revision}_*.py")):
        raise UserError(
            f"{path} was written by a newer MLflow than the installed {mlflow.__version__} (its schema is {revision}): "
            "install that MLflow, or move the file away; the next run makes a new one"
        )


def _check_server(uri: str) -> None:
    # MLflow's client tries for 246 s before it says that a server is down.
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=3).close()
    except (OSError, ValueError) as error:
        # Whether one that answers lets us in shows at the first request; 502 and its like are a proxy's.
        if isinstance(error, urllib.error.HTTPError) and error.code < 500:
            return
        raise Unavailable(
            f"MLFLOW_TRACKING_URI = {uri}: no MLflow server answers ({error}): start it, or unset the variable"
        ) from None


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Take a store that does not do what it should at any other time for one that does not answer."""
    try:
        yield
    except MlflowException as error:
        if error.error_code in REFUSALS:
            raise
        raise Unavailable(f"{store_uri()}: MLflow does not do what it is asked ({error})") from None


def start(
    settings: config.Settings,
    prepared: records.PreparedDataset,
    lineage: records.Lineage,
    flow_run_id: str | None = None,
    parent_run_id: str | None = None,
) -> records.Run:
    """Begin an MLflow run with its settings, its data and where it comes from, and its folder mlruns/runs/<run_id>.

    Args:
        settings: become the run's parameters.
        prepared: becomes the run's dataset.
        lineage: where the run comes from.
        flow_run_id: the run of Prefect's flow.
        parent_run_id: of the comparison that the run belongs to; MLflow's pages show it under that one.

    Raises:
        UserError: see ``open_store``; or the experiment was deleted.
    """
    kind, loop = settings.strategy.kind, settings.train.loop
    tags = {"strategy": kind, "loop": loop, "mlflow.parentRunId": parent_run_id}
    params = settings.flat()
    if parent_run_id is not None:
        # The first parameter that differs, so the one that MLflow's page for comparing runs draws first.
        params = {"comparison": f"{kind} {loop}", **params}
    key = runs.key_of(settings)
    return _begin(settings, prepared, lineage, f"{kind}-{loop}", "runs", key, flow_run_id, params, tags)


def start_comparison(
    settings: config.Settings,
    prepared: records.PreparedDataset,
    lineage: records.Lineage,
    key: str,
    flow_run_id: str | None,
) -> records.Run:
    """Begin the MLflow run that is the parent of a comparison's runs; its folder is mlruns/comparisons/<run_id>.

    Args:
        settings: of any of those runs; what they do not share is left out of the parameters.
        prepared: becomes the run's dataset.
        lineage: where the run comes from.
        key: what the process that leads the comparison holds, see ``runs.hold``.
        flow_run_id: the run of Prefect's flow.

    Raises:
        UserError: see ``open_store``; or the experiment was deleted.
    """
    shared = {
        key: value for key, value in settings.flat().items() if key != "train.loop" and not key.startswith("strategy.")
    }
    return _begin(settings, prepared, lineage, "comparison", "comparisons", key, flow_run_id, shared, {})


def _begin(
    settings: config.Settings,
    prepared: records.PreparedDataset,
    lineage: records.Lineage,
    kind: str,
    room: str,
    key: str,
    flow_run_id: str | None,
    params: Mapping[str, Any],
    tags: Mapping[str, str | None],
) -> records.Run:
    """Begin a run of a kind, with its folder in a room of mlruns/."""
    experiment = settings.tracking.experiment or settings.dataset.name
    described = {
        "dataset": prepared.name,
        "data_version": lineage.data_version,
        "code_digest": lineage.code_digest,
        "settings_digest": lineage.settings_digest,
        "git_dirty": None if lineage.git_dirty is None else str(lineage.git_dirty).lower(),
        "flow_run_id": flow_run_id,
        "held_by": _holder(key),
        "mlflow.source.git.commit": lineage.git_commit,
        "mlflow.source.name": "stratagem",
        "mlflow.source.type": "LOCAL",
        **tags,
    }
    start_time = int(time.time() * 1000)
    host = socket.gethostname()
    creation: Event = {"experiment": experiment, "start_time": start_time, "tags": _present(described)}
    try:
        client: mlflow.MlflowClient | None = open_store()
        run_id = _create(client, creation)
    except (Unavailable, MlflowException) as error:
        if store_uri().startswith(SQLITE):
            raise
        client, run_id = None, uuid.uuid4().hex  # MLflow's own run gets another id, and this one as a tag.
        _warn(run_id, error)
    run: records.Run | None = None
    try:
        # The id's first letters tell runs of one kind apart, and lead from a chart's legend to the folder.
        run = records.Run(
            run_id=run_id,
            experiment=experiment,
            name=f"{prepared.name}-{kind}-{run_id[:6]}",
            folder=f"mlruns/{room}/{run_id}",
            lineage=lineage,
            settings=settings.to_json(),
            flow_run_id=flow_run_id,
            parent_run_id=tags.get("mlflow.parentRunId"),
            number=runs.next_number(),
            start_time=start_time,
            key=key,
            host=host,
            store=_store(),
        )
        data = {"dataset": _dataset(prepared, lineage).to_dictionary(), "context": "training"}
        told: list[Event] = [] if client is not None else [{"create": creation}]
        told += [{"name": run.name}, {"params": {key: _text(value) for key, value in params.items()}}, {"input": data}]
        runs.settle(run, "RUNNING")
        records.save(run, config.project_root() / run.folder / "records" / "run.json")
        _deliver(run, *told)
    except BaseException as error:
        status = "FAILED" if isinstance(error, Exception) else "KILLED"
        if run is not None:
            with _best_effort():
                runs.settle(run, status, str(error) or type(error).__name__)
        if client is not None:
            client.set_terminated(run_id, status)
        raise
    return run


def _create(client: mlflow.MlflowClient, creation: Event, local_id: str | None = None) -> str:
    """Return the id of a new MLflow run; of the one that a local run got before, if it did."""
    experiment_id = _experiment_id(client, creation["experiment"])
    tags = dict(creation["tags"])
    if (parent := tags.get("mlflow.parentRunId")) is not None:
        tags["mlflow.parentRunId"] = _mlflow_id_of_comparison(parent)
    if local_id is not None:
        tags["local_run_id"] = local_id
        found = client.search_runs([experiment_id], f"tags.local_run_id = '{local_id}'", ViewType.ALL, 1)
        if found:
            return str(found[0].info.run_id)
    created: str = client.create_run(experiment_id, creation["start_time"], tags).info.run_id
    return created


def _experiment_id(client: mlflow.MlflowClient, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        # MLflow's default would be relative to the folder that the user happens to be in.
        uri = store_uri()
        beside = Path(uri.removeprefix(SQLITE)).absolute().parent if uri.startswith(SQLITE) else None
        location = (beside / "artifacts" / name).as_uri() if beside else None
        try:
            # The tag makes MLflow's pages show training runs at the side, instead of prompts and agents.
            made: str = client.create_experiment(name, location, {"mlflow.experimentKind": "custom_model_development"})
            return made
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # Another process was quicker.
    if found.lifecycle_stage == "deleted":
        raise UserError(
            f"the MLflow experiment '{name}' was deleted: bring it back with `mlflow experiments restore "
            f"--experiment-id {found.experiment_id}`, or give another one: --set tracking.experiment=NAME"
        )
    found_id: str = found.experiment_id
    return found_id


def _dataset(prepared: records.PreparedDataset, lineage: records.Lineage) -> Dataset:
    images = TensorSpec(np.dtype("uint8"), (-1, *prepared.image_shape), "image")
    labels = TensorSpec(np.dtype("int64"), (-1,), "label")
    sizes = {f"num_{name}": split.num_examples for name, split in prepared.splits.items()}
    # Without DVC there is no version, and MLflow wants a digest: that of the manifest, which holds every file's sha256.
    digest = lineage.data_version or hashlib.sha256(prepared.model_dump_json().encode()).hexdigest()
    return Dataset(
        name=prepared.name,
        digest=digest[:MAX_DIGEST_LENGTH],
        source_type="local",
        source=json.dumps({"uri": prepared.folder}),
        schema=json.dumps(TensorDatasetSchema(Schema([images]), Schema([labels])).to_dict()),
        profile=json.dumps({**sizes, "num_classes": prepared.num_classes}),
    )


def resume(
    run: records.Run, settings: config.Settings, lineage: records.Lineage, flow_run_id: str | None = None
) -> records.Run:
    """Set a run that was begun before running again, and return it as it is from now on.

    Args:
        settings: from now on.
        lineage: from now on.
        flow_run_id: the run of Prefect's flow, from now on.

    Raises:
        UserError: see ``open_store``.
    """
    with contextlib.suppress(Unavailable):
        try:
            deleted = open_store().get_run(mlflow_run_id(run)).info.lifecycle_stage == "deleted"
        except MlflowException as error:
            # Unless it began while the server did not answer.
            deleted = error.error_code == "RESOURCE_DOES_NOT_EXIST" and not _outbox(run).exists()
        if deleted:
            raise UserError(
                f"the run '{run.run_id}' cannot be resumed: it is no longer in {store_uri()}. Bring it back with "
                f"`mlflow runs restore --run-id {run.run_id}`, or begin a new one with --fresh"
            )
    before, now = config.parse(run.settings).flat(), settings.flat()
    changes = {
        f"changed.{name}": f"{_text(before.get(name))} -> {_text(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    }
    key = runs.key_of(settings)
    now_of = {
        "settings": settings.to_json(),
        "lineage": lineage,
        "key": key,
        "host": socket.gethostname(),
        "number": runs.next_number(),
        "flow_run_id": flow_run_id,
    }
    if (lineage.settings_digest, lineage.data_version) != (run.lineage.settings_digest, run.lineage.data_version):
        runs.forget_results(run)  # Of the training as it was; before the run says that it is another one.
    run = run.model_copy(update=now_of)
    records.save(run, config.project_root() / run.folder / "records" / "run.json")
    runs.settle(run, "RUNNING")
    tags = _present({"held_by": _holder(key), "flow_run_id": flow_run_id, **changes})
    _deliver(run, {"status": "RUNNING"}, {"tags": tags}, {"no_tag": "reason"})
    return run


def finish(run: records.Run, status: Literal["FINISHED", "FAILED", "KILLED"], reason: str | None = None) -> None:
    """End a run. The reason of a failure becomes a tag."""
    with _best_effort():
        runs.settle(run, status, reason)
    _ask_again["at"] = 0.0  # It may be back, and this is the last chance of this process.
    _deliver(
        run,
        *([{"tags": {"reason": reason}}] if reason is not None else []),
        {"status": status, "end_time": int(time.time() * 1000)},
    )


@_answering()
def end_abandoned(mine: str = "", but: str | None = None) -> list[records.Ended]:
    """End the runs of this host whose process died: as it had put down, else as KILLED. Also deliver what runs that are
    not at work have kept.

    Args:
        mine: a key that the caller holds; what was done under it before is over.
        but: the id of a run of this key that the caller is at work on.

    Raises:
        UserError: see ``open_store``; what can be known without the store is settled then.
    """
    ended: list[records.Ended] = []
    known: dict[str, records.Run] = {}
    died = f"the process that led it on {socket.gethostname()} died"
    for path in _run_files():
        with contextlib.suppress(UserError):  # Killed while it was written.
            known[path.parent.parent.name] = records.load(records.Run, path)
    for run in known.values():
        if run.run_id == but or not (run.key == mine or runs.is_over(run)):
            continue
        put_down = runs.status(run)
        with _best_effort():  # What is left of another user's run must not end this one.
            if put_down is not None and put_down.status == "RUNNING":
                _tell_again(run, _written(run))
                finish(run, "KILLED", died)
                ended.append(records.Ended(what=f"MLflow run {run.run_id}", status="KILLED", reason=died))
            elif _outbox(run).exists():
                _flush(run)
    client = open_store()
    wanted = "attributes.status = 'RUNNING' AND tags.`mlflow.source.name` = 'stratagem'"
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for found in client.search_runs(experiments, wanted, max_results=1000) if experiments else []:
        held_by, run_id = found.data.tags.get("held_by", ""), found.info.run_id
        local_id = found.data.tags.get("local_run_id", run_id)
        run_of = known.get(local_id)
        # What it is told last may still be on its way.
        key = run_of.key if run_of is not None else held_by.rpartition(":")[2]
        if held_by != _holder(held_by.rpartition(":")[2]) or local_id == but or (key != mine and runs.is_held(key)):
            continue
        # Killed after it had put down its end, and before MLflow knew; or before it had a folder.
        put_down = runs.status(run_of) if run_of is not None else None
        if put_down is not None and put_down.status == "RUNNING":
            continue  # It has just begun.
        status, reason = (put_down.status, put_down.reason) if put_down is not None else ("KILLED", died)
        if reason is not None:
            client.set_tag(run_id, "reason", reason)
        client.set_terminated(run_id, status)
        if f"MLflow run {local_id}" not in {record.what for record in ended}:
            ended.append(records.Ended(what=f"MLflow run {local_id}", status=status, reason=reason or ""))
    return ended


def set_tags(run: records.Run, tags: Mapping[str, str]) -> None:
    """Add short texts to a run, such as where its checkpoint lies."""
    _deliver(run, {"tags": dict(tags)})


def log_files(run: records.Run, paths: Iterable[str | Path], folder: str) -> None:
    """Copy files, named from the project's folder, into a folder of the run's artifacts."""
    root = config.project_root()
    _deliver(run, *({"file": str((root / path).relative_to(root)), "folder": folder} for path in paths))


def log_comparison(run: records.Run, comparison: records.Comparison, page: Path, tables: Sequence[Path]) -> None:
    """Give a comparison its table, as files and as its description, and each of its runs its own figures.

    They have the same names in all runs, so that MLflow's page for comparing runs shows them in one chart each.

    Args:
        run: the comparison's.
        comparison: its rows name the runs.
        page: the table in Markdown.
        tables: other files to keep with it.
    """
    for row in comparison.rows:
        if row.run_id is None or row.reason is not None:
            continue
        figures = {
            "num_replicas": row.num_replicas,
            "seconds_per_epoch": row.seconds_per_epoch,
            "speed_up": row.speed_up,
            "efficiency": row.efficiency,
            "start_seconds": row.start_seconds,
            "setup_seconds": row.setup_seconds,
            "tracing_seconds": row.tracing_seconds,
        }
        known = {f"performance/{name}": value for name, value in figures.items() if value is not None}
        log_metrics(records.load(records.Run, _run_file(row.run_id)), known)
    log_files(run, [page, *tables], "comparison")
    # MLflow shows a few lines of a description: those of the table, not its heading.
    description = page.read_text(encoding="utf-8").partition("\n\n")[2]
    set_tags(run, {"mlflow.note.content": description[:MAX_TAG_LENGTH]})


class MetricWriter:
    """Delivers a run's metrics from a thread of its own: no training step waits for the store, or fails with it.

    What is written is in the run's metrics.jsonl at once. So what a killed process had not delivered yet is delivered
    by the next one, and what both do (the rest of an epoch after the last checkpoint) is told once.
    """

    def __init__(self, run: records.Run) -> None:
        self.run = run
        self._known: dict[str, int] = {}
        """The last step that a process before this one wrote, by metric."""
        self._file: IO[str] | None = None
        self._queue: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver_all, name="metric-writer", daemon=True)

    def __enter__(self) -> Self:
        points = _written(self.run)
        for name, _, _, step in points:
            self._known[name] = max(step, self._known.get(name, step))
        _tell_again(self.run, points)
        with _best_effort():
            self._file = _metrics_file(self.run).open("a", encoding="utf-8")
            self._file.write("\n")  # A process killed while it wrote left half a line.
        self._thread.start()
        return self

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics for delivery; returns at once."""
        new = {name: value for name, value in metrics.items() if step > self._known.get(name, -1)}
        if not new:
            return
        points = _metrics(new, step)
        with _best_effort():
            if self._file is not None:
                self._file.write(json.dumps(points) + "\n")
                self._file.flush()
        self._queue.put(points)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until everything is delivered or kept; not for long where the training was stopped or failed."""
        self._queue.put(None)
        self._thread.join(None if kind is None else STOPPING_SECONDS)
        if self._file is not None:
            with _best_effort():  # It writes what a full disk did not take before.
                self._file.close()

    def _deliver_all(self) -> None:
        closing = False
        while not closing:
            taken = [self._queue.get()]
            while not self._queue.empty():
                taken.append(self._queue.get())
            closing = None in taken
            points = [metric for metrics in taken if metrics is not None for metric in metrics]
            if points:
                _deliver(self.run, {"metrics": points})


def log_metrics(run: records.Run, metrics: Mapping[str, float]) -> None:
    """Deliver metrics that a run has once, such as its test accuracy."""
    # MLflow's pages compare runs in bars where the step is 0; at any other step each run is a dot in a line chart.
    _deliver(run, {"metrics": _metrics(metrics, 0)})


def _written(run: records.Run) -> list[list[Any]]:
    """Return all points that the processes of a run have written so far."""
    path = _metrics_file(run)
    points = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # An empty line, or half of one.
            points += json.loads(line)
    return points


def _tell_again(run: records.Run, points: Sequence[list[Any]]) -> None:
    """Deliver the last points of a run whose process died: it may have had them on their way."""
    if points:
        _deliver(run, {"metrics": points[-MAX_METRICS_PER_BATCH:]})


def _deliver(run: records.Run, *events: Event) -> None:
    """Tell the store what happened to a run, or keep it; it is told in the order of these calls."""
    with _delivering, _best_effort(), FileLock(_outbox(run).with_suffix(".lock")):
        path = _outbox(run)
        if not path.exists() and _send(run, list(events)) == len(events):
            return
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # A process killed while it wrote left half a line.
                    file.write(b"\n")
            file.write("".join(json.dumps(event) + "\n" for event in events).encode())
        _send_kept(run)


def _flush(run: records.Run) -> None:
    """Deliver what is kept, as far as the store takes it now; nothing while another process does that."""
    with contextlib.suppress(Timeout), _delivering, FileLock(_outbox(run).with_suffix(".lock"), blocking=False):
        _send_kept(run)


def _send_kept(run: records.Run) -> None:
    path = _outbox(run)
    if not path.exists() or _is_away(run):
        return  # After a day without its server this would be seconds of reading, every few seconds.
    events: list[Event] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if "metrics" in event and events and "metrics" in events[-1]:
                events[-1]["metrics"] += event["metrics"]  # A request for a thousand points, not one for each line.
            else:
                events.append(event)
    sent = _send(run, events)
    if sent == len(events):
        path.unlink()
    elif sent:
        rest = path.with_suffix(".partial")
        rest.write_text("".join(json.dumps(event) + "\n" for event in events[sent:]), encoding="utf-8")
        rest.replace(path)


@contextlib.contextmanager
def _best_effort() -> Iterator[None]:
    """A disk that is full must not hide why a training ended, nor end one."""
    try:
        yield
    except OSError as error:
        logger.warning("what MLflow is to be told cannot be kept: %s", error)


def _send(run: records.Run, events: Sequence[Event]) -> int:
    """Return how many of the events were delivered; all others come after them."""
    sent = 0
    if _is_away(run):
        return 0
    try:
        client = open_store()
        for event in events:
            try:
                _send_one(client, run, event)
            except (MlflowException, FileNotFoundError) as error:
                if isinstance(error, MlflowException) and error.error_code not in REFUSALS:
                    raise
                logger.warning("MLflow does not take what it is told of run %s: %s", run.run_id, error)
            sent += 1
    except Exception as error:  # Whatever ails the store, the training goes on.
        _ask_again["at"] = time.monotonic() + PAUSE_SECONDS
        _warn(run.run_id, error)
    return sent


def _is_away(run: records.Run) -> bool:
    """Return whether a run's store is another one than this process's, or did not answer a moment ago."""
    return run.store != _store() or time.monotonic() < _ask_again["at"]


def _send_one(client: mlflow.MlflowClient, run: records.Run, event: Event) -> None:
    place = config.project_root() / run.folder / "mlflow_run_id"
    if "create" in event:
        place.write_text(_create(client, event["create"], run.run_id), encoding="utf-8")
        return
    run_id = mlflow_run_id(run)
    if "name" in event:
        client.update_run(run_id, name=event["name"])
    elif "params" in event:
        params = [Param(key, text[:MAX_PARAM_LENGTH]) for key, text in event["params"].items()]
        for batch in _batches(params, MAX_PARAMS_PER_BATCH):
            client.log_batch(run_id, params=batch)
    elif "input" in event:
        context = InputTag("mlflow.data.context", event["input"]["context"])
        client.log_inputs(run_id, [DatasetInput(Dataset(**event["input"]["dataset"]), [context])])
    elif "metrics" in event:
        for batch in _batches([Metric(*values) for values in event["metrics"]], MAX_METRICS_PER_BATCH):
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
    if run.store != _store():
        own = f"MLFLOW_TRACKING_URI = {run.store}" if run.store else "no MLFLOW_TRACKING_URI"
        raise UserError(
            f"run {run.run_id} was begun with {own}, and it is {_store() or 'not set'} now: set it as it was then"
        )
    open_store()
    _ask_again["at"] = 0.0
    _flush(run)
    if _outbox(run).exists():
        raise Unavailable(f"{store_uri()}: MLflow cannot be told of run {run.run_id} now: see to it")


def mlflow_run_id(run: records.Run) -> str:
    """Return the id that MLflow knows a run by: its own, unless it began while the server did not answer."""
    place = config.project_root() / run.folder / "mlflow_run_id"
    return place.read_text(encoding="utf-8") if place.exists() else run.run_id


def _warn(run_id: str, error: Exception) -> None:
    """Tell once that a run's events are kept."""
    if run_id not in _warned:
        _warned.add(run_id)
        logger.warning(
            "MLflow cannot be told of this run now (%s): it goes on, and what there is to tell is kept and delivered "
            "later, also by `stratagem reconcile`",
            " ".join(str(error).split()),
        )


_delivering = threading.RLock()
_ask_again = {"at": 0.0}
_warned: set[str] = set()


@contextlib.contextmanager
def system_metrics(writer: MetricWriter, settings: config.Settings) -> Iterator[None]:
    """Write processor, memory, disk, network and GPU use every 5 seconds and at the end, unless the settings say no.

    The step of these metrics is the number of seconds since the run began.
    """
    if not settings.tracking.system_metrics:
        yield
        return
    began = writer.run.start_time / 1000
    monitor = SystemMetricsMonitor(writer.run.run_id, tracking_uri=store_uri())
    stop = threading.Event()

    # Not monitor.start(): its first sample is over no time at all, so 0 %, and what it has at the end it drops.
    def sample() -> None:
        monitor.collect_metrics()  # psutil measures from one call to the next of the same thread.
        stopping = sampled = False
        while not stopping:
            for part in monitor.monitors:
                part.clear_metrics()
            since = time.monotonic()
            stopping = stop.wait(SYSTEM_METRICS_EVERY_SECONDS)
            if sampled and time.monotonic() - since < 1:
                return  # Too short: processor time comes in ticks.
            monitor.collect_metrics()
            values = {f"system/{name}": value for name, value in monitor.aggregate_metrics().items()}
            writer.write(int(time.time() - began), values)
            sampled = True

    thread = threading.Thread(target=sample, name="system-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@_answering()
def log_model(
    run: records.Run,
    name: str,
    keras_file: str | Path,
    prepared: records.PreparedDataset,
    example: "np.ndarray",
    step: int,
    metrics: Mapping[str, float],
) -> str:
    """Log an exported model with its signature, its requirements and the metrics of its evaluation.

    The .keras file is copied as it is; its input is uint8 (batch, height, width, channels), its output float32
    (batch, num_classes). ``mlflow.keras`` and ``mlflow.pyfunc`` load it.

    Args:
        name: what MLflow calls the model, without its version.
        keras_file: from the project's folder.
        example: images, uint8 (n, height, width, channels), kept with the model as the request to try its server with.
        step: of training, at which the model was exported.

    Returns:
        the model's address, ``models:/<model_id>``.

    Raises:
        Unavailable: the tracking server does not answer, or fails.
    """
    client = open_store()
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    packages = ["keras", "numpy", backend]
    signature = ModelSignature(
        inputs=Schema([TensorSpec(np.dtype("uint8"), (-1, *prepared.image_shape))]),
        outputs=Schema([TensorSpec(np.dtype("float32"), (-1, prepared.num_classes))]),
    )
    run_id = mlflow_run_id(run)
    experiment_id = client.get_run(run_id).info.experiment_id
    with (config.project_root() / keras_file).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    tags = _present(
        {"data_version": run.lineage.data_version, "git_commit": run.lineage.git_commit, "keras_file_sha256": digest}
    )
    found = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'")
    for one in found:  # Of a registration that was killed.
        if one.status == LoggedModelStatus.READY and one.tags.get("keras_file_sha256") == digest:
            return f"models:/{one.model_id}"
        if one.status == LoggedModelStatus.PENDING:
            client.finalize_logged_model(one.model_id, "FAILED")
    logged = client.create_logged_model(experiment_id, name, run_id, tags=tags, model_type="keras")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "model")
            model = Model(run_id=run_id, model_id=logged.model_id, model_uuid=logged.model_id)
            model.add_flavor(
                "keras", data="data", keras_version=version("keras"), keras_backend=backend, save_exported_model=False
            )
            # Not mlflow.keras.save_model: it wants the model in memory, and writes another file than the run's.
            mlflow.pyfunc.save_model(
                str(folder),
                loader_module="mlflow.keras",
                mlflow_model=model,
                signature=signature,
                input_example=example,
                pip_requirements=[f"{package}=={version(package)}" for package in packages],
            )
            (folder / "data").mkdir()
            copied = Path(shutil.copyfile(config.project_root() / keras_file, folder / "data" / "model.keras"))
            model.model_size_bytes += copied.stat().st_size
            model.save(str(folder / "MLmodel"))
            client.log_model_artifacts(logged.model_id, str(folder))
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step)])
        dataset = _dataset(prepared, run.lineage)
        of_model = {"model_id": logged.model_id, "dataset_name": dataset.name, "dataset_digest": dataset.digest}
        measured = [Metric(*values, **of_model) for values in _metrics(metrics, 0)]
        client.log_batch(run_id, metrics=measured)
        client.finalize_logged_model(logged.model_id, "READY")
    except BaseException:
        client.finalize_logged_model(logged.model_id, "FAILED")
        raise
    return f"models:/{logged.model_id}"


@_answering()
def register_version(run: records.Run, model_uri: str, name: str, alias: str, tags: Mapping[str, str]) -> str:
    """Make a logged model the next version of a registered model, give it the alias, and return the version.

    Raises:
        Unavailable: the tracking server does not answer, or fails.
        StratagemError: MLflow did not make the version ready; the alias stays where it was.
    """
    client = open_store()
    model_id = model_uri.removeprefix("models:/")
    # MLflow looks `models:/` up in the process' default store, which need not be this one; a server uses its own.
    local = store_uri().startswith(SQLITE)
    source = client.get_logged_model(model_id).artifact_location if local else model_uri
    with contextlib.suppress(MlflowException):
        client.create_registered_model(name)
    # A registration that was killed may have made the version.
    versions = client.search_model_versions(f"name = '{name}' AND run_id = '{mlflow_run_id(run)}'")
    made = next((version for version in versions if version.source == source), None)
    if made is None:
        made = client.create_model_version(name, source, mlflow_run_id(run), tags=dict(tags), model_id=model_id)
    status = client.get_model_version(name, made.version).status
    if status != "READY":
        raise StratagemError(f"version {made.version} of model '{name}' is {status}: '{alias}' was not moved to it")
    client.set_registered_model_alias(name, alias, made.version)
    # What MLflow's pages link the model to its version with.
    client.set_logged_model_tags(
        model_id, {"mlflow.modelVersions": json.dumps([{"name": name, "version": made.version}])}
    )
    set_tags(run, {"model_version": f"{name}/{made.version}"})
    return str(made.version)


def _metrics(metrics: Mapping[str, float], step: int) -> list[list[Any]]:
    now = int(time.time() * 1000)
    return [[name, float(value), now, step] for name, value in metrics.items()]


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _present(texts: Mapping[str, str | None]) -> dict[str, str]:
    return {key: text for key, text in texts.items() if text is not None}


def _text(value: object) -> str:
    """Return a setting in the spelling of ``--set``."""
    return value if isinstance(value, str) else json.dumps(value)


def _run_file(run_id: str) -> Path:
    return config.project_root() / "mlruns" / "runs" / run_id / "records" / "run.json"


def _store() -> str:
    """Return what a run remembers of its store: nothing for the project's own, which may be moved with it."""
    return os.environ.get("MLFLOW_TRACKING_URI", "")


def _holder(key: str) -> str:
    """Return who leads a run, for others that share the store: the host, the project's folder and the key."""
    return f"{socket.gethostname()}:{config.project_root()}:{key}"


def _mlflow_id_of_comparison(run_id: str) -> str:
    """Return the id that MLflow knows a comparison by; one that began without the server is told to it first."""
    path = config.project_root() / "mlruns" / "comparisons" / run_id / "records" / "run.json"
    if not path.exists():
        return run_id
    comparison = records.load(records.Run, path)
    _flush(comparison)
    return mlflow_run_id(comparison)


def _run_files() -> list[Path]:
    """Return the files of all runs, comparisons too."""
    return sorted(config.project_root().glob("mlruns/*/*/records/run.json"))


def _outbox(run: records.Run) -> Path:
    return config.project_root() / run.folder / "unsent.jsonl"


def _metrics_file(run: records.Run) -> Path:
    return config.project_root() / run.folder / "metrics.jsonl"
