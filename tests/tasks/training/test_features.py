"""Trainings of numbers, categories, texts and images together: both loops give what a plain Keras script gives."""

import hashlib
from pathlib import Path

import keras
import numpy as np
import pytest
import yaml

from tasks import config, records
from tasks.evaluate import evaluate
from tasks.input.order import carve, order
from tasks.modeling import models
from tasks.records import Column, Feature, Target
from tasks.system.errors import UserError
from tasks.train import check

NUM_EXAMPLES = {"train": 90, "test": 31}
TARGETS = {
    "classification": Target.of_classes(["no", "yes", "perhaps"]),
    "multilabel": Target(task="multilabel", num_outputs=2, class_names=("hot", "wet")),
    "regression": Target(task="regression", num_outputs=1, mean=(40.0,), deviation=(9.0,)),
}
FEATURES = {
    "number": Feature(kind="number", shape=(3,), dtype="float32", mean=(10.0, 0.0, 0.0), deviation=(2.0, 1.0, 1.0)),
    "category": Feature(kind="category", shape=(2,), dtype="int32", vocabulary_sizes=(4, 6)),
    "text": Feature(kind="text", shape=(7,), dtype="int32", vocabulary_sizes=(30,)),
    "photo": Feature(kind="image", shape=(8, 8, 3), dtype="uint8", mean=(1.0,) * 3, deviation=(1.0,) * 3),
}
PLAIN = (
    "train.global_batch_size=16", "train.epochs=2", "model={name: mixed, options: {dropout: 0.0}}",
    "optimizer={kind: sgd}", "schedule={kind: constant, learning_rate: 0.01}", "checkpoint.monitor=validation/loss",
    "input.augmentation={flip: false, crop_padding: 0}", "input.validation=0.2", "train.deterministic=true",
)  # fmt: skip


@pytest.fixture
def mixture(project):
    """Write a dataset of all kinds of features as `prepare` does: ``mixture("regression")``."""

    def mixture(task, weighted=False, **description):
        generator = np.random.default_rng(0)
        folder = project / "data" / "mixture" / "prepared"
        folder.mkdir(parents=True)
        splits, target = {}, TARGETS[task]
        for split, count in NUM_EXAMPLES.items():
            arrays = {
                "number": generator.normal(10, 2, (count, 3)).astype("float32"),
                "category": generator.integers(0, 4, (count, 2)).astype("int32"),
                "text": generator.integers(0, 30, (count, 7)).astype("int32"),
                "photo": generator.integers(0, 256, (count, 8, 8, 3)).astype("uint8"),
            }
            score = arrays["number"][:, 0] - 10 + arrays["category"][:, 0] - 1.5
            labels = {
                "classification": np.digitize(score, [-1, 1]).astype("int64"),
                "multilabel": np.stack([score > 0, arrays["category"][:, 1] > 1], axis=1).astype("uint8"),
                "regression": (40 + 4 * score[:, None]).astype("float32"),
            }[task]
            arrays |= {"labels": labels, "weights": generator.random(count).astype("float32")}
            paths = {}
            for name, values in arrays.items():
                np.save(folder / f"{split}_{name}.npy", values)
                paths[name] = f"data/mixture/prepared/{split}_{name}.npy"
            splits[split] = records.PreparedSplit(
                num_examples=count,
                features={name: paths[name] for name in FEATURES},
                labels=paths["labels"],
                weights=paths["weights"] if weighted else None,
                sha256={path: hashlib.sha256((project / path).read_bytes()).hexdigest() for path in paths.values()},
                class_counts=(),
            )
        prepared = records.PreparedDataset(
            name="mixture", kind="table", version="1", folder="data/mixture/prepared", features=FEATURES,
            target=target, splits=splits,
        )  # fmt: skip
        records.save(prepared, folder / "manifest.json")
        described = {"kind": "table", "name": "mixture", "source": "m.csv", "target": "y", **description}
        (folder.parent / "params.yaml").write_text(yaml.safe_dump({"dataset": described}))
        return prepared

    return mixture


def load(*overrides):
    return config.load("../small.yaml", [*PLAIN, *overrides])


def arrays_of(prepared, split, rows=slice(None)):
    made = prepared.splits[split]
    return {name: np.load(path)[rows] for name, path in made.features.items()}, np.load(made.labels)[rows]


def compiled(prepared, settings):
    """A model that is to be trained as a script of Keras' guide does it."""
    keras.utils.set_random_seed(settings.train.seed)
    model = models.build(settings.model, prepared, settings.input.normalization)
    loss = {
        "classification": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "multilabel": keras.losses.BinaryCrossentropy(from_logits=True),
        # In deviations of the target, which is 9.
        "regression": lambda y, outputs: keras.losses.mean_squared_error(y / 9, outputs / 9),
    }[prepared.target.task]
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss)
    return model


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(
    ("task", "weighted"),
    [
        ("classification", True),
        pytest.param("multilabel", False, marks=pytest.mark.exhaustive),
        ("regression", False),
    ],
)
def test_a_training_is_a_plain_keras_script(mixture, train, task, weighted):
    prepared = mixture(task, weighted)
    overrides = [*PLAIN, *(["train.class_weights=balanced"] if weighted else [])]
    results = {loop: train(prepared, *overrides, f"train.loop={loop}", run_id=loop) for loop in ("fit", "custom")}

    settings = config.load(None, overrides)
    rows = carve(prepared, settings.input.validation, settings.train.seed)["train"][1]
    labels = np.load(prepared.splits["train"].labels)
    weights = np.ones(len(labels), "float32")
    if weighted:
        counts = np.bincount(labels[rows], minlength=3)
        weights = np.load(prepared.splits["train"].weights) * (len(rows) / (3 * counts))[labels]
    model = compiled(prepared, settings)
    for epoch in range(2):
        shuffled = rows[order(len(rows), settings.train.seed, epoch)]
        for first in range(0, len(shuffled), 16):
            step = shuffled[first : first + 16]
            x, y = arrays_of(prepared, "train", step)
            model.train_on_batch(x, y, sample_weight=weights[step] if weighted else None)
    for loop, result in results.items():
        trained = keras.models.load_model(result.final_model, compile=False)
        for own, other in zip(trained.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(own, other, rtol=2e-4, atol=2e-5, err_msg=loop)


@pytest.mark.parametrize(
    "task", ["classification", *(pytest.param(task, marks=pytest.mark.exhaustive) for task in [*TARGETS][1:])]
)
def test_an_evaluation_is_that_of_the_model_that_was_exported(mixture, train, task):
    prepared = mixture(task)
    training = train(prepared, *PLAIN)
    result = evaluate(load("evaluate.global_batch_size=7"), prepared, training)
    x, y = arrays_of(prepared, "test")
    outputs = keras.models.load_model(training.final_model)(x).numpy()
    assert result.num_examples == 31
    assert [one.name for one in result.classes] == list(TARGETS[task].class_names)
    assert bool(result.confusion_matrix) == (task == "classification")
    assert len(result.predictions) == (31 if task == "regression" else 0)
    if task == "classification":
        assert result.metrics["test/accuracy"] == pytest.approx((outputs.argmax(1) == y).mean(), rel=1e-5)
    if task == "multilabel":
        taken = outputs > 0
        assert [one.support for one in result.classes] == y.sum(axis=0).tolist()
        assert [one.recall for one in result.classes] == pytest.approx(((taken & (y == 1)).sum(0) / y.sum(0)).tolist())
    if task == "regression":
        assert result.metrics["test/mae"] == pytest.approx(np.abs(outputs - y).mean(), rel=1e-5)
        np.testing.assert_allclose(result.predictions, np.column_stack([y[:, 0], outputs[:, 0]]), rtol=1e-5)


def test_the_columns_that_decide_are_the_important_ones(mixture, train):
    """The label is of the first number and the first category alone."""
    prepared = mixture("regression")
    columns = {
        "number": tuple(Column(name=name, kind="number") for name in ("height", "width", "depth")),
        "category": tuple(Column(name=name, kind="category") for name in ("town", "colour")),
    }
    features = {name: FEATURES[name].model_copy(update={"columns": own}) for name, own in columns.items()}
    splits = {
        name: split.model_copy(update={"features": {one: split.features[one] for one in features}})
        for name, split in prepared.splits.items()
    }
    prepared = prepared.model_copy(update={"features": features, "splits": splits})
    records.save(prepared, Path(prepared.folder) / "manifest.json")
    options = ("optimizer={kind: adam}", "train.epochs=40", "register.metric=test/r2")
    found = evaluate(load(*options), prepared, train(prepared, *PLAIN, *options)).importance
    assert {one.metric for one in found} == {"test/r2"}
    assert {one.column for one in found[:2]} == {"height", "town"}
    assert found[0].interval[0] > 0
    assert len(found) == 5
    assert max(one.value for one in found[2:]) < found[1].value / 2


@pytest.mark.parametrize("key", ["group", "time"])
def test_validation_examples_are_not_drawn_from_rows_that_belong_together(mixture, train, key):
    prepared = mixture("regression", **{key: "person"})
    with pytest.raises(UserError, match=f"dataset.{key} = 'person'.+Write `validation: 0.1` into data/mixture/params"):
        train(prepared, *PLAIN)
    whole = prepared.model_copy(update={"splits": {**prepared.splits, "validation": prepared.splits["test"]}})
    records.save(whole, Path(prepared.folder, "manifest.json"))
    with pytest.raises(UserError, match=r"input.validation = 0.2: .+ Set input.validation=validation, or"):
        check(config.load("../small.yaml", PLAIN), whole)


@pytest.mark.slow
def test_a_kill_in_the_middle_ends_with_the_same_bits(mixture, train):
    prepared = mixture("regression")
    whole = train(prepared, *PLAIN, "model.options.dropout=0.3", run_id="whole")
    train(prepared, *PLAIN, "model.options.dropout=0.3", "train.epochs=1", run_id="cut")
    rest = train(prepared, *PLAIN, "model.options.dropout=0.3", run_id="cut", resume=True)
    assert rest.weights_digest == whole.weights_digest
