"""Exported models in MLflow, and their versions in its registry."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import mlflow
import numpy as np
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import Schema, TensorSpec

from tasks import config, records
from tasks.errors import StratagemError
from tasks.tracking.lifecycle import set_tags
from tasks.tracking.metrics import points_of
from tasks.tracking.outbox import mlflow_run_id, present
from tasks.tracking.store import SQLITE, answering, dataset_of, open_store, store_uri


@answering()
def log_model(
    run: records.Run,
    name: str,
    keras_file: str | Path,
    prepared: records.PreparedDataset,
    step: int,
    metrics: Mapping[str, float],
) -> str:
    """Log an exported model with its signature, its requirements and the metrics of its evaluation.

    The .keras file is copied as it is; its input is uint8 (batch, height, width, channels), its output float32
    (batch, num_classes). ``mlflow.keras`` and ``mlflow.pyfunc`` load it.

    Args:
        name: what MLflow calls the model, without its version.
        keras_file: from the project's folder.
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
    tags = present(
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
                # Of random pixels, to try the model's server with: the first training image is not MLflow's business.
                input_example=np.random.default_rng(0).integers(0, 256, (1, *prepared.image_shape), np.uint8),
                pip_requirements=[f"{package}=={version(package)}" for package in packages],
            )
            (folder / "data").mkdir()
            copied = Path(shutil.copyfile(config.project_root() / keras_file, folder / "data" / "model.keras"))
            model.model_size_bytes += copied.stat().st_size
            model.save(str(folder / "MLmodel"))
            client.log_model_artifacts(logged.model_id, str(folder))
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step)])
        dataset = dataset_of(prepared, run.lineage)
        of_model = {"model_id": logged.model_id, "dataset_name": dataset.name, "dataset_digest": dataset.digest}
        measured = [Metric(*values, **of_model) for values in points_of(metrics, 0)]
        client.log_batch(run_id, metrics=measured)
        client.finalize_logged_model(logged.model_id, "READY")
    except BaseException:
        client.finalize_logged_model(logged.model_id, "FAILED")
        raise
    return f"models:/{logged.model_id}"


@answering()
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
