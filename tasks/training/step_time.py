"""Where a training step's time goes, found out after the training by steps of which nothing else is kept.

A trace slows the steps that are in it, so none of the training's own is. Nor is a copy of the step without its
collectives, or without its input, timed beside it: under tf.distribute and on JAX the two are one compiled program,
and what is left of it when a part is taken out is another program.
"""

import math
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import keras

from tasks import config, strategies
from tasks.records import Pace, PreparedDataset, StepTime
from tasks.system.errors import UserError
from tasks.training import Training, loops, model_state, setup, trace
from tasks.training.autotune import Calls
from tasks.training.position import Position

MIN_CALLS, MAX_CALLS = 5, 50
ENOUGH_SECONDS = 3.0


def measure(training: Training, stop: threading.Event) -> StepTime | None:
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
    call = training.position.longest_call
    epochs = 1 + -(-(call + num_steps) // training.batches.steps)
    values = {"epochs": position.epoch + epochs, "steps_per_execution": call, "profile_steps": None}
    section = training.settings.train.model_copy(update=values)
    with tempfile.TemporaryDirectory() as folder:
        # Several workers would have to ask each other.
        stop = stop if training.strategy.num_workers == 1 else threading.Event()
        traced = _Traced(position, num_steps, Path(folder) if training.strategy.is_chief else None, stop)
        again = replace(
            training,
            settings=training.settings.model_copy(update={"train": section}),
            validation=None,
            position=position,
            callbacks=(position, traced),
        )
        with traced:
            loops.run(again)
        return traced.found()


class _Traced(keras.callbacks.Callback):
    """Traces the calls after the first one, which builds its graph anew, and ends the training after so many steps."""

    def __init__(self, position: Position, num_steps: int, folder: Path | None, stop: threading.Event) -> None:
        super().__init__()
        self.position = position
        self.num_steps = num_steps
        self.folder = folder
        self.stop = stop
        self.done = 0
        """Steps in traced calls."""
        self._opened = ExitStack()
        self._call = ExitStack()
        self._first_call = True
        self._step = 0

    def __enter__(self) -> "_Traced":
        return self

    def __exit__(self, *error: object) -> None:
        self._call.close()
        self._opened.close()

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._step = self.position.step
        if self._first_call or self.folder is None:
            return
        if not self.done:
            trace.start(self.folder)
            self._opened.callback(trace.stop)
        self._call.enter_context(trace.mark_call(self._step + 1, {"epoch": self.position.epoch}))

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        # The logs are read, so an accelerator has done what the call handed to it.
        self._call.close()
        if not self._first_call:
            self.done += self.position.step - self._step
        self._first_call = False
        if self.done >= self.num_steps or self.stop.is_set():
            self.model.stop_training = True

    def found(self) -> StepTime | None:
        """Return what the trace says, when it has ended."""
        if self.folder is None or not self.done:
            return None
        (written,) = self.folder.glob("plugins/profile/*/*.xplane.pb")
        parts = trace.split(written, self.done)
        return StepTime(num_steps=self.done, **{f"{name}_ms": value for name, value in parts.items()})


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
