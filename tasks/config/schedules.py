"""Learning-rate schedules by `schedule.kind`: what each takes. tasks/modeling/schedules.py makes them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tasks.config.section import MAX_FLOAT32, Count, Result, Section

LearningRate = Annotated[float, Field(gt=0, le=MAX_FLOAT32)]


class Constant(Section):
    """One learning rate for all steps."""

    kind: Result[Literal["constant"]]
    learning_rate: Result[LearningRate]
    """That of all steps."""


class Piecewise(Section):
    """Learning rates that change at the beginning of some epochs."""

    kind: Result[Literal["piecewise"]]
    boundaries_epochs: Result[Annotated[list[Count], Field(min_length=1, max_length=1000)]] = [3, 7]
    """Epochs at which the next learning rate starts."""
    learning_rates: Result[list[LearningRate]] = [1e-3, 1e-4, 1e-5]
    """One more than there are boundaries."""

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
    """A linear warm-up, then half a cosine down to the last step."""

    kind: Result[Literal["cosine"]]
    learning_rate: Result[LearningRate]
    """The highest, at the end of the warm-up."""
    warmup_epochs: Result[Annotated[float, Field(ge=0, le=1e9)]] = 1.0
    """Epochs in which the learning rate rises from 0."""
    final_learning_rate: Result[Annotated[float, Field(ge=0, le=MAX_FLOAT32)]] = 0.0
    """That of the last step."""


AnySchedule = Constant | Piecewise | Cosine
