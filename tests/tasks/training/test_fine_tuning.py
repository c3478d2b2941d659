"""Layers that are frozen, all along or at first, and where a new run's weights come from."""

import keras
import numpy as np
import pytest

from tasks import config, models
from tasks.errors import UserError
from tasks.train import check

VGG = ("model={name: vgg, options: {filters: [4, 4]}}", "train.global_batch_size=60", "train.deterministic=true")
BODY = "model.freeze=[conv.*, 'norm1[ab]']"


def by_path(model):
    return {one.path: keras.ops.convert_to_numpy(one) for one in model.weights}


def exported(file):
    return by_path(keras.saving.load_model(file, compile=False))


def made(prepared, *overrides):
    """The weights that a training begins with, by path."""
    settings = config.load(None, [*VGG, *overrides])
    keras.utils.set_random_seed(settings.train.seed)
    return by_path(models.build(settings.model, prepared, settings.input.normalization))


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_what_is_frozen_keeps_its_bits_and_its_averages(tiny, train, loop):
    trained = train(tiny, *VGG, f"train.loop={loop}", BODY)
    before, after = made(tiny), exported(trained.final_model)
    frozen = {path for path in after if path.split("/")[-2].startswith(("conv", "norm1"))}
    assert len(frozen) == 12
    assert {path for path in after if np.array_equal(before[path], after[path])} == frozen
    assert trained.history["train/loss"][1] < trained.history["train/loss"][0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "[logit]",
            r"'logit' matches the whole name of no layer. The layers with weights are: conv1a, norm1a, conv1b, ",
        ),
        ("[pool1]", "'pool1' matches the whole name of no layer"),
        ("['.*']", r"model.freeze = \['\.\*'\] leaves nothing to be trained"),
    ],
)
def test_names_that_freeze_nothing_or_all_are_refused_before_a_run_exists(tiny, train, project, given, said):
    with pytest.raises(UserError, match=said):
        check(config.load(None, [*VGG, f"model.freeze={given}"]), tiny)


def test_what_is_no_regular_expression_is_refused(project):
    with pytest.raises(UserError, match=r"model\.freeze.*'conv\(' is no regular expression"):
        config.load(None, ["model.freeze=['conv(']"])
