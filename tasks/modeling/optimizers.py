"""Optimizers. Each ``optimizer`` section is named after the Keras class that it makes; on TensorFlow, Adam and AdamW
are classes of this project. The section of a custom optimizer names its ``module:name``."""

from typing import Any

import keras

from tasks import config
from tasks.modeling import own_code, schedules
from tasks.system import upstream
from tasks.system.errors import UserError


class BetaPowers:
    """Computes ``beta_1 ** step`` and ``beta_2 ** step`` of Adam once per step for all variables on a device.
    TensorFlow merges these operations on a single device, but not for a replica, whose step had 50 operations instead
    of 14."""

    def __init__(self) -> None:
        self._known: tuple[Any, Any] = (None, None)

    def of(self, adam: Any, variable: Any) -> Any:
        """Return both powers in the dtype of a variable, on its device."""
        import tensorflow as tf

        here = (tf.compat.v1.get_default_graph(), variable.handle.device, variable.dtype)
        place, powers = self._known  # Both in one reading: other threads trace other graphs.
        if tf.executing_eagerly() or place != here:
            step = tf.cast(adam.iterations + 1, variable.dtype)
            # Rounds like Keras: tf.cast converts a Python number to float32 before float64.
            powers = [tf.cast(beta, variable.dtype) ** step for beta in (adam.beta_1, adam.beta_2)]
            self._known = here, powers
        return powers


class _FusedUpdate:
    """Adam's update of a variable in a single operation on the variable's device, on TensorFlow, without ``amsgrad``.

    Keras updates the two moments and the variable in a dozen successive operations. On two cores a convnet's step took
    1.05 times as long that way, and a perceptron's 1.35 times. With parameter servers, a worker could also read a first
    moment that already includes another worker's gradient and a second moment that does not: if both were 0 before, as
    for pixels that are rarely lit, it divides by epsilon, and a single step made a network on digits diverge for good
    (loss 36, in 1 of 18 trainings).
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._beta_powers = BetaPowers()

    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable, float (...), with a gradient of the same shape and dtype. The parts of a sparse gradient
        are summed before they are squared; Keras squares each part."""
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
    """Adam with one operation per variable."""


class FusedAdamW(_FusedUpdate, keras.optimizers.AdamW):
    """AdamW with one operation per variable."""


# An exported model refers to Keras' own class, because it is loaded without this project installed.
upstream.export_as(FusedAdam, keras.optimizers.Adam)
upstream.export_as(FusedAdamW, keras.optimizers.AdamW)

ON_TENSORFLOW = {"Adam": FusedAdam, "AdamW": FusedAdamW}
"""Replacements for the Keras classes with these names."""


def class_name(optimizer: keras.optimizers.Optimizer) -> str:
    """Return the class name of the optimizer, or of its inner optimizer if it only scales the loss."""
    return type(getattr(optimizer, "inner_optimizer", optimizer)).__name__


def build(
    settings: config.Settings, steps: int, global_batch_size: int, factor: float = 1.0, epochs: int | None = None
) -> keras.optimizers.Optimizer:
    """Return a new optimizer; call it inside the strategy's scope.

    Args:
        settings: ``optimizer``, ``schedule``, ``train.epochs``, ``train.scale_learning_rate_from`` and
            ``train.gradient_accumulation_steps`` are read.
        steps: steps per epoch.
        global_batch_size: examples per step over all replicas.
        factor: multiplies every learning rate.
        epochs: epochs of the schedule; the default is ``train.epochs``.
    """
    reference = settings.train.scale_learning_rate_from
    scale = factor * global_batch_size / reference if reference else factor
    section = settings.optimizer
    options = section.model_dump(exclude={"kind"})
    if settings.train.gradient_accumulation_steps > 1:
        options["gradient_accumulation_steps"] = settings.train.gradient_accumulation_steps
    options["learning_rate"] = schedules.learning_rate(settings.schedule, steps, epochs or settings.train.epochs, scale)
    if isinstance(section, config.OwnOptimizer):
        if "learning_rate" in (given := options.pop("options")):
            raise UserError("optimizer.options.learning_rate: the schedule sets it. Set schedule.learning_rate instead")
        given |= {name: value for name, value in options.items() if value is not None}
        return own_code.make(section.kind, "optimizer.kind", keras.optimizers.Optimizer, given)
    name = type(section).__name__
    own = ON_TENSORFLOW.get(name) if keras.backend.backend() == "tensorflow" else None
    made: keras.optimizers.Optimizer = (own or getattr(keras.optimizers, name))(**options)
    return made


def check(settings: config.Settings, steps: int, global_batch_size: int) -> None:
    """Raise ``UserError`` if a custom optimizer or schedule cannot be built, or if its first step fails."""
    if ":" not in settings.optimizer.kind + settings.schedule.kind:
        return
    optimizer, weight = build(settings, steps, global_batch_size), keras.Variable([1.0])
    named = [f"{key} = '{name}'" for name, key in own_code.named_in(settings).items() if key.endswith(".kind")]
    with own_code.blamed(f"{' and '.join(named)}: its first step fails"):
        optimizer.build([weight])
        optimizer.apply([keras.ops.zeros([1])])
