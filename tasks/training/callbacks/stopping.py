"""What ends a training before its last epoch: a metric that gets no better, one that is too bad to go on with, and a
loss that is not a finite number."""

import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tasks import config
from tasks.modeling import metrics
from tasks.records import Limits
from tasks.system.errors import StratagemError
from tasks.training import shards
from tasks.training.position import Position


class ResumableEarlyStopping(keras.callbacks.EarlyStopping):
    """Keras' own, whose memory goes into the checkpoint: a resumed run stops where the whole one would have."""

    _memory = ("wait", "best", "best_epoch", "stopped_epoch")

    def __init__(self, section: config.EarlyStopping, saved: Mapping[str, Any], position: Position) -> None:
        mode = {"higher": "max", "lower": "min"}[metrics.better(section.monitor)]
        super().__init__(metrics.keras_log_name(section.monitor), section.min_delta, section.patience_epochs, mode=mode)
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


class StopBelowLimits(keras.callbacks.Callback):
    """Ends a trial of a sweep at the end of an epoch after which it must have been better. A trial that is resumed
    after that end is not trained on: its history is in the checkpoint."""

    def __init__(self, limits: Limits, position: Position) -> None:
        super().__init__()
        self.limits = limits
        self.position = position

    @property
    def over(self) -> bool:
        """Whether the training is given up."""
        return self.limits.missed(self.position.history.get(self.limits.metric, ())) is not None

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if self.over:
            self.model.stop_training = True


class NonFiniteLoss(StratagemError):
    """The loss is not a finite number, or the weights are not after the last step."""

    def __init__(self, what: str, position: Position) -> None:
        step = position.nonfinite_step or position.step
        self.step = step + position.offset
        self.start = position.start
        epoch = (step - 1) // position.batches.steps + 1
        super().__init__(
            f"{what} at step {self.step}, in epoch {epoch}. Lower schedule.learning_rate, give "
            "optimizer.global_clipnorm, or train.on_nonfinite=rollback"
        )


def refuse_nonfinite(position: Position) -> None:
    """Raise ``NonFiniteLoss`` if the loss of the steps that are known to be done is not a finite number."""
    if position.nonfinite_loss is not None:
        raise NonFiniteLoss(f"train/loss is {position.nonfinite_loss}", position)


class StopOnNonFinite(keras.callbacks.Callback):
    """Ends a training whose loss is not a finite number, on every worker at the same step, before anything is saved."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        refuse_nonfinite(self.position)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        # What the epoch's last step did to the weights shows in the validation first.
        losses = {name: value for name, value in (logs or {}).items() if name in ("loss", "val_loss")}
        for name, value in metrics.by_split(losses).items():
            if not math.isfinite(value):
                raise NonFiniteLoss(f"{name} is {value}", self.position)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        # What the last step of all did to the weights, no loss shows.
        for variable in self.model.trainable_variables:
            if shards.in_pieces(variable.value):
                finite = keras.ops.all(keras.ops.isfinite(variable.value))  # All workers compute it together.
            else:
                finite = np.isfinite(keras.ops.convert_to_numpy(variable)).all()
            if not bool(finite):
                raise NonFiniteLoss(f"{variable.path} is not a finite number", self.position)
