"""What a dataset without a recipe is trained with."""

import json

import pytest

from tasks import config
from tasks.config.data_defaults import choose
from tasks.system.errors import UserError

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


@pytest.fixture
def prepared_table(project):
    folder = project / "data" / "own.v1" / "prepared"
    folder.mkdir(parents=True)
    split = {"num_examples": 80, "class_counts": [40, 40]}
    (folder / "manifest.json").write_text(json.dumps(manifest({"number": NUMBER}, 400, validation=split)))


def test_what_is_given_comes_before_what_is_chosen(prepared_table):
    settings = config.load(None, ["dataset.name=own/v1"])
    assert (settings.model.name, settings.input.validation) == ("mixed", "validation")
    assert settings.optimizer == config.load().optimizer, "of params.yaml, which nothing is chosen for"
    own = config.load(None, ["dataset.name=own/v1", "model.options.units=[7]", "train.global_batch_size=50"])
    assert own.model.options == {"units": [7]}
    assert (own.train.per_replica_batch_size, own.train.global_batch_size) == (None, 50)
    assert config.load(None, ["dataset.name=own/v1", "model.name=wide_deep"]).model.options == {}


def test_what_was_given_otherwise_than_chosen_is_known(prepared_table):
    def keys(*given):
        settings = config.load(None, ["dataset.name=own/v1", *given])
        return [key for one in config.choices(None, settings.to_json()) for key in config.overruled(one, settings)]

    assert keys() == []
    assert keys("train.epochs=3", "schedule.learning_rate=0.1", "train.seed=4") == [
        "schedule.learning_rate", "train.epochs",
    ]  # fmt: skip
    assert keys("train.epochs=3", "schedule.learning_rate=0.002") == ["train.epochs"], "as was chosen"


def test_a_recipe_and_params_yaml_say_what_their_dataset_is_trained_with(prepared_table, project):
    (project / "own.yaml").write_text("dataset: {name: own.v1}\n")
    recipe = config.load(str(project / "own.yaml"))
    assert recipe.model == config.load().model
    assert config.choices(str(project / "own.yaml"), recipe.to_json()) is None
    assert config.choices(None, config.load().to_json()) is None, "the dataset of params.yaml"
    params = project / "params.yaml"
    params.write_text(params.read_text().replace("name: digits", "name: own.v1", 1))
    assert config.load().model.name == "convnet2"


def test_nothing_is_chosen_for_data_that_are_not_there_or_not_whole(project):
    for name in ("absent", "own"):
        folder = project / "data" / name / "prepared"
        if name == "own":
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text('{"features": {')
        settings = config.load(None, [f"dataset.name={name}"])
        assert config.choices(None, settings.to_json()) == []
        assert settings.model == config.load().model
    with pytest.raises(UserError, match=r"dataset\.name"):
        config.load(None, ["dataset.name=../../etc"])
