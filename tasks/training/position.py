"""Where a training is."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import keras

from tasks.input.batches import Batches
from tasks.modeling import metrics
from tasks.system import upstream
from tasks.training.checkpoints import State


class Position(keras.callbacks.Callback):
    """Knows where the training is, and tells the input pipeline before it starts an epoch. First of all callbacks."""

    def __init__(self, batches: Batches, start: State) -> None:
        super().__init__()
        self.batches = batches
        self.start = start
        self.history: dict[str, list[float]] = {name: list(values) for name, values in start.history.items()}
        self.epoch = start.epoch
        self.step_in_epoch = start.step_in_epoch
        self.aside_seconds = 0.0
        """What checkpoints and the profiler's own work took so far."""
        self.all_applied = True
        """Whether the variables are those of ``step``; under parameter servers later steps may be under way."""
        self.drain = False
        """Whether no step is to begin before that is so."""
        self.nonfinite_step: int | None = None
        """The first step after which the loss was no finite number, where a call of several steps had it inside."""
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

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._first_step = self.start.step_in_epoch if epoch == self.start.epoch else 0
        self.epoch, self.step_in_epoch = epoch, self._first_step
        self.batches.epoch, self.batches.start_step = epoch, self._first_step

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        # With steps_per_execution the last call of an epoch reports steps that it did not do.
        before = self.step_in_epoch
        self.step_in_epoch = min(self._first_step + batch + 1, self.batches.steps)
        self.longest_call = max(self.longest_call, self.step_in_epoch - before)

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
