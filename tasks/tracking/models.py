"""Exported models in MLflow: logged, loaded, and found again by their address."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import mlflow
import numpy as np
import pandas
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import AnyType, ColSpec, Schema, TensorSpec

from tasks import config, records
from tasks.data import prepared_data
from tasks.modeling import own_code
from tasks.system import files, upstream
from tasks.system.errors import UserError, cut
from tasks.tracking import trained_models
from tasks.tracking.champion import local_run_id
from tasks.tracking.metrics import points_of
from tasks.tracking.outbox import mlflow_run_id, present
from tasks.tracking.store import REFUSALS, is_own_store, open_store, retried, store_uri
from tasks.tracking.trained_models import TrainedModel

ADDRESS = re.compile(r"models:/((?P<model_id>m-[0-9a-f]{32})|(?P<name>[^/@]+)(@(?P<alias>[^/@]+)|/(?P<version>\d+)))")


@retried
def log_model(
    run: records.Run,
    name: str,
    keras_file: str | Path,
    prepared: records.PreparedDataset,
    step: int,
    metrics: Mapping[str, float],
) -> str:
    """Log an exported model with its signature, its requirements and the metrics of its evaluation.

    The .keras file is copied as it is; its inputs are the features as prepared, its output float32 (batch,
    num_outputs). ``mlflow.pyfunc`` loads it with what makes features of raw rows or of files of images, and with the
    user's own code that it needs; ``mlflow.keras`` loads it where it needs none.

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
    run_id = mlflow_run_id(run)
    found_run = client.get_run(run_id)
    experiment_id = found_run.info.experiment_id
    digest = files.digest(config.project_root() / keras_file)
    tags = present(
        {"data_version": run.lineage.data_version, "git_commit": run.lineage.git_commit, "keras_file_sha256": digest}
    )
    logged = _find_logged(client, experiment_id, run_id, digest)
    if logged is not None and logged.status == LoggedModelStatus.READY:
        return f"models:/{logged.model_id}"
    if logged is None:
        # Those of its run, by which MLflow's list of models can be sorted and searched.
        params = found_run.data.params
        logged = client.create_logged_model(experiment_id, name, run_id, tags=tags, params=params, model_type="keras")
    # If one of these fails, the model stays pending, and the next try goes on with it.
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        _write_model(folder, run, run_id, logged.model_id, keras_file, prepared)
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
    """Return what MLflow's run was tested on, as a metric names it; nothing where MLflow does not say."""
    inputs = run.inputs.dataset_inputs if run.inputs else []
    tested = [one.dataset for one in inputs if "test" in {tag.value for tag in one.tags}]
    return {"dataset_name": tested[0].name, "dataset_digest": tested[0].digest} if tested else {}


def _find_logged(client: mlflow.MlflowClient, experiment_id: str, run_id: str, digest: str) -> Any:
    """Return the model that was logged from a run's file before, ready or else pending; None where there is none."""
    found = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'")
    same = [one for one in found if one.tags.get("keras_file_sha256") == digest]
    return min(same, key=lambda one: one.status != LoggedModelStatus.READY, default=None)


def _with_time_in_run(client: mlflow.MlflowClient, run_id: str, point: list[Any]) -> list[Any]:
    """Return a point with the time of the run's own: MLflow gives a model's metrics to its run too, a second time."""
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
    keras_file: str | Path,
    prepared: records.PreparedDataset,
) -> None:
    """Write an MLflow model into a new folder.

    It is not written by mlflow.keras, which wants the model in memory, and writes another file than the run's.
    """
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    takes_raw = prepared_data.encoder_config(prepared) is not None
    packages = ["keras", "numpy", backend, *(["pandas", "pillow"] if takes_raw else [])]
    signature = ModelSignature(
        inputs=Schema(_inputs(prepared.features, takes_raw)),
        outputs=Schema([TensorSpec(np.dtype("float32"), (-1, prepared.target.num_outputs))]),
    )
    model = Model(run_id=run_id, model_id=model_id, model_uuid=model_id)
    model.add_flavor(
        "keras", data="data", keras_version=version("keras"), keras_backend=backend, save_exported_model=False
    )
    code, loader = _write_code(folder.with_name("code"), run.settings["model"]["name"], takes_raw)
    with upstream.without_a_look_at_packages():
        mlflow.pyfunc.save_model(
            str(folder),
            loader_module=loader,
            code_paths=code or None,
            mlflow_model=model,
            signature=signature,
            # Of random pixels, to try the model's server with: the first training image is not MLflow's business.
            input_example=_example(prepared.features),
            pip_requirements=[f"{package}=={version(package)}" for package in packages],
        )
    (folder / "data").mkdir()
    trained_models.write_meaning(folder / "data", prepared)
    copied = Path(shutil.copyfile(config.project_root() / keras_file, folder / "data" / "model.keras"))
    model.model_size_bytes += copied.stat().st_size
    model.save(str(folder / "MLmodel"))


def _inputs(features: Mapping[str, records.Feature], takes_raw: bool) -> list[Any]:
    """Return what MLflow's signature says of the input: the columns of a table, raw; images; or arrays as prepared."""
    columns = [column for feature in features.values() for column in feature.columns]
    if columns:
        # Not of a type: MLflow would refuse 3 where a number may be 3.5, and in a category that is written 3.
        return [ColSpec("string" if column.kind == "text" else AnyType(), column.name) for column in columns]
    if takes_raw:
        return [TensorSpec(np.dtype(object), (-1,))]  # Lets anything through: the encoder refuses what is not an image.
    return [
        TensorSpec(np.dtype(feature.dtype), (-1, *feature.shape), name if len(features) > 1 else None)
        for name, feature in features.items()
    ]


def _example(features: Mapping[str, records.Feature]) -> Any:
    """Return one example of no meaning: a row of a table, or arrays of random values."""
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


def _write_code(folder: Path, model_name: str, takes_raw: bool) -> tuple[list[str], str]:
    """Write the code that a model needs, and return what lies in the folder and the module that loads the model.

    That is the user's own: Keras knows a class of the user's by its name once the module that registers it is imported,
    and imports none. And what makes features of raw values.
    """
    root = config.project_root()
    code = own_code.files(model_name)
    if not code and not takes_raw:
        return [], "mlflow.keras"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for file in code:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        digest.update((root / file).read_bytes())
        shutil.copyfile(root / file, folder / file)
    text = '"""Loads the model."""\n\n'
    if code:
        module = model_name.partition(":")[0]
        text = f'"""Loads the model, whose classes are registered in {module}."""\n\n'
        text += f"import importlib\n\nimportlib.import_module({module!r})\n\n"
    if takes_raw:
        text += LOADER.replace("ENCODING", trained_models.copy_encoder(folder))
    else:
        text += "from mlflow.keras.load import _load_pyfunc\n"
    # A process that loads two models must not take one's code for the other's.
    digest.update(text.encode())
    loader = f"load_{digest.hexdigest()[:12]}"
    (folder / f"{loader}.py").write_text(text, encoding="utf-8")
    return sorted(str(path) for path in folder.iterdir()), loader


@retried
def find_model(uri: str) -> records.LoggedModel:
    """Return what a model was logged from: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION`` or ``models:/<model_id>``.

    Raises:
        UserError: it is written otherwise, there is none, or another program registered it.
        Unavailable: the tracking server does not answer, or fails.
    """
    client = open_store()
    found = _find_at(client, uri, "model")
    run_id = found.source_run_id if isinstance(found, LoggedModel) else found.run_id
    if "keras_file_sha256" not in found.tags:
        raise UserError(f"'{uri}' was not registered by stratagem: it does not say which file of a run it is")
    return records.LoggedModel(
        run_id=local_run_id(client, run_id) or "", keras_file_sha256=found.tags["keras_file_sha256"]
    )


@retried
def fetch_model(address: str, folder: str) -> TrainedModel:
    """Copy a version of a registered model into a folder.

    Raises:
        UserError: there is none, its files are damaged, or another program registered it.
        Unavailable: the tracking server does not answer, or fails.
    """
    client = open_store()
    version = _find_at(client, address)
    place = client.get_model_version_download_uri(version.name, version.version)
    try:
        found = mlflow.artifacts.download_artifacts(artifact_uri=place, dst_path=folder, tracking_uri=store_uri())
    except OSError as error:
        raise UserError(f"the files of '{address}' cannot be read ({error})") from None
    model = trained_models.of_folder(Path(found), f"{version.name}/{version.version}", version.tags)
    check_code(version.name, version.version, version.tags)
    return model


def check_code(name: str, version: str, tags: Mapping[str, str]) -> None:
    """Refuse a version whose classes are registered in a module of the user's own: to load it imports that. Those of
    the project's own store may name any; of a server, where others may have written the tags, those that are allowed.

    Args:
        name: of the registered model.
        version: its number.
        tags: of the version.

    Raises:
        UserError: says how the module is allowed.
    """
    model = tags.get("model", "")
    if ":" in model and not is_own_store():
        own_code.check_allowed([(f"{name}/{version}", model)], "a model of a server, MLFLOW_TRACKING_URI,")


@retried
def find_version(address: str) -> records.ModelVersion:
    """Return the version of a registered model that an address names now; see ``fetch_model``."""
    found = _find_at(open_store(), address)
    return records.ModelVersion(
        name=found.name, version=str(found.version), aliases=tuple(found.aliases), run_id=found.run_id, tags=found.tags
    )


def _find_at(client: mlflow.MlflowClient, address: str, what: Literal["version", "model"] = "version") -> Any:
    """Return the version at an address; with ``model``, also the logged model.

    Raises:
        UserError: it is written otherwise, or there is none.
    """
    named = ADDRESS.fullmatch(address)
    if named is None or (named["model_id"] and what == "version"):
        raise UserError(f"'{address}' names no {what}: write it as models:/NAME@ALIAS or models:/NAME/VERSION")
    try:
        if named["model_id"]:
            return client.get_logged_model(named["model_id"])
        if named["alias"]:
            return client.get_model_version_by_alias(named["name"], named["alias"])
        return client.get_model_version(named["name"], named["version"])
    except MlflowException as error:
        if error.error_code not in REFUSALS:
            raise
        known = ", ".join(sorted(f"{one.name}/{one.version}" for one in client.search_model_versions()))
        raise UserError(f"'{address}' is not in {store_uri()}. There: {cut(known) or 'no model version'}") from None


def predict(place: str, tracking_uri: str, features: Mapping[str, Any], encoded: bool) -> Any:
    """Return the outputs of a logged model for rows, float (n, num_outputs), loaded as a server of models would load
    it.

    Args:
        place: where its files lie, see ``registry.model_place``.
        tracking_uri: of the store that may be asked for them.
        features: as prepared, each (n, *shape); without any the model is given its own example.
        encoded: whether the model takes rows of a table: then these are given to the Keras model in it, because as
            prepared they are no such rows any more; and the whole is given its own example.
    """
    mlflow.set_tracking_uri(tracking_uri)
    # Its warnings are of packages, and to have any MLflow reads the lists of files of all that are installed.
    model = mlflow.pyfunc.load_model(place, suppress_warnings=True)
    if not features:
        example = model.input_example
        return np.asarray([] if example is None else model.predict(example))
    given = records.as_input(dict(features))
    if not encoded:
        return np.asarray(model.predict(given))
    model.predict(model.input_example)
    return np.asarray(model.get_raw_model().predict(given, verbose=0))
