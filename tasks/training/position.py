"""The current epoch and step of a training."""

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
    """Steps that a loop has passed to the devices; an accelerator may still be running them."""

    first: int
    """First step."""
    count: int
    """Number of steps."""
    loss: Any
    """The mean loss of the epoch so far: a number, or a scalar on a device."""
    is_ahead: bool
    """Whether the devices may still be running it, so that reading the loss would wait for them."""
    finite: Any = None
    """The number of steps after which the loss was still finite, if the loop counts them: a scalar like ``loss``."""
    began: float = 0.0
    """When it was passed to the devices, by ``Position.now``."""
    measure: Callable[[int, float], None] = lambda count, seconds: None
    """Takes the number of steps and their duration in seconds."""


class Position(keras.callbacks.Callback):
    """Tracks the current step, and sets the start of each epoch in the input pipeline. It is the first callback.

    It also reads the loss of each call, the only value that is read before the end of an epoch. Reading waits for the
    call, so on an accelerator it happens after the next call has started.
    """

    def __init__(self, batches: Batches, start: State) -> None:
        super().__init__()
        self.batches = batches
        self.start = start
        self.history: dict[str, list[float]] = {name: list(values) for name, values in start.history.items()}
        self.epoch = start.epoch
        self.step_in_epoch = start.step_in_epoch
        self.aside_seconds = 0.0
        """Seconds so far for checkpoints, the profiler's own work and later compilations."""
        self.all_applied = True
        """Whether the variables are those of ``step``; under parameter servers later steps may be running."""
        self.drain = False
        """Whether no step may start until ``all_applied``."""
        self.nonfinite_loss: float | None = None
        """The loss, if it is not finite."""
        self.nonfinite_step: int | None = None
        """The first step with a loss that is not finite."""
        self.call: Call | None = None
        """The call that a step function has just started; None after a call of Keras' own."""
        self._under_way: Call | None = None
        self._done_at = 0.0
        self.longest_call = 1
        """Largest number of steps of a call so far."""
        self._first_step = start.step_in_epoch
        self.offset = start.step - self.step
        """The run's actual number of steps minus ``step``; not 0 after a resume with another batch size."""

    @property
    def step(self) -> int:
        """Training steps since the start of the run, counted in batches of the current size."""
        return self.epoch * self.batches.steps + self.step_in_epoch

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the time of the block, which interrupts the steps, from ``Throughput``."""
        began = time.perf_counter()
        yield
        self.aside_seconds += time.perf_counter() - began

    def now(self) -> float:
        """Return the seconds of a clock that stands still during ``aside``."""
        return time.perf_counter() - self.aside_seconds

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._first_step = self.start.step_in_epoch if epoch == self.start.epoch else 0
        self.epoch, self.step_in_epoch = epoch, self._first_step
        self.batches.epoch, self.batches.start_step = epoch, self._first_step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # With steps_per_execution the last call of an epoch reports more steps than it ran.
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
        """Wait until all steps so far are finished, and check that the loss is still finite."""
        call, self._under_way = self._under_way, None
        if call is None:
            return
        loss = float(call.loss)
        now = self.now()
        # The devices began it when it was passed to them or when the previous call ended.
        call.measure(call.count, now - max(call.began, self._done_at))
        self._done_at = now
        if not math.isfinite(loss) and self.nonfinite_loss is None:
            finite = call.count - 1 if call.finite is None else int(call.finite)
            self.nonfinite_loss, self.nonfinite_step = loss, call.first + min(finite + 1, call.count)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        logs = logs if logs is not None else {}
        logs["learning_rate"] = self._learning_rate()
        if self.step_in_epoch < self.batches.steps:
            return  # A callback stopped the training inside the epoch: a resume continues in its middle.
        self.epoch, self.step_in_epoch = epoch + 1, 0
        for name, value in metrics.by_split(logs).items():
            self.history.setdefault(name, []).append(value)

    def _learning_rate(self) -> float:
        """Return the learning rate of the last step; the optimizer's own is already that of the next step."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)  # Under mixed_float16.
        rate = upstream.rate_of(optimizer)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(upstream.steps_of(optimizer) - 1)
        return float(keras.ops.convert_to_numpy(rate))

    def state(self, callbacks: dict[str, dict[str, Any]]) -> State:
        """Return the state for a checkpoint at this step; ``callbacks`` holds the callbacks' states by name."""
        return self.start.model_copy(
            update={
                "step": self.step + self.offset,
                "epoch": self.epoch,
                "step_in_epoch": self.step_in_epoch,
                "history": {name: tuple(values) for name, values in self.history.items()},
                "callbacks": callbacks,
            }
        )
