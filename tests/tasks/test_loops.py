from pathlib import Path

import keras
import numpy as np
import pytest

from tasks import config, input_pipeline, loops, strategies
from tasks.checkpoints import Checkpoints, State
from tasks.input_pipeline import Batches

ORIGIN = {"global_batch_size": 8, "seed": 0, "settings_digest": "d", "data_version": None, "history": {}}
START = State(step=0, epoch=0, step_in_epoch=0, **ORIGIN)


def inside(epoch, step_in_epoch, steps=5, **more):
    """The state of a checkpoint inside an epoch of ``steps`` steps."""
    return State(step=epoch * steps + step_in_epoch, epoch=epoch, step_in_epoch=step_in_epoch, **(ORIGIN | more))


def batches(num_examples=33, size=8):
    return Batches(num_examples, size, drop_remainder=False)


@pytest.mark.parametrize(
    ("num_examples", "size", "drop", "steps"),
    [(32, 8, False, 4), (33, 8, False, 5), (33, 8, True, 4), (8, 8, True, 1), (1, 8, False, 1)],
)
def test_steps_in_an_epoch(num_examples, size, drop, steps):
    assert Batches(num_examples, size, drop).steps == steps


def test_our_names_of_keras_logs():
    logs = {"loss": np.float32(0.5), "accuracy": 1, "learning_rate": 0.1, "val_loss": 2.0, "val_accuracy": 0.25}
    assert loops.metric_names(logs) == {
        "train/loss": 0.5,
        "train/accuracy": 1.0,
        "train/learning_rate": 0.1,
        "validation/loss": 2.0,
        "validation/accuracy": 0.25,
    }


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = [0.0]
    monkeypatch.setattr(loops.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


@pytest.mark.parametrize(
    ("start", "calls", "examples", "seconds"),
    [
        # (index of the call's last step, seconds of the call); the first call of all traces and does not count.
        (START, [[(0, 100), (1, 2), (2, 2), (3, 2), (4, 1)], [(0, 2), (1, 2), (2, 2), (3, 2), (4, 1)]], 25 + 33, 16),
        # Two steps a call; the last call of an epoch tells of a step that it did not do.
        (START, [[(1, 100), (3, 4), (5, 1)], [(1, 4), (3, 4), (5, 1)]], 17 + 33, 14),
        # A resumed epoch begins at its third step.
        (inside(0, 2), [[(0, 100), (1, 2), (2, 1)], [(0, 2), (4, 8)]], 9 + 33, 13),
        (START, [[(4, 100)]], 0, 0),
    ],
)
def test_throughput_counts_what_was_trained_after_the_first_call(clock, start, calls, examples, seconds):
    position = loops.Position(batches(), start)
    position.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    position.model.compile(loss="mse")
    throughput = loops.Throughput(position)
    for epoch, epoch_calls in enumerate(calls):
        for callback in (position, throughput):
            callback.on_epoch_begin(epoch)
        for batch, duration in epoch_calls:
            clock(duration)
            for callback in (position, throughput):
                callback.on_train_batch_end(batch)
        clock(1000)  # Validation and checkpoints.
        position.on_epoch_end(epoch, {})
    assert (throughput.num_examples, throughput.seconds) == (examples, seconds)
    assert throughput.examples_per_second == (examples / seconds if examples else None)
    assert position.step == len(calls) * 5


class Recorder(keras.callbacks.Callback):
    """Writes down what a callback sees."""

    def __init__(self, training):
        super().__init__()
        self.training = training
        self.seen = []

    def on_train_begin(self, logs=None):
        self.seen.append("train")

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(("epoch", epoch, self.training.epoch, self.training.start_step))

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(f"test {batch}")

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(("end", epoch, *sorted(logs)))


def small_model(**options):
    keras.utils.set_random_seed(0)
    images = keras.Input((8, 8, 1), dtype="uint8")
    logits = keras.layers.Dense(10)(keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(images)))
    model = keras.Model(images, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], jit_compile=False, **options)
    model.optimizer.build(model.trainable_variables)
    return model


def pipeline(tiny, validation):
    # 33 examples in batches of 8: five steps; two batches to validate on.
    settings = config.load(
        None, {"input.validation": 167, "train.per_replica_batch_size": 8, "input.augmentation.crop_padding": 0}
    )
    training = input_pipeline.training(settings, tiny, 8)
    return training, input_pipeline.ordered(settings, tiny, "validation", 100) if validation else None


ONE_DEVICE = config.OneDevice(kind="one_device", device="cpu")


@pytest.mark.parametrize(
    ("start", "steps_per_execution", "expected"),
    [
        (START, 1, ["train", ("epoch", 0, 0, 0), 0, 1, 2, 3, 4, 0, ("epoch", 1, 1, 0), 0, 1, 2, 3, 4, 0]),
        (START, 4, ["train", ("epoch", 0, 0, 0), 3, 7, 0, ("epoch", 1, 1, 0), 3, 7, 0]),
        (inside(0, 3), 1, ["train", ("epoch", 0, 0, 3), 0, 1, 0, "train", ("epoch", 1, 1, 0), 0, 1, 2, 3, 4, 0]),
        (inside(1, 4), 1, ["train", ("epoch", 1, 1, 4), 0, 0]),
        (inside(1, 0), 1, ["train", ("epoch", 1, 1, 0), 0, 1, 2, 3, 4, 0]),
        (inside(2, 0), 1, []),
    ],
)
@pytest.mark.parametrize("validate", [False, True])
def test_fit_does_each_step_that_is_left_once(tiny, start, steps_per_execution, expected, validate):
    training, validation = pipeline(tiny, validate)
    model = small_model(steps_per_execution=steps_per_execution)
    position, recorder = loops.Position(training, start), Recorder(training)
    loops.fit(model, strategies.build(ONE_DEVICE), training, validation, 2, start, [position, recorder])

    names = ("accuracy", "learning_rate", "loss") + ("val_accuracy", "val_loss") * validate
    number = start.epoch
    wanted = []
    for i, item in enumerate(expected):
        # A 0 after the last step of an epoch stands for its end.
        if item == 0 and not (isinstance(expected[i - 1], tuple)):
            last = 3 if steps_per_execution == 4 else 0
            wanted += ([f"test {last}"] if last else ["test 0", "test 1"]) * validate + [("end", number, *names)]
            number += 1
        else:
            wanted.append(item)
    assert recorder.seen == wanted
    assert (position.epoch, position.step_in_epoch) == (2, 0)
    assert model.optimizer.iterations == 10 - start.step
    assert len(position.history.get("train/loss", [])) == 2 - start.epoch


class StopAfterFirstEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


@pytest.mark.parametrize("start", [START, inside(0, 2)])
def test_a_callback_can_stop_the_training(tiny, start):
    training, _ = pipeline(tiny, False)
    position = loops.Position(training, start)
    loops.fit(small_model(), strategies.build(ONE_DEVICE), training, None, 9, start, [position, StopAfterFirstEpoch()])
    assert (position.epoch, position.step) == (1, 5)


@pytest.mark.parametrize(
    ("every_epochs", "every_steps", "expected"),
    [
        (1, None, [5, 10, 15]),
        (2, None, [10, 15]),
        (None, 4, [4, 8, 12, 15]),
        (1, 2, [2, 4, 5, 6, 8, 10, 12, 14, 15]),
        (None, 100, [15]),
        (None, 5, [5, 10, 15]),
        (None, None, [15]),
    ],
)
def test_checkpoints_are_written_when_they_are_due_and_at_the_end(tiny, tmp_path, every_epochs, every_steps, expected):
    training, _ = pipeline(tiny, False)
    position = loops.Position(training, START)
    with Checkpoints(Path(tmp_path, "c"), keep=99, monitor="train/loss") as saved:
        saving = loops.SaveCheckpoints(saved, position, None, every_epochs, every_steps, lambda: None)
        model = small_model()
        model.compute_metrics(None, keras.ops.zeros([1], "int64"), keras.ops.zeros([1, 10]))
        loops.fit(model, strategies.build(ONE_DEVICE), training, None, 3, START, [position, saving])
        saved.find("latest")
        assert saved.steps() == expected
        for step in expected:
            state = saved.restore(step)[1]
            assert (state.step, state.epoch, state.step_in_epoch) == (step, step // 5, step % 5)
            assert len(state.history.get("train/loss", ())) == step // 5


def stopping(saved, monitor="validation/loss", patience=2, min_delta=0.0):
    section = config.EarlyStopping(monitor=monitor, patience_epochs=patience, min_delta=min_delta)
    callback = loops.EarlyStopping(section, saved)
    callback.set_model(small_model())
    callback.model.stop_training = False
    callback.on_train_begin()
    return callback


@pytest.mark.parametrize(
    ("monitor", "values", "stops_after"),
    [
        ("validation/loss", [0.5, 0.4, 0.45, 0.41, 0.3], 4),
        ("validation/accuracy", [0.5, 0.6, 0.55, 0.6, 0.9], 4),
        ("train/loss", [0.5, 0.4, 0.3, 0.2, 0.1], None),
        ("train/accuracy", [0.5, 0.4, 0.3, 0.9, 0.9], 3),
    ],
)
@pytest.mark.parametrize("resume_after", [0, 1, 2, 3])
def test_early_stopping_remembers_across_a_resume(monitor, values, stops_after, resume_after):
    name = monitor.replace("train/", "").replace("validation/", "val_")
    callback, stopped = stopping({}, monitor), None
    for epoch, value in enumerate(values):
        if epoch == resume_after:
            assert not callback.over
            callback = stopping(callback.state() if epoch else {}, monitor)
        callback.on_epoch_end(epoch, {name: value})
        if callback.model.stop_training:
            stopped = epoch + 1
            break
    assert stopped == stops_after
    assert stopping(callback.state(), monitor).over == (stops_after is not None)
    # With more patience there is something left to do.
    assert not stopping(callback.state(), monitor, patience=3).over
