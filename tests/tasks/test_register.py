import base64
import hashlib
import io
import json
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import keras
import mlflow
import numpy as np
import pandas
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.pyfunc.scoring_server import invocations
from mlflow.utils import requirements_utils
from PIL import Image

from tasks import records
from tasks.evaluation import predictions
from tasks.modeling import models
from tasks.system.errors import UserError
from tasks.tracking.store import open_store, store_uri
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
        with pytest.raises(ValueError, match="give n x 4 x 4 x 1 pixels, whole numbers from 0 to 255, or n files"):
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


@pytest.mark.exhaustive
def test_the_version_predicts_files_of_images(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()
    result = trained.register()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_uri())
    model = mlflow.pyfunc.load_model(f"models:/{result.model_name}@challenger")
    expected = model.predict(IMAGES)

    def file(pixels: object) -> bytes:
        written = io.BytesIO()
        Image.fromarray(pixels).save(written, "PNG")
        return written.getvalue()

    files = [file(image[..., 0]) for image in IMAGES]
    texts = [base64.b64encode(file).decode() for file in files]
    given = [np.array(files, object), pandas.DataFrame({"image": files}), pandas.DataFrame({"image": texts})]
    for images in given:
        np.testing.assert_array_equal(model.predict(images), expected)
    in_colours = np.array([file(np.full((30, 20, 3), 77, np.uint8))], object)
    np.testing.assert_array_equal(model.predict(in_colours), model.predict(np.full((1, 4, 4, 1), 77, np.uint8)))
    with pytest.raises(ValueError, match=r"row 1: b'\\x89PNG.+ is not a whole image"):
        model.predict(np.array([files[0], files[1][:50]], object))
    with pytest.raises(ValueError, match=r"row 0: b'no image' is not a whole image \(it is none of PNG, JPEG"):
        model.predict(np.array([b"no image"], object))
    assert model.predict(IMAGES[:0]).shape == (0, 3)

    # As MLflow's server reads what it is sent.
    split = {"columns": ["image"], "data": [[text] for text in texts]}
    for sent in ({"inputs": texts}, {"instances": texts}, {"inputs": IMAGES.tolist()}, {"dataframe_split": split}):
        answer = invocations(json.dumps(sent), "application/json", model, model.metadata.get_input_schema())
        assert answer.status == 200, answer.response
        np.testing.assert_allclose(json.loads(answer.response)["predictions"], expected, rtol=1e-5)


@pytest.mark.in_ci(0, 2, 3)
@pytest.mark.parametrize(
    ("overrides", "evaluation", "reason"),
    [
        ([], {"accuracy": 0.8999}, r"test/accuracy = 0\.8999 does not reach register\.minimum = 0\.9"),
        ([], {"accuracy": float("nan")}, r"test/accuracy = nan does not reach register\.minimum = 0\.9"),
        (["register.metric=test/loss", "register.minimum=0.1"], {}, r"test/loss = 0\.2000 does not reach .* = 0\.1"),
        (
            ["register.metric=test/top_2_accuracy", "register.minimum=null"],
            {},
            r"the evaluation was told of no test/top_2_accuracy: `stratagem evaluate --run \w{32} --set "
            r"register\.metric=test/top_2_accuracy`, then `stratagem register --run \w{32} --set register",
        ),
        (
            ["register.metric=test/silent:never", "register.minimum=null"],
            {},
            "test/silent:never says nothing about these test rows",
        ),
        (["register.enabled=false"], {}, r"register\.enabled is false"),
        ([], {"step": 15}, r"checkpoint .*/checkpoints/15 has no exported model; .*/10 and .*/20"),
    ],
)
def test_no_version_and_an_alias_that_stays(
    store: Path, overrides: list[str], evaluation: dict[str, float], reason: str
) -> None:
    Path("silent.py").write_text("def never(labels, outputs):\n    return 0 * outputs[:, 0] + float('nan')\n")
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


@pytest.mark.exhaustive
def test_a_registration_does_not_read_what_is_installed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements_utils, "_MODULES_TO_PACKAGES", None)
    assert Trained().register().model_version == "1"
    assert requirements_utils._MODULES_TO_PACKAGES is None
    # MLflow by itself does: this much of upstream.py is still needed.
    requirements_utils.warn_dependency_requirement_mismatches(["numpy"])
    assert requirements_utils._MODULES_TO_PACKAGES is not None


@pytest.mark.exhaustive
def test_a_registration_that_was_killed_is_ended_by_the_next_with_one_version(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained()
    first = trained.register()
    calls = []

    def killed(self: object, name: str, *more: object, **options: object) -> None:
        calls.append(name)
        raise KeyboardInterrupt

    def register_killed_at(call: str, trained: Trained) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(mlflow.MlflowClient, call, killed)
            with pytest.raises(KeyboardInterrupt):
                trained.register()

    # Between the version and its alias; then between the model and its version.
    second = Trained()
    register_killed_at("set_registered_model_alias", second)
    client = open_store()
    name = first.model_name
    assert str(client.get_model_version_by_alias(name, "challenger").version) == "1", "unmoved until it is complete"
    assert second.register().model_version == "2"
    assert str(client.get_model_version_by_alias(name, "challenger").version) == "2"

    third = Trained()
    register_killed_at("create_model_version", third)
    assert third.register().model_version == "3"
    assert third.register().model_version == "3", "one version a run"
    assert calls == [name, name]
    assert sorted(int(version.version) for version in client.search_model_versions(f"name = '{name}'")) == [1, 2, 3]
    experiment = client.get_experiment_by_name("digits").experiment_id
    assert len(client.search_logged_models([experiment])) == 3


def test_a_run_whose_loss_was_no_number_is_never_registered(store: Path) -> None:
    trained = Trained()
    trained.training = trained.training.model_copy(update={"nonfinite_steps": (7,)})
    result = trained.register()
    assert result.model_version is None
    assert result.reason == "the loss was not a finite number at step 7, and such a run is never registered"


def test_without_its_server_a_model_waits_for_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="was started with no MLFLOW_TRACKING_URI"):
        trained.register()
    began, trained.run = trained.run, trained.run.model_copy(update={"store": "http://127.0.0.1:9"})
    result = trained.register()
    trained.run = began
    assert (result.model_uri, result.model_version) == (None, None)
    assert result.reason.endswith(f"; then `stratagem register --run {trained.run.run_id}`")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert trained.register().model_version == "1"


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
    assert f"stratagem register --run {trained.run.run_id}" in result.reason
    assert trained.register().model_uri == result.model_uri, "the logged model is used again"


def test_the_same_model_is_the_same_version(store: Path) -> None:
    first, second = Trained(), Trained()
    keras.saving.load_model(first.training.final_model).save(second.training.final_model)
    files = [Path(trained.training.final_model).read_bytes() for trained in (first, second)]
    assert files[0] != files[1], "they hold the time at which they were written"
    before, again = first.register(), second.register()
    assert (again.model_version, again.aliases) == (before.model_version, before.aliases)
    assert (again.model_version, again.aliases) == ("1", ("challenger", "champion"))
    assert again.judgement.reason == "this model is @champion already"
    assert (before.notes, again.notes) == (
        (), (f"the same model as run {first.run.run_id}'s: version 1 is used again",)
    )  # fmt: skip
    client = open_store()
    assert [version.run_id for version in client.search_model_versions()] == [first.run.run_id]
    assert client.get_run(second.run.run_id).data.tags["model_version"] == f"{again.model_name}/1"

    other = Trained()  # Other layers; in `second` and here the weights' digest is the same, too.
    assert (other.register().model_version, other.register().notes) == ("2", ())


@pytest.mark.in_ci(0, 2)
@pytest.mark.parametrize(
    ("overrides", "before", "now", "note"),
    [
        ([], {"accuracy": 0.98}, {"accuracy": 0.95}, "test/accuracy 0.9500, version 1 has 0.9800"),
        (["register.metric=test/loss", "register.minimum=null"], {"loss": 0.1}, {"loss": 0.2},
         "test/loss 0.2000, version 1 has 0.1000"),
        ([], {"accuracy": 0.95}, {"accuracy": 0.95}, None),
        ([], {"accuracy": 0.95}, {"accuracy": 0.98}, None),
        (["register.metric=test/loss", "register.minimum=null"], {"loss": 0.2}, {"loss": 0.1}, None),
    ],
)  # fmt: skip
def test_an_alias_that_moves_to_a_worse_model_says_so(
    store: Path, overrides: list[str], before: dict[str, float], now: dict[str, float], note: str | None
) -> None:
    Trained(*overrides).register(**before)
    worse = Trained(*overrides)
    result = worse.register(**now)
    assert (result.model_version, result.aliases) == ("2", ("challenger",)), "said, not refused"
    expected = None if note is None else f"@challenger moved to a worse model: {note}"
    assert result.notes == (() if expected is None else (expected,))
    client = open_store()
    assert client.get_run(worse.run.run_id).data.tags.get("alias_moved") == expected
    assert client.get_model_version(result.model_name, "2").tags.get("alias_moved") == expected


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


CLEAN = """
import mlflow, numpy, sys
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
images = numpy.random.default_rng(1).integers(0, 256, (5, 4, 4, 1), numpy.uint8)
print(repr(model.predict(images).tolist()))
print(type(model.get_raw_model()).__name__)
"""


@pytest.mark.slow
def test_the_documents_own_model_is_loaded_in_a_process_that_knows_nothing_of_the_project(
    store: Path, project: Path, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```python\n(# my_models.py\n.*?)```", Path("docs/own-model.md").read_text(), re.DOTALL)
    Path("my_models.py").write_text(block)
    trained = Trained("model.name=my_models:build", "model.options={units: 8}")
    try:
        model = models.build(trained.settings.model, trained.prepared, "scale")
        model.save(trained.training.final_model)
    finally:
        sys.modules.pop("my_models", None)
        sys.path.remove(str(project))
    result = trained.register()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.delenv("PYTHONPATH")
    uri = f"models:/{result.model_name}@challenger"
    ended = run([sys.executable, "-c", CLEAN, store_uri(), uri], cwd=elsewhere)
    assert ended.returncode == 0, ended.stderr
    predicted, kind = ended.stdout.splitlines()[-2:]
    np.testing.assert_allclose(json.loads(predicted), model.predict(IMAGES, verbose=0), rtol=1e-5)
    assert kind == "Functional"
