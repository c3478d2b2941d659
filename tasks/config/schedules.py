"""The settings of each learning-rate schedule, by `schedule.kind`; tasks/modeling/schedules.py builds them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tasks.config.section import MAX_FLOAT32, Count, Options, OwnCode, Result, Section

LearningRate = Annotated[float, Field(gt=0, le=MAX_FLOAT32)]


class Constant(Section):
    """One learning rate for all steps."""

    kind: Result[Literal["constant"]]
    learning_rate: Result[LearningRate]
    """The learning rate of all steps."""


class Piecewise(Section):
    """A learning rate that changes at the start of given epochs."""

    kind: Result[Literal["piecewise"]]
    boundaries_epochs: Result[Annotated[list[Count], Field(min_length=1, max_length=1000)]] = [3, 7]
    """Epochs at which the next learning rate starts."""
    learning_rates: Result[list[LearningRate]] = [1e-3, 1e-4, 1e-5]
    """The learning rates; one more than boundaries."""

    @model_validator(mode="after")
    def one_more_rate(self) -> Self:
        if len(self.learning_rates) != len(self.boundaries_epochs) + 1:
            raise ValueError(
                f"{len(self.boundaries_epochs)} boundaries_epochs need {len(self.boundaries_epochs) + 1} "
                f"learning_rates, got {len(self.learning_rates)}"
            )
        if sorted(set(self.boundaries_epochs)) != self.boundaries_epochs:
            raise ValueError(f"boundaries_epochs = {self.boundaries_epochs}: the epochs must rise, such as [3, 7]")
        return self


class Cosine(Section):
    """A linear warm-up, then a cosine decay until the last step."""

    kind: Result[Literal["cosine"]]
    learning_rate: Result[LearningRate]
    """The highest learning rate, at the end of the warm-up."""
    warmup_epochs: Result[Annotated[float, Field(ge=0, le=1e9)]] = 1.0
    """Epochs during which the learning rate rises from 0."""
    final_learning_rate: Result[Annotated[float, Field(ge=0, le=MAX_FLOAT32)]] = 0.0
    """The learning rate of the last step."""


class OwnSchedule(Section):
    """Your own keras.optimizers.schedules.LearningRateSchedule, or any of Keras'."""

    kind: Result[OwnCode]
    options: Result[Options] = {}
    """Keyword arguments of the class or function, except `steps_per_epoch` and `epochs`, which it receives anyway if it
    has them."""


AnySchedule = Constant | Piecewise | Cosine | OwnSchedule
