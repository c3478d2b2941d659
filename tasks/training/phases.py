"""The phases of a training: with ``train.frozen_epochs`` it begins with frozen layers, and goes on with all of them.

Which phase it is follows from the epoch alone, so a resume is in the one that the training was in. Between two phases
the training is built anew from its checkpoint, as a resume does: with an optimizer and a schedule of the phase's own.
"""

from typing import NamedTuple

from tasks import config


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
