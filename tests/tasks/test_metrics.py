import sys

import keras
import numpy as np
import pytest
from sklearn import metrics as sklearn

from tasks import config
from tasks.modeling import losses, metrics, own_code
from tasks.records import HEADLINES, Target
from tasks.system.errors import UserError
from tests.tasks.made_up import CHECKOUT

NAMES = ("a", "b", "c", "d", "e", "f")
TARGETS = {
    "classification": Target.of_classes(NAMES),
    "multilabel": Target(task="multilabel", num_outputs=6, class_names=NAMES),
    "regression": Target(task="regression", num_outputs=2, mean=(3.0, 0.0), deviation=(2.0, 1.0)),
}


def predictions(task, count=203, seed=0):
    """Labels as `prepare` leaves them, and outputs that know something of them; some are equal."""
    generator = np.random.default_rng(seed)
    if task == "regression":
        labels = generator.normal(3, 2, (count, 2)).astype("float32")
        return labels, labels + generator.normal(0, 1, labels.shape)
    outputs = generator.integers(-3, 4, (count, 6)) / 2.0
    if task == "multilabel":
        labels = (generator.random((count, 6)) < 0.3).astype("uint8")
        return labels, outputs + labels
    labels = generator.integers(0, 6, count)
    return labels, outputs + 1.5 * np.eye(6)[labels] + generator.normal(0, 0.01, outputs.shape)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


# What scikit-learn makes of the same.
EXPECTED = {
    ("classification", "accuracy"): lambda y, p: sklearn.accuracy_score(y, p.argmax(1)),
    ("classification", "top_5_accuracy"): lambda y, p: sklearn.top_k_accuracy_score(y, p, k=5),
    ("classification", "macro_f1"): lambda y, p: sklearn.f1_score(y, p.argmax(1), average="macro"),
    ("classification", "auc"): lambda y, p: sklearn.roc_auc_score(y, softmax(p), multi_class="ovr"),
    ("multilabel", "micro_f1"): lambda y, p: sklearn.f1_score(y, p > 0, average="micro"),
    ("multilabel", "macro_f1"): lambda y, p: sklearn.f1_score(y, p > 0, average="macro"),
    ("multilabel", "auc"): sklearn.roc_auc_score,
    ("multilabel", "mean_average_precision"): sklearn.average_precision_score,
    ("regression", "mae"): sklearn.mean_absolute_error,
    ("regression", "rmse"): lambda y, p: np.sqrt(sklearn.mean_squared_error(y, p)),
    ("regression", "r2"): sklearn.r2_score,
}


@pytest.mark.parametrize("task", list(TARGETS))
def test_every_metric_is_what_scikit_learn_computes(task):
    labels, outputs = predictions(task)
    expected = {name: compute(labels, outputs) for (of, name), compute in EXPECTED.items() if of == task}
    assert metrics.compute(task, labels, outputs) == pytest.approx(expected, rel=1e-6)


MEASURED = [
    (task, name) for task in TARGETS for name, one in metrics.of_task(task).items() if one.in_training is not None
]


RANKINGS = "auc", "mean_average_precision"  # A training counts their scores in bins.


def measured(name, target, *batches):
    """A metric of a training that has seen these batches."""
    metric = metrics.find_metric(name).in_training(name, target)
    for labels, outputs, *weights in batches:
        metric.update_state(labels, outputs.astype("float32"), *weights)
    return metric


def assert_measured(metric, labels, outputs, **tolerance):
    """It says what an evaluation computes of all at once."""
    expected = metrics.find_metric(metric.name).of_predictions(labels, outputs)
    tolerance = tolerance or ({"abs": 1e-3} if metric.name in RANKINGS else {"rel": 1e-5})
    assert float(metric.result()) == pytest.approx(expected, **tolerance)


@pytest.mark.parametrize(("task", "name"), MEASURED)
def test_a_training_sums_up_over_batches_what_an_evaluation_computes_at_once(task, name):
    labels, outputs = predictions(task)
    parts = [slice(first, first + 50) for first in range(0, len(labels), 50)]  # The last one is short.
    metric = measured(name, TARGETS[task], *((labels[part], outputs[part]) for part in parts))
    assert metric.name == name
    assert_measured(metric, labels, outputs)


@pytest.mark.parametrize(("task", "name"), MEASURED)
def test_parts_of_workers_add_up(task, name):
    labels, outputs = predictions(task)
    parts = (slice(0, 70), slice(70, None), slice(None))
    one, other, whole = (measured(name, TARGETS[task], (labels[part], outputs[part])) for part in parts)
    for variables in zip(one.variables, other.variables, whole.variables, strict=True):
        first, second, both = map(np.asarray, variables)
        np.testing.assert_allclose(both, first + second, rtol=1e-5)


def test_a_metric_that_says_nothing_is_left_out():
    two = np.array([0, 1, 1]), np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    assert "top_5_accuracy" not in metrics.compute("classification", *two)
    assert metrics.compute("classification", *two)["auc"] == 1.0
    one_class = np.array([1, 1]), np.zeros((2, 2))
    assert "auc" not in metrics.compute("classification", *one_class)
    constant = np.ones((3, 1), "float32"), np.zeros((3, 1))
    assert set(metrics.compute("regression", *constant)) == {"mae", "rmse"}


@pytest.mark.parametrize("task", ["classification", "multilabel"])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_a_ranking_in_bins_is_near_the_exact_one_whatever_the_scores_are(task, scale):
    generator = np.random.default_rng(0)
    labels, _ = predictions(task, 5000)
    own = np.eye(6)[labels] if task == "classification" else labels
    outputs = scale * (generator.normal(0, 1, own.shape) + own)
    for name in RANKINGS if task == "multilabel" else RANKINGS[:1]:
        assert_measured(measured(name, TARGETS[task], (labels, outputs)), labels, outputs)


def test_a_ranking_leaves_out_the_classes_that_an_evaluation_leaves_out():
    labels, outputs = predictions("classification")
    labels, outputs = labels[labels < 4], outputs[labels < 4]
    assert float(measured("auc", TARGETS["classification"]).result()) == 0.0
    assert_measured(measured("auc", TARGETS["classification"], (labels, outputs)), labels, outputs)
    labels, outputs = predictions("multilabel")
    labels[:, 2] = 0
    for name in RANKINGS:
        assert_measured(measured(name, TARGETS["multilabel"], (labels, outputs)), labels, outputs)


def test_a_ranking_tells_scores_apart_whose_probabilities_are_1_in_float32():
    labels = np.array([0, 0, 1, 1])
    outputs = np.array([[40.0, 0.0], [30.0, 0.0], [25.0, 0.0], [20.0, 0.0]])
    assert float(measured("auc", Target.of_classes("ab"), (labels, outputs)).result()) == 1.0


def test_r2_of_a_training_keeps_its_digits_far_from_0():
    generator = np.random.default_rng(0)
    labels = (20_000 + generator.normal(0, 2, (1000, 1))).astype("float32")
    outputs = labels + generator.normal(0, 1, labels.shape)
    target = Target(task="regression", num_outputs=1, mean=(20_000.4,), deviation=(2.0,))
    metric = measured("r2", target, *((labels[part], outputs[part]) for part in np.array_split(np.arange(1000), 7)))
    assert_measured(metric, labels, outputs, abs=1e-3)
    metric.reset_state()
    metric.update_state(np.full((1000, 1), 20_003.3, "float32"), outputs.astype("float32"))
    assert float(metric.result()) == 0.0


@pytest.mark.parametrize("name", ["auc", "mean_average_precision", "r2"])
def test_a_weight_counts_as_so_many_examples(name):
    task = "regression" if name == "r2" else "multilabel"
    labels, outputs = predictions(task)
    weights = np.arange(len(labels)) % 3
    weighted = measured(name, TARGETS[task], (labels, outputs, weights))
    repeated = measured(name, TARGETS[task], [np.repeat(values, weights, axis=0) for values in (labels, outputs)])
    assert float(weighted.result()) == pytest.approx(float(repeated.result()), rel=1e-5)


def test_top_k_is_there_for_each_k():
    labels, outputs = predictions("classification")
    name = "top_3_accuracy"
    settings = load(f"register.metric=test/{name}")
    found = metrics.compute("classification", labels, outputs, metrics.without_file(settings))
    assert found[name] == pytest.approx(sklearn.top_k_accuracy_score(labels, outputs, k=3))
    assert found["top_5_accuracy"] > found[name] > found["accuracy"]
    metric = measured(name, TARGETS["classification"], (labels, outputs))
    assert float(metric.result()) == pytest.approx(found[name], rel=1e-5)
    assert metrics.better(f"validation/{name}") == "higher"


def prepared_of(tiny, task):
    return tiny.model_copy(update={"target": TARGETS[task]})


def load(*overrides):
    return config.load(None, overrides)


@pytest.mark.parametrize(
    ("task", "overrides", "expected"),
    [
        ("classification", [], ["accuracy"]),
        ("classification", ["train.metrics=[macro_f1,top_5_accuracy]"], ["accuracy", "macro_f1", "top_5_accuracy"]),
        ("classification", ["checkpoint.monitor=validation/macro_f1"], ["accuracy", "macro_f1"]),
        ("multilabel", ["checkpoint.monitor=validation/loss"], ["micro_f1"]),
        (
            "regression",
            ["checkpoint.monitor=train/loss", "train.early_stopping={monitor: validation/rmse}"],
            ["mae", "rmse"],
        ),
        ("regression", ["checkpoint.monitor=validation/r2"], ["mae", "r2"]),
        ("classification", ["train.metrics=[top_3_accuracy,auc]"], ["accuracy", "auc", "top_3_accuracy"]),
        (
            "multilabel",
            ["checkpoint.monitor=validation/mean_average_precision"],
            ["mean_average_precision", "micro_f1"],
        ),
    ],
)
def test_a_training_measures_its_headline_and_what_is_asked_for(tiny, task, overrides, expected):
    assert HEADLINES[task] in expected
    assert list(metrics.in_training(load(*overrides), prepared_of(tiny, task))) == expected


@pytest.mark.parametrize(
    ("task", "override", "message"),
    [
        ("regression", "train.metrics=[accuracy]", "train.metrics = accuracy: .* is a regression. A training"),
        ("classification", "train.metrics=[top_6_accuracy]", r"top_6_accuracy: tiny has 6 classes.* K below 6"),
        ("regression", "train.metrics=[top_3_accuracy]", "train.metrics = top_3_accuracy: .* is a regression"),
        (
            "multilabel",
            "checkpoint.monitor=validation/accuracy",
            "checkpoint.monitor = 'validation/acc.*: .* multil",
        ),
        (
            "regression",
            "train.early_stopping={monitor: train/auc}",
            "early_stopping.monitor = 'train/auc': .* is a regression",
        ),
    ],
)
def test_a_metric_that_a_training_cannot_measure_is_refused(tiny, task, override, message):
    with pytest.raises(UserError, match=message):
        metrics.in_training(load("checkpoint.monitor=validation/loss", override), prepared_of(tiny, task))


OWN_METRICS = """
import keras


def near(labels, outputs):  # Of a classification.
    return labels == keras.ops.argmax(outputs, axis=-1)


def far(labels, outputs):
    return keras.ops.max(keras.ops.abs(outputs - keras.ops.cast(labels, outputs.dtype)), axis=-1)


def nothing(labels, outputs):
    return outputs[:, 0] * float("nan")


def averaged(labels, outputs):
    return keras.ops.mean(outputs)


def broken(labels, outputs):
    return 1 / 0


def sideways(labels, outputs):
    return outputs[:, 0]


far.better = "lower"
sideways.better = "left"
"""
OWN = {
    "classification": ("own_metrics:near", lambda y, p: (y == p.argmax(1)).mean()),
    "multilabel": ("own_metrics:far", lambda y, p: abs(p - y).max(1).mean()),
    "regression": ("own_metrics:far", lambda y, p: abs(p - y).max(1).mean()),
}


@pytest.fixture
def own_metrics(project, monkeypatch):
    (project / "own_metrics.py").write_text(OWN_METRICS)
    sys.modules.pop("own_metrics", None)  # Of another test's project.
    (project / "val_metrics.py").write_text(OWN_METRICS)
    monkeypatch.syspath_prepend(project)


@pytest.mark.parametrize("task", list(TARGETS))
@pytest.mark.parametrize(
    "override",
    ["train.metrics=[{}]", "checkpoint.monitor=validation/{}", "train.early_stopping={{monitor: train/{}}}"],
)
def test_a_metric_of_ones_own_is_measured_as_ours_are(tiny, own_metrics, task, override):
    name, expected = OWN[task]
    settings = load("checkpoint.monitor=validation/loss", "register.metric=test/loss", override.format(name))
    prepared = prepared_of(tiny, task)
    metrics.check(settings, prepared, losses.example(prepared, 2))
    assert list(metrics.in_training(settings, prepared)) == [HEADLINES[task], name]
    assert metrics.better(f"test/{name}") == ("lower" if name == "own_metrics:far" else "higher")
    labels, outputs = predictions(task)
    found = metrics.compute(task, labels, outputs, own_code.metrics_of(settings))
    assert found[name] == pytest.approx(expected(labels, outputs), rel=1e-6)
    metric = metrics.in_training(settings, prepared)[name].in_training(name, TARGETS[task])
    for part in (slice(0, 70), slice(70, None)):
        metric.update_state(keras.ops.convert_to_tensor(labels[part]), keras.ops.convert_to_tensor(outputs[part]))
    assert float(metric.result()) == pytest.approx(found[name], rel=1e-5)
    assert not type(metric).__module__.startswith("keras."), "an exported model must not name it"


def test_a_metric_of_ones_own_that_is_the_gate_is_evaluated_alone(tiny, own_metrics):
    settings = load("register.metric=test/own_metrics:near")
    metrics.check(settings, prepared_of(tiny, "classification"), losses.example(tiny, 2))
    assert list(metrics.in_training(settings, tiny)) == ["accuracy"]
    labels, outputs = predictions("classification")
    found = metrics.compute("classification", labels, outputs, own_code.metrics_of(settings))
    assert found["own_metrics:near"] == found["accuracy"]
    own = {"own_metrics:nothing": "train.metrics"}
    assert "own_metrics:nothing" not in metrics.compute("classification", labels, outputs, own)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.metrics=[no_such_module:f]"],
            "^train.metrics = 'no_such_module:f': there is no module",
        ),
        (
            ["register.metric=test/own_metrics:absent"],
            "^register.metric = 'own_metrics:absent': own_metrics has no function or class 'absent'",
        ),
        (
            ["checkpoint.monitor=train/own_metrics:broken"],
            "^checkpoint.monitor = 'own_metrics:broken': cannot be computed .*ZeroDivisionError",
        ),
        (
            ["train.metrics=[keras.metrics:AUC]"],
            "^train.metrics = 'keras.metrics:AUC': is a class, but must be a function of labels and outputs",
        ),
        (
            ["train.early_stopping={monitor: train/own_metrics:averaged}"],
            r"^train.early_stopping.monitor = 'own_metrics:averaged': returns the shape \(\) for 2 examples",
        ),
        (
            ["train.metrics=[own_metrics:sideways]"],
            "^train.metrics = 'own_metrics:sideways': its attribute `better` is 'left'. Allowed: 'higher' or 'lower'",
        ),
        (
            ["checkpoint.monitor=train/val_metrics:near"],
            "^checkpoint.monitor = 'val_metrics:near': .* Rename the module",
        ),
    ],
)
def test_a_metric_that_cannot_be_is_refused_before_a_training(tiny, own_metrics, overrides, message):
    prepared = prepared_of(tiny, "classification")
    with pytest.raises(UserError, match=message):
        metrics.check(load(*overrides), prepared, losses.example(prepared, 2))


def test_a_gate_that_no_evaluation_measures_is_refused(tiny):
    prepared = prepared_of(tiny, "classification")
    with pytest.raises(UserError, match=r"register.metric = 'test/mae': .* is a classification, for which"):
        metrics.check_gate(load("register.metric=test/mae"), prepared)
    with pytest.raises(UserError, match=r"register.metric = 'test/top_6_accuracy': .* has 6 classes, .* a K below 6"):
        metrics.check_gate(load("register.metric=test/top_6_accuracy"), prepared)
    for allowed in ("register.metric=test/auc", "register.metric=test/loss", "register.metric=test/top_2_accuracy"):
        metrics.check_gate(load(allowed), prepared)
    metrics.check_gate(load("register.metric=test/mae", "register.enabled=false"), prepared)


# Losses.


# With a label smoothing of 0.1 where a loss has one.
MEASURED_LOSSES = """
from tasks.records import PreparedDataset
from tests.tasks.test_metrics import TARGETS, load, losses, predictions
for task, target in TARGETS.items():
    data = PreparedDataset(name="a", kind="table", version="1", folder="a", features={}, target=target, splits={})
    for name in losses.LOSSES[task]:
        smoothing = 0.1 if name in losses.SMOOTHED else 0
        loss = losses.find_loss(load(f"train.loss={name}", f"train.label_smoothing={smoothing}").train, data)
        print(float(losses.of_examples(loss, *predictions(task)).mean()))
"""


def test_an_evaluation_measures_the_same_losses_on_every_backend(run):
    found = []
    for backend in ("tensorflow", "jax"):
        done = run(["python", "-c", MEASURED_LOSSES], env={"KERAS_BACKEND": backend, "PYTHONPATH": str(CHECKOUT)})
        assert done.returncode == 0, done.stderr
        found.append([float(line) for line in done.stdout.split()])
    assert len(found[0]) == sum(map(len, losses.LOSSES.values()))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


OWN_LOSSES = """
import keras


def quartic(labels, outputs):
    return keras.ops.mean((outputs - keras.ops.cast(labels, outputs.dtype)) ** 4, axis=-1)


def averaged(labels, outputs):
    return keras.ops.mean(outputs)


def broken(labels, outputs):
    return 1 / 0


def forgets_to_return(labels, outputs):
    pass
"""


@pytest.mark.parametrize("task", list(TARGETS))
def test_auto_is_the_usual_loss_of_the_task(tiny, task):
    labels, outputs = predictions(task)
    got = losses.of_examples(losses.find_loss(load().train, prepared_of(tiny, task)), labels, outputs).mean()
    expected = {
        "classification": lambda: sklearn.log_loss(labels, softmax(outputs)),
        "multilabel": lambda: sklearn.log_loss(labels.ravel(), 1 / (1 + np.exp(-outputs.ravel()))),
        "regression": lambda: sklearn.mean_squared_error(labels / [2, 1], outputs / [2, 1]),  # In deviations.
    }[task]()
    assert got == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        (
            "regression",
            ["train.loss=sparse_categorical_crossentropy"],
            "is a regression, whose losses are mean_s",
        ),
        ("classification", ["train.loss=huber"], "train.loss = 'huber': .* is a classification"),
        ("regression", ["train.label_smoothing=0.1"], "train.label_smoothing = 0.1: mean_squared_error cannot use it"),
        ("regression", ["train.loss=no_such_module:f"], "train.loss = 'no_such_module:f': there is no module"),
        ("regression", ["train.loss=own_losses:absent"], "own_losses has no function or class 'absent'"),
        ("regression", ["train.loss=own_losses:averaged"], r"returns the shape \(\) for 2 examples"),
        ("regression", ["train.loss=own_losses:broken"], "cannot be computed .*ZeroDivisionError"),
        (
            "regression",
            ["train.loss=own_losses:forgets_to_return"],
            "returns a NoneType for 2 examples, but must",
        ),
        ("regression", ["train.loss=keras.losses:Huber"], "'keras.losses:Huber': is a class, but must be a function"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(tiny, own_losses, task, overrides, message):
    with pytest.raises(UserError, match=message):
        losses.find_loss(load(*overrides).train, prepared_of(tiny, task))


@pytest.fixture
def own_losses(project, monkeypatch):
    sys.modules.pop("own_losses", None)  # Of another test's project.
    (project / "own_losses.py").write_text(OWN_LOSSES)
    monkeypatch.syspath_prepend(project)


def test_a_loss_of_ones_own(tiny, own_losses):
    loss = losses.find_loss(load("train.loss=own_losses:quartic").train, prepared_of(tiny, "regression"))
    labels, outputs = predictions("regression")
    expected = ((outputs - labels) ** 4).mean(axis=1)
    np.testing.assert_allclose(losses.of_examples(loss, labels, outputs), expected, rtol=1e-5)
    got = keras.ops.convert_to_numpy(loss(labels, outputs.astype("float32")))
    assert float(got) == pytest.approx(expected.mean(), rel=1e-5)


@pytest.mark.parametrize("name", ["accuracy", "macro_f1"])
def test_a_metric_of_mixed_images_counts_the_class_with_the_largest_share(name):
    labels, outputs = predictions("classification")
    shares = 0.7 * np.eye(6)[labels] + 0.3 * np.eye(6)[labels[::-1]]
    metric = metrics.of_largest_share(measured(name, TARGETS["classification"]), "classification")
    for y in (shares.astype("float32"), labels):
        metric.reset_state()
        metric.update_state(y, outputs.astype("float32"))
        assert_measured(metric, labels, outputs)


def test_a_metric_of_mixed_images_counts_the_labels_of_half_an_image():
    labels, outputs = predictions("multilabel")
    shares = 0.7 * labels + 0.3 * labels[::-1]
    metric = metrics.of_largest_share(measured("micro_f1", TARGETS["multilabel"]), "multilabel")
    metric.update_state(shares.astype("float32"), outputs.astype("float32"))
    assert_measured(metric, labels, outputs)


@pytest.mark.parametrize("name", ["auto", "mean_squared_error"])
def test_a_loss_of_shares_is_the_mean_of_the_losses_of_classes_or_that_of_the_distance(digits, name):
    section = config.load(None, {"train.loss": name}).train
    loss = losses.find_loss(section, digits, shares=True)
    labels, logits = np.array([1, 2]), np.random.default_rng(0).normal(size=(2, 10)).astype("float32")
    one_hot = np.eye(10, dtype="float32")[labels]
    shares = 0.75 * one_hot + 0.25 * one_hot[::-1]
    found = keras.ops.convert_to_numpy(loss.call(shares, logits))
    if name == "auto":
        each = np.array([[float(loss.call(labels[[j]], logits[[i]])[0]) for j in (0, 1)] for i in (0, 1)])
        wanted = 0.75 * np.diag(each) + 0.25 * np.diag(each[:, ::-1])
    else:
        wanted = np.square(softmax(logits) - shares).mean(1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_loss_of_ones_own_takes_no_shares(digits, project):
    section = config.load(None, {"train.loss": "own:loss"}).train
    with pytest.raises(
        UserError, match=r"train\.loss = 'own:loss': needs one class per example, but input\.augmentation\.mixup"
    ):
        losses.find_loss(section, digits, shares=True)
