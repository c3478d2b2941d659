"""The recipes: what their headers say can be typed, and the worked examples are those of their sources."""

import itertools
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tasks import config

ROOT = Path(__file__).resolve().parent.parent


def header(recipe):
    """The comment lines above the first section."""
    lines = (ROOT / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#") for line in lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")]]


@pytest.mark.parametrize("recipe", config.recipes(ROOT))
def test_a_header_says_what_to_type_and_what_to_expect(recipe):
    from flows.cli.main import app
    from flows.pairs import plan

    known = {command.name for command in app.registered_commands}
    lines = header(recipe)
    typed = [shlex.split(line.strip()) for line in lines if line.startswith("   stratagem ")]
    assert typed, lines
    for _, command, named, *arguments in typed:
        assert command in known
        assert named == recipe
        options = dict(itertools.pairwise(arguments))
        if command == "compare":
            planned = plan(options["--strategies"].split(","), options["--loops"].split(","), recipe, {})
            assert not planned.left_out
            assert "one_device" in {pair.strategy for pair in planned.pairs}, "else there is no speed-up to tell"
            assert all(pair.settings for pair in planned.pairs)
        elif "--set" in options:
            config.load(recipe, [options["--set"]], ROOT)
    expected = [line for line in lines if line.startswith(" Expect: ")]
    assert len(expected) == 1
    told = " ".join(line.strip() for line in lines[lines.index(expected[0]) :])
    assert "still to be measured" in told or re.search(
        r"(accuracy|loss) 0\.\d{4} ± 0\.\d{3,4}\b.* \(seed 0, two cores of an (AMD EPYC|Intel Xeon)[;)]", told
    ), "a measured figure, how far it may differ, and where it was measured"


COURSE = {
    "strategy.kind": "mirrored", "strategy.devices": 2, "train.epochs": 10, "schedule.kind": "constant",
    "schedule.learning_rate": 1e-3, "model.options": {"dropout": 0.0, "padding": "valid"}, "input.validation": None,
    "input.augmentation.crop_padding": 0, "input.normalization": "scale", "input.shuffle": True,
}  # fmt: skip
GUIDE = {
    "strategy.kind": "mirrored", "strategy.devices": 2, "train.epochs": 2, "input.validation": 10000,
    "input.augmentation.crop_padding": 0, "input.shuffle": False, "schedule.kind": "constant",
    "schedule.learning_rate": 1e-3, "optimizer.kind": "adam",
}  # fmt: skip
PARALLEL = {
    "dataset.name": "noise", "strategy.devices": 8, "train.epochs": 3, "train.loss": "mean_squared_error",
    "optimizer.kind": "rmsprop", "schedule.learning_rate": 1e-3, "model.options": {"dropout": 0.4},
    "input.validation": None, "input.augmentation.crop_padding": 0,
}  # fmt: skip
CONVNET2 = 9 * 32 + 32 + 9 * 32 * 64 + 64 + 5 * 5 * 64 * 64 + 64 + 64 * 10 + 10
MLP = 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
DENSE200 = 784 * 200 + 200 * 10 + 10
# Each row: recipe, settings that make it the example that it is, the model's parameters and an epoch's steps, as the
# source has them.
EXAMPLES = [
    ("keras-guide", GUIDE | {"input.normalization": "none"}, MLP, 782),
    ("keras-guide-scaled", GUIDE | {"input.normalization": "scale"}, MLP, 1563),
    ("tf-tutorial",
     {"strategy.kind": "mirrored", "strategy.devices": 2, "train.epochs": 12, "train.per_replica_batch_size": 64,
      "schedule.boundaries_epochs": [3, 7], "schedule.learning_rates": [1e-3, 1e-4, 1e-5], "train.tensorboard": True,
      "evaluate.checkpoint": "latest", "input.validation": None, "input.normalization": "scale"},
     9 * 32 + 32 + 13 * 13 * 32 * 64 + 64 + 64 * 10 + 10, 469),
    ("course-fashion-mnist", COURSE, CONVNET2, 469),
    ("course-svhn", COURSE | {"dataset.name": "svhn_cropped"},
     27 * 32 + 32 + 9 * 32 * 64 + 64 + 6 * 6 * 64 * 64 + 64 + 64 * 10 + 10, 573),
    ("data-parallel", PARALLEL | {"strategy.kind": "data_parallel"}, DENSE200, 8),
    ("model-parallel", PARALLEL | {"strategy.kind": "model_parallel", "strategy.mesh_shape": [2, 4]}, DENSE200, 8),
    ("mnist", {"model.options": {"dropout": 0.4, "padding": "valid"}}, CONVNET2, 860),
    ("fashion-mnist", {"model.options": {"dropout": 0.4, "padding": "valid"}}, CONVNET2, 860),
]  # fmt: skip


TRAINING_EXAMPLES = {"mnist": 60_000, "fashion_mnist": 60_000, "svhn_cropped": 73_257, "noise": 128}


@pytest.mark.parametrize(("recipe", "expected", "num_parameters", "steps"), EXAMPLES, ids=[row[0] for row in EXAMPLES])
def test_a_worked_example_is_what_its_source_says(recipe, expected, num_parameters, steps, project, make_dataset):
    from tasks.modeling import models

    settings = config.load(recipe)
    values = settings.to_json()
    for key, value in expected.items():
        found = values
        for part in key.split("."):
            found = found[part]
        assert found == value, key
    global_batch_size = settings.train.global_batch_size or (
        settings.train.per_replica_batch_size * getattr(settings.strategy, "devices", 1)
    )
    num_examples = TRAINING_EXAMPLES[settings.dataset.name] - (settings.input.validation or 0)
    assert math.ceil(num_examples / global_batch_size) == steps
    shape = (32, 32, 3) if settings.dataset.name == "svhn_cropped" else (28, 28, 1)
    images, labels = np.zeros((4, *shape), np.uint8), np.arange(4)
    prepared = make_dataset("zeros", train=(images, labels), test=(images, labels))
    assert models.build(settings.model, prepared, "scale").count_params() == num_parameters
