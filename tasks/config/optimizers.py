"""Optimizers by `optimizer.kind`: what each takes. tasks/modeling/optimizers.py makes Keras' class of the same name."""

from typing import Annotated, Literal

from pydantic import Field

from tasks.config.section import MAX_FLOAT32, Result, Section


class OptimizerBase(Section):
    global_clipnorm: Result[Annotated[float, Field(gt=0, le=MAX_FLOAT32)] | None] = None
    """Clip all gradients together to this norm; null is off."""


class Adam(OptimizerBase):
    """Adam: on TensorFlow this project's `FusedAdam`, one operation a variable, else Keras' own."""

    kind: Result[Literal["adam"]]


class AdamW(OptimizerBase):
    """Adam with decoupled weight decay: on TensorFlow this project's `FusedAdamW`, else Keras' AdamW."""

    kind: Result[Literal["adamw"]]
    weight_decay: Result[Annotated[float, Field(ge=0, le=MAX_FLOAT32)]] = 0.004
    """Each step makes every weight smaller by this share of itself, times the learning rate."""


class SGD(OptimizerBase):
    """Keras' SGD: gradient descent, with momentum where it is given."""

    kind: Result[Literal["sgd"]]
    momentum: Result[Annotated[float, Field(ge=0, lt=1)]] = 0.0
    """The share of the step before that a step goes on with; 0 is off."""
    nesterov: Result[bool] = False
    """Nesterov's momentum: the gradient as if it were taken a step ahead."""


class RMSprop(OptimizerBase):
    """Keras' RMSprop."""

    kind: Result[Literal["rmsprop"]]
    momentum: Result[Annotated[float, Field(ge=0, lt=1)]] = 0.0
    """The share of the step before that a step goes on with; 0 is off."""


AnyOptimizer = Adam | AdamW | SGD | RMSprop
