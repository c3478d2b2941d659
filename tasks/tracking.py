"""Runs, metrics and models in MLflow; the only importer of mlflow.

The store is mlruns/mlflow.db with its files in mlruns/artifacts, or what MLFLOW_TRACKING_URI names. A run is always
addressed by its id, never as MLflow's "active run", which does not cross threads and leaves stray runs behind.
"""

import contextlib
import json
import logging
import os
import queue
import shutil
import sqlite3
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

import filelock
import mlflow
import numpy as np
from mlflow.data.schema import TensorDatasetSchema
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.types.schema import Schema, TensorSpec

from tasks import config, records
from tasks.errors import StratagemError, UserError

logger = logging.getLogger(__name__)

SQLITE = "sqlite:///"
SYSTEM_METRICS_EVERY_SECONDS = 5.0

# MLflow's own limits.
MAX_METRICS_PER_BATCH = 1000
MAX_PARAMS_PER_BATCH = 100
MAX_PARAM_LENGTH = 6000
MAX_DIGEST_LENGTH = 36


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
        with filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=120):
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
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=5).close()
    except urllib.error.HTTPError:
        pass  # It answers. Whether it lets us in shows at the first request.
    except (OSError, ValueError) as error:
        raise UserError(
            f"MLFLOW_TRACKING_URI = {uri}: no MLflow server answers ({error}): start it, or unset the variable"
        ) from None


def start(
    settings: config.Settings,
    prepared: records.PreparedDataset,
    lineage: records.Lineage,
    flow_run_id: str | None = None,
) -> records.Run:
    """Begin an MLflow run with its settings, its data and where it comes from, and its folder mlruns/runs/<run_id>.

    Raises:
        UserError: see ``open_store``; or the experiment was deleted.
    """
    client = open_store()
    experiment = settings.tracking.experiment or settings.dataset.name
    tags = {
        "dataset": prepared.name,
        "strategy": settings.strategy.kind,
        "loop": settings.train.loop,
        "data_version": lineage.data_version,
        "code_digest": lineage.code_digest,
        "settings_digest": lineage.settings_digest,
        "git_dirty": None if lineage.git_dirty is None else str(lineage.git_dirty).lower(),
        "flow_run_id": flow_run_id,
        "mlflow.source.git.commit": lineage.git_commit,
        "mlflow.source.name": "stratagem",
        "mlflow.source.type": "LOCAL",
    }
    run_id = client.create_run(_experiment_id(client, experiment), tags=_present(tags)).info.run_id
    try:
        # The id's first letters tell runs of one kind apart, and lead from a chart's legend to the folder.
        name = f"{prepared.name}-{settings.strategy.kind}-{settings.train.loop}-{run_id[:6]}"
        client.update_run(run_id, name=name)
        params = [Param(key, _text(value)[:MAX_PARAM_LENGTH]) for key, value in settings.flat().items()]
        for batch in _batches(params, MAX_PARAMS_PER_BATCH):
            client.log_batch(run_id, params=batch)
        context = InputTag("mlflow.data.context", "training")
        client.log_inputs(run_id, [DatasetInput(_dataset(prepared, lineage), [context])])
        folder = f"mlruns/runs/{run_id}"
        run = records.Run(
            run_id=run_id,
            experiment=experiment,
            name=name,
            folder=folder,
            lineage=lineage,
            settings=settings.to_json(),
            flow_run_id=flow_run_id,
        )
        records.save(run, _run_file(run_id))
    except BaseException:
        client.set_terminated(run_id, "FAILED")
        raise
    return run


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
    digest = lineage.data_version or sha256(prepared.model_dump_json().encode()).hexdigest()
    return Dataset(
        name=prepared.name,
        digest=digest[:MAX_DIGEST_LENGTH],
        source_type="local",
        source=json.dumps({"uri": prepared.folder}),
        schema=json.dumps(TensorDatasetSchema(Schema([images]), Schema([labels])).to_dict()),
        profile=json.dumps({**sizes, "num_classes": prepared.num_classes}),
    )


def resume(run_id: str) -> records.Run:
    """Return a run that was begun before, and set it running again.

    Raises:
        UserError: there is no such run.
    """
    known = {path.parent.parent.name: path for path in config.project_root().glob("mlruns/runs/*/records/run.json")}
    if run_id not in known:
        near = get_close_matches(run_id, known, n=1, cutoff=0.6)
        newest = sorted(known, key=lambda name: known[name].stat().st_mtime, reverse=True)[:5]
        raise UserError(
            f"unknown run '{run_id}': {f'did you mean {near[0]}? ' if near else ''}"
            f"The newest runs: {', '.join(newest) if newest else '(none yet)'}"
        )
    run = records.load(records.Run, known[run_id])
    client = open_store()
    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException as error:
        raise UserError(f"the run '{run_id}' cannot be resumed in {store_uri()}: {error}. Start a new run") from None
    return run


def finish(run: records.Run, status: Literal["FINISHED", "FAILED", "KILLED"], reason: str | None = None) -> None:
    """End a run. The reason of a failure becomes a tag."""
    client = open_store()
    if reason is not None:
        client.set_tag(run.run_id, "reason", reason)
    client.set_terminated(run.run_id, status)


def set_tags(run: records.Run, tags: Mapping[str, str]) -> None:
    """Add short texts to a run, such as where its checkpoint lies."""
    open_store().log_batch(run.run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def log_files(run: records.Run, paths: Iterable[str | Path], folder: str) -> None:
    """Copy files, named from the project's folder, into a folder of the run's artifacts."""
    client = open_store()
    for path in paths:
        client.log_artifact(run.run_id, str(config.project_root() / path), folder)


class MetricWriter:
    """Sends a run's metrics from a thread of its own: no training step waits for the store, or fails with it.

    What cannot be sent is kept in the run's unsent_metrics.jsonl, and sent when this writer closes or the run's next
    one opens.
    """

    def __init__(self, run: records.Run) -> None:
        self.run = run
        self._queue: queue.SimpleQueue[list[Metric] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="metric-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics for sending; returns at once."""
        self._queue.put(_metrics(metrics, step))

    def __exit__(self, *_: object) -> None:
        """Wait until everything is sent or kept."""
        self._queue.put(None)
        self._thread.join()

    def _send_all(self) -> None:
        send_unsent_metrics(self.run)
        closing = False
        while not closing:
            taken = [self._queue.get()]
            while not self._queue.empty():
                taken.append(self._queue.get())
            closing = None in taken
            _send_or_keep(self.run, [metric for metrics in taken if metrics is not None for metric in metrics])
        send_unsent_metrics(self.run)


def log_metrics(run: records.Run, metrics: Mapping[str, float]) -> None:
    """Send metrics that a run has once, such as its test accuracy, or keep them as a ``MetricWriter`` does."""
    # MLflow's pages compare runs in bars where the step is 0; at any other step each run is a dot in a line chart.
    _send_or_keep(run, _metrics(metrics, 0))


def send_unsent_metrics(run: records.Run) -> bool:
    """Send what could not be sent before; return whether nothing is kept any more. Sending twice changes nothing."""
    path = _unsent_file(run)
    with _unsent:
        if not path.exists():
            return True
        metrics = []
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # A process killed while it wrote leaves half a line.
                metrics.append(Metric(*json.loads(line)))
        if not _send(run, metrics):
            return False
        path.unlink()
        return True


def _send_or_keep(run: records.Run, metrics: Sequence[Metric]) -> None:
    if _send(run, metrics):
        return
    path = _unsent_file(run)
    lines = [json.dumps([metric.key, metric.value, metric.timestamp, metric.step]) + "\n" for metric in metrics]
    with _unsent, path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def _send(run: records.Run, metrics: Sequence[Metric]) -> bool:
    if not metrics:
        return True
    try:
        client = open_store()
        for batch in _batches(metrics, MAX_METRICS_PER_BATCH):
            client.log_batch(run.run_id, metrics=batch)
    except Exception as error:  # Whatever ails the store, the training goes on.
        if run.run_id not in _warned:
            _warned.add(run.run_id)
            logger.warning("metrics cannot be sent to MLflow and are kept in %s: %s", _unsent_file(run), error)
        return False
    return True


_unsent = threading.Lock()
_warned: set[str] = set()


@contextlib.contextmanager
def system_metrics(writer: MetricWriter, settings: config.Settings) -> Iterator[None]:
    """Write processor, memory, disk, network and GPU use every 5 seconds and at the end, unless the settings say no.

    The step of these metrics is the number of seconds since the run began.
    """
    if not settings.tracking.system_metrics:
        yield
        return
    began = open_store().get_run(writer.run.run_id).info.start_time / 1000
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
    """
    client = open_store()
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    packages = ["keras", "numpy", backend]
    signature = ModelSignature(
        inputs=Schema([TensorSpec(np.dtype("uint8"), (-1, *prepared.image_shape))]),
        outputs=Schema([TensorSpec(np.dtype("float32"), (-1, prepared.num_classes))]),
    )
    experiment_id = client.get_run(run.run_id).info.experiment_id
    tags = _present({"data_version": run.lineage.data_version, "git_commit": run.lineage.git_commit})
    logged = client.create_logged_model(experiment_id, name, run.run_id, tags=tags, model_type="keras")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "model")
            model = Model(run_id=run.run_id, model_id=logged.model_id, model_uuid=logged.model_id)
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
        client.log_outputs(run.run_id, [LoggedModelOutput(logged.model_id, step)])
        dataset = _dataset(prepared, run.lineage)
        of_model = {"model_id": logged.model_id, "dataset_name": dataset.name, "dataset_digest": dataset.digest}
        client.log_batch(run.run_id, metrics=_metrics(metrics, 0, **of_model))
        client.finalize_logged_model(logged.model_id, "READY")
    except BaseException:
        client.finalize_logged_model(logged.model_id, "FAILED")
        raise
    return f"models:/{logged.model_id}"


def register_version(run: records.Run, model_uri: str, name: str, alias: str, tags: Mapping[str, str]) -> str:
    """Make a logged model the next version of a registered model, give it the alias, and return the version.

    Raises:
        StratagemError: MLflow did not make the version ready; the alias stays where it was.
    """
    client = open_store()
    model_id = model_uri.removeprefix("models:/")
    # MLflow looks `models:/` up in the process' default store, which need not be this one; a server uses its own.
    local = store_uri().startswith(SQLITE)
    source = client.get_logged_model(model_id).artifact_location if local else model_uri
    with contextlib.suppress(MlflowException):
        client.create_registered_model(name)
    made = client.create_model_version(name, source, run.run_id, tags=dict(tags), model_id=model_id)
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


def _metrics(metrics: Mapping[str, float], step: int, **of_model: str) -> list[Metric]:
    now = int(time.time() * 1000)
    return [Metric(name, float(value), now, step, **of_model) for name, value in metrics.items()]


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


def _unsent_file(run: records.Run) -> Path:
    return config.project_root() / run.folder / "unsent_metrics.jsonl"
