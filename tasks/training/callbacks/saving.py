"""Decides when to write a checkpoint, and lets all workers of a training stop at the same step."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tasks.modeling import metrics
from tasks.system.errors import Interrupted
from tasks.training import Training
from tasks.training.callbacks.own import OwnCallback
from tasks.training.callbacks.stopping import ResumableEarlyStopping, refuse_nonfinite
from tasks.training.checkpoints import Checkpoints
from tasks.training.model_state import snapshot

# How often workers ask each other whether one of them has to stop.
MEETING_SECONDS = 1.0


class SaveCheckpoints(keras.callbacks.Callback):
    """Saves at the configured steps, epochs and seconds, when the training has to stop, and always at the end. It comes
    after the callbacks whose state it saves.

    A worker that is not the chief has no ``checkpoints``.
    """

    def __init__(
        self,
        training: Training,
        checkpoints: Checkpoints | None,
        remembering: Sequence[ResumableEarlyStopping | OwnCallback],
        restore_metrics: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        """
        Args:
            remembering: callbacks whose state the checkpoints hold.
            restore_metrics: restores the metrics from a checkpoint inside an epoch.
            stop: set when this process has to stop; then all workers stop at the same step.
        """
        super().__init__()
        self.section = training.settings.checkpoint
        self.position = position = training.position
        self.strategy = training.strategy
        self.checkpoints = checkpoints
        self.remembering = remembering
        self.restore_metrics = restore_metrics
        self.stop = stop
        self._metrics: dict[str, float] | None = None
        self._last_step = self._saved_step = position.step
        self._saved_at = time.perf_counter()
        self._due = self._stopping = False
        self._next_meeting = self._met_step = position.step
        self._met_at = time.perf_counter()

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._meet(always=True)
        if self._stopping:
            raise Interrupted("the training was stopped before its first step. The same command continues")

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        start = self.position.start
        if epoch == start.epoch and start.step_in_epoch:
            self.restore_metrics()  # Keras has just reset them, but they must include this epoch's first part.

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        done, every = self.position.step, self.section.every_steps
        self._due = self._due or (every is not None and done // every > self._last_step // every)
        self._last_step = done
        self._meet()
        wanted = self._inside_epoch and (self._due or self._stopping)  # `on_epoch_end` saves the last step.
        self.position.drain = wanted and not self.position.all_applied
        if wanted and self.position.all_applied:
            self._save(None)
            self._end_if_stopping()

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        if self._inside_epoch:
            self._save(None)  # The training stops here, and validation would reset the metrics so far.

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._metrics = metrics.by_split(logs or {}) if self.position.epoch > epoch else None
        self._meet(always=True)
        by_epoch = self.section.every_epochs and (epoch + 1) % self.section.every_epochs == 0
        if by_epoch or self._due or self._stopping:
            self._save(self._metrics)
        self._end_if_stopping()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._save(self._metrics)

    @property
    def _inside_epoch(self) -> bool:
        return self.position.step_in_epoch < self.position.batches.steps

    def _meet(self, always: bool = False) -> None:
        """Agree with all workers whether a checkpoint is due by the clock and whether a worker has to stop."""
        now, step = time.perf_counter(), self.position.step
        every = self.section.every_seconds
        due = every is not None and now - self._saved_at >= every
        stop_asked = self.stop.is_set()
        if self.strategy.num_workers > 1:
            if not always and step < self._next_meeting:
                return
            rate = (step - self._met_step) / max(now - self._met_at, 1e-6)
            until = max(1, int(rate * MEETING_SECONDS))
            # Only the chief's clock counts.
            chief = self.strategy.is_chief
            stops, dues, steps = self.strategy.sum_over_workers([stop_asked, due and chief, until if chief else 0])
            stop_asked, due = bool(stops > 0), bool(dues > 0)
            self._next_meeting, self._met_step, self._met_at = step + int(steps), step, now
        self._due = self._due or due
        self._stopping = self._stopping or stop_asked

    def _end_if_stopping(self) -> None:
        if self._stopping:
            step = self.position.step
            raise Interrupted(f"the training was stopped at step {step}, which is saved. The same command continues")

    def _save(self, values: dict[str, float] | None) -> None:
        self._due, self._saved_at = False, time.perf_counter()
        if self.position.step == self._saved_step:
            return  # The last step of an epoch can be due twice; all workers must skip the second time.
        self._saved_step = self.position.step
        self.position.wait()
        refuse_nonfinite(self.position)
        with self.position.aside():
            if self.checkpoints is None:
                snapshot(self.model)  # The chief's snapshot needs every worker.
            else:
                remembered = {one.name: one.state() for one in self.remembering}
                self.checkpoints.save(self.model, self.position.state(remembered), values)
