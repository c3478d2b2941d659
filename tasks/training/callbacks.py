"""What happens beside the steps: position, throughput, early stopping, checkpoints, metrics. The same in every loop."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tasks import config, timeline
from tasks.checkpoints import Checkpoints, State, snapshot
from tasks.errors import Interrupted, StratagemError
from tasks.input.batches import Batches
from tasks.strategies import Strategy

MetricSink = Callable[[int, Mapping[str, float]], None]

# How often several workers ask each other whether one of them was told to stop.
MEETING_SECONDS = 1.0


def metric_names(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return Keras' logs under our names: ``loss`` is ``train/loss``, ``val_loss`` is ``validation/loss``."""
    return {
        f"validation/{name.removeprefix('val_')}" if name.startswith("val_") else f"train/{name}": float(value)
        for name, value in logs.items()
    }


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
        self.settled = True
        """Whether the variables are those of ``step``; under parameter servers later steps may be under way."""
        self.drain = False
        """Whether no step is to begin before that is so."""
        self.nonfinite_step: int | None = None
        """The first step after which the loss was no finite number, where a call of several steps had it inside."""
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
        self.step_in_epoch = min(self._first_step + batch + 1, self.batches.steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        logs = logs if logs is not None else {}
        logs["learning_rate"] = self._learning_rate()
        if self.step_in_epoch < self.batches.steps:
            return  # A callback stopped the training inside the epoch: a resume goes on in its middle.
        self.epoch, self.step_in_epoch = epoch + 1, 0
        for name, value in metric_names(logs).items():
            self.history.setdefault(name, []).append(value)

    def _learning_rate(self) -> float:
        """Return the rate of the step just done. The optimizer's own is the next step's, of another epoch by now."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)  # Under mixed_float16.
        rate = optimizer._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(optimizer._iterations - 1)  # Without the underscore it counts accumulated steps as one.
        return float(keras.ops.convert_to_numpy(rate))

    def state(self, stopping: "EarlyStopping | None") -> State:
        """Return what a checkpoint needs to carry on from here."""
        return self.start.model_copy(
            update={
                "step": self.step + self.offset,
                "epoch": self.epoch,
                "step_in_epoch": self.step_in_epoch,
                "history": {name: tuple(values) for name, values in self.history.items()},
                "stopping": stopping.state() if stopping else {},
            }
        )


class Throughput(keras.callbacks.Callback):
    """Measures examples per second over all training steps after the first call, without validation, checkpoints and
    the profiler's own work; and the first call, which traces and compiles, by itself."""

    def __init__(self, position: Position, began: float) -> None:
        super().__init__()
        self.position = position
        self.began = began
        """When the stage began, by ``time.perf_counter``."""
        self.setup_seconds = 0.0
        self.first_call_seconds: float | None = None
        self.epoch_seconds: list[float] = []
        self.seconds = 0.0
        self.num_examples = 0
        self._epoch_began = 0.0
        self._since = 0.0
        self._step = 0

    @property
    def examples_per_second(self) -> float | None:
        """None when there was only the first call, which traces."""
        return self.num_examples / self.seconds if self.num_examples else None

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._epoch_began, self._since = time.perf_counter(), self._now()
        self._step = self.position.step
        if self.first_call_seconds is None:
            self.setup_seconds = self._epoch_began - self.began

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        # Keras has read the loss for its callbacks, so an accelerator has done what the call handed to it.
        now, step = self._now(), self.position.step
        if self.first_call_seconds is None:
            self.first_call_seconds = now - self._since
            timeline.write("stages", "first step", time.monotonic() - self.first_call_seconds)
        else:
            self.num_examples += sum(self.position.batches.size(done) for done in range(self._step, step))
            self.seconds += now - self._since
        self._since, self._step = now, step

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        begun_here = epoch > self.position.start.epoch or not self.position.start.step_in_epoch
        if begun_here and self.position.epoch > epoch:
            self.epoch_seconds.append(time.perf_counter() - self._epoch_began)

    def _now(self) -> float:
        return time.perf_counter() - self.position.aside_seconds


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras' own, whose memory goes into the checkpoint: a resumed run stops where the whole one would have."""

    _memory = ("wait", "best", "best_epoch", "stopped_epoch")

    def __init__(self, stopping: Any, saved: Mapping[str, Any], position: Position) -> None:
        monitor = stopping.monitor.replace("train/", "").replace("validation/", "val_")
        mode = "min" if monitor.endswith("loss") else "max"
        super().__init__(monitor, stopping.min_delta, stopping.patience_epochs, mode=mode)
        self.position = position
        self._saved = saved

    @property
    def over(self) -> bool:
        """Whether the training had stopped before it was resumed."""
        return bool(self._saved.get("stopped_epoch", 0) > 0 and self._saved["wait"] >= self.patience)

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        super().on_train_begin(logs)
        for name, value in self._saved.items():
            setattr(self, name, value)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if self.position.epoch > epoch:  # An epoch that was stopped inside is judged when a resume has ended it.
            super().on_epoch_end(epoch, logs)
            self._saved = self.state()

    def state(self) -> dict[str, Any]:
        """Return what the next decision needs."""
        return {name: getattr(self, name) for name in self._memory}


class NonFiniteLoss(StratagemError):
    """The loss is no finite number, or the weights are not after the last step."""

    def __init__(self, what: str, position: Position) -> None:
        step = position.nonfinite_step or position.step
        self.step = step + position.offset
        self.start = position.start
        epoch = (step - 1) // position.batches.steps + 1
        super().__init__(
            f"{what} at step {self.step}, in epoch {epoch}. Lower schedule.learning_rate, give "
            "optimizer.global_clipnorm, or train.on_nonfinite=rollback"
        )


class StopOnNonFinite(keras.callbacks.Callback):
    """Ends a training whose loss is no finite number, on every worker at the same step, before anything is saved."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._check(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._check(logs)  # Of the validation: what the epoch's last step did to the weights shows there first.

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        # What the last step of all did to the weights, no loss shows.
        for variable in self.model.trainable_variables:
            if not np.isfinite(keras.ops.convert_to_numpy(variable)).all():
                raise NonFiniteLoss(f"{variable.path} is no finite number", self.position)

    def _check(self, logs: dict[str, float] | None) -> None:
        losses = {name: value for name, value in (logs or {}).items() if name in ("loss", "val_loss")}
        for name, value in metric_names(losses).items():
            if not math.isfinite(value):
                raise NonFiniteLoss(f"{name} is {value}", self.position)


class SaveCheckpoints(keras.callbacks.Callback):
    """Saves every so many steps, epochs and seconds, when the training is to stop, and always at the end. After
    EarlyStopping, whose memory it saves.

    A worker that is not the chief has no ``checkpoints``.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        position: Position,
        stopping: EarlyStopping | None,
        section: config.Checkpoint,
        restore_metrics: Callable[[], None],
        stop: threading.Event,
        strategy: Strategy,
    ) -> None:
        """
        Args:
            section: ``checkpoint`` of the settings.
            restore_metrics: gives the metrics the values of a checkpoint inside an epoch.
            stop: set when this process is told to stop; then all workers do, at the same step.
            strategy: how workers ask each other.
        """
        super().__init__()
        self.checkpoints = checkpoints
        self.position = position
        self.stopping = stopping
        self.section = section
        self.restore_metrics = restore_metrics
        self.stop = stop
        self.strategy = strategy
        self._metrics: dict[str, float] | None = None
        self._last_step = self._saved_step = position.step
        self._saved_at = time.perf_counter()
        self._due = self._told_to_stop = False
        self._next_meeting = self._met_step = position.step
        self._met_at = time.perf_counter()

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._meet(always=True)
        if self._told_to_stop:
            raise Interrupted("the training was stopped before it did a step. The same command goes on")

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        start = self.position.start
        if epoch == start.epoch and start.step_in_epoch:
            self.restore_metrics()  # Keras has just reset them, and this epoch's first part is in them.

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        done, every = self.position.step, self.section.every_steps
        self._due = self._due or (every is not None and done // every > self._last_step // every)
        self._last_step = done
        self._meet()
        wanted = self._inside_epoch and (self._due or self._told_to_stop)  # An epoch's end saves its metrics too.
        self.position.drain = wanted and not self.position.settled
        if wanted and self.position.settled:
            self._save(None)
            self._end_if_told()

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        if self._inside_epoch:
            self._save(None)  # The training was stopped here, and validation resets the metrics of the epoch's part.

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._metrics = metric_names(logs or {}) if self.position.epoch > epoch else None
        self._meet(always=True)
        by_epoch = self.section.every_epochs and (epoch + 1) % self.section.every_epochs == 0
        if by_epoch or self._due or self._told_to_stop:
            self._save(self._metrics)
        self._end_if_told()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._save(self._metrics)

    @property
    def _inside_epoch(self) -> bool:
        return self.position.step_in_epoch < self.position.batches.steps

    def _meet(self, always: bool = False) -> None:
        """Learn whether a checkpoint is due by the clock, and whether a worker is told to stop: the same on all."""
        now, step = time.perf_counter(), self.position.step
        every = self.section.every_seconds
        due = every is not None and now - self._saved_at >= every
        told = self.stop.is_set()
        if self.strategy.num_workers > 1:
            if not always and step < self._next_meeting:
                return
            rate = (step - self._met_step) / max(now - self._met_at, 1e-6)
            until = max(1, int(rate * MEETING_SECONDS))
            # The clock is the chief's: each worker has its own.
            chief = self.strategy.is_chief
            stops, dues, steps = self.strategy.total([told, due and chief, until if chief else 0])
            told, due = stops > 0, dues > 0
            self._next_meeting, self._met_step, self._met_at = step + steps, step, now
        self._due = self._due or due
        self._told_to_stop = self._told_to_stop or told

    def _end_if_told(self) -> None:
        if self._told_to_stop:
            step = self.position.step
            raise Interrupted(f"the training was stopped at step {step}, which is saved. The same command goes on")

    def _save(self, metrics: dict[str, float] | None) -> None:
        self._due, self._saved_at = False, time.perf_counter()
        if self.position.step == self._saved_step:
            return  # The last step of an epoch can be due twice, and every worker must take that the same way.
        self._saved_step = self.position.step
        with self.position.aside():
            if self.checkpoints is None:
                snapshot(self.model)  # The sum of a metric over all workers needs each of them.
            else:
                self.checkpoints.save(self.model, self.position.state(self.stopping), metrics)


class SendMetrics(keras.callbacks.Callback):
    """Hands each epoch's metrics to whoever tracks the run."""

    def __init__(self, send: MetricSink, position: Position) -> None:
        super().__init__()
        self.send = send
        self.position = position

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.send(self.position.step + self.position.offset, metric_names(logs or {}))
