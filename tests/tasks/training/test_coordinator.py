import threading
from collections import Counter
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tasks import config, strategies
from tasks.input import sources
from tasks.input.order import carve
from tasks.modeling import losses, metrics, optimizers
from tasks.training import Training, coordinator, loops
from tasks.training.callbacks.saving import SaveCheckpoints
from tasks.training.checkpoints import Checkpoints, State
from tasks.training.model_state import snapshot
from tasks.training.position import Position
from tests.tasks.training.test_loops import Calls

# 33 examples in batches of 8: five steps, the last a short one.
STEPS = 5
AUGMENTED = {f"input.augmentation.{key}": on for key, on in (("flip", True), ("crop_padding", 1), ("rotation", 0.1))}
MIXED = {"input.augmentation.flip": True, "input.augmentation.mixup": 0.4, "input.augmentation.cutmix": 1.0}


def at(step, steps=STEPS):
    """The state of a checkpoint."""
    return State(step=step, epoch=step // steps, step_in_epoch=step % steps, global_batch_size=8)


def pipeline(tiny, **options):
    settings = config.load(
        None,
        {"input.validation": 167, "train.per_replica_batch_size": 8, "input.augmentation.crop_padding": 0, **options},
    )
    return sources.training_batches(settings, tiny, 8), sources.ordered_batches(settings, tiny, "validation", 100)


RATE = keras.optimizers.schedules.PiecewiseConstantDecay([3, 7], [0.01, 0.001, 0.0001])


def small_model(dropout=0.5, rate=RATE):
    keras.utils.set_random_seed(0)
    images = keras.Input((8, 8, 1), dtype="uint8")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(images))
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(dropout, seed=3)(x))
    model = keras.Model(images, keras.layers.Dense(10, kernel_regularizer=keras.regularizers.L2(0.01))(x))
    loss = losses.SmoothedCrossentropy(0.0)  # Of classes, and of shares of them.
    accuracy = metrics.of_largest_share(keras.metrics.SparseCategoricalAccuracy("accuracy"), "classification")
    model.compile(optimizers.FusedAdam(learning_rate=rate), loss, metrics=[accuracy], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.compute_metrics(None, keras.ops.zeros([1], "int64"), keras.ops.zeros([1, 10]))
    return model, loss


class Result:
    def __init__(self, workers, work):
        self.workers = workers
        self.work = work
        self.value = None

    def fetch(self):
        self.workers.work_until(self)
        return self.value


class Workers:
    """Stands in for ClusterCoordinator: one worker, which is this process. It is given the groups in the order that
    ``choose`` makes of those that wait, and works when a result is asked for."""

    def __init__(self, choose=lambda waiting: waiting[0]):
        self.choose = choose
        self.waiting = []
        self.most = 0
        self.shapes = Counter()

    def create_per_worker_dataset(self, make):
        return make()

    def schedule(self, function, args):
        self.shapes[args[1].shape] += 1
        self.waiting.append(Result(self, lambda: function(*args).numpy()))
        self.most = max(self.most, len(self.waiting))
        return self.waiting[-1]

    def work_until(self, wanted=None):
        while self.waiting if wanted is None else wanted in self.waiting:
            chosen = self.choose(self.waiting)
            chosen.value = chosen.work()
            self.waiting.remove(chosen)

    def join(self):
        self.work_until()


def train(workers, model_and_loss, data, callbacks=(), start=None, epochs=2, spe=1, devices=1, **fields):
    """Train with the coordinator, or without ``workers`` with the custom loop, to the end of epoch ``epochs``."""
    position = Position(data[0], start or at(0))
    one = strategies.build(config.OneDevice(kind="one_device", device="cpu"))
    settings = config.load(None, {"train.epochs": epochs, "train.steps_per_execution": spe})
    loop = loops.custom
    if workers is not None:
        one = replace(one, coordinator=workers, devices=one.devices * devices, **fields)
        loop = coordinator.asynchronous
    loop(Training(settings, one, *model_and_loss, *data, position, (position, *callbacks)))
    return position


@pytest.mark.parametrize(
    ("start", "spe", "options"),
    [
        (0, 4, AUGMENTED),
        (3, 2, {}),
        pytest.param(0, 4, MIXED, marks=pytest.mark.exhaustive),
        pytest.param(0, 3, {"train.steps_per_epoch": 7, **AUGMENTED}, marks=pytest.mark.exhaustive),
    ],
)
def test_one_worker_does_what_the_custom_loop_does(tiny, start, spe, options):
    found = []
    for workers in (None, Workers()):
        data = training, _ = pipeline(tiny, **options)
        model, calls = small_model(), Calls()
        model[0].optimizer.iterations.assign(start)
        position = train(workers, model, data, [calls], at(start, training.steps), spe=spe)
        found.append((calls.calls, snapshot(model[0]), position.history, position.step))
    (told, arrays, history, step), (again, same_arrays, same_history, same_step) = found
    assert [call[:-1] for call in again] == [call[:-1] for call in told]
    for (*what, logs), (*_, same) in zip(told, again, strict=True):
        assert same == pytest.approx(logs, rel=1e-5), what
    assert same_arrays.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_allclose(same_arrays[key], array, rtol=1e-5, atol=1e-6, err_msg=key)
    assert same_step == step == 2 * training.steps
    assert same_history.keys() == history.keys()
    for name, values in history.items():
        assert same_history[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize("options", [{}, AUGMENTED, {"train.steps_per_epoch": 7, **AUGMENTED}, MIXED])
def test_a_worker_is_told_each_example_of_a_pass_once(tiny, options):
    training, _ = pipeline(tiny, **options)
    groups = [coordinator.examples(training, first, min(first + 3, 10), 3) for first in range(0, 10, 3)]
    columns = {"{}": 2, str(MIXED): 3 + 2 * 8}.get(str(options), 11)
    assert {group.shape for group in groups} == {(24, columns)}, "TensorFlow traces one shape"
    assert {group.dtype for group in groups} == {np.dtype(np.int64)}
    lines = np.concatenate(groups)
    lines = lines[lines[:, 0] >= 0]
    assert np.bincount(lines[:, 0]).tolist() == [8, 8, 8, 8, 1, 8, 8, 8, 8, 1]
    _, own = carve(tiny, 167, 0)["train"]
    for part in (lines[:33], lines[33:]):
        assert sorted(part[:, 1]) == own.tolist()
    for step in range(10):
        mine = lines[lines[:, 0] == step]
        rows = training.rows(step).reshape(len(mine), -1)
        np.testing.assert_array_equal(mine[:, 1 : 1 + rows.shape[1]], rows)
        if options:
            draws = training.draws(step).reshape(len(mine), -1)
            np.testing.assert_array_equal(mine[:, 1 + rows.shape[1] :], draws)


def test_groups_are_handed_out_ahead_and_counted_in_order(tiny):
    """Workers that finish the newest group first: the metrics are of all examples all the same."""
    found = {}
    for name, choose in {"in order": lambda waiting: waiting[0], "newest": lambda waiting: waiting[-1]}.items():
        workers, calls = Workers(choose), Calls()
        model = small_model(dropout=0.0, rate=1e-30)  # Nothing moves, so the order does not matter.
        model[0].layers[-2].momentum = 1.0
        data = pipeline(tiny, **{"train.steps_per_epoch": 40, "input.drop_remainder": True})
        train(workers, model, data, [calls], epochs=1, spe=2, devices=3)
        assert workers.most == coordinator.GROUPS_PER_WORKER * 3
        assert workers.shapes == {(16, 2): 20}
        ends = [call for call in calls.calls if call[0] == "on_train_batch_end"]
        assert [end[1] for end in ends] == list(range(1, 40, 2))
        found[name] = ends[-1][2]
    assert found["newest"] == pytest.approx(found["in order"], rel=1e-6)


@pytest.mark.parametrize(
    ("start", "spe", "every_epochs", "every_steps", "expected"),
    [
        (0, 3, None, 4, [4, 8, 12, 15]),  # A group ends where a checkpoint is due.
        (3, 2, 1, 4, [4, 5, 8, 10, 12, 15]),
    ],
)
def test_a_checkpoint_is_of_one_step(tiny, tmp_path, start, spe, every_epochs, every_steps, expected):
    training, _ = pipeline(tiny)
    workers = Workers(lambda waiting: waiting[-1])
    (model, loss), in_flight = small_model(), []

    class Saving(SaveCheckpoints):
        def _save(self, values):
            in_flight.append(len(workers.waiting))
            super()._save(values)

    def restore():
        for variable in model.metrics_variables[1::2]:
            variable.assign(start * 8)  # How many examples the loss and the accuracy are of.

    position = Position(training, at(start))
    with Checkpoints(tmp_path / "c", keep=99, monitor="train/loss") as saved:
        strategy = strategies.build(config.OneDevice(kind="one_device", device="cpu"))
        settings = config.load(
            None,
            {
                "checkpoint.every_epochs": every_epochs,
                "checkpoint.every_steps": every_steps,
                "train.epochs": 3,
                "train.steps_per_execution": spe,
            },
        )
        strategy = replace(strategy, coordinator=workers)
        made = Training(settings, strategy, model, loss, training, None, position)
        saving = Saving(made, saved, [], restore, threading.Event())
        coordinator.asynchronous(replace(made, callbacks=(position, saving)))
        saved.find("latest")
        assert saved.steps() == expected
        assert set(in_flight) == {0}
        for step in expected:
            arrays, state = saved.restore(step)
            assert (state.step, state.epoch, state.step_in_epoch) == (step, step // 5, step % 5)
            assert arrays["optimizer/0000"] == step, "a resumed run has the learning rate of its step"
            assert arrays["metric/0001"] == arrays["metric/0003"] == (step % 5 * 8 or 33), "the epoch's examples so far"


def test_a_step_has_its_own_learning_rate_whenever_it_is_done(tiny):
    training, _ = pipeline(tiny)
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.1, 0.0])
    model, loss = small_model(rate=rate)
    one = strategies.build(config.OneDevice(kind="one_device", device="cpu"))
    function = coordinator.worker_function(Training(config.load(), one, model, loss, training, None, None))
    arrays = iter(coordinator.resident(training)())
    before = model.trainable_variables[-2].numpy()
    for step, moves in ((9, False), (4, False), (3, True), (8, False)):
        function(arrays, coordinator.examples(training, step, step + 1, 1))
        after = model.trainable_variables[-2].numpy()
        assert (after != before).any() == moves, step
        before = after


def test_the_loss_of_logits_of_half_precision_is_computed_in_full(tiny):
    training, _ = pipeline(tiny)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model, loss = small_model(dropout=0.0, rate=1e-30)
    finally:
        keras.config.set_dtype_policy("float32")
    one = strategies.build(config.OneDevice(kind="one_device", device="cpu"))
    arrays = iter(coordinator.resident(training)())
    function = coordinator.worker_function(Training(config.load(), one, model, loss, training, None, None))
    images, labels, _ = next(arrays)
    rows = training.rows(0)
    outputs = model(tf.gather(images, rows), training=True)
    assert outputs.dtype == tf.bfloat16
    expected = loss(tf.gather(labels, rows), outputs) + sum(model.losses)  # Keras' own.
    found = function(arrays, coordinator.examples(training, 0, 1, 1))
    assert float(found[0]) / 8 == pytest.approx(float(expected), rel=1e-6)


class StopAfter(keras.callbacks.Callback):
    """Stops after the first batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


def test_a_callback_can_stop_the_training(tiny):
    """What was handed out is done: the weights are those of the steps that are counted."""
    workers, calls, (model, loss) = Workers(), Calls(), small_model()
    train(workers, (model, loss), pipeline(tiny), [calls, StopAfter()], epochs=9)
    assert [call[0] for call in calls.calls].count("on_train_batch_end") == coordinator.GROUPS_PER_WORKER
    assert model.optimizer.iterations == coordinator.GROUPS_PER_WORKER
    assert not workers.waiting
    assert [call[0] for call in calls.calls][-2:] == ["on_epoch_end", "on_train_end"]
