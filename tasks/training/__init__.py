"""What a training is made of: one ``Training`` goes from the stage to its loop, its steps and its callbacks.

With ``train.frozen_epochs`` a training has two phases: the first with frozen layers, the second with all of them. The
epoch alone says which phase it is, so a resume is in the same one. Between them the training is built anew from its
checkpoint, as for a resume, with a new optimizer and schedule.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks import config
from tasks.input.batches import Batches
from tasks.strategies import Strategy
from tasks.training.position import Position


class Phase(NamedTuple):
    """Epochs ``first_epoch`` to before ``end_epoch``, counted from 0."""

    freezes: bool
    """Whether the layers of ``model.freeze`` are frozen."""
    first_epoch: int
    end_epoch: int
    rate_factor: float
    """On every learning rate."""


def phase_at(settings: config.Settings, epoch: int) -> Phase:
    """Return the phase of an epoch, counted from 0; ``model.freeze`` and ``train`` are read."""
    section, thaws_at = settings.train, settings.train.frozen_epochs
    if thaws_at is None:
        return Phase(bool(settings.model.freeze), 0, section.epochs, 1.0)
    if epoch < thaws_at:
        return Phase(True, 0, thaws_at, 1.0)
    return Phase(False, thaws_at, section.epochs, section.thawed_learning_rate_factor)


@dataclass(frozen=True)
class Training:
    """One training that is ready to begin, or to go on."""

    settings: config.Settings
    strategy: Strategy
    model: Any
    """Compiled and built, with the variables of its optimizer and its metrics."""
    loss: Any
    """The ``keras.losses.Loss`` that the model was compiled with."""
    batches: Batches
    validation: Batches | None
    position: Position
    """Where the training is; the first of its callbacks."""
    callbacks: tuple[Any, ...] = ()
    """In the order in which they are called."""

    @property
    def phase(self) -> Phase:
        """The phase that is trained; the training ends with it."""
        return phase_at(self.settings, self.position.start.epoch)
