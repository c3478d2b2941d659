"""Optimizers. A section of ``optimizer`` is named after the class of Keras' that it makes; on TensorFlow Adam and AdamW
are classes of our own."""

from typing import Any

import keras

from tasks import config
from tasks.modeling import schedules
from tasks.system import upstream


class BetaPowers:
    """Computes ``beta_1 ** step`` and ``beta_2 ** step`` of an Adam, once for all variables of a step that lie on one
    device. TensorFlow finds that out by itself for one device, and not for one replica: its step had 50 operations
    instead of 14."""

    def __init__(self) -> None:
        self._known: tuple[Any, Any] = (None, None)

    def of(self, adam: Any, variable: Any) -> Any:
        """Return both powers in the dtype of a variable, on its device."""
        import tensorflow as tf

        here = (tf.compat.v1.get_default_graph(), variable.handle.device, variable.dtype)
        place, powers = self._known  # Both in one reading: other threads trace other graphs.
        if tf.executing_eagerly() or place != here:
            step = tf.cast(adam.iterations + 1, variable.dtype)
            # As Keras rounds: tf.cast makes float32 of a Python number before it makes float64 of it.
            powers = [tf.cast(beta, variable.dtype) ** step for beta in (adam.beta_1, adam.beta_2)]
            self._known = here, powers
        return powers


class _FusedUpdate:
    """Adam's change of one variable in one operation where the variable lies, on TensorFlow, without ``amsgrad``.

    Keras changes the two moments and the variable by a dozen operations, one after the other. On two cores a step of a
    convnet took 1.05 times as long so, and a perceptron's 1.35 times. And a worker of a parameter server that reads the
    first moment with another one's gradient in it, and the second still without, divides by epsilon: where both were 0,
    as those of pixels that are hardly ever lit are, one step of digits threw a network out for good (loss 36, in 1 of
    18 trainings).
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._beta_powers = BetaPowers()

    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Change a variable, float (...), by a gradient of its shape and dtype. The parts of a sparse gradient are
        summed before they are squared; Keras squares each."""
        import tensorflow as tf

        first, second = upstream.moments_of(self, variable)
        powers = self._beta_powers.of(self, variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,  # Keras hands over what TensorFlow holds.
            m=first.value.handle,
            v=second.value.handle,
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=tf.cast(learning_rate, variable.dtype),
            beta1=self.beta_1,
            beta2=self.beta_2,
            epsilon=self.epsilon,
            grad=tf.cast(gradient, variable.dtype),
            use_locking=True,
        )


class FusedAdam(_FusedUpdate, keras.optimizers.Adam):
    """Adam in one operation a variable."""


class FusedAdamW(_FusedUpdate, keras.optimizers.AdamW):
    """AdamW in one operation a variable."""


# An exported model says Keras' own: it is loaded where this project is not installed.
upstream.export_as(FusedAdam, keras.optimizers.Adam)
upstream.export_as(FusedAdamW, keras.optimizers.AdamW)

ON_TENSORFLOW = {"Adam": FusedAdam, "AdamW": FusedAdamW}
"""In the place of Keras' class of that name."""


def class_name(optimizer: keras.optimizers.Optimizer) -> str:
    """Return the name of the class that changes the weights, which may lie in another that scales the loss."""
    return type(getattr(optimizer, "inner_optimizer", optimizer)).__name__


def build(
    settings: config.Settings, steps: int, global_batch_size: int, factor: float = 1.0, epochs: int | None = None
) -> keras.optimizers.Optimizer:
    """Return a new optimizer; call it inside the strategy's scope.

    Args:
        settings: ``optimizer``, ``schedule``, and of ``train`` the epochs, ``scale_learning_rate_from`` and
            ``gradient_accumulation_steps`` are read.
        steps: steps in one epoch.
        global_batch_size: examples in one step of all replicas together.
        factor: on every learning rate.
        epochs: that the schedule is for; ``train.epochs`` without it.
    """
    reference = settings.train.scale_learning_rate_from
    scale = factor * global_batch_size / reference if reference else factor
    options = settings.optimizer.model_dump(exclude={"kind"})
    if settings.train.gradient_accumulation_steps > 1:
        options["gradient_accumulation_steps"] = settings.train.gradient_accumulation_steps
    name = type(settings.optimizer).__name__
    own = ON_TENSORFLOW.get(name) if keras.backend.backend() == "tensorflow" else None
    made = own or getattr(keras.optimizers, name)
    rate = schedules.learning_rate(settings.schedule, steps, epochs or settings.train.epochs, scale)
    return made(learning_rate=rate, **options)
