"""The parts of a training: the stage passes one ``Training`` to the loop, the steps and the callbacks.

With ``train.frozen_epochs`` a training has two phases: the first with frozen layers, the second with all layers
trainable. The epoch alone determines the phase, so a resumed run continues in the same one. Between the phases the
training is rebuilt from its checkpoint, as on a resume, with a new optimizer and schedule.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks import config
from tasks.input.batches import Batches
from tasks.strategies import Strategy
from tasks.training.position import Position


class Phase(NamedTuple):
    """Epochs from ``first_epoch`` up to, but not including, ``end_epoch``, counted from 0."""

    freezes: bool
    """Whether the layers of ``model.freeze`` are frozen."""
    first_epoch: int
    end_epoch: int
    rate_factor: float
    """Multiplies every learning rate."""


def phase_at(settings: config.Settings, epoch: int) -> Phase:
    """Return the phase of an epoch, counted from 0; reads ``model.freeze`` and ``train``."""
    section, thaws_at = settings.train, settings.train.frozen_epochs
    if thaws_at is None:
        return Phase(bool(settings.model.freeze), 0, section.epochs, 1.0)
    if epoch < thaws_at:
        return Phase(True, 0, thaws_at, 1.0)
    return Phase(False, thaws_at, section.epochs, section.thawed_learning_rate_factor)


@dataclass(frozen=True)
class Training:
    """A training that is ready to start or to resume."""

    settings: config.Settings
    strategy: Strategy
    model: Any
    """Compiled and built, with the variables of its optimizer and its metrics."""
    loss: Any
    """The ``keras.losses.Loss`` that the model was compiled with."""
    batches: Batches
    validation: Batches | None
    position: Position
    """The current step and epoch; the first callback."""
    callbacks: tuple[Any, ...] = ()
    """In calling order."""

    @property
    def phase(self) -> Phase:
        """The phase to train; the loop stops at its end."""
        return phase_at(self.settings, self.position.start.epoch)
