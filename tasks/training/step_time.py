"""Where a training step's time goes, found out after the training by steps of which nothing else is kept.

A trace slows the steps that are in it, so none of the training's own is. Nor is a copy of the step without its
collectives, or without its input, timed beside it: under tf.distribute and on JAX the two are one compiled program,
and what is left of it when a part is taken out is another program.
"""

import math
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import keras

from tasks import config, strategies
from tasks.records import Pace, PreparedDataset, StepTime
from tasks.system.errors import UserError
from tasks.training import Training, loops, model_state, setup, trace
from tasks.training.autotune import Calls
from tasks.training.callbacks.profiler import Profiler
from tasks.training.position import Position

MIN_CALLS, MAX_CALLS = 5, 50
ENOUGH_SECONDS = 3.0


def measure_step_time(training: Training, stop: threading.Event) -> StepTime | None:
    """Do and trace ``train.traced_steps`` of a training that is over, in calls as long as its own; return what a step's
    time went into, on the chief. Its model has other weights afterwards.

    Every worker of a cluster does the same steps. The trace is of the chief's process; under parameter servers, whose
    steps other processes do, these look at their own clocks (``coordinator.time_steps``).

    Args:
        training: its results are saved.
        stop: ends it early, where there is one process.

    Returns:
        None where it is off, on other workers, and where too few steps were done.
    """
    num_steps = training.settings.train.traced_steps
    if num_steps is None:
        return None
    if training.strategy.coordinator is not None:
        from tasks.training import coordinator

        return coordinator.time_steps(training, num_steps)
    position = Position(training.batches, training.position.state({}))
    call, is_chief = training.position.longest_call, training.strategy.is_chief
    epochs = 1 + -(-(call + num_steps) // training.batches.steps)
    values = {"epochs": position.epoch + epochs, "steps_per_execution": call, "profile_steps": None}
    section = training.settings.train.model_copy(update=values)
    # The first call builds its graph anew, so the trace begins after it.
    first_step = position.step + min(call, training.batches.steps - position.step_in_epoch) + 1
    with tempfile.TemporaryDirectory() as folder:
        profiler = Profiler(position, first_step, sys.maxsize, Path(folder), lambda step, metrics: None)
        # Several workers would have to ask each other.
        stop = stop if training.strategy.num_workers == 1 else threading.Event()
        ending = _EndAfter(position, first_step + num_steps - 1, stop)
        again = replace(
            training,
            settings=training.settings.model_copy(update={"train": section}),
            validation=None,
            position=position,
            callbacks=(position, profiler, ending) if is_chief else (position, ending),
        )
        try:
            loops.run(again)
        finally:
            profiler.close()
        if not profiler.num_steps:
            return None
        (written,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        parts = trace.split(written, profiler.num_steps)
        return StepTime(num_steps=profiler.num_steps, **{f"{name}_ms": value for name, value in parts.items()})


class _EndAfter(keras.callbacks.Callback):
    """Ends a training after a step, or as soon as an event is set."""

    def __init__(self, position: Position, last_step: int, stop: threading.Event) -> None:
        super().__init__()
        self.position = position
        self.last_step = last_step
        self.stop = stop

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if self.position.step >= self.last_step or self.stop.is_set():
            self.model.stop_training = True


def measure_pace(settings: config.Settings, prepared: PreparedDataset) -> Pace:
    """Train for a few seconds, and return what a step took.

    Args:
        settings: their strategy is a single device, with the batch and the steps a call that are asked for.
        prepared: the data.

    Raises:
        UserError: the batch is larger than the data.
    """
    from tasks.training import steps  # It imports TensorFlow, which a training on JAX does without.

    strategy = strategies.build(settings.strategy)
    size = settings.train.per_replica_batch_size or settings.train.global_batch_size or 0
    training = setup.fresh(settings, prepared, strategy)
    if training.batches.num_examples < size:
        raise UserError(
            f"train.per_replica_batch_size = {size}: the training split has {training.batches.num_examples} examples. "
            "Give fewer, or --step-seconds as measured elsewhere"
        )
    calls = Calls(training)
    count = calls.next(training.batches.steps)
    call = steps.train_function(training, calls)
    found: list[float] = []
    while len(found) <= MIN_CALLS or (len(found) < MAX_CALLS and sum(found[1:]) * count < ENOUGH_SECONDS):
        began = time.perf_counter()
        with strategy.scope():
            float(call(None)["loss"])
        found.append((time.perf_counter() - began) / count)
    return Pace(
        parameters=sum(math.prod(variable.shape) for variable in training.model.trainable_variables),
        examples=size,
        step_seconds=tuple(found[1:]),  # The first call traces.
        checkpoint_seconds=statistics.median(_snapshot_seconds(training.model) for _ in range(3)),
        device=strategy.describe(),
    )


def _snapshot_seconds(model: object) -> float:
    began = time.perf_counter()
    model_state.snapshot(model)
    return time.perf_counter() - began
