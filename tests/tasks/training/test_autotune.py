import threading
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest

from tasks import config, strategies
from tasks.input.array import ArraySource
from tasks.input.batches import Batches
from tasks.system.errors import Interrupted
from tasks.training import Training, autotune
from tasks.training.autotune import Calls
from tasks.training.callbacks.stopping import NonFiniteLoss
from tasks.training.checkpoints import Checkpoints, State
from tasks.training.position import Position

START = State(global_batch_size=1)
AUTO = "train.steps_per_execution=auto"


def calls_of(position, values, **strategy):
    """The calls of a training of which nothing but its place, its settings and its workers matters."""
    strategy = SimpleNamespace(**({"num_workers": 1} | strategy))
    return Calls(Training(config.load(None, values), strategy, None, None, position.batches, None, position))


def sizes(position, calls, step_seconds, num_steps):
    """The steps of each call of a training whose step takes so long; the first call takes a second more."""
    batches, found = position.batches, []
    while sum(found) < num_steps:
        batches.epoch, batches.start_step = divmod(sum(found), batches.steps)
        one = next(calls.over(batches, []))
        calls.measure(one.num_steps, one.num_steps * step_seconds(one.first) + (not found))
        found.append(one.num_steps)
    return found


@pytest.mark.parametrize(
    ("options", "epoch", "step_seconds", "expected"),
    [
        ({}, 1000, lambda step: 0.001, [1, 1, 8, 64, 200, 200, 200, 200, 126]),
        ({}, 1000, lambda step: 0.0025, [1, 1, 8, 64, *[100] * 9, 26]),
        ({}, 5, lambda step: 0.3, [1] * 10),
        ({}, 20, lambda step: 0.001, [1, 1, 8, 10, 20]),
        # A checkpoint lies where it would with single steps.
        ({"checkpoint.every_steps": 30}, 70, lambda step: 0.001, [1, 1, 8, 20, 30, 10, 20, 30, 20]),
        ({"train.steps_per_execution": 7}, 20, lambda step: 9.0, [7, 7, 6, 7, 7, 6]),
    ],
)
def test_calls_grow_with_the_time_that_they_take(options, epoch, step_seconds, expected):
    position = Position(Batches(epoch, 1, drop_remainder=False), START)
    found = sizes(position, calls_of(position, options), step_seconds, sum(expected))
    assert found == expected


def test_calls_shrink_when_a_step_takes_longer():
    position = Position(Batches(10_000, 1, drop_remainder=False), START)
    calls = calls_of(position, {})
    found = sizes(position, calls, lambda step: 0.05 if 500 < step < 950 else 0.001, 2000)
    slow = found.index(5)
    assert found[:slow].count(200) == 4
    assert set(found[slow : slow + 10]) == {5}
    assert 200 in found[slow:], "and grow again"


def test_all_workers_do_as_the_chief_measures():
    asked = []

    def sum_over_workers(values):
        asked.append(values)
        return [9]

    counts = {}
    for is_chief in (True, False):
        position = Position(Batches(100, 1, drop_remainder=False), START)
        calls = calls_of(position, {}, num_workers=2, is_chief=is_chief, sum_over_workers=sum_over_workers)
        counts[is_chief] = sizes(position, calls, lambda step: 0.01 if step else 5, 40)
    assert counts[True] == counts[False] == [1, 1, 9, 9, 9, 9, 9][: len(counts[True])]
    assert asked[: len(asked) // 2] == [[8], [25]], "no more, when the calls have stopped growing"
    assert asked[len(asked) // 2 :] == [[0], [0]]


SAME = [
    ("train.loop=fit", "model.options={units: [16], dropout: 0.5}"),
    ("train.loop=custom", "model.options={units: [16], dropout: 0.5}", "input.augmentation={flip: true}"),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", SAME, ids=" ".join)
def test_the_numbers_are_those_of_single_steps(tiny, train, options):
    options = ("train.deterministic=true", "input.validation=53", "train.per_replica_batch_size=4", *options)
    kept = {}
    for steps in (1, "auto"):
        result = train(tiny, *options, f"train.steps_per_execution={steps}", "checkpoint.every_steps=10",
                       "checkpoint.keep=99", run_id=f"steps_{steps}")  # fmt: skip
        with Checkpoints(Path(result.checkpoints)) as saved:
            kept[steps] = result.weights_digest, result.history, saved.steps()
    assert kept["auto"] == kept[1]


@pytest.mark.exhaustive
def test_a_run_that_was_stopped_ends_with_the_same_bits(tiny, train, at_step):
    options = ("train.deterministic=true", AUTO, "input.validation=53", "train.per_replica_batch_size=4")
    whole = train(tiny, *options, run_id="whole")
    stop = threading.Event()
    with at_step(21, lambda model: stop.set()), pytest.raises(Interrupted):
        train(tiny, *options, run_id="stopped", stop=stop)
    resumed = train(tiny, *options, run_id="stopped", resume=True)
    assert resumed.weights_digest == whole.weights_digest
    assert resumed.history == whole.history


@pytest.mark.parametrize(("loop", "steps"), [("fit", "auto"), ("custom", 16)])
def test_a_loss_that_is_no_number_is_named_by_its_own_step(tiny, train, own, steps, loop):
    """The network's output is not a number from its eleventh step on, in the middle of a call."""
    code = """
import keras

class FineForTen(keras.layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
        return x / keras.ops.cast(self.calls < 10.5, x.dtype)

def build(image_shape, num_classes):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(num_classes), FineForTen()])
"""
    with pytest.raises(NonFiniteLoss, match="at step 11, in epoch 1") as error:
        train(tiny, own(code), "model.options={}", "train.per_replica_batch_size=4", f"train.loop={loop}",
              f"train.steps_per_execution={steps}", "checkpoint.every_steps=2", "register.enabled=false")  # fmt: skip
    assert error.value.step == 11


# XLA


def dense():
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(2000)])


def small():
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])


def convolutional():
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(2, 3), keras.layers.Flatten()])


LONG = {"train.epochs": 22}
CHOICES = [
    (dense, LONG, True),
    (dense, LONG | {"train.jit_compile": False}, False),
    (convolutional, LONG | {"train.jit_compile": True}, True),
    (convolutional, LONG, False),
    (small, LONG, False),
    (dense, {"train.epochs": 21}, False),
    (dense, LONG | {"train.deterministic": True}, False),
    (dense, LONG | {"train.dtype_policy": "mixed_bfloat16"}, False),
]


def choice(build, values, begun=None, **strategy):
    found = strategies.Strategy(
        **({"kind": "one_device", "num_replicas": 1, "devices": ("/device:CPU:0",), "scope": None} | strategy)
    )
    batches = Batches(1000, 10, drop_remainder=False, source=ArraySource(None, None))
    position = Position(batches, START.model_copy(update={"jit_compile": bool(begun)}))
    training = Training(config.load(None, values), found, build(), None, batches, None, position)
    decided = autotune.choose_compiler(training, begun is not None)
    if values.get("train.jit_compile") is None:
        assert position.state({}).jit_compile is decided.settings.train.jit_compile
    return decided.settings.train.jit_compile


@pytest.mark.parametrize(("build", "values", "expected"), CHOICES)
def test_xla_compiles_long_trainings_of_dense_layers(build, values, expected):
    assert choice(build, values) is expected


def test_a_run_keeps_its_choice():
    assert choice(dense, {"train.epochs": 1}, begun=True), "it was chosen for a longer training"
    assert not choice(dense, LONG, begun=False), "it was chosen for a shorter training"
    assert not choice(dense, LONG, begun=True, distributed=True), "no strategy of copies has XLA"
    assert not choice(dense, LONG, begun=True, devices=("/device:GPU:0",))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_training_that_was_left_to_choose_is_the_one_that_was_told(tiny, train, monkeypatch):
    monkeypatch.setattr(autotune, "MIN_STEPS", 1)
    monkeypatch.setattr(autotune, "MIN_PARAMETERS", 1)
    chosen = train(tiny, "train.loop=custom", run_id="chosen")
    told = train(tiny, "train.loop=custom", "train.jit_compile=true", run_id="told")
    plain = train(tiny, "train.loop=custom", "train.jit_compile=false", run_id="plain")
    with Checkpoints(Path("mlruns/runs/chosen/checkpoints"), read_only=True) as saved:
        assert saved.restore_latest()[1].jit_compile
    assert chosen.weights_digest == told.weights_digest
    assert chosen.history["train/loss"] == pytest.approx(plain.history["train/loss"], rel=1e-4)
