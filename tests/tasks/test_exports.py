import importlib
import importlib.util
import io
import json
import re
import runpy
import shutil
import sys
import tomllib
from hashlib import sha256
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tasks import config, records
from tasks.records import ExportedModel, Lineage, Run
from tasks.runs import entries, outcome
from tasks.serving import formats
from tasks.serving.export import export
from tasks.serving.formats import Format
from tasks.serving.raw_model import RawModel
from tasks.system.errors import StratagemError, UserError
from tasks.tracking import trained_models

# Without a framework, and none that another test has imported.
NAMES = """
import importlib
import sys
from tasks import config
from tasks.serving import formats
found = [importlib.import_module(f"tasks.serving.formats.{name}").FORMAT for name in config.names_of("serving/formats")]
assert all(isinstance(one, formats.Format) for one in found), found
assert isinstance(formats.find_format("keras"), formats.Format)
print(sorted({"tensorflow", "keras", "jax"} & set(sys.modules)))
"""
OWN = """
import keras

{decorator}
class Small(keras.Model):
    def __init__(self, num_classes, **kwargs):
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.flatten = keras.layers.Flatten()
        self.logits = keras.layers.Dense(num_classes, dtype="float32")

    def call(self, images):
        return self.logits(self.flatten(images))

    def get_config(self):
        return super().get_config() | {{"num_classes": self.num_classes}}


def build(input_shape, num_classes):
    return {made}
"""


# A stranger makes a function of the files, by the documentation of Keras, TensorFlow, ONNX Runtime and LiteRT.
def keras_by_hand(folder):
    return lambda images: keras.models.load_model(folder / "model.keras").predict(images, verbose=0)


def savedmodel_by_hand(folder):
    serving = tf.saved_model.load(str(folder)).signatures["serving_default"]
    return lambda images: serving(tf.constant(images))["output_0"].numpy()


def onnx_by_hand(folder):
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx")
    return lambda images: session.run(None, {"pixels": images})[0]


def litert_by_hand(folder):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(folder / "model.tflite"))
    (taken,), (given,) = interpreter.get_input_details(), interpreter.get_output_details()

    def predict(images):
        interpreter.resize_tensor_input(taken["index"], images.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(taken["index"], images)
        interpreter.invoke()
        return interpreter.get_tensor(given["index"])

    return predict


BY_HAND = {
    "keras": keras_by_hand,
    "savedmodel": savedmodel_by_hand,
    "onnx": onnx_by_hand,
    "litert": litert_by_hand,
    "litert_quantized": litert_by_hand,
}
# What an output of a rounded format may differ by.
ALLOWED = {"litert_quantized": 0.1}


def installed(name):
    """Skip the test where the extra of a format is not installed."""
    try:
        formats.find_format(name)
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def trained(tiny, train):
    """Train, and leave the record as a stage process does: ``trained("train.epochs=1")`` gives settings and run."""

    def trained(*overrides, run_id="first"):
        result = train(tiny, *overrides, run_id=run_id)
        folder = Path(f"mlruns/runs/{run_id}")
        records.save(result, folder / "records" / "training.json")
        settings = config.load("../small.yaml", overrides)
        origin = Lineage(git_commit="c0ffee", git_dirty=False, code_digest="", settings_digest="", data_version="da7a")
        values = {"experiment": "tests", "name": "tests", "lineage": origin, "settings": settings.to_json()}
        return settings, Run(run_id=run_id, folder=str(folder), **values)

    return trained


def everything(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in Path(folder).rglob("*")}


def test_formats_are_found_by_name_without_a_framework(project, run):
    done = run([sys.executable, "-c", NAMES])
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    with pytest.raises(UserError, match=r"unknown export format 'saved_model': did you mean 'savedmodel'\? Allowed: "):
        formats.find_format("saved_model")


# A training has the other formats refused.
REFUSED = {("bfloat16", "onnx"), ("bfloat16", "litert"), ("bfloat16", "litert_quantized")}
TRAININGS = {
    "dropout": ("model={name: convnet2, options: {dropout: 0.4, padding: same}}", "input.normalization=standardize"),
    "bfloat16": ("train.dtype_policy=mixed_bfloat16",),
}


@pytest.mark.in_ci(0, 3, 5, 7, 9)
@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("name", config.names_of("serving/formats"))
def test_a_model_is_what_it_was_in_each_format(tiny, trained, name, kind, tmp_path):
    installed(name)
    overrides = TRAININGS[kind]
    settings, run = trained(*overrides, "train.epochs=1")
    if (kind, name) in REFUSED:
        policy = settings.train.dtype_policy
        with pytest.raises(UserError, match=f"cannot be exported as {name}: it was trained with train.dtype_policy = "
                                            f"{policy}, and "):  # fmt: skip
            export(settings, tiny, run, name, "latest", str(tmp_path / "out"))
        assert list(tmp_path.glob("out")) == []
        return
    training = outcome.load_training(run)
    made = export(settings, tiny, run, name, "latest", str(tmp_path / "deep" / "er"))
    folder = tmp_path / "deep" / "er"
    images = np.load(tiny.splits["test"].features["image"])
    expected = keras.models.load_model(training.final_model).predict(images, verbose=0)
    allowed = ALLOWED.get(name, 1e-4)
    np.testing.assert_allclose(BY_HAND[name](folder)(images), expected, rtol=0, atol=allowed)
    assert made.folder == str(folder)
    assert records.load(ExportedModel, folder / "export.json") == made.model_copy(update={"folder": None})
    assert (made.format, made.run_id, made.dataset, made.checkpoint) == (name, "first", "tiny", training.checkpoint)
    assert (made.data_version, made.git_commit, made.weights_digest) == ("da7a", "c0ffee", training.weights_digest)
    assert (made.num_examples, made.max_difference <= allowed) == (53, True)
    (taken,), (given,) = made.inputs, made.outputs
    assert (taken.name, taken.shape, taken.dtype) == ("pixels", (None, 8, 8, 1), "uint8")
    assert (given.shape, given.dtype) == ((None, 10), "float32")
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert present == {*made.files, "export.json"}
    assert all(sha256((folder / path).read_bytes()).hexdigest() == digest for path, digest in made.files.items())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["er"], "nothing half-written is left beside it"


@pytest.mark.slow
def test_a_rounded_model_is_much_smaller_and_says_how_good_it_is(tiny, trained, tmp_path):
    installed("litert_quantized")
    settings, run = trained("model={name: mlp, options: {units: [256]}}", "train.epochs=3")
    whole = export(settings, tiny, run, "litert", "latest", str(tmp_path / "whole"))
    rounded = export(settings, tiny, run, "litert_quantized", "latest", str(tmp_path / "rounded"))
    sizes = [(tmp_path / folder / "model.tflite").stat().st_size for folder in ("whole", "rounded")]
    assert sizes[1] < sizes[0] / 2.5
    assert (whole.metrics, whole.keras_metrics) == (None, None)
    images, labels = (np.load(tiny.splits["test"].features["image"]), np.load(tiny.splits["test"].labels))
    logits = BY_HAND["litert_quantized"](tmp_path / "rounded")(images)
    expected = keras.models.load_model(outcome.load_training(run).final_model).predict(images, verbose=0)
    assert rounded.max_difference == pytest.approx(np.abs(logits.astype("float64") - expected).max())
    assert rounded.metrics["test/accuracy"] == pytest.approx((logits.argmax(1) == labels).mean())
    assert rounded.keras_metrics["test/accuracy"] == pytest.approx((expected.argmax(1) == labels).mean())
    said = json.loads((tmp_path / "rounded" / "export.json").read_text())
    assert said["metrics"] == rounded.metrics


def files_of_images(images):
    """Return each image as the bytes of a PNG."""
    buffers = [io.BytesIO() for _ in images]
    for image, buffer in zip(images, buffers, strict=True):
        Image.fromarray(image[..., 0]).save(buffer, "PNG")
    return [buffer.getvalue() for buffer in buffers]


def test_an_export_brings_what_makes_its_input_of_files_of_images(tiny, trained, tmp_path):
    settings, run = trained("train.epochs=1")
    made = export(settings, tiny, run, "savedmodel", "latest", str(tmp_path / "out"))
    (package,) = (path.name for path in (tmp_path / "out").glob("encoding_*"))
    assert {"encoding.json", f"{package}/__init__.py", "predict.py", "target.json"} <= set(made.files)
    assert not list((tmp_path / "out").rglob("*.pyc"))
    before = sys.path[:]
    encoder = runpy.run_path(str(tmp_path / "out" / "predict.py"))["load"](tmp_path / "out").encoder
    assert (type(encoder).__module__, sys.path) == (package, before)
    images = np.load(tiny.splits["test"].features["image"])
    np.testing.assert_array_equal(encoder.model_input(files_of_images(images)), images)
    assert json.loads((tmp_path / "out" / "target.json").read_text())["class_names"] == list(tiny.target.class_names)


def test_the_encoder_of_another_release_has_another_name(tmp_path, monkeypatch):
    own = trained_models.copy_encoder(tmp_path)
    other = shutil.copytree(tmp_path / own, tmp_path / "other")
    with (other / "cells.py").open("a") as file:
        file.write("# Another release.\n")
    monkeypatch.setattr(trained_models, "ENCODER", other)
    assert trained_models.copy_encoder(tmp_path) != own


def test_the_file_of_an_export_takes_raw_inputs_wherever_it_is_copied_to(tiny, trained, tmp_path):
    settings, run = trained("train.epochs=1")
    export(settings, tiny, run, "keras", "latest", str(tmp_path / "out"))
    elsewhere = shutil.copytree(tmp_path / "out", tmp_path / "elsewhere")
    file, images = str(elsewhere / "model.keras"), np.load(tiny.splits["test"].features["image"])
    expected = keras.models.load_model(outcome.load_training(run).final_model).predict(images, verbose=0)
    shutil.rmtree(run.folder)  # As in another project.
    assert entries.look_up(run.run_id) is None
    model = RawModel(trained_models.find_trained_model(file))
    assert model.target == tiny.target
    inputs = model.encoder.model_input(files_of_images(images))
    np.testing.assert_allclose(model.outputs({"image": inputs}), expected, rtol=0, atol=1e-5)
    load = runpy.run_path(str(elsewhere / "predict.py"))["load"]
    (package,) = (path.name for path in elsewhere.glob("encoding_*"))
    for name in ("encoding.json", "target.json", "model.keras", "predict.py", f"{package}/cells.py", "export.json"):
        whole = (elsewhere / name).read_bytes()
        (elsewhere / name).write_bytes(whole.replace(b"\n", b"\n ") if name == "predict.py" else whole + b"\n")
        if name == "export.json":
            (elsewhere / name).unlink()
        with pytest.raises(UserError, match=rf"{name} (is damaged or was changed: its sha256 is|is missing)"):
            trained_models.find_trained_model(file)
        with pytest.raises(ValueError, match=rf"{name} is missing(, damaged or was changed| or damaged): copy the fol"):
            load(elsewhere)
        (elsewhere / name).write_bytes(whole)
    load(elsewhere)


def test_the_best_model_is_another_one_and_lies_beside_the_latest_in_the_folder_of_the_run(tiny, trained):
    # A learning rate that ruins what the first epoch learned: the best is not the final one.
    schedule = "schedule={kind: piecewise, boundaries_epochs: [1], learning_rates: [0.003, 10]}"
    settings, run = trained(schedule, "checkpoint.monitor=validation/loss")
    training = outcome.load_training(run)
    assert training.best_checkpoint != training.checkpoint
    found = {}
    for which, file in (("latest", training.final_model), ("best", training.best_model)):
        made = export(settings, tiny, run, "keras", which, None)
        assert Path(made.folder) == Path.cwd() / run.folder / "exports" / f"keras-{Path(made.checkpoint).name}"
        assert (Path(made.folder) / "model.keras").read_bytes() == Path(file).read_bytes()
        found[which] = made
    assert found["best"].weights_digest == training.best_weights_digest != found["latest"].weights_digest
    assert found["best"].model_digest != found["latest"].model_digest


def test_the_second_time_nothing_is_written_and_nothing_of_others_ever(tiny, trained, tmp_path):
    settings, run = trained("train.epochs=1")
    target = tmp_path / "out"
    first = export(settings, tiny, run, "savedmodel", "latest", str(target))
    before = everything(target), target.stat().st_mtime_ns
    assert export(settings, tiny, run, "savedmodel", "latest", str(target)) == first
    assert (everything(target), target.stat().st_mtime_ns) == before
    with pytest.raises(
        UserError, match=r"out already contains another model, of run first as savedmodel. Choose another"
    ):
        export(settings, tiny, run, "keras", "latest", str(target))
    (target / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"out already contains this export, but its files were changed, added or"):
        export(settings, tiny, run, "savedmodel", "latest", str(target))
    assert everything(target) == {**before[0], target / "mine.txt": b"mine"}


def test_what_no_export_made_is_left_alone(tiny, trained, tmp_path):
    settings, run = trained("train.epochs=1")
    out = tmp_path / "out"
    for name in ("folder", "empty", "elsewhere"):
        (out / name).mkdir(parents=True)
    (out / "folder" / "export.json").write_text("{}")
    (out / "file").write_text("mine")
    (out / "link").symlink_to(out / "elsewhere")
    (out / "dangling").symlink_to(out / "nowhere")
    before = everything(out)
    for name in ("folder", "empty", "file", "link", "dangling"):
        with pytest.raises(UserError, match=f"{name} already exists and is not an export. Choose another folder: --"):
            export(settings, tiny, run, "keras", "latest", str(out / name))
    assert everything(out) == before
    assert (out / "link").is_symlink()
    assert (out / "dangling").is_symlink()


def test_a_folder_that_cannot_be_made_is_one_message(tiny, trained, tmp_path):
    settings, run = trained("train.epochs=1")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"file/below/out: cannot be written \(.*Not a directory.*\). Check its perm"):
        export(settings, tiny, run, "keras", "latest", str(tmp_path / "file" / "below" / "out"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_leaves_nothing(tiny, trained, tmp_path, mount_small):
    # As large as several pages, so that a disk of a few can be full.
    settings, run = trained("train.epochs=1", "model.options={units: [512]}")
    small = tmp_path / "small"
    small.mkdir()
    mount_small(small, "size=64k")
    with pytest.raises(StratagemError, match=r"cannot be written \(No space left on device\). Make room") as caught:
        export(settings, tiny, run, "keras", "latest", str(small / "out" / "model"))
    assert caught.value.exit_code == 1
    assert list(small.iterdir()) == []


def test_a_model_that_is_missing_or_damaged_is_refused(tiny, trained, tmp_path):
    settings, run = trained("train.epochs=1")
    other = outcome.load_training(trained("train.epochs=1", "train.seed=1", run_id="second")[1]).final_model
    file = Path(outcome.load_training(run).final_model)
    whole = file.read_bytes()
    for content in (b"", whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], Path(other).read_bytes()):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"final.keras is damaged or was changed: .* Restore it from a"):
            export(settings, tiny, run, "keras", "latest", str(tmp_path / "out"))
    file.unlink()
    with pytest.raises(
        UserError, match=r"models/final.keras cannot be read \(No such file.*\). Restore it from a backup, or"
    ):
        export(settings, tiny, run, "keras", "latest", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert export(settings, tiny, run, "keras", "best", str(tmp_path / "out")).num_examples == 53


def test_a_run_that_was_not_trained_to_its_end_is_refused(tiny, trained, tmp_path):
    settings, run = trained("train.epochs=1")
    Path(run.folder, "records", "training.json").unlink()
    with pytest.raises(UserError, match=r"run first did not finish its training: resume it with `stratagem train"):
        export(settings, tiny, run, "keras", "latest", str(tmp_path / "out"))


def copied(model, keras_file, folder):
    shutil.copyfile(keras_file, folder / "model")


def broken(model, keras_file, folder):
    raise RuntimeError("this was said first\nno such operation: Frobnicate")


LOADER = """
def load_model(folder):
    import keras

    found = keras.models.load_model("mlruns/runs/first/models/final.keras")
    return lambda batch: {outputs}
"""
WRONG = [
    (copied, "found(batch).numpy() + 1e-3", StratagemError, r"among the first 53 test examples, an output "
     r"differs from Keras' by 0\.001, but at most 0\.0001 is allowed\. The files were removed from .*out"),
    (copied, "found(batch).numpy() * float('nan')", StratagemError, "differs from Keras' by nan"),
    (copied, "found(batch)[:1]", StratagemError, r"have the shape \(1, 10\), but Keras"),
    (copied, "of_the_project(batch)", UserError, r"exported as wrong \(NameError: name 'of_the_project' is not d"),
    (broken, "found(batch)", UserError, r"cannot be exported as wrong \(RuntimeError: no such operation: Frob"),
]  # fmt: skip


def loader_in(path, outputs):
    """Return a ``load_model`` of a file."""
    path.write_text(LOADER.format(outputs=outputs))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_model


def test_what_is_not_the_model_is_not_left_behind(tiny, trained, tmp_path, monkeypatch):
    settings, run = trained("train.epochs=1")
    for number, (write, outputs, error, message) in enumerate(WRONG):
        format = Format(write, loader_in(tmp_path / f"wrong{number}.py", outputs))
        monkeypatch.setattr(formats, "find_format", {"wrong": format}.__getitem__)
        with pytest.raises(error, match=message) as caught:
            export(settings, tiny, run, "wrong", "latest", str(tmp_path / "new" / "er" / "out"))
        assert type(caught.value) is error
        assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_model_of_the_users_own_is_exported(tiny, trained, own, tmp_path):
    name = "litert"
    installed(name)
    code = OWN.format(decorator="@keras.saving.register_keras_serializable()", made="Small(num_classes)")
    settings, run = trained(own(code), "model.options={}", "train.epochs=1")
    made = export(settings, tiny, run, name, "latest", str(tmp_path / "out"))
    allowed = ALLOWED.get(name, 1e-4)
    assert (made.num_examples, made.max_difference <= allowed) == (53, True)
    images = np.load(tiny.splits["test"].features["image"])
    expected = keras.models.load_model(outcome.load_training(run).final_model).predict(images, verbose=0)
    np.testing.assert_allclose(BY_HAND[name](tmp_path / "out")(images), expected, rtol=0, atol=allowed)
    with open("mine.py", "a") as file:
        file.write("\nWIDTH = 3\n")
    again = export(settings, tiny, run, name, "latest", str(tmp_path / "again"))
    assert again.weights_digest == made.weights_digest
    assert again.model_digest != made.model_digest, "it is of other code"


@pytest.mark.slow
def test_a_model_that_keras_cannot_load_is_refused_with_the_reason(tiny, trained, own, tmp_path):
    unregistered = own(OWN.format(decorator="", made="Small(num_classes)"))
    settings, run = trained(unregistered, "model.options={}", "train.epochs=1", "register.enabled=false")
    with pytest.raises(UserError, match=r"Keras cannot load .*final.keras \(.*must be registered, by") as caught:
        export(settings, tiny, run, "savedmodel", "latest", str(tmp_path / "out"))
    assert "Small" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_format_whose_packages_are_not_installed_says_which_extra_has_them(monkeypatch, code_in, tmp_path):
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {name: set(extras["optional-dependencies"].get(name, ())) for name in config.names_of("serving/formats")}
    for name in wanted:
        found = importlib.import_module(f"tasks.serving.formats.{name}").FORMAT
        packages = wanted[found.extra or name]
        assert set(found.packages) == {re.split("[<>=]", one)[0].replace("-", "_") for one in packages}
    for name in ("onnxruntime", "tf2onnx"):
        monkeypatch.setitem(sys.modules, name, None)  # Python then finds no such module.
    with pytest.raises(UserError, match=r"--format onnx needs onnxruntime and tf2onnx, not.*\.\[onnx\]"):
        formats.find_format("onnx")
    # A project of the installed package has neither a Makefile nor a pyproject.toml.
    code_in(tmp_path)
    with pytest.raises(UserError, match=r"not installed: `pip install 'onnxruntime>=[\d.]+' 'tf2onnx>=[\d.]+'`$"):
        formats.find_format("onnx")
