"""Writes a run to its own store, a local file, so that a training never depends on the network for its tracking.

If MLFLOW_TRACKING_URI names a server, ``copier`` copies the run to it. A file in the run's folder marks a run that the
server may lack in part.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from tasks import config, records
from tasks.modeling.metrics import keras_log_name
from tasks.runs import entries
from tasks.system import files, network
from tasks.tracking.store import SQLITE, is_own_store, open_own_store, own_uri, retried

logger = logging.getLogger(__name__)

# MLflow's limits.
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 8000


def write(run: records.Run, work: Callable[[mlflow.MlflowClient, str], object]) -> bool:
    """Write a part of a run to its own store; return whether that succeeded. An error of the store does not stop the
    training.

    Args:
        run: the run.
        work: an idempotent function of the store's client and the run's id in the store.
    """
    with best_effort():
        mark_uncopied(run)
    try:
        retried(lambda: work(open_own_store(), mlflow_run_id(run)))()
        return True
    except MlflowException as error:  # One of store.REFUSALS: ``retried`` replaces all others.
        what = "MLflow rejects a record of run %s: %s"
        logger.warning(what, run.run_id, network.without_secrets(str(error)))
        return True
    except Exception as error:
        why = files.find_full_disk(error, own_uri().removeprefix(SQLITE)) or error
        logger.warning("MLflow did not accept a record of run %s: %s", run.run_id, " ".join(str(why).split()))
        return False


def set_tags(run: records.Run, tags: Mapping[str, str]) -> None:
    """Add tags to a run, cut to MLflow's limit."""
    given = [RunTag(key, text[:MAX_TAG_LENGTH]) for key, text in tags.items()]
    write(run, lambda client, run_id: client.log_batch(run_id, tags=given))


def log_params(run: records.Run, texts: Mapping[str, str]) -> None:
    """Add parameters to a run, cut to MLflow's limit."""
    params = [Param(key, text[:MAX_PARAM_LENGTH]) for key, text in texts.items()]
    write(run, lambda client, run_id: client.log_batch(run_id, params=params))


def log_points(run: records.Run, points: Iterable[Sequence[Any]]) -> bool:
    """Add points of metrics, each with the fields of MLflow's ``Metric``; return whether the store has all of them.
    Points that it already has stay as they are."""
    as_in_keras = run.settings.get("tracking", {}).get("metric_names") == "keras"
    metrics = [Metric(keras_log_name(name) if as_in_keras else name, *rest) for name, *rest in points]
    return write(run, lambda client, run_id: client.log_batch(run_id, metrics=metrics))


def log_files(run: records.Run, paths: Iterable[str | Path], folder: str) -> None:
    """Copy files, with paths relative to the project's folder, into a folder of the run's artifacts."""

    def log(path: str) -> None:
        write(run, lambda client, run_id: client.log_artifact(run_id, path, folder))

    for path in paths:
        log(str(config.project_root() / path))


def mlflow_run_id(run: records.Run) -> str:
    """Return a run's id in its own store: the run's own id, unless another machine started it."""
    place = config.project_root() / run.folder / "mlflow_run_id"
    return place.read_text(encoding="utf-8") if place.exists() else run.run_id


def mark_uncopied(run: records.Run) -> None:
    """Record that the server of MLFLOW_TRACKING_URI, if set, does not have all of a run."""
    if not is_own_store():
        (config.project_root() / run.folder / entries.UNCOPIED).touch()


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Log write errors and continue: a full disk must not end a training, or hide why it ended."""
    try:
        yield
    except OSError as error:
        # An error in the middle of a file does not name the file.
        place = error.filename or config.project_root() / "mlruns"
        logger.warning("cannot write a record of the run: %s", files.unwritable(place, error))


def present(texts: Mapping[str, str | None]) -> dict[str, str]:
    """Return the texts that are not None."""
    return {key: text for key, text in texts.items() if text is not None}
