"""What a training is made of: one ``Training`` goes from the stage to its loop, its steps and its callbacks."""

from dataclasses import dataclass
from typing import Any

from tasks import config
from tasks.input.batches import Batches
from tasks.strategies import Strategy
from tasks.training.phases import Phase, phase_at
from tasks.training.position import Position


@dataclass(frozen=True)
class Training:
    """One training that is ready to begin, or to go on."""

    settings: config.Settings
    strategy: Strategy
    model: Any
    """Compiled and built: what its optimizer and its metrics need is there."""
    loss: Any
    """The ``keras.losses.Loss`` that the model was compiled with."""
    batches: Batches
    validation: Batches | None
    position: Position
    """Where the training is; the first of its callbacks."""
    callbacks: tuple[Any, ...] = ()
    """In the order in which they are told."""

    @property
    def phase(self) -> Phase:
        """The phase that is trained; the training ends with it."""
        return phase_at(self.settings, self.position.start.epoch)
