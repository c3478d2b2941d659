"""Callbacks that end a training early: a metric no longer improves, misses a sweep's limits, or the loss is not
finite."""

import math
from typing import Any

import keras
import numpy as np

from tasks import config
from tasks.modeling import metrics
from tasks.records import Limits
from tasks.system.errors import StratagemError
from tasks.training.model_state import in_pieces
from tasks.training.position import Position


class ResumableEarlyStopping(keras.callbacks.EarlyStopping):
    """Keras' EarlyStopping with its state in the checkpoint: a resumed run stops where an uninterrupted one would."""

    name = "train.early_stopping"
    _memory = ("wait", "best", "best_epoch", "stopped_epoch")

    def __init__(self, section: config.EarlyStopping, position: Position) -> None:
        mode = {"higher": "max", "lower": "min"}[metrics.better(section.monitor)]
        super().__init__(metrics.keras_log_name(section.monitor), section.min_delta, section.patience_epochs, mode=mode)
        self.position = position
        self._saved = position.start.callbacks.get(self.name, {})

    @property
    def over(self) -> bool:
        """Whether early stopping had ended the training before the resume."""
        return bool(self._saved.get("stopped_epoch", 0) > 0 and self._saved["wait"] >= self.patience)

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        super().on_train_begin(logs)
        for name, value in self._saved.items():
            setattr(self, name, value)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if self.position.epoch > epoch:  # An interrupted epoch is judged when a resume has completed it.
            super().on_epoch_end(epoch, logs)
            self._saved = self.state()

    def state(self) -> dict[str, Any]:
        """Return the state that the next decision needs."""
        return {name: getattr(self, name) for name in self._memory}


class StopBelowLimits(keras.callbacks.Callback):
    """Ends a sweep's trial after an epoch in which its metric missed the limits. If such a trial is resumed, it does
    not train any further: the checkpoint has its history."""

    def __init__(self, limits: Limits, position: Position) -> None:
        super().__init__()
        self.limits = limits
        self.position = position

    @property
    def over(self) -> bool:
        """Whether the metric has missed the limits."""
        return self.limits.missed(self.position.history.get(self.limits.metric, ())) is not None

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if self.over:
            self.model.stop_training = True


class NonFiniteLoss(StratagemError):
    """The loss, or a weight after the last step, is not a finite number."""

    def __init__(self, what: str, position: Position) -> None:
        step = position.nonfinite_step or position.step
        self.step = step + position.offset
        self.start = position.start
        epoch = (step - 1) // position.batches.steps + 1
        super().__init__(
            f"{what} at step {self.step}, in epoch {epoch}. Lower schedule.learning_rate, or set "
            "optimizer.global_clipnorm or train.on_nonfinite=rollback"
        )


def refuse_nonfinite(position: Position) -> None:
    """Raise ``NonFiniteLoss`` if the loss of the finished steps is not a finite number."""
    if position.nonfinite_loss is not None:
        raise NonFiniteLoss(f"train/loss is {position.nonfinite_loss}", position)


class StopOnNonFinite(keras.callbacks.Callback):
    """Ends a training whose loss is not finite, on all workers at the same step, before anything is saved."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        refuse_nonfinite(self.position)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        # The validation is the first to show the effect of the epoch's last step on the weights.
        losses = {name: value for name, value in (logs or {}).items() if name in ("loss", "val_loss")}
        for name, value in metrics.by_split(losses).items():
            if not math.isfinite(value):
                raise NonFiniteLoss(f"{name} is {value}", self.position)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        # No loss shows the effect of the very last step on the weights.
        for variable in self.model.trainable_variables:
            if in_pieces(variable):
                finite = keras.ops.all(keras.ops.isfinite(variable.value))  # All workers compute it together.
            else:
                finite = np.isfinite(keras.ops.convert_to_numpy(variable)).all()
            if not bool(finite):
                raise NonFiniteLoss(f"{variable.path} is not a finite number", self.position)
