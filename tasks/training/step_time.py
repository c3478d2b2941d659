"""Measure the parts of a training step's time with extra steps after the training, whose results are discarded.

A trace slows down its steps, so the training's own steps are not traced. Timing a step without its collectives or
without its input would not help either: under tf.distribute and on JAX a step is one compiled program, and without a
part it is a different program.
"""

import itertools
import math
import statistics
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from tasks import config, strategies
from tasks.records import Pace, PreparedDataset, StepTime
from tasks.training import Training, loops, model_state, setup, trace
from tasks.training.autotune import Calls
from tasks.training.checkpoints import State
from tasks.training.position import Position

MIN_CALLS, MAX_CALLS = 5, 50
ENOUGH_SECONDS = 3.0


def measure_step_time(training: Training, stop: threading.Event, folder: Path) -> StepTime | None:
    """Run and trace ``train.traced_steps`` steps of a finished training, in calls as long as its own; on the chief,
    return the parts of a step's time. The model's weights change.

    Every worker of a cluster runs the same steps; the trace is of the chief's process. Under parameter servers other
    processes run the steps, and nothing is measured.

    Args:
        training: its results must already be saved.
        stop: ends the measurement early if there is a single process.
        folder: for the trace, where TensorBoard (with the package xprof) finds it.

    Returns:
        None on other workers, under parameter servers, or if too few steps ran.
    """
    if training.strategy.coordinator is not None:
        return None
    num_steps = training.settings.train.traced_steps or 0
    position = Position(training.batches, training.position.state({}))
    call = training.position.longest_call
    epochs = 1 + -(-(call + num_steps) // training.batches.steps)
    values = {"epochs": position.epoch + epochs, "steps_per_execution": call}
    section = training.settings.train.model_copy(update=values)
    # Several workers would have to agree to stop.
    stop = stop if training.strategy.num_workers == 1 else threading.Event()
    traced = _Traced(position, num_steps, stop, folder if training.strategy.is_chief else None)
    again = replace(
        training,
        settings=training.settings.model_copy(update={"train": section}),
        validation=None,
        position=position,
        callbacks=(position, traced),
    )
    try:
        loops.run(again)
    finally:
        traced.close()
    if not traced.num_steps:
        return None
    written = max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    parts = trace.split(written, traced.num_steps)
    return StepTime(num_steps=traced.num_steps, **{f"{name}_ms": value for name, value in parts.items()})


class _Traced(keras.callbacks.Callback):
    """Traces a training after its first call, which rebuilds the graph; stops it after ``num_steps`` steps, or as soon
    as ``stop`` is set. Without ``folder`` it traces nothing."""

    def __init__(self, position: Position, num_steps: int, stop: threading.Event, folder: Path | None) -> None:
        super().__init__()
        self.position = position
        self.folder = folder
        self.stop = stop
        self.num_steps = 0
        """Traced steps."""
        self._left = num_steps
        self._first_call, self._tracing = True, False
        self._begun_at = 0
        self._call = ExitStack()

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._begun_at = self.position.step
        if self._first_call or self.folder is None:
            return
        if not self._tracing:
            self.position.wait()
            trace.start(self.folder)
            self._tracing = True
        self._call.enter_context(trace.mark_call(self.position.step + 1, self.position.epoch))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        done = self.position.step - self._begun_at
        if not self._first_call:
            self._left -= done
        self._first_call = False
        if ends := self._left <= 0 or self.stop.is_set():
            self.position.wait()  # The mark of the last call ends with its steps.
        self._call.close()
        if self._tracing:
            self.num_steps += done
        if ends:
            self.close()
            self.model.stop_training = True

    def close(self) -> None:
        """Stop the trace, if one is running: a process can have only one."""
        self._call.close()
        if self._tracing:
            trace.stop()
            self._tracing = False


def measure_pace(settings: config.Settings, prepared: PreparedDataset) -> Pace:
    """Train for a few seconds on a single device, the strategy of the settings, and return the time of a step.

    Raises:
        UserError: the batch is larger than the data.
    """
    from tasks.training import steps  # It imports TensorFlow, which a training on JAX does not need.

    strategy = strategies.build(settings.strategy)
    size = setup.find_global_batch_size(settings.train, strategy.num_replicas)
    data = setup.find_batches(settings, prepared, strategy, size)
    training = setup.build(settings, prepared, strategy, data, State(global_batch_size=size), {})
    calls = Calls(training)
    first = next(calls.over(training.batches, itertools.repeat(None)))
    call = steps.train_function(training, calls)
    found: list[float] = []
    while len(found) <= MIN_CALLS or (len(found) < MAX_CALLS and sum(found[1:]) * first.num_steps < ENOUGH_SECONDS):
        began = time.perf_counter()
        with strategy.scope():
            float(call(first)["loss"])
        found.append((time.perf_counter() - began) / first.num_steps)
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
