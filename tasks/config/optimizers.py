"""The settings of each optimizer, by `optimizer.kind`; tasks/modeling/optimizers.py builds them."""

from typing import Annotated, Literal

from pydantic import Field

from tasks.config.section import MAX_FLOAT32, Options, OwnCode, Result, Section


class OptimizerBase(Section):
    global_clipnorm: Result[Annotated[float, Field(gt=0, le=MAX_FLOAT32)] | None] = None
    """Clip the gradients' global norm to this value; null is off."""


class Adam(OptimizerBase):
    """Adam: on TensorFlow this project's `FusedAdam`, with one operation per variable; otherwise Keras' own."""

    kind: Result[Literal["adam"]]


class AdamW(OptimizerBase):
    """Adam with decoupled weight decay: on TensorFlow this project's `FusedAdamW`, otherwise Keras' AdamW."""

    kind: Result[Literal["adamw"]]
    weight_decay: Result[Annotated[float, Field(ge=0, le=MAX_FLOAT32)]] = 0.004
    """Weight decay: each step reduces every weight by this fraction of it, times the learning rate."""


class SGD(OptimizerBase):
    """Keras' SGD: gradient descent, optionally with momentum."""

    kind: Result[Literal["sgd"]]
    momentum: Result[Annotated[float, Field(ge=0, lt=1)]] = 0.0
    """Momentum: the fraction of the previous update that each step adds; 0 is off."""
    nesterov: Result[bool] = False
    """Use Nesterov momentum."""


class RMSprop(OptimizerBase):
    """Keras' RMSprop."""

    kind: Result[Literal["rmsprop"]]
    momentum: Result[Annotated[float, Field(ge=0, lt=1)]] = 0.0
    """Momentum: the fraction of the previous update that each step adds; 0 is off."""


class OwnOptimizer(OptimizerBase):
    """Your own keras.optimizers.Optimizer, or any of Keras': `my_code:Lion`, `keras.optimizers:Lion`."""

    kind: Result[OwnCode]
    options: Result[Options] = {}
    """Keyword arguments of the class or function, except the learning rate."""


AnyOptimizer = Adam | AdamW | SGD | RMSprop | OwnOptimizer
