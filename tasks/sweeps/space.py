"""Reads and checks the file of a search space, SPACE.yaml."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    model_serializer,
    model_validator,
)

from tasks import config
from tasks.records import PreparedDataset
from tasks.runs import listing
from tasks.strategies import engines
from tasks.system.errors import UserError, cut, one_of, shown

FOLDER = Path("recipes") / "sweeps"
NOT_SWEPT = {
    "dataset": "other data have other validation examples, so the values could not be compared",
    "strategy": "`stratagem compare` compares strategies",
    "checkpoint": "its monitor is the sweep's metric, and the rest does not change the result",
    "evaluate": "validation examples judge the trials",
    "register": "it controls what happens to the best model",
    "tracking": "it does not change the result",
    "input.validation": "with other validation examples the values could not be compared",
    "train.seed": "it chooses the validation examples, so the values could not be compared; and a lucky seed is not a "
    "better setting",
}
OF_THE_LOSS = ("train.loss", "train.label_smoothing", "train.class_weights")


class Part(BaseModel):
    """A part of the file, which refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


def _number(value: Any) -> Any:
    """Check a number. YAML reads 1e-4, without a dot, as a text."""
    value = float(value) if isinstance(value, str) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("it must be a finite number")
    return value


Number = Annotated[Any, AfterValidator(_number)]


class Range(Part):
    """Integers if ``low``, ``high`` and ``step`` are integers; else floats."""

    low: Number
    high: Number
    log: bool = False
    step: Number | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        distribution(self)  # Optuna refuses impossible ranges.
        return self

    @model_serializer(mode="wrap")
    def _as_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if key in self.model_fields_set}


Parameter = Annotated[
    Annotated[Range, Tag("range")] | Annotated[list[Any], Field(min_length=2), Tag("choices")],
    Discriminator(lambda given: "choices" if isinstance(given, list) else "range"),
]


class Halving(Part):
    """When a trial is pruned: see ``study.limits``."""

    min_epochs: Annotated[int, Field(ge=1)] = 1
    """The epoch of the first comparison between trials; each further one is after ``factor`` times as many epochs."""
    factor: Annotated[int, Field(ge=2)] = 3
    """The best 1/factor of the trials continue."""
    min_trials: Annotated[int, Field(ge=1)] = 4
    """The number of trials that must have reached an epoch before any trial is pruned there."""


class SpaceFile(Part):
    """SPACE.yaml."""

    space: Annotated[dict[str, Parameter], Field(min_length=1)]
    """A range or a list of choices by settings key, in the spelling of ``--set``."""
    recipe: str | None = None
    """The source of the settings that are not swept; by default params.yaml."""
    set: dict[str, Any] = {}
    """Settings that override it in all trials."""
    metric: str | None = None
    """validation/NAME; by default checkpoint.monitor."""
    direction: Literal["lower", "higher"] | None = None
    """Which values are better; only needed for a user-defined metric."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of the suggestions; ``train.seed`` is the seed of the trainings."""
    pruner: Halving | None = Halving()
    """Null trains every trial to its end."""


class Space:
    """A search space, read from its file."""

    def __init__(
        self, path: Path, file: SpaceFile, prepared: PreparedDataset | None, overrides: Mapping[str, Any]
    ) -> None:
        self.path, self.file, self.parameters, self._prepared = path, file, file.space, prepared
        self.overrides, self.fixed = overrides, {**config.flat(file.set), **overrides}
        self.name = path.stem
        self.metric = file.metric or self._load(next(self.corners())).checkpoint.monitor

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values of the metric are better."""
        given = self.file.direction
        return given == "lower" if given is not None else listing.lower_is_better(self.metric)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's distributions of the parameters."""
        return {key: distribution(one) for key, one in self.parameters.items()}

    def settings(self, params: Mapping[str, Any]) -> config.Settings:
        """Return the settings of a trial.

        Raises:
            UserError: the settings contradict each other.
        """
        return self._load(self.given(params))

    def given(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a trial over the recipe."""
        own = {"checkpoint.monitor": self.file.metric} if self.file.metric else {}
        return {**self.fixed, **params, **own}

    def final_settings(self, params: Mapping[str, Any], epochs: int) -> dict[str, Any]:
        """Return the settings over the recipe for the training on all examples: those of a trial, without a validation
        split and the settings that need one, for the number of epochs of the trial's model."""
        settings = self.settings(params)
        values = {**self.fixed, **params, "input.validation": None, "train.epochs": epochs}
        values["checkpoint.monitor"] = self.metric.replace("validation/", "train/")
        stopping = settings.train.early_stopping
        if stopping is not None and stopping.monitor.startswith("validation/"):
            values = {key: value for key, value in values.items() if not key.startswith("train.early_stopping")}
            values["train.early_stopping"] = None
        if settings.evaluate.checkpoint != "latest":  # Training examples do not show which checkpoint is best.
            values["evaluate.checkpoint"] = "latest"
        return values

    def _load(self, values: Mapping[str, Any]) -> config.Settings:
        try:
            return config.load(self.file.recipe, {**self.fixed, **values}, prepared=self._prepared)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    def check(self) -> None:
        """Refuse an unsuitable metric, and corners with invalid settings.

        Raises:
            UserError: names the key.
        """
        first = next(self.corners())
        base = self._load(first)
        # Processes that another program started wait for a single training.
        if engines.is_foreign(base.strategy.cluster):
            raise UserError(
                f"{self.path}: a sweep starts its processes itself, but another program started this cluster: add "
                "`set: {strategy.launcher: local}`"
            )
        if base.input.validation is None:
            raise UserError(
                f"{self.path}: input.validation is null, but validation examples judge the trials. Add "
                "`set: {input.validation: 0.1}`"
            )
        if not self.metric.startswith("validation/"):
            why = (
                "the gate judges by the test split"
                if self.metric.startswith("test/")
                else "it must be a metric of the validation examples"
            )
            raise UserError(
                f"{self.path}: metric = '{cut(self.metric)}': {why}. Choose one such as validation/loss or "
                "validation/accuracy"
            )
        if self.file.direction is None and ":" in self.metric:
            raise UserError(
                f"{self.path}: metric = '{self.metric}' is your own metric: set `direction: lower` or "
                "`direction: higher`"
            )
        for key in OF_THE_LOSS:
            if key in self.parameters and self.metric == "validation/loss":
                raise UserError(
                    f"{self.path}: {key} changes what validation/loss means, so its values could not be compared: "
                    "choose another metric, such as validation/accuracy"
                )
        given = self.file.pruner is not None and "pruner" in self.file.model_fields_set
        if given and base.strategy.cluster is not None:
            raise UserError(
                f"{self.path}: the workers of strategy.kind={base.strategy.kind} cannot end a training early "
                "together, so trials cannot be pruned: set `pruner: null`"
            )
        for corner in self.corners():
            self.settings(corner)

    def corners(self) -> Iterator[dict[str, Any]]:
        """Yield the first values of all parameters, then each further end of a range and each further choice."""
        ends = {key: (one.low, one.high) if isinstance(one, Range) else one for key, one in self.parameters.items()}
        first = {key: values[0] for key, values in ends.items()}
        yield first
        yield from ({**first, key: value} for key, values in ends.items() for value in values[1:])

    @property
    def example(self) -> config.Settings:
        """The settings of a trial: those of the first corner."""
        return self.settings(next(self.corners()))

    @property
    def pruner(self) -> Halving | None:
        """The pruner; None if several processes train together, see ``check``."""
        return self.file.pruner if self.example.strategy.cluster is None else None


def spaces(root: Path) -> dict[str, Path]:
    """Return the spaces of the project by name."""
    return {path.stem: path for path in sorted((root / FOLDER).glob("*.yaml"))}


def load(name: str, prepared: PreparedDataset | None = None, overrides: Mapping[str, Any] | None = None) -> Space:
    """Read a space and check it as far as possible before anything starts.

    Args:
        name: the name of a file in ``recipes/sweeps/``, or a path.
        prepared: the data, which determine the defaults of some settings.
        overrides: settings that override the recipe and ``set`` in all trials.

    Raises:
        UserError: the space does not exist; or names its first fault, the allowed values and what to do.
    """
    known_spaces = spaces(config.project_root())
    if name not in known_spaces and not (name.endswith((".yaml", ".yml")) and os.path.isfile(name)):
        raise UserError(f"{one_of('space', name, known_spaces)}, or the path of a YAML file")
    path = known_spaces.get(name) or Path(name)
    values = config.read_yaml(path)
    try:
        config.refuse_secrets(values)  # First: a message about what else is wrong would show the value.
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    try:
        file = SpaceFile.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {_explain(error)}") from None
    space = Space(path, file, prepared, overrides or {})
    for key in space.parameters:
        _refuse_key(path, key, space.fixed)
    space.check()
    return space


def _explain(error: ValidationError) -> str:
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    loc = [str(part) for part in first["loc"] if part not in ("range", "choices")]
    key, told = ".".join(loc), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden" and len(loc) == 1:
        known = one_of("key", key, SpaceFile.model_fields)
        return f"{known}. Swept settings belong under `space:`, settings that all trials share under `set:`"
    if first["type"] == "extra_forbidden":
        model = Halving if loc[0] == "pruner" else Range
        return one_of("key", key, [".".join([*loc[:-1], name]) for name in model.model_fields])
    told = f"{key} = {shown(first['input'])}: {told[:1].lower()}{told[1:]}"
    if loc[0] == "space":
        told += (
            ". Give each setting a range, such as {low: 1.0e-4, high: 0.1, log: true}, or a list of choices; a setting "
            "with one value for all trials belongs under `set:`"
        )
    return told


def distribution(parameter: Parameter) -> BaseDistribution:
    """Return Optuna's distribution for a parameter; choices are encoded as JSON, because they may be lists."""
    if not isinstance(parameter, Range):
        return CategoricalDistribution([json.dumps(one, sort_keys=True) for one in parameter])
    low, high, step = parameter.low, parameter.high, parameter.step
    if all(isinstance(number, int) for number in (low, high, step or 1)):
        return IntDistribution(int(low), int(high), log=parameter.log, step=int(step or 1))
    return FloatDistribution(float(low), float(high), log=parameter.log, step=None if step is None else float(step))


def _refuse_key(path: Path, key: str, fixed: Mapping[str, Any]) -> None:
    """Refuse a key that is unknown, given twice, or may not be swept."""
    marks = config.marks_of(config.Settings)
    known = key in marks or f"{key.partition('.options.')[0]}.options" in marks
    for name, why in NOT_SWEPT.items():
        if key == name or (key.startswith(f"{name}.") and known):
            raise UserError(f"{path}: space.{key} cannot be swept: {why}. Leave it out, or set one value under `set:`")
    if not known:
        swept = [one for one, mark in marks.items() if mark.what == "result" and not one.startswith(tuple(NOT_SWEPT))]
        raise UserError(f"{path}: {one_of('key', key, swept)}, and model.options.NAME")
    if key in marks and marks[key].what != "result":
        raise UserError(
            f"{path}: space.{key} cannot be swept: it does not change the result. Leave it out, or set one value "
            "under `set:`"
        )
    for other in fixed:
        if other == key or key.startswith(f"{other}.") or other.startswith(f"{key}."):
            raise UserError(f"{path}: {key} is swept, but {other} has one value for all trials: remove one of them")
