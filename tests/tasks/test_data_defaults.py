"""What a dataset without a recipe is trained with."""

import numpy as np
import pytest

from tasks import config
from tasks.config.data_defaults import CHOSEN, choose
from tasks.records import PreparedDataset

IMAGE = {"kind": "image", "shape": [64, 64, 3]}
NUMBER, TEXT = {"kind": "number", "shape": [5]}, {"kind": "text", "shape": [20]}
CLASSES = {"task": "classification", "num_outputs": 2}


def manifest(features, num_examples=1000, target=CLASSES, **splits):
    train = {"num_examples": num_examples, "class_counts": [num_examples // 4, num_examples - num_examples // 4]}
    return {"features": features, "target": target, "splits": {"train": train, **splits}}


def values_of(made):
    return {key: value for choice in choose(made) for key, value in choice.values.items()}


@pytest.mark.parametrize(
    ("features", "name", "options"),
    [
        ({"image": IMAGE}, "vgg", {"filters": [24, 40, 56, 72], "dropout": 0.2}),
        ({"image": {"kind": "image", "shape": [8, 8, 1]}}, "vgg", {"filters": [24, 40], "dropout": 0.2}),
        (
            {"image": {"kind": "image", "shape": [500, 400, 3]}},
            "vgg",
            {"filters": [24, 40, 56, 72, 88, 104], "dropout": 0.2},
        ),
        ({"review": TEXT}, "text_cnn", {}),
        ({"number": NUMBER}, "mixed", {}),
        ({"number": NUMBER, "review": TEXT, "photo": IMAGE}, "mixed", {}),
    ],
)  # fmt: skip
def test_the_model_follows_the_features(features, name, options):
    values = values_of(manifest(features))
    assert (values["model.name"], values["model.options"]) == (name, options)


@pytest.mark.parametrize(
    ("shape", "flip", "padding"), [([64, 64, 3], True, 6), ([64, 64, 1], False, 6), ([32, 32, 3], False, 3)]
)
def test_only_photographs_are_mirrored(shape, flip, padding):
    values = values_of(manifest({"image": {"kind": "image", "shape": shape}}))
    assert (values["input.augmentation.flip"], values["input.augmentation.crop_padding"]) == (flip, padding)


@pytest.mark.parametrize(("channels", "rate"), [(1, 0.003), (3, 0.001)])
def test_what_is_coloured_is_learnt_at_a_lower_rate(channels, rate):
    chosen = choose(manifest({"image": {"kind": "image", "shape": [96, 96, channels]}}))[0]
    assert chosen.values["schedule.learning_rate"] == rate
    assert f"a learning rate of {rate}," in chosen.reason


@pytest.mark.parametrize(
    ("task", "num_examples", "rate"),
    [("regression", 999, 0.0005), ("regression", 1000, 0.002), ("classification", 999, 0.002)],
)
def test_a_small_regression_has_a_lower_learning_rate(task, num_examples, rate):
    chosen = choose(manifest({"number": NUMBER}, num_examples, {"task": task, "num_outputs": 2}))[0]
    assert chosen.values["schedule.learning_rate"] == rate
    assert ("few rows" in chosen.reason) == (rate == 0.0005)


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "epochs"),
    [(5, 5, 40), (300, 8, 32), (1437, 32, 27), (60_000, 128, 10), (10**7, 128, 10)],
)
def test_the_batch_and_the_epochs_follow_the_size(num_examples, batch_size, epochs):
    values = values_of(manifest({"number": NUMBER}, num_examples))
    assert (values["train.per_replica_batch_size"], values["train.epochs"]) == (batch_size, epochs)


def test_the_gate_follows_the_task():
    test = {"num_examples": 10, "class_counts": [3, 7]}
    assert values_of(manifest({"number": NUMBER}, test=test))["register.minimum"] == 0.7
    numbers = values_of(manifest({"number": NUMBER}, target={"task": "regression", "num_outputs": 1}))
    assert (numbers["register.metric"], numbers["checkpoint.monitor"]) == ("test/r2", "validation/loss")
    several = values_of(manifest({"number": NUMBER}, target={"task": "multilabel", "num_outputs": 3}))
    assert (several["register.metric"], several["register.minimum"]) == ("test/micro_f1", None)


def test_all_that_may_be_chosen_is_listed():
    labels = {"task": "multilabel", "num_outputs": 3}
    made = [manifest({"image": IMAGE}), manifest({"number": NUMBER}, validation={"num_examples": 1}, target=labels)]
    assert {key for one in made for key in values_of(one)} == set(CHOSEN)
    listed = {key for key in config.load().flat() if key.startswith(CHOSEN)}
    assert {key for key in listed - set(CHOSEN) if not key.startswith("model.options.")} == set()


@pytest.fixture
def load(project):
    """Load settings for a table of numbers that is prepared."""
    split = {"features": {}, "labels": "", "sha256": {}, "num_examples": 400, "class_counts": (200, 200)}
    features = {"number": {"kind": "number", "shape": (5,), "dtype": "float32"}}
    prepared = {
        "name": "own.v1", "kind": "table", "version": "1", "folder": "", "features": features, "sha256": {},
        "target": CLASSES | {"class_names": ("a", "b")}, "splits": {"train": split, "validation": split},
    }  # fmt: skip
    prepared = PreparedDataset.model_validate(prepared)

    def load(*given, recipe=None):
        settings = config.load(recipe, ["dataset.name=own/v1", *given], prepared=prepared)
        return settings, config.choices(recipe, settings, prepared)

    return load


def test_what_is_given_comes_before_what_is_chosen(load):
    settings, _ = load()
    assert (settings.model.name, settings.input.validation) == ("mixed", "validation")
    assert settings.optimizer == config.load().optimizer, "of params.yaml, which nothing is chosen for"
    own, _ = load("model.options.units=[7]", "train.global_batch_size=50")
    assert own.model.options == {"units": [7]}
    assert (own.train.per_replica_batch_size, own.train.global_batch_size) == (None, 50)
    assert load("model.name=wide_deep")[0].model.options == {}


@pytest.mark.parametrize("schedule", ["kind: piecewise", "kind: my_parts:Steps"])
def test_a_schedule_without_one_learning_rate_is_given_none(load, project, schedule):
    params = project / "params.yaml"
    text, rest = params.read_text().split("schedule:\n")
    rest = rest[rest.index("strategy:") :]
    params.write_text(f"{text}schedule: {{{schedule}}}\n{rest}")
    settings, _ = load()
    assert (f"kind: {settings.schedule.kind}", settings.model.name) == (schedule, "mixed")


def test_what_was_given_otherwise_than_chosen_is_known(load):
    def keys(*given):
        settings, chosen = load(*given)
        return [key for one in chosen for key in config.overruled(one, settings)]

    assert keys() == []
    assert keys("train.epochs=3", "schedule.learning_rate=0.1", "train.seed=4") == [
        "schedule.learning_rate", "train.epochs",
    ]  # fmt: skip
    assert keys("train.epochs=3", "schedule.learning_rate=0.002") == ["train.epochs"], "as was chosen"


def test_a_recipe_and_params_yaml_say_what_their_dataset_is_trained_with(load, project):
    (project / "own.yaml").write_text("dataset: {name: own.v1}\n")
    settings, chosen = load(recipe=str(project / "own.yaml"))
    assert (settings.model, chosen) == (config.load().model, [])
    params = project / "params.yaml"
    params.write_text(params.read_text().replace("name: digits", "name: own.v1", 1))
    assert load()[0].model.name == "convnet2"


def test_nothing_is_chosen_by_what_was_prepared_earlier(project, make_dataset):
    """Only a run knows which data it trains on: its own, after they were prepared."""
    make_dataset("own", train=(np.zeros((9, 8, 8, 1), np.uint8), np.arange(9)))
    settings = config.load(None, ["dataset.name=own"])
    assert config.follows_data(None, settings)
    assert (settings.model, settings.train) == (config.load().model, config.load().train)
