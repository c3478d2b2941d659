import hashlib
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import keras
import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from tasks import records
from tasks.evaluation import predictions
from tasks.system.errors import UserError
from tasks.tracking.metrics import MetricWriter
from tasks.tracking.store import open_own_store, open_store, store_uri
from tests.tasks.registering import IMAGES, VERSION, Trained


def logged_folder(model_uri: str) -> Path:
    location = open_store().get_logged_model(model_uri.removeprefix("models:/")).artifact_location
    return Path(location.removeprefix("file://"))


def test_a_good_model_becomes_a_version_with_the_alias(store: Path) -> None:
    trained = Trained()
    result = trained.register()
    name = f"digits-{trained.settings.model.name}"
    assert (result.model_name, result.model_version, result.aliases) == (name, "1", ("challenger", "champion"))
    assert result.reason is None
    assert result.judgement == records.Judgement(promoted=True, reason="the first model that passes the gate")

    client = open_store()
    version = client.get_model_version_by_alias(name, "challenger")
    assert (str(version.version), version.status, version.run_id) == ("1", "READY", trained.run.run_id)

    # From the version to data, commit, checkpoint, weights and file ...
    keras_file = Path(trained.training.final_model)
    for digest in ("model_digest", "takes_digest", "test_outputs_sha256"):
        assert re.fullmatch("[0-9a-f]{64}", version.tags.pop(digest))
    assert version.tags == {
        "data_version": VERSION,
        "git_commit": trained.run.lineage.git_commit,
        "code_digest": trained.run.lineage.code_digest,
        "settings_digest": trained.settings.digest(),
        "checkpoint": trained.training.checkpoint,
        "weights_digest": "f" * 64,
        "keras_file_sha256": hashlib.sha256(keras_file.read_bytes()).hexdigest(),
        "model": trained.settings.model.name,
        "test_rows": predictions.test_rows(trained.prepared),
        "test_outputs": f"{trained.run.folder}/evaluation/20.npz",
        "test/accuracy": "0.9500",
        "gate": "the first model that passes the gate",
    }
    assert (logged_folder(result.model_uri) / "data" / "model.keras").read_bytes() == keras_file.read_bytes()

    # ... and back from the run, the model and the data to the version.
    found = client.get_run(trained.run.run_id)
    assert found.data.tags["model_version"] == f"{name}/1"
    assert [f"models:/{output.model_id}" for output in found.outputs.model_outputs] == [result.model_uri]
    assert [v.version for v in client.search_model_versions(f"run_id = '{trained.run.run_id}'")] == [version.version]
    assert [v.version for v in client.search_model_versions(f"tags.data_version = '{VERSION}'")] == [version.version]
    logged = client.get_logged_model(result.model_uri.removeprefix("models:/"))
    assert (logged.source_run_id, logged.status.value) == (trained.run.run_id, "READY")
    assert f'"name": "{name}"' in logged.tags["mlflow.modelVersions"]
    assert {metric.key: metric.value for metric in logged.metrics} == {"test/accuracy": 0.95, "test/loss": 0.2}
    assert {(metric.dataset_name, metric.dataset_digest) for metric in logged.metrics} == {("digits/test", VERSION)}
    assert logged.params["model.name"] == "convnet2", "what MLflow's list of models is searched by"
    assert logged.params == found.data.params
    for metric, value in (("test/accuracy", 0.95), ("test/loss", 0.2)):
        history = client.get_metric_history(trained.run.run_id, metric)
        assert [(point.step, point.value) for point in history] == [(0, value)], "once, though the model has it too"

    assert mlflow.active_run() is None
    every = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert [(one.info.run_id, one.info.status) for one in every] == [(trained.run.run_id, "FINISHED")]


def test_the_version_predicts_raw_pixels(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()
    result = trained.register()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_uri())
    model = mlflow.pyfunc.load_model(f"models:/{result.model_name}@challenger")
    expected = keras.saving.load_model(trained.training.final_model).predict(IMAGES, verbose=0)
    predicted = model.predict(IMAGES)
    assert (predicted.dtype, predicted.shape) == (np.float32, (5, 3))
    np.testing.assert_array_equal(predicted, expected)
    np.testing.assert_array_equal(mlflow.keras.load_model(result.model_uri).predict(IMAGES, verbose=0), expected)

    for wrong in (IMAGES[:, :3], IMAGES.astype(np.float32), IMAGES.astype(int) - 256, IMAGES.astype(int) + 256):
        with pytest.raises(ValueError, match="pass n x 4 x 4 x 1 pixels, whole numbers from 0 to 255, or n files"):
            model.predict(wrong)
    example = model.input_example
    assert example.shape == (1, 4, 4, 1)
    assert not any(np.array_equal(example[0].astype(int), image) for image in IMAGES), (
        "none of the data leaves with the model"
    )
    assert model.predict(example).shape == (1, 3)

    folder = logged_folder(result.model_uri)
    required = (folder / "requirements.txt").read_text().split()
    names = {line.partition("==")[0] for line in required}
    assert names == {"mlflow", "keras", "numpy", "pandas", "pillow", "tensorflow"}
    assert f"keras=={keras.__version__}" in required
    assert model.metadata.model_size_bytes > (folder / "data" / "model.keras").stat().st_size


@pytest.mark.in_ci(0, 1, 2)
@pytest.mark.parametrize(
    ("overrides", "evaluation", "reason"),
    [
        ([], {"accuracy": 0.8999}, r"test/accuracy = 0\.8999 does not reach register\.minimum = 0\.9"),
        (["register.metric=test/loss", "register.minimum=0.1"], {}, r"test/loss = 0\.2000 does not reach .* = 0\.1"),
        (
            ["register.metric=test/top_2_accuracy", "register.minimum=null"],
            {},
            r"the evaluation did not measure test/top_2_accuracy: `stratagem evaluate \w{32} --set "
            r"register\.metric=test/top_2_accuracy`, then `stratagem models register \w{32} --set register",
        ),
        (["register.enabled=false"], {}, r"register\.enabled is false"),
    ],
)
def test_no_version_and_an_alias_that_stays(
    store: Path, overrides: list[str], evaluation: dict[str, float], reason: str
) -> None:
    first = Trained().register()
    second = Trained(*overrides).register(**evaluation)
    assert (second.model_version, second.aliases) == (None, ())
    assert re.search(reason, str(second.reason))
    client = open_store()
    assert str(client.get_model_version_by_alias(first.model_name, "challenger").version) == first.model_version
    assert len(client.search_model_versions()) == 1
    assert "model_version" not in client.get_run(second.run_id).data.tags


@pytest.mark.parametrize(
    "overrides",
    [["register.metric=test/loss", "register.minimum=0.2"], ["register.minimum=0.95"], ["register.minimum=null"]],
)
def test_a_value_on_the_gate_passes(store: Path, overrides: list[str]) -> None:
    assert Trained(*overrides).register().model_version == "1"


def test_the_best_checkpoint_brings_the_best_model_and_moves_the_alias(store: Path) -> None:
    Trained().register()
    trained = Trained("register.model_name=digits-mlp", "register.alias=best")
    other = Trained()
    name = other.register().model_name
    result = trained.register(step=10)
    assert (result.model_name, result.aliases) == ("digits-mlp", ("best", "champion"))
    client = open_store()
    best = client.get_model_version_by_alias("digits-mlp", "best")
    best_file = Path(trained.training.best_model).read_bytes()
    assert best.tags["keras_file_sha256"] == hashlib.sha256(best_file).hexdigest()
    assert best.tags["checkpoint"] == trained.training.best_checkpoint
    assert best.tags["weights_digest"] == "e" * 64
    assert client.get_model_version_by_alias(name, "challenger").run_id == other.run.run_id


def test_a_users_own_model_has_a_name_that_mlflow_takes(store: Path) -> None:
    result = Trained("model.name=my.models:build", "model.options={}").register()
    assert (result.model_name, result.model_version) == ("digits-my.models.build", "1")


def test_a_run_whose_loss_was_no_number_is_never_registered(store: Path) -> None:
    trained = Trained()
    trained.training = trained.training.model_copy(update={"nonfinite_steps": (7,)})
    result = trained.register()
    assert result.model_version is None
    assert result.reason == "the loss was not a finite number at step 7, and such a run is never registered"


def test_without_its_server_a_model_waits_for_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    result = trained.register()
    assert result.model_version is None
    assert (
        open_own_store().get_logged_model(result.model_uri.removeprefix("models:/")).source_run_id == trained.run.run_id
    )
    assert "no MLflow server answers" in result.reason
    assert result.reason.endswith("; then `stratagem runs sync` registers it")
    assert result.waits
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store.absolute().with_name('another.db')}")
    with pytest.raises(UserError, match="It was started with its project's own store: unset it"):
        trained.register()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert trained.register().model_version == "1"


def test_a_run_whose_store_was_replaced_is_written_there_again(store: Path, empty_store: Path) -> None:
    trained = Trained()
    with MetricWriter(trained.run) as writer:
        writer.write(1, {"train/loss": 0.5})
    trained.register()
    before = open_store().get_run(trained.run.run_id)
    shutil.copy(empty_store, store)
    assert trained.register().model_version == "1"
    (found,) = open_store().search_runs(["1"])
    assert (found.info.status, found.info.run_name) == ("FINISHED", before.info.run_name)
    assert found.data.params == before.data.params
    assert found.data.metrics == before.data.metrics
    assert found.data.tags["stratagem.run_id"] == trained.run.run_id


@pytest.mark.slow
def test_a_store_that_fails_in_the_registration_does_not_fail_the_run(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained()

    def fail(self: object, *args: object, **options: object) -> None:
        raise MlflowException("database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "create_model_version", fail)
        result = trained.register()
    assert result.model_version is None
    assert "database is locked" in result.reason
    assert result.reason.endswith(f"; then `stratagem models register {trained.run.run_id}`")
    assert trained.register().model_uri == result.model_uri, "the logged model is used again"


def test_the_same_model_is_the_same_version(store: Path) -> None:
    first, second = Trained(), Trained()
    keras.saving.load_model(first.training.final_model).save(second.training.final_model)
    second.sign()
    files = [Path(trained.training.final_model).read_bytes() for trained in (first, second)]
    assert files[0] != files[1], "they hold the time at which they were written"
    before, again = first.register(), second.register()
    assert (again.model_version, again.aliases) == (before.model_version, before.aliases)
    assert (again.model_version, again.aliases) == ("1", ("challenger", "champion"))
    assert again.judgement.reason == "this model is already @champion"
    assert (before.notes, again.notes) == (
        (), (f"the same model as run {first.run.run_id}'s: version 1 is used again",)
    )  # fmt: skip
    client = open_store()
    assert [version.run_id for version in client.search_model_versions()] == [first.run.run_id]
    assert client.get_run(second.run.run_id).data.tags["model_version"] == f"{again.model_name}/1"

    other = Trained()  # Other layers; in `second` and here the weights' digest is the same, too.
    assert (other.register().model_version, other.register().notes) == ("2", ())


def test_a_model_of_a_project_that_was_moved_is_loaded_from_its_new_place(
    store: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(store)) as database, database:  # As of a store that was made here.
        place = f"{project.as_uri()}/mlruns/artifacts/0"
        database.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = 0", (place,))
    before = Trained().register()
    new = project.rename(project.with_name("moved"))
    monkeypatch.chdir(new)
    after = Trained().register()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_uri())
    assert not project.exists(), "the old place does not come back"
    for version in (before, after):
        model = mlflow.pyfunc.load_model(f"models:/{version.model_name}/{version.model_version}")
        assert model.predict(IMAGES).shape == (5, 3)
        assert logged_folder(version.model_uri).is_relative_to(new)
