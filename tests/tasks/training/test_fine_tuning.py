"""Layers that are frozen, all along or at first, and where a new run's weights come from."""

import threading
from pathlib import Path

import keras
import numpy as np
import pytest

from tasks import config, models
from tasks.checkpoints import Checkpoints
from tasks.errors import Interrupted, UserError
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


# Three steps an epoch; Dropout, batch normalisation, and a schedule over each phase.
PHASES = (
    "model={name: vgg, options: {filters: [4, 4], dropout: 0.3}}", "train.global_batch_size=60", BODY,
    "train.deterministic=true", "schedule={kind: cosine, learning_rate: 0.01, warmup_epochs: 0.0}", "train.epochs=4",
    "train.frozen_epochs=2", "checkpoint.every_steps=2", "checkpoint.keep=9",
    "train.early_stopping={patience_epochs: 9}",
)  # fmt: skip


class Killed(Exception):
    pass


@pytest.mark.parametrize(("loop", "cuts"), [("fit", ["at 2", "in 3"]), ("custom", ["in 2"])])
def test_a_kill_in_either_phase_ends_with_the_same_bits(tiny, train, loop, cuts):
    options = (*PHASES, f"train.loop={loop}")
    whole = train(tiny, *options, run_id="whole")
    assert np.all(np.diff(whole.history["train/learning_rate"])[[0, 2]] < 0)
    assert whole.history["train/learning_rate"][2] == pytest.approx(0.1 * whole.history["train/learning_rate"][0])
    assert whole.steps == 12
    for cut in cuts:
        how, epoch = cut.split()
        stop, epochs = threading.Event(), []

        def send(step, metrics, how=how, epoch=int(epoch), stop=stop, epochs=epochs):
            epochs.append(step)
            if len(epochs) == epoch:
                if how == "in":
                    raise Killed  # The last checkpoint is that of every_steps.
                stop.set()

        with pytest.raises((Killed, Interrupted)):
            train(tiny, *options, run_id=cut, send=send, stop=stop)
        assert (
            Checkpoints(Path(f"mlruns/runs/{cut}/checkpoints"), read_only=True).steps()[-1]
            == {"in 2": 4, "at 2": 6, "in 3": 8}[cut]
        )
        rest = train(tiny, *options, run_id=cut, resume=True)
        assert (rest.weights_digest, rest.history) == (whole.weights_digest, whole.history), cut


def test_what_is_thawed_is_trained_by_a_new_optimizer(tiny, train):
    options = (*PHASES, "checkpoint.every_steps=null")
    result = train(tiny, *options)
    saved = Checkpoints(Path("mlruns/runs/first/checkpoints"), read_only=True)
    begun = made(tiny, *PHASES)
    (frozen, state), (thawed, _) = saved.restore(6), saved.restore(12)
    assert (state.epoch, state.step_in_epoch) == (2, 0)
    still = [key for key, array in zip(frozen, begun.values(), strict=False) if np.array_equal(frozen[key], array)]
    assert len(still) == 12
    assert not any(np.array_equal(frozen[key], thawed[key]) for key in still)
    assert int(thawed["optimizer/0000"]) == 6, "it counts from where the layers were thawed"
    assert exported(result.final_model).keys() == begun.keys()


def test_a_training_that_stopped_early_is_not_thawed(tiny, train):
    stopping = "train.early_stopping={patience_epochs: 0, min_delta: 1.0e+9}"
    options = (*PHASES, stopping, "train.epochs=4", "train.frozen_epochs=2")
    result = train(tiny, *options)
    again = train(tiny, *options, resume=True)
    assert (result.epochs, again.epochs) == (2, 2)
    assert again.weights_digest == result.weights_digest


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["train.frozen_epochs=2"], r"train.frozen_epochs = 2: model.freeze = \[\] freezes nothing"),
        ([BODY, "train.frozen_epochs=15"], r"train.frozen_epochs = 15 leaves none of train.epochs = 15"),
    ],
)
def test_phases_that_cannot_be_are_refused(project, given, said):
    with pytest.raises(UserError, match=said):
        config.load(None, given)
