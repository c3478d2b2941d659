"""Where a training is."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras

from tasks.input.batches import Batches
from tasks.modeling import metrics
from tasks.system import upstream
from tasks.training.checkpoints import State


@dataclass(frozen=True)
class Call:
    """Steps that a loop has handed to the devices, which an accelerator may still be doing."""

    first: int
    """Its first step."""
    count: int
    """Its number of steps."""
    loss: Any
    """The mean loss of the epoch so far: a number, or a scalar on a device."""
    is_ahead: bool
    """Whether the devices may still be doing it, so that reading the loss would wait for them."""
    finite: Any = None
    """After how many of its steps the loss was a finite number, if the loop counts them: a scalar like ``loss``."""
    began: float = 0.0
    """When it was handed over, by ``Position.now``."""
    measure: Callable[[int, float], None] = lambda count, seconds: None
    """Takes its number of steps, and how long they took."""


class Position(keras.callbacks.Callback):
    """Knows where the training is, and tells the input pipeline before it starts an epoch. First of all callbacks.

    Its other task is to read what a call found, of which the loss is all that is read before an epoch's end. To read it
    waits for the call, so on an accelerator that happens when the next call has been handed over.
    """

    def __init__(self, batches: Batches, start: State) -> None:
        super().__init__()
        self.batches = batches
        self.start = start
        self.history: dict[str, list[float]] = {name: list(values) for name, values in start.history.items()}
        self.epoch = start.epoch
        self.step_in_epoch = start.step_in_epoch
        self.aside_seconds = 0.0
        """What checkpoints, the profiler's own work and compiling once more took so far."""
        self.all_applied = True
        """Whether the variables are those of ``step``; under parameter servers later steps may be under way."""
        self.drain = False
        """Whether no step is to begin before that is so."""
        self.nonfinite_loss: float | None = None
        """The loss, if it is not a finite number."""
        self.nonfinite_step: int | None = None
        """The first step after which that was so."""
        self.call: Call | None = None
        """The call that a step function has just handed over; without one Keras has done a single call of its own."""
        self._under_way: Call | None = None
        self._done_at = 0.0
        self.longest_call = 1
        """The most steps that a call has done."""
        self._first_step = start.step_in_epoch
        self.offset = start.step - self.step
        """How many more steps the run has done than ``step`` says, since it went on with another batch size."""

    @property
    def step(self) -> int:
        """Training steps since the start of the run; as many as with the batch size of now."""
        return self.epoch * self.batches.steps + self.step_in_epoch

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Do inside what interrupts the steps, so that ``Throughput`` does not take its time for theirs."""
        began = time.perf_counter()
        yield
        self.aside_seconds += time.perf_counter() - began

    def now(self) -> float:
        """Return the seconds on a clock that stands still for what is ``aside``."""
        return time.perf_counter() - self.aside_seconds

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._first_step = self.start.step_in_epoch if epoch == self.start.epoch else 0
        self.epoch, self.step_in_epoch = epoch, self._first_step
        self.batches.epoch, self.batches.start_step = epoch, self._first_step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # With steps_per_execution the last call of an epoch reports steps that it did not do.
        before, first = self.step_in_epoch, self.step
        self.step_in_epoch = min(self._first_step + batch + 1, self.batches.steps)
        count = self.step_in_epoch - before
        self.longest_call = max(self.longest_call, count)
        self.wait()
        if logs and "loss" in logs:
            self._under_way = self.call or Call(first, count, logs["loss"], not isinstance(logs["loss"], float))
        self.call = None
        if self._under_way is not None and (not self._under_way.is_ahead or self.step_in_epoch == self.batches.steps):
            self.wait()

    def wait(self) -> None:
        """Wait until all steps so far are done, and look whether the loss is still a finite number."""
        call, self._under_way = self._under_way, None
        if call is None:
            return
        loss = float(call.loss)
        now = self.now()
        # It began when it was handed over, or when the one before was done.
        call.measure(call.count, now - max(call.began, self._done_at))
        self._done_at = now
        if not math.isfinite(loss) and self.nonfinite_loss is None:
            finite = call.count - 1 if call.finite is None else int(call.finite)
            self.nonfinite_loss, self.nonfinite_step = loss, call.first + min(finite + 1, call.count)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        logs = logs if logs is not None else {}
        logs["learning_rate"] = self._learning_rate()
        if self.step_in_epoch < self.batches.steps:
            return  # A callback stopped the training inside the epoch: a resume goes on in its middle.
        self.epoch, self.step_in_epoch = epoch + 1, 0
        for name, value in metrics.by_split(logs).items():
            self.history.setdefault(name, []).append(value)

    def _learning_rate(self) -> float:
        """Return the rate of the step just done. The optimizer's own is the next step's, of another epoch by now."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)  # Under mixed_float16.
        rate = upstream.rate_of(optimizer)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(upstream.steps_of(optimizer) - 1)
        return float(keras.ops.convert_to_numpy(rate))

    def state(self, stopping: dict[str, Any]) -> State:
        """Return what a checkpoint needs to go on from here; ``stopping`` is what early stopping remembers."""
        return self.start.model_copy(
            update={
                "step": self.step + self.offset,
                "epoch": self.epoch,
                "step_in_epoch": self.step_in_epoch,
                "history": {name: tuple(values) for name, values in self.history.items()},
                "stopping": stopping,
            }
        )
