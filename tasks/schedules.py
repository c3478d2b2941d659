"""Learning-rate schedules and optimizers. Durations are given in epochs and turned into steps here, and only here."""

from collections.abc import Callable
from typing import Any

import keras

from tasks import config


def learning_rate(
    schedule: config.Constant | config.Piecewise | config.Cosine, steps: int, epochs: int, scale: float
) -> Any:
    """Return a float or a ``keras.optimizers.schedules.LearningRateSchedule``.

    Args:
        schedule: the settings' section.
        steps: steps in one epoch.
        epochs: epochs of the whole training; a cosine ends there.
        scale: factor on every learning rate (linear scaling rule, Goyal et al. 2017, section 2.1).
    """
    if schedule.kind == "piecewise":
        # Keras takes values[i] for step <= boundaries[i], and steps count from 0: the last step of epoch e is e *
        # steps - 1.
        boundaries = [epoch * steps - 1 for epoch in schedule.boundaries_epochs]
        return keras.optimizers.schedules.PiecewiseConstantDecay(
            boundaries, [scale * r for r in schedule.learning_rates]
        )
    if schedule.kind == "cosine":
        warmup = round(schedule.warmup_epochs * steps)
        peak = scale * schedule.learning_rate
        return keras.optimizers.schedules.CosineDecay(
            initial_learning_rate=0.0 if warmup else peak,
            decay_steps=max(1, epochs * steps - warmup),
            alpha=schedule.final_learning_rate / schedule.learning_rate,
            warmup_target=peak if warmup else None,
            warmup_steps=warmup,
        )
    return scale * schedule.learning_rate


def optimizer(
    settings: config.Settings, steps: int, global_batch_size: int, factor: float = 1.0
) -> keras.optimizers.Optimizer:
    """Return a new optimizer; call it inside the strategy's scope.

    Args:
        settings: ``optimizer``, ``schedule``, and of ``train`` the epochs, ``scale_learning_rate_from`` and
            ``gradient_accumulation_steps`` are read.
        steps: steps in one epoch.
        global_batch_size: examples in one step of all replicas together.
        factor: on every learning rate.
    """
    reference = settings.train.scale_learning_rate_from
    scale = factor * global_batch_size / reference if reference else factor
    rate = learning_rate(settings.schedule, steps, settings.train.epochs, scale)
    options = settings.optimizer.model_dump(exclude={"kind"})
    if settings.train.gradient_accumulation_steps > 1:
        options["gradient_accumulation_steps"] = settings.train.gradient_accumulation_steps
    kinds = {
        "adam": keras.optimizers.Adam,
        "adamw": keras.optimizers.AdamW,
        "sgd": keras.optimizers.SGD,
        "rmsprop": keras.optimizers.RMSprop,
    }
    made = kinds[settings.optimizer.kind](learning_rate=rate, **options)
    if keras.backend.backend() == "tensorflow" and isinstance(made, keras.optimizers.Adam):  # AdamW is one.
        made.update_step = adam_at_once(made)
    return made


def adam_at_once(adam: Any) -> Callable[[Any, Any, Any], None]:
    """Return what replaces Adam's ``update_step`` on TensorFlow: the same change of one variable, float (...), by a
    gradient of its shape and dtype, in one operation where the variable lies. The parts of a sparse gradient are summed
    before they are squared; Keras squares each.

    Keras changes the two moments and the variable by a dozen operations, one after the other. On two cores a step of a
    convnet took 1.05 times as long so, and a perceptron's 1.35 times. And a worker of a parameter server that reads the
    first moment with another one's gradient in it, and the second still without, divides by epsilon: where both were 0,
    as those of pixels that are hardly ever lit are, one step of digits threw a network out for good (loss 36, in 1 of
    18 trainings).
    """
    import tensorflow as tf

    known: tuple[Any, Any] = (None, None)

    def beta_powers(variable: Any) -> Any:
        nonlocal known
        # Once for all variables of a step that lie on one device. TensorFlow finds that out by itself for one device,
        # and not for one replica: its step had 50 operations instead of 14.
        here = (tf.compat.v1.get_default_graph(), variable.handle.device, variable.dtype)
        place, powers = known  # Both at once: other threads trace other graphs.
        if tf.executing_eagerly() or place != here:
            step = tf.cast(adam.iterations + 1, variable.dtype)
            # As Keras rounds: tf.cast makes float32 of a Python number before it makes float64 of it.
            powers = [tf.cast(beta, variable.dtype) ** step for beta in (adam.beta_1, adam.beta_2)]
            known = here, powers
        return powers

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        index = adam._get_variable_index(variable)
        powers = beta_powers(variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,  # Keras hands over what TensorFlow holds.
            m=adam._momentums[index].value.handle,
            v=adam._velocities[index].value.handle,
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=tf.cast(learning_rate, variable.dtype),
            beta1=adam.beta_1,
            beta2=adam.beta_2,
            epsilon=adam.epsilon,
            grad=tf.cast(gradient, variable.dtype),
            use_locking=True,
        )

    return update_step
