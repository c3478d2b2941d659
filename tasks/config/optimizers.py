"""Optimizers by `optimizer.kind`: what each takes. tasks/optimizers.py makes them."""

from typing import Annotated, Literal

from pydantic import Field

from tasks.config.affects import Result
from tasks.config.section import MAX_FLOAT32, Section


class OptimizerBase(Section):
    global_clipnorm: Result[Annotated[float, Field(gt=0, le=MAX_FLOAT32)] | None] = None
    """Clip all gradients together to this norm; null is off."""


class Adam(OptimizerBase):
    kind: Result[Literal["adam"]]


class AdamW(OptimizerBase):
    kind: Result[Literal["adamw"]]
    weight_decay: Result[Annotated[float, Field(ge=0, le=MAX_FLOAT32)]] = 0.004


class SGD(OptimizerBase):
    kind: Result[Literal["sgd"]]
    momentum: Result[Annotated[float, Field(ge=0, lt=1)]] = 0.0
    nesterov: Result[bool] = False


class RMSprop(OptimizerBase):
    kind: Result[Literal["rmsprop"]]
    momentum: Result[Annotated[float, Field(ge=0, lt=1)]] = 0.0


AnyOptimizer = Adam | AdamW | SGD | RMSprop
