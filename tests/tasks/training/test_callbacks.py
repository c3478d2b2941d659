import threading
from dataclasses import replace
from pathlib import Path

import keras
import pytest

from tasks import config
from tasks.input.batches import Batches
from tasks.strategies import Strategy
from tasks.system.errors import Interrupted
from tasks.training import Training
from tasks.training.callbacks.progress import Throughput
from tasks.training.callbacks.saving import SaveCheckpoints
from tasks.training.checkpoints import Checkpoints, State
from tasks.training.position import Position

START = State(global_batch_size=8)


def inside(epoch, step_in_epoch, steps=5, **more):
    """The state of a checkpoint inside an epoch of ``steps`` steps."""
    return START.model_copy(
        update={"step": epoch * steps + step_in_epoch, "epoch": epoch, "step_in_epoch": step_in_epoch, **more}
    )


def model(kind=keras.Sequential):
    keras.utils.set_random_seed(0)
    built = kind([keras.Input((1,)), keras.layers.Dense(1)])
    built.compile("sgd", "mse")
    built.optimizer.build(built.trainable_variables)
    built.compute_metrics(None, keras.ops.zeros([1, 1]), keras.ops.zeros([1, 1]))
    return built


def position_of(start=START, steps_per_epoch=None, num_examples=33, made=None):
    # 33 examples in batches of 8: five steps.
    batches = Batches(num_examples, 8, drop_remainder=False, steps_per_epoch=steps_per_epoch)
    position = Position(batches, start)
    position.set_model(made or model())
    return position


ALONE = Strategy("one_device", 1, ("cpu",), None)


def saving_of(saved, position, every_epochs=None, every_steps=None, every_seconds=None, strategy=ALONE, **more):
    section = config.Checkpoint(
        every_epochs=every_epochs, every_steps=every_steps, every_seconds=every_seconds, keep=99, monitor="train/loss"
    )
    settings = config.load().model_copy(update={"checkpoint": section})
    options = {"restore_metrics": lambda: None, "stop": threading.Event()} | more
    training = Training(settings, strategy, position.model, None, position.batches, None, position)
    return SaveCheckpoints(training, saved, [], **options)


def drive(position, listeners, epochs, steps_a_call=1, logs=lambda epoch: {"loss": 0.5}):
    """Tell the callbacks what a loop tells them, without a training."""
    told = [position, *listeners]
    for callback in told:
        callback.set_model(position.model)
        callback.on_train_begin()
    for epoch in range(position.start.epoch, epochs):
        for callback in told:
            callback.on_epoch_begin(epoch)
        first = position.step_in_epoch
        for done in range(0, position.batches.steps - first, steps_a_call):
            for callback in told:
                callback.on_train_batch_end(done + steps_a_call - 1, {"loss": 0.5})
        results = logs(epoch)
        for callback in told:
            callback.on_epoch_end(epoch, results)
    for callback in told:
        callback.on_train_end()


# (index of the call's last step, seconds of the call); the first call of all traces and does not count. Then examples,
# seconds, the first call's seconds, and those of the whole epochs.
THROUGHPUT = [
    (START, None, [[(0, 100), (1, 2), (2, 2), (3, 2), (4, 1)], [(0, 2), (1, 2), (2, 2), (3, 2), (4, 1)]],
     (25 + 33, 16, 100, [1107, 1009])),
    # Two steps a call; the last call of an epoch tells of a step that it did not do.
    (START, None, [[(1, 100), (3, 4), (5, 1)], [(1, 4), (3, 4), (5, 1)]], (17 + 33, 14, 100, [1105, 1009])),
    # A resumed epoch begins at its third step, and is no whole one.
    (inside(0, 2), None, [[(0, 100), (1, 2), (2, 1)], [(0, 2), (4, 8)]], (9 + 33, 13, 100, [1010])),
    (START, None, [[(4, 100)]], (0, 0, 100, [1100])),
    # Two steps an epoch: the short last batch is the first of the third epoch.
    (START, 2, [[(0, 100), (1, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1)]], (8 + 16 + 9, 5, 100, [1101, 1002, 1002])),
    # Seven steps an epoch: the first has a short batch in its middle.
    (START, 7, [[(3, 100), (6, 1)], [(6, 1)]], (1 + 16 + 16 + 1 + 32, 2, 100, [1101, 1001])),
]  # fmt: skip


@pytest.mark.parametrize(("start", "steps_per_epoch", "calls", "expected"), THROUGHPUT)
def test_throughput_counts_what_was_trained_after_the_first_call(clock, start, steps_per_epoch, calls, expected):
    position = position_of(start, steps_per_epoch)
    throughput = Throughput(position, began=-7.0)
    for epoch, epoch_calls in enumerate(calls):
        for callback in (position, throughput):
            callback.on_epoch_begin(epoch)
        for batch, duration in epoch_calls:
            clock(duration)
            for callback in (position, throughput):
                callback.on_train_batch_end(batch)
        clock(1000)  # Validation and checkpoints.
        for callback in (position, throughput):
            callback.on_epoch_end(epoch, {})
    found = (throughput.num_examples, throughput.seconds, throughput.first_call_seconds, throughput.epoch_seconds)
    assert found == expected
    assert throughput.setup_seconds == 7, "from the stage's beginning"
    examples, seconds = expected[:2]
    assert throughput.examples_per_second == (examples / seconds if examples else None)
    assert position.step == len(calls) * (steps_per_epoch or 5)


@pytest.mark.parametrize(("compiles_each_size", "expected"), [(True, (24 + 33, 14)), (False, (24 + 1 + 33, 114))])
def test_a_call_that_compiles_for_a_short_batch_is_not_the_steps_time(clock, compiles_each_size, expected):
    position = position_of()
    throughput = Throughput(position, 0.0, compiles_each_size)
    seconds = [50, 2, 2, 2, 100, 2, 2, 2, 1, 1]

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            clock(seconds.pop(0))

    drive(position, [Steps(), throughput], epochs=2)
    assert (throughput.num_examples, throughput.seconds) == expected


def test_a_checkpoint_inside_an_epoch_is_not_the_steps_time(clock):
    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            clock(2)

    class Slow:
        def save(self, model, state, metrics=None):
            saved.append(state.step)
            clock(1000)

    position, saved = position_of(), []
    throughput = Throughput(position, began=0.0)
    saving = saving_of(Slow(), position, None, 2)
    drive(position, [Steps(), throughput, saving], epochs=2)
    assert saved == [2, 4, 6, 8, 10]
    assert (throughput.num_examples, throughput.seconds) == (25 + 33, 18)


DUE = [
    (1, None, 1, [5, 10, 15]),
    (2, None, 1, [10, 15]),
    (None, 4, 1, [4, 8, 12, 15]),
    (1, 2, 1, [2, 4, 5, 6, 8, 10, 12, 14, 15]),
    (None, 100, 1, [15]),
    (None, 5, 1, [5, 10, 15]),
    (None, None, 1, [15]),
    # A step that is due inside a call is saved after the call, also when the call ends an epoch: of 7 after 10.
    (None, 4, 5, [5, 10, 15]),
    (None, 7, 5, [10, 15]),
    (None, 6, 3, [8, 13, 15]),
    (None, 4, 2, [4, 9, 12, 15]),
    (2, 3, 2, [4, 7, 9, 10, 12, 15]),
]


@pytest.mark.parametrize(("every_epochs", "every_steps", "steps_a_call", "expected"), DUE)
def test_checkpoints_are_written_when_they_are_due_and_at_the_end(
    tmp_path, every_epochs, every_steps, steps_a_call, expected
):
    position = position_of()
    with Checkpoints(Path(tmp_path, "c"), keep=99, monitor="train/loss") as saved:
        saving = saving_of(saved, position, every_epochs, every_steps)
        drive(position, [saving], epochs=3, steps_a_call=steps_a_call)
        saved.find("latest")
        assert saved.steps() == expected
        for step in expected:
            state = saved.restore(step)[1]
            assert (state.step, state.epoch, state.step_in_epoch) == (step, step // 5, step % 5)
            assert len(state.history.get("train/loss", ())) == step // 5


@pytest.mark.parametrize("start", [START, inside(0, 3), inside(1, 0), inside(1, 4)])
@pytest.mark.parametrize(("every_epochs", "every_steps", "steps_a_call", "_"), DUE[3::8])
def test_every_worker_takes_part_when_the_chief_saves(start, every_epochs, every_steps, steps_a_call, _):
    # A metric's value is the sum over all workers: one that did not ask for it would leave the others waiting.
    class Chief:
        def save(self, model, state, metrics=None):
            chief.append(state.step)

    class TellsWhenItIsRead(keras.Sequential):
        @property
        def metrics_variables(self):
            other.append(position.step)
            return super().metrics_variables

    chief, other = [], []
    for saved in (Chief(), None):
        position = position_of(start, made=model(TellsWhenItIsRead))
        callback = saving_of(saved, position, every_epochs, every_steps)
        drive(position, [callback], epochs=3, steps_a_call=steps_a_call)
    assert chief == other
    assert len(set(chief)) == len(chief), "a step is saved once"


class Kept:
    """Checkpoints that only tell their steps."""

    def __init__(self):
        self.steps = []

    def save(self, model, state, metrics=None):
        self.steps.append(state.step)


def test_a_checkpoint_is_due_by_the_clock_from_the_one_before(clock):
    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            clock(2)

    position, kept = position_of(), Kept()
    # Steps 4 and 7 are the first after seven seconds; the end of the epoch at 5 saves nothing.
    drive(position, [Steps(), saving_of(kept, position, every_seconds=7.0)], epochs=2)
    assert kept.steps == [4, 8, 10]
    position, kept = position_of(), Kept()
    drive(position, [Steps(), saving_of(kept, position, every_epochs=1, every_seconds=7.0)], epochs=2)
    assert kept.steps == [4, 5, 9, 10], "counted from whichever was the last"


class StopsAt(keras.callbacks.Callback):
    """Has a training told to stop while it does a step, or while it validates."""

    def __init__(self, position, stop, step):
        super().__init__()
        self.position, self.stop, self.step = position, stop, step

    def on_train_batch_end(self, batch, logs=None):
        if self.position.step == self.step:
            self.stop.set()


def test_a_training_that_is_told_to_stop_before_it_begins_saves_nothing():
    position, kept, stop = position_of(), Kept(), threading.Event()
    stop.set()
    with pytest.raises(Interrupted, match="before its first step"):
        drive(position, [saving_of(kept, position, stop=stop)], epochs=3)
    assert kept.steps == []


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize("step", [1, 7, 5])
def test_all_workers_stop_at_the_same_step_whichever_is_told(told, step):
    """Each worker is a thread that waits for the other one where it asks it."""
    barrier, given, ended, kept = threading.Barrier(2), {}, {}, Kept()

    def work(worker):
        def sum_over_workers(values):
            given[worker] = values
            barrier.wait(60)
            summed = [sum(column) for column in zip(given[0], given[1], strict=True)]
            barrier.wait(60)
            return summed

        position, stop = position_of(), threading.Event()
        strategy = replace(ALONE, num_workers=2, worker=worker, sum_over_workers=sum_over_workers)
        saving = saving_of(kept if worker == 0 else None, position, stop=stop, strategy=strategy)
        watching = StopsAt(position, stop, step) if worker == told else keras.callbacks.Callback()
        try:
            drive(position, [watching, saving], epochs=9)
        except Interrupted as interrupted:
            ended[worker] = str(interrupted)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(kept.steps) == 1
    assert step <= kept.steps[0] <= 45
    assert (
        ended[0]
        == ended[1]
        == f"the training was stopped at step {kept.steps[0]}, which is saved. " + ("The same command continues")
    )


@pytest.mark.parametrize(("start", "restored"), [(START, []), (inside(1, 0), []), (inside(1, 2), [1])])
def test_the_metrics_of_an_epoch_that_was_left_are_given_back_when_it_goes_on(start, restored):
    position, asked = position_of(start), []
    saving = saving_of(None, position, restore_metrics=lambda: asked.append(position.epoch))
    drive(position, [saving], epochs=3)
    assert asked == restored


def test_a_run_that_a_callback_stopped_inside_an_epoch_goes_on_there(tiny, train, at_step):
    def stop_training(model):
        model.stop_training = True

    options = [
        "input.validation=null", "train.deterministic=true", "train.per_replica_batch_size=40",
        "model.options={units: [16], dropout: 0.5}",
        "train.epochs=3", "train.steps_per_execution=1",
        # No epoch is so much better than the first, so each counts.
        "train.early_stopping={monitor: train/accuracy, patience_epochs: 9, min_delta: 0.95}",
        "checkpoint.monitor=train/loss",
    ]  # fmt: skip
    whole = train(tiny, *options, run_id="whole")
    assert whole.steps == 15
    with at_step(7, stop_training):
        stopped = train(tiny, *options, run_id="stopped")
    assert (stopped.epochs, stopped.steps, Path(stopped.checkpoint).name) == (1, 7, "7")
    assert stopped.stopped_early
    assert Path(stopped.best_checkpoint).name == "5", "a part of an epoch is not judged"
    assert len(stopped.epoch_seconds) == 1
    assert stopped.history == {name: values[:1] for name, values in whole.history.items()}, "whole epochs"
    resumed = train(tiny, *options, run_id="stopped", resume=True)
    assert (resumed.epochs, resumed.steps) == (3, 15)
    assert resumed.weights_digest == whole.weights_digest
    assert resumed.history == whole.history
    states = []
    for result in (whole, resumed):
        with Checkpoints(Path(result.checkpoints)) as saved:
            states.append(saved.restore(15)[1])
    assert states[0] == states[1], "and what early stopping remembers"
