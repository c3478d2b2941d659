"""Learning-rate schedules by ``schedule.kind``. Durations are given in epochs and become steps here, and only here; one
of the user's own counts steps."""

from typing import Any

import keras

from tasks import config
from tasks.modeling import own_code


def constant(section: config.Constant, steps: int, epochs: int, scale: float) -> float:
    """Return the one learning rate."""
    return scale * section.learning_rate


def piecewise(section: config.Piecewise, steps: int, epochs: int, scale: float) -> Any:
    """Return one learning rate after the other."""
    # Keras takes values[i] for step <= boundaries[i], and steps count from 0: the last step of epoch e is e * steps -
    # 1.
    boundaries = [epoch * steps - 1 for epoch in section.boundaries_epochs]
    return keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, [scale * r for r in section.learning_rates])


def cosine(section: config.Cosine, steps: int, epochs: int, scale: float) -> Any:
    """Return a rise and a cosine that ends with the last epoch."""
    warmup = round(section.warmup_epochs * steps)
    peak = scale * section.learning_rate
    return keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0 if warmup else peak,
        decay_steps=max(1, epochs * steps - warmup),
        alpha=section.final_learning_rate / section.learning_rate,
        warmup_target=peak if warmup else None,
        warmup_steps=warmup,
    )


def own(section: config.OwnSchedule, steps: int, epochs: int, scale: float) -> Any:
    """Return the user's own schedule."""
    schedules = keras.optimizers.schedules
    known = {"steps_per_epoch": steps, "epochs": epochs}
    made = own_code.make(section.kind, "schedule.kind", schedules.LearningRateSchedule, section.options, **known)
    return made if scale == 1 else Scaled(made, scale)


class Scaled(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of which each rate is multiplied."""

    def __init__(self, schedule: Any, scale: float) -> None:
        super().__init__()
        self.schedule = schedule
        self.scale = scale

    def __call__(self, step: Any) -> Any:
        return self.schedule(step) * self.scale


SCHEDULES = {"constant": constant, "piecewise": piecewise, "cosine": cosine, "module:name": own}
"""What ``schedule.kind`` can be."""


def learning_rate(section: Any, steps: int, epochs: int, scale: float) -> Any:
    """Return a float or a ``keras.optimizers.schedules.LearningRateSchedule``.

    Args:
        section: ``schedule`` of the settings.
        steps: steps in one epoch.
        epochs: epochs of the whole training; a cosine ends there.
        scale: factor on every learning rate (linear scaling rule, Goyal et al. 2017, section 2.1).
    """
    make: Any = SCHEDULES[str(config.kind_of(section))]
    return make(section, steps, epochs, scale)
