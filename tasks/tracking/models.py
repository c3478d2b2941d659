"""Logs exported models in MLflow, loads them and finds them by their address."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import AnyType, ColSpec, Schema, TensorSpec

from tasks import config, records
from tasks.modeling import own_code
from tasks.system import files, upstream
from tasks.system.errors import UserError, listed, one_of
from tasks.tracking import trained_models
from tasks.tracking.lifecycle import find_or_create
from tasks.tracking.metrics import points_of
from tasks.tracking.registry import version_of
from tasks.tracking.store import (
    REFUSALS,
    is_own_store,
    logged_models,
    open_own_store,
    open_registry,
    pages,
    retried,
    store_uri,
)
from tasks.tracking.trained_models import TrainedModel
from tasks.tracking.writing import present


@retried
def log_model(
    run: records.Run,
    name: str,
    keras_file: str | Path,
    prepared: records.PreparedDataset,
    step: int,
    metrics: Mapping[str, float],
) -> str:
    """Log an exported model in the own store, with its signature, its requirements and the metrics of its evaluation.

    The .keras file is copied unchanged; its inputs are the features as prepared, its output is float32 (batch,
    num_outputs). ``mlflow.pyfunc`` loads it with the encoder of raw rows or image files, and with the user-defined code
    that it needs; ``mlflow.keras`` loads it if it needs neither.

    Args:
        name: the name of the logged model.
        keras_file: the path relative to the project's folder.
        step: the training step of the exported checkpoint.

    Returns:
        the model's address, ``models:/<model_id>``.

    Raises:
        UserError: the run is in another store.
        Unavailable: the store fails.
    """
    client, found_run = open_own_store(), find_or_create(run)
    run_id = found_run.info.run_id
    path = config.project_root() / keras_file
    trained_models.verify(f"run {run.run_id}", path, path.with_name(trained_models.MANIFEST))
    digest = files.digest(path)
    tags = present(
        {"data_version": run.lineage.data_version, "git_commit": run.lineage.git_commit, "keras_file_sha256": digest}
    )
    same = [one for one in logged_models(client, found_run) if one.tags.get("keras_file_sha256") == digest]
    logged = min(same, key=lambda one: one.status != LoggedModelStatus.READY, default=None)
    if logged is not None and logged.status == LoggedModelStatus.READY:
        return f"models:/{logged.model_id}"
    if logged is None:
        # The parameters of its run, so that MLflow's list of models can be sorted and searched by them.
        params = found_run.data.params
        logged = client.create_logged_model(
            found_run.info.experiment_id, name, run_id, tags=tags, params=params, model_type="keras"
        )
    # If a step fails, the model stays pending, and the next attempt continues with it.
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        _write_model(folder, run, run_id, logged.model_id, path, prepared)
        client.log_model_artifacts(logged.model_id, str(folder))
    outputs = found_run.outputs.model_outputs if found_run.outputs else []
    if logged.model_id not in {output.model_id for output in outputs}:
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step)])
    of_model = {"model_id": logged.model_id, **_test_dataset(found_run)}
    points = [_with_time_in_run(client, run_id, point) for point in points_of(metrics, 0)]
    client.log_batch(run_id, metrics=[Metric(*point, **of_model) for point in points])
    client.finalize_logged_model(logged.model_id, "READY")
    return f"models:/{logged.model_id}"


def _test_dataset(run: Any) -> dict[str, str]:
    inputs = run.inputs.dataset_inputs if run.inputs else []
    tested = [one.dataset for one in inputs if "test" in {tag.value for tag in one.tags}]
    return {"dataset_name": tested[0].name, "dataset_digest": tested[0].digest} if tested else {}


def _with_time_in_run(client: mlflow.MlflowClient, run_id: str, point: list[Any]) -> list[Any]:
    """Return a point with the timestamp of the run's own point, because MLflow adds a model's metrics to its run,
    too."""
    name, value, _, step = point
    for known in client.get_metric_history(run_id, name):
        if known.step == step and (known.value == value or (known.value != known.value and value != value)):
            return [name, value, known.timestamp, step]
    return point


def _write_model(
    folder: Path,
    run: records.Run,
    run_id: str,
    model_id: str,
    keras_file: Path,
    prepared: records.PreparedDataset,
) -> None:
    """Write an MLflow model into a new folder.

    This does not use mlflow.keras, which requires the model in memory and writes a file that differs from the run's.
    """
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    takes_raw = keras_file.with_name(trained_models.ENCODING).exists()
    packages = ["keras", "numpy", backend, *(["pandas", "pillow"] if takes_raw else [])]
    signature = ModelSignature(
        inputs=Schema(_inputs(prepared.features, takes_raw)),
        outputs=Schema([TensorSpec(np.dtype("float32"), (-1, prepared.target.num_outputs))]),
    )
    model = Model(run_id=run_id, model_id=model_id, model_uuid=model_id)
    model.add_flavor(
        "keras", data="data", keras_version=version("keras"), keras_backend=backend, save_exported_model=False
    )
    module, colon, _ = run.model.partition(":")
    code, loader = _write_code(folder.with_name("code"), keras_file, module if colon else None, takes_raw)
    with upstream.without_a_look_at_packages():
        mlflow.pyfunc.save_model(
            str(folder),
            loader_module=loader,
            code_paths=code or None,
            mlflow_model=model,
            signature=signature,
            # Random pixels for trying out a model server, because training images must not go to MLflow.
            input_example=_example(prepared.features),
            pip_requirements=[f"{package}=={version(package)}" for package in packages],
        )
    (folder / "data").mkdir()
    trained_models.copy_meaning(keras_file, folder / "data")
    copied = Path(shutil.copyfile(keras_file, folder / "data" / "model.keras"))
    model.model_size_bytes += copied.stat().st_size
    model.save(str(folder / "MLmodel"))
    trained_models.write_manifest(folder)


def _inputs(features: Mapping[str, records.Feature], takes_raw: bool) -> list[Any]:
    """Return the inputs for MLflow's signature: the raw columns of a table, images, or arrays as prepared."""
    columns = [column for feature in features.values() for column in feature.columns]
    if columns:
        # AnyType, because MLflow would refuse the integer 3 in a column of floats or of categories.
        return [ColSpec("string" if column.kind == "text" else AnyType(), column.name) for column in columns]
    if takes_raw:
        return [TensorSpec(np.dtype(object), (-1,))]  # Accepts everything; the encoder rejects values without an image.
    return [
        TensorSpec(np.dtype(feature.dtype), (-1, *feature.shape), name if len(features) > 1 else None)
        for name, feature in features.items()
    ]


def _example(features: Mapping[str, records.Feature]) -> Any:
    generator = np.random.default_rng(0)
    columns = [column for feature in features.values() for column in feature.columns]
    if columns:
        values = {"number": 0.0, "datetime": "2000-01-31 12:00", "category": "a", "text": "some words", "image": None}
        return pandas.DataFrame({column.name: [values[column.kind]] for column in columns})
    made = {}
    for name, feature in features.items():
        made[name] = generator.integers(0, 256 if feature.kind == "image" else 2, (1, *feature.shape)).astype(
            feature.dtype
        )
    return records.as_input(made)


LOADER = """\
import json
from pathlib import Path

import numpy as np
from mlflow.keras.load import _load_pyfunc as load

from ENCODING import Encoder


class RawModel:
    \"\"\"Takes the columns of a table as they are in the file that was trained on; pixels, or files of images.\"\"\"

    def __init__(self, inner, encoder):
        self._inner, self._encoder = inner, encoder

    def get_raw_model(self):
        return self._inner.get_raw_model()

    def predict(self, given, params=None):
        model, inputs = self.get_raw_model(), self._encoder.model_input(given)
        if not len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs):
            return np.zeros((0, *model.output_shape[1:]), "float32")  # Keras fails without a batch.
        return model.predict(inputs, verbose=0)


def _load_pyfunc(path, **options):
    known = json.loads(Path(path, "data", "encoding.json").read_text(encoding="utf-8"))
    return RawModel(load(path, **options), Encoder(known["features"], known["vocabularies"]))
"""


def _write_code(folder: Path, keras_file: Path, module: str | None, takes_raw: bool) -> tuple[list[str], str]:
    """Write the code that a model needs, and return the paths in the folder and the module that loads the model.

    The code consists of the encoder of raw values and the user's code: Keras finds a user-defined class by name only
    after the import of the module that registers it.
    """
    own = keras_file.with_name(trained_models.CODE)
    if not own.exists() and not takes_raw:
        return [], "mlflow.keras"
    folder.mkdir(parents=True)
    digest = hashlib.sha256()
    text = '"""Loads the model."""\n\n'
    if own.exists():
        shutil.copytree(own, folder, dirs_exist_ok=True)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest.update(file.read_bytes())
        text = f'"""Loads the model, whose classes are registered in {module}."""\n\n'
        text += f"import importlib\n\nimportlib.import_module({module!r})\n\n"
    if takes_raw:
        text += LOADER.replace("ENCODING", trained_models.copy_encoder(folder))
    else:
        text += "from mlflow.keras.load import _load_pyfunc\n"
    # A process that loads two models must not mix up their code.
    digest.update(text.encode())
    loader = f"load_{digest.hexdigest()[:12]}"
    (folder / f"{loader}.py").write_text(text, encoding="utf-8")
    return sorted(str(path) for path in folder.iterdir()), loader


@retried
def fetch_files(address: str | None, folder: str) -> dict[str, str | None]:
    """Return the paths of the files of a registered model's version, see ``fetch_model``."""
    return fetch_model(address, folder).places


def fetch_model(address: str | None, folder: str) -> TrainedModel:
    """Return the verified version of a registered model.

    Args:
        address: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``; None is the only champion.
        folder: the target for the version's files; unused if the registry is the own store.

    Raises:
        UserError: the version does not exist, its files are damaged, another program registered it, or a server's
            version names a user's module that is not allowed.
        Unavailable: the tracking server does not answer, or fails.
    """
    client = open_registry()
    version = _find_at(client, address or _only_champion(client))
    name = f"{version.name}/{version.version}"
    place = client.get_model_version_download_uri(version.name, version.version)
    into = None if is_own_store() else folder
    try:
        found = mlflow.artifacts.download_artifacts(artifact_uri=place, dst_path=into, tracking_uri=store_uri())
    except OSError as error:
        raise UserError(f"{name}: its files cannot be read ({error})") from None
    if "keras_file_sha256" not in version.tags:
        raise UserError(f"{name} was not registered by Stratagem: its tags do not name its file")
    file, model_name = Path(found, "data", "model.keras"), version.tags.get("model", "")
    manifest, code = Path(found, trained_models.MANIFEST), Path(found, trained_models.CODE)
    model = trained_models.read_model(name, file, manifest, model_name, code)
    if ":" in model_name and not is_own_store():  # On a server, others may have written the tags.
        own_code.check_allowed([(name, model_name)], "a model of a server, MLFLOW_TRACKING_URI,")
    return model


def _only_champion(client: mlflow.MlflowClient) -> str:
    names = sorted(one.name for one in pages(client.search_registered_models) if config.CHAMPION in one.aliases)
    if len(names) == 1:
        return f"models:/{names[0]}@{config.CHAMPION}"
    others = "a run (`stratagem runs`), `latest`, or a file FILE.keras"
    if not names:
        raise UserError(f"no registered model is @{config.CHAMPION}: train one with `stratagem run`, or name {others}")
    raise UserError(
        f"{len(names)} registered models have a @{config.CHAMPION}: name one of "
        f"{listed([f'models:/{name}@{config.CHAMPION}' for name in names])}; or {others}"
    )


@retried
def find_version(address: str) -> records.ModelVersion:
    """Return the version of a registered model to which an address currently points; see ``fetch_model``."""
    client = open_registry()
    found = _find_at(client, address)
    return version_of(client, found, found.aliases)


def _find_at(client: mlflow.MlflowClient, address: str) -> Any:
    named = trained_models.parse_address(address)
    try:
        if named["alias"]:
            return client.get_model_version_by_alias(named["name"], named["alias"])
        return client.get_model_version(named["name"], named["version"])
    except MlflowException as error:
        if error.error_code not in REFUSALS:
            raise
        there = [f"models:/{one.name}/{one.version}" for one in client.search_model_versions()]
        there += [f"models:/{one.name}@{alias}" for one in client.search_registered_models() for alias in one.aliases]
        see = f"{store_uri()} has: {listed(sorted(there), 5)}" if there else f"{store_uri()} has none"
        raise UserError(one_of("model", address, there, see)) from None


def predict(place: str, tracking_uri: str, features: Mapping[str, Any], encoded: bool) -> Any:
    """Load a logged model as a model server does, and return its outputs, float (n, num_outputs).

    Args:
        place: its artifact location, see ``registry.model_place``.
        tracking_uri: the address of the store that has the files.
        features: the features as prepared, each (n, *shape).
        encoded: whether the model takes rows of a table: then the inner Keras model gets the features, because they are
            already encoded, and the whole model gets its own input example.

    Raises:
        UserError: its files are missing or damaged.
    """
    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(tracking_uri)
    try:
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=place))
        trained_models.verify("the model", folder / "data" / "model.keras", folder / trained_models.MANIFEST)
        # Warnings only concern packages; for them, MLflow reads the file lists of all installed packages.
        model = mlflow.pyfunc.load_model(str(folder), suppress_warnings=True)
        given = records.as_input(dict(features))
        if not encoded:
            return np.asarray(model.predict(given))
        model.predict(model.input_example)
        return np.asarray(model.get_raw_model().predict(given, verbose=0))
    finally:
        mlflow.set_tracking_uri(None)  # This also removes the variable.
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before
