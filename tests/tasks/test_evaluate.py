import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from sklearn.metrics import (
    accuracy_score,
    classification_report,
    confusion_matrix,
    f1_score,
    log_loss,
    roc_auc_score,
    top_k_accuracy_score,
)

from tasks import config, tracked
from tasks.evaluate import evaluate
from tasks.evaluation import predictions
from tasks.input.order import carve
from tasks.system.errors import UserError


def load(*overrides):
    return config.load("../small.yaml", overrides)


def outputs_of(prepared, model, split="test", rows=slice(None)):
    """Labels and logits of some rows, by Keras alone."""
    files = prepared.splits[split]
    images, labels = np.load(files.features["image"])[rows], np.load(files.labels)[rows]
    # Not ``predict``, which XLA would compile: half a second a model.
    return labels, keras.models.load_model(model)(images).numpy().astype("float64")


def predict(prepared, model, split="test"):
    """Labels and probabilities, by Keras alone."""
    labels, logits = outputs_of(prepared, model, split)
    return labels, np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def test_metrics_are_those_of_scikit_learn(tiny, train):
    training = train(tiny, "train.epochs=1")
    result = evaluate(load("evaluate.global_batch_size=7"), tiny, training)
    labels, shares = predict(tiny, training.final_model)
    top = {k: top_k_accuracy_score(labels, shares, k=k, labels=range(10)) for k in (4, 5, 6)}
    assert top[4] < top[5] < top[6], "else these data would not tell them apart"
    predicted = shares.argmax(1)
    assert result.metrics == {
        "test/loss": pytest.approx(log_loss(labels, shares, labels=range(10)), rel=1e-5),
        "test/accuracy": pytest.approx(accuracy_score(labels, predicted)),
        "test/auc": pytest.approx(roc_auc_score(labels, shares, multi_class="ovr", labels=range(10))),
        "test/macro_f1": pytest.approx(f1_score(labels, predicted, average="macro", labels=range(10), zero_division=0)),
        "test/top_5_accuracy": pytest.approx(top[5]),
    }
    assert (result.num_examples, result.run_id) == (53, "first")
    assert result.checkpoint == training.checkpoint
    np.testing.assert_array_equal(result.confusion_matrix, confusion_matrix(labels, predicted, labels=range(10)))
    expected = classification_report(labels, predicted, labels=range(10), output_dict=True, zero_division=0)
    for number, one in enumerate(result.classes):
        assert one.name == tiny.target.class_names[number] == f"class {number}"
        by_hand = expected[str(number)]
        assert (one.precision, one.recall, one.f1) == pytest.approx(
            (by_hand["precision"], by_hand["recall"], by_hand["f1-score"])
        )
        assert one.support == by_hand["support"]

    kept = predictions.load(Path(result.outputs), result.outputs_sha256)
    np.testing.assert_array_equal(kept.labels, np.load(tiny.splits["test"].labels))
    _, logits = outputs_of(tiny, training.final_model)
    np.testing.assert_allclose(kept.outputs, logits, rtol=1e-5, atol=1e-5)
    assert (kept.outputs.dtype, kept.labels.dtype) == (np.float32, np.int64)


def test_what_is_kept_of_an_evaluation_is_whole_or_nothing(tmp_path):
    path = tmp_path / "evaluation" / "20.npz"
    labels, outputs = np.arange(3), np.random.default_rng(0).random((3, 4))
    sha256 = predictions.save(path, labels, outputs)
    assert predictions.save(path, labels, outputs) == sha256, "the same bytes again"
    assert [file.name for file in path.parent.iterdir()] == ["20.npz"]
    assert predictions.load(path, sha256).outputs.dtype == np.float32
    assert predictions.load(path, "0" * 64) is None, "another one"
    path.write_bytes(path.read_bytes()[:-10])
    assert predictions.load(path, sha256) is None
    assert predictions.load(tmp_path / "gone.npz", sha256) is None


def test_which_rows_were_tested_depends_on_the_test_arrays_alone(tiny):
    rows = predictions.test_rows(tiny)
    test = tiny.splits["test"]
    trained_otherwise = tiny.model_copy(update={"data_version": "0" * 32, "splits": {"test": test}})
    assert predictions.test_rows(trained_otherwise) == rows
    moved = {f"data/other/prepared/{Path(path).name}": digest for path, digest in test.sha256.items()}
    elsewhere = test.model_copy(
        update={"sha256": moved, "labels": f"data/other/prepared/{Path(test.labels).name}",
                "features": {"image": f"data/other/prepared/{Path(test.features['image']).name}"}}
    )  # fmt: skip
    assert predictions.test_rows(tiny.model_copy(update={"splits": {"test": elsewhere}})) == rows
    for path in test.sha256:
        other = test.model_copy(update={"sha256": test.sha256 | {path: "0" * 64}})
        assert predictions.test_rows(tiny.model_copy(update={"splits": {"test": other}})) != rows


def test_a_stream_is_evaluated_as_an_array_is(digits, train, monkeypatch):
    training = train(digits, "train.epochs=1")
    array = evaluate(load(), digits, training)
    kept = predictions.load(Path(array.outputs), array.outputs_sha256)
    # TensorFlow has its devices by now, and would refuse to leave one out.
    monkeypatch.setattr("tensorflow.config.set_visible_devices", pytest.fail)
    stream = evaluate(load("input.source=stream", "evaluate.global_batch_size=70"), digits, training)
    assert stream.metrics == pytest.approx(array.metrics, rel=1e-5)
    assert stream.confusion_matrix == array.confusion_matrix
    again = predictions.load(Path(stream.outputs), stream.outputs_sha256)
    np.testing.assert_array_equal(again.labels, kept.labels, "the order is the same, so examples can be compared")
    np.testing.assert_allclose(again.outputs, kept.outputs, rtol=1e-4, atol=1e-4)


OWN = """
import keras

def build(input_shape, num_classes):
    images = keras.Input(input_shape)
    x = keras.layers.Flatten()(images)
    x = keras.layers.Dense(16, kernel_regularizer=keras.regularizers.L2(0.01), activity_regularizer="l2")(x)
    return keras.Model(images, keras.layers.Dense(num_classes)(x))
"""


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "mean_squared_error"])
@pytest.mark.usefixtures("own_imports")
def test_the_loss_is_that_of_validation(tiny, train, make_dataset, project, loss):
    """The run's own, and the model's own losses on top, as Keras' evaluate has it."""
    (project / "own_evaluated.py").write_text(OWN)
    sys.modules.pop("own_evaluated", None)  # Of another test's project.
    train_arrays, held_out = (
        tuple(np.load(path) for path in (tiny.splits[split].features["image"], tiny.splits[split].labels))
        for split in ("train", "test")
    )
    same = make_dataset("same", train=train_arrays, validation=held_out, test=held_out)
    options = ("model.name=own_evaluated:build", "model.options={}", "input.validation=validation",
               f"train.loss={loss}", "train.global_batch_size=32", "evaluate.global_batch_size=32")  # fmt: skip
    training = train(same, *options)
    result = evaluate(load(*options), same, training)
    assert result.metrics["test/loss"] == pytest.approx(training.history["validation/loss"][-1], rel=1e-5)
    labels, shares = predict(same, training.final_model)
    plain = log_loss(labels, shares, labels=range(10))
    if loss == "mean_squared_error":
        plain = ((shares - np.eye(10)[labels]) ** 2).mean()
    assert result.metrics["test/loss"] > plain + 0.01, "else the model's own losses would not be seen"


@pytest.fixture
def few(make_dataset):
    """Grey images whose class is their brightness; class 2 has no test example."""

    def few(num_classes):
        labels = np.arange(60) % num_classes
        images = np.broadcast_to((labels * 40)[:, None, None, None], (60, 2, 2, 1)).astype(np.uint8)
        test = labels != 2
        return make_dataset("few", num_classes, train=(images, labels), test=(images[test], labels[test]))

    return few


def test_top_5_where_there_are_more_than_5_classes(few, train):
    prepared = few(6)
    result = evaluate(load(), prepared, train(prepared))
    assert "test/top_5_accuracy" in result.metrics
    assert np.shape(result.confusion_matrix) == (6, 6)
    assert [one.support for one in result.classes] == [10 * (i != 2) for i in range(6)]
    # A class without examples, or that is never predicted, has zeros and no warning.
    assert all(np.isfinite([one.precision, one.recall, one.f1]).all() for one in result.classes)


OWN_METRIC = """
import keras


def far(labels, outputs):
    return keras.ops.max(keras.ops.abs(outputs - keras.ops.cast(labels, outputs.dtype)[:, None]), axis=-1)


far.better = "lower"
"""


def farthest(labels, logits):
    """The same by NumPy, of all examples."""
    return abs(logits - labels[:, None]).max(1).mean()


def test_latest_best_or_a_number_by_a_metric_of_ones_own(tiny, train, project):
    (project / "distances.py").write_text(OWN_METRIC)
    own = ("train.metrics=[distances:far]", "checkpoint={keep: 3, monitor: validation/distances:far}")
    # A learning rate that ruins what the first epoch learned: the best is not the latest.
    training = train(
        tiny,
        *own,
        "train.deterministic=true",
        "train.epochs=3",
        "schedule={kind: piecewise, boundaries_epochs: [1], learning_rates: [0.01, 50]}",
    )
    steps = training.steps // 3
    found = {
        which: evaluate(load(*own, f"evaluate.checkpoint={which}"), tiny, training)
        for which in ("latest", "best", 2 * steps)
    }
    assert {which: result.step for which, result in found.items()} == {
        "latest": 3 * steps,
        "best": steps,
        2 * steps: 2 * steps,
    }
    assert training.best_checkpoint == found["best"].checkpoint == f"mlruns/runs/first/checkpoints/{steps}"
    losses = {which: result.metrics["test/loss"] for which, result in found.items()}
    assert losses["best"] < losses[2 * steps] != losses["latest"]
    validation = carve(tiny, load().input.validation, load().train.seed)["validation"]
    for which, epoch, model in (("latest", 2, training.final_model), ("best", 0, training.best_model)):
        labels, shares = predict(tiny, model)
        assert found[which].metrics["test/accuracy"] == pytest.approx(accuracy_score(labels, shares.argmax(1)))
        assert found[which].metrics["test/distances:far"] == pytest.approx(farthest(*outputs_of(tiny, model)), rel=1e-5)
        assert found[which].lower_is_better == ("test/loss", "test/distances:far")
        value = training.history["validation/distances:far"][epoch]
        assert value == pytest.approx(farthest(*outputs_of(tiny, model, *validation)), rel=1e-5)
    with pytest.raises(UserError, match=r"evaluate.checkpoint = 99999: .* has no checkpoint of that step. Allowed: "):
        evaluate(load("evaluate.checkpoint=99999"), tiny, training)
    # What the message says can be typed: `evaluate` takes a run by --run.
    (arrays,) = Path(f"mlruns/runs/first/checkpoints/{2 * steps}").glob("*.npz")
    arrays.write_bytes(arrays.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"`stratagem evaluate first --set evaluate.checkpoint=best`, or a step"):
        evaluate(load(f"evaluate.checkpoint={2 * steps}"), tiny, training)
    # Another file took the place of the one that the training was checked with.
    labels = Path(tiny.splits["test"].labels)
    labels.with_name("new").write_bytes(labels.read_bytes()[:-8] + bytes([9]) + bytes(7))
    labels.with_name("new").replace(labels)

    def register(settings, prepared, training):
        records = {"prepared": prepared, "training": training, "evaluation": found["best"], "run": None}
        return tracked.register(settings, **records)

    for stage in (evaluate, register):
        with pytest.raises(UserError, match=r"test_labels.npy is damaged: its sha256 is"):
            stage(load(), tiny, training)


def test_the_model_is_a_fresh_one_of_the_checkpoint_alone(tiny, train):
    training = train(tiny)
    expected = evaluate(load(), tiny, training)
    # Neither the exported models nor the optimizer that it was trained with are looked at.
    shutil.rmtree(Path(training.final_model).parent)
    assert evaluate(load("optimizer.kind=sgd"), tiny, training) == expected
    with pytest.raises(UserError, match=r"belongs to a different model or optimizer: "):
        evaluate(load("model.options={units: [17]}"), tiny, training)


# Strategies that this process, or any machine of the tests, cannot have.
def test_a_machine_without_the_runs_devices_evaluates_on_one(tiny, train, caplog, monkeypatch):
    strategy, reason = "strategy={kind: mirrored, devices: ['gpu:7']}", "this machine has 0 GPUs"
    monkeypatch.delenv("TF_CONFIG", raising=False)
    training = train(tiny)
    expected = evaluate(load(), tiny, training)
    caplog.set_level("INFO", "tasks.evaluate")
    found = evaluate(load(strategy), tiny, training)
    assert (found.strategy, found.metrics) == ("one_device", expected.metrics)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tasks.evaluate"]
    assert line.startswith("evaluating on one device: ")
    assert reason in line
    # Where one device is asked for, nobody looks for the others.
    caplog.clear()
    assert evaluate(load(strategy, "evaluate.strategy=one_device"), tiny, training) == found
    assert [record for record in caplog.records if record.name == "tasks.evaluate"] == []  # TensorFlow may speak.


def test_a_run_without_a_checkpoint(tiny, train):
    training = train(tiny)
    shutil.rmtree(training.checkpoints)
    with pytest.raises(UserError, match="holds no checkpoint"):
        evaluate(load(), tiny, training)
