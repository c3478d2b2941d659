"""The file that says what a sweep may try: SPACE.yaml."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks import config
from tasks.records import PreparedDataset
from tasks.system.errors import UserError, cut, one_of, shown

FOLDER = Path("recipes") / "sweeps"
MAX_PARAMETERS = 30
MAX_CHOICES = 1000
MAX_CORNERS = 64
"""Of more, only those are checked before anything starts in which one parameter is at an end."""
NOT_SWEPT = {
    "dataset": "other data have other validation examples, so the values could not be compared",
    "strategy": "`stratagem compare` compares strategies",
    "checkpoint": "its monitor is the sweep's metric, and the rest changes no result",
    "evaluate": "a trial is judged by its validation examples",
    "register": "it says what happens to the best model",
    "tracking": "it changes no number",
    "input.validation": "with other validation examples the values could not be compared",
    "train.seed": "it chooses the validation examples, so the values could not be compared; and a lucky seed is no "
    "better setting",
}
OF_THE_LOSS = ("train.loss", "train.label_smoothing", "train.class_weights")


class Part(BaseModel):
    """A part of the file, which knows its keys and refuses all others."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Range(Part):
    """Whole numbers where ``low``, ``high`` and ``step`` are; else any."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int) and isinstance(self.step, int | None)

    def problem(self) -> str | None:
        """Return what is wrong with it, None where nothing is."""
        if self.low == self.high:
            return f"low and high are both {self.low}, so there is nothing to choose: give it under `set:`"
        if self.low > self.high:
            return f"low = {self.low} is more than high = {self.high}: the range is empty. Exchange them"
        if self.log and self.low <= 0:
            return f"log: true needs a low above 0, and low = {self.low}: give a small number, or log: false"
        if self.log and self.step is not None:
            return "log: true and step exclude each other: leave one out, or list the values"
        if self.step is not None and not 0 < self.step <= self.high - self.low:
            return f"step = {self.step} must be above 0 and no more than high - low = {self.high - self.low:g}"
        return None


class Halving(Part):
    """When a trial is given up: see ``study.limits``."""

    min_epochs: Annotated[int, Field(ge=1)] = 1
    """After which the first trials are judged; then after ``factor`` times so many, and so on."""
    factor: Annotated[int, Field(ge=2)] = 3
    """The best 1/factor of the trials go on."""
    min_trials: Annotated[int, Field(ge=1)] = 4
    """So many trials must have come so far before any is judged there."""


class SpaceFile(Part):
    """SPACE.yaml."""

    space: Annotated[dict[str, Any], Field(min_length=1, max_length=MAX_PARAMETERS)]
    """A range or a list of choices by settings key, in the spelling of ``--set``."""
    recipe: str | None = None
    """What the settings are that are not swept; without it params.yaml."""
    set: dict[str, Any] = {}
    """Single settings laid over it, for all trials."""
    metric: str | None = None
    """validation/NAME; without it checkpoint.monitor."""
    direction: Literal["lower", "higher"] | None = None
    """Which values are better; needed only for a metric of the user's own."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of the suggestions; ``train.seed`` is that of the trainings."""
    pruner: Halving | None = Halving()
    """Null trains each trial to its end."""


Parameter = Range | tuple[Any, ...]


class Space:
    """A space whose file was read and checked: settings of its corners are accepted."""

    def __init__(
        self,
        path: Path,
        file: SpaceFile,
        parameters: Mapping[str, Parameter],
        prepared: PreparedDataset | None = None,
    ) -> None:
        self.path, self.file, self.parameters, self._prepared = path, file, parameters, prepared
        self.fixed = config.flat(file.set)
        self.name = path.stem
        self.metric = file.metric or self._load(next(self.corners())).checkpoint.monitor

    def settings(self, params: Mapping[str, Any]) -> config.Settings:
        """Return the settings of a trial.

        Raises:
            UserError: they contradict each other.
        """
        return self._load({**params, "checkpoint.monitor": self.metric})

    def final_settings(self, params: Mapping[str, Any], epochs: int) -> dict[str, Any]:
        """Return what the training on all examples has over the recipe: a trial's settings, without a validation split
        and what needs one, for as many epochs as the trial's model took."""
        settings = self.settings(params)
        values = {**self.fixed, **params, "input.validation": None, "train.epochs": epochs}
        values["checkpoint.monitor"] = self.metric.replace("validation/", "train/")
        stopping = settings.train.early_stopping
        if stopping is not None and stopping.monitor.startswith("validation/"):
            values = {key: value for key, value in values.items() if not key.startswith("train.early_stopping")}
            values["train.early_stopping"] = None
        if settings.evaluate.checkpoint != "latest":  # The best by the training examples is none to go by.
            values["evaluate.checkpoint"] = "latest"
        return values

    def _load(self, values: Mapping[str, Any]) -> config.Settings:
        try:
            return config.load(self.file.recipe, {**self.fixed, **values}, prepared=self._prepared)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    def check(self) -> None:
        """Refuse a metric that is none to go by, and corners whose settings are refused.

        Raises:
            UserError: names the key.
        """
        first = next(self.corners())
        base = self._load(first)
        if base.input.validation is None:
            raise UserError(
                f"{self.path}: input.validation is null, and a trial is judged by validation examples. Give "
                "`set: {input.validation: 0.1}`"
            )
        if not self.metric.startswith("validation/"):
            why = (
                "the gate judges by the test split" if self.metric.startswith("test/") else "it must be a validation's"
            )
            raise UserError(
                f"{self.path}: metric = '{cut(self.metric)}': {why}. Give one such as validation/loss or "
                "validation/accuracy"
            )
        self.settings(first)
        for key in OF_THE_LOSS:
            if key in self.parameters and self.metric == "validation/loss":
                raise UserError(
                    f"{self.path}: {key} changes what validation/loss means, so its values could not be compared: "
                    "give another metric, such as validation/accuracy"
                )
        given = self.file.pruner is not None and "pruner" in self.file.model_fields_set
        if given and base.strategy.cluster is not None:
            raise UserError(
                f"{self.path}: pruner: not under strategy.kind={base.strategy.kind}, whose workers cannot end a "
                "training together for it: give `pruner: null`"
            )
        for corner in self.corners():
            self.settings(corner)

    def corners(self) -> Iterator[dict[str, Any]]:
        """Yield the parameters at the ends of the ranges, and each choice: together, or, where these are too many, one
        after another."""
        ends = {key: _ends(one) for key, one in self.parameters.items()}
        first = {key: values[0] for key, values in ends.items()}
        if math.prod(map(len, ends.values())) <= MAX_CORNERS:
            yield from (dict(zip(ends, values, strict=True)) for values in itertools.product(*ends.values()))
            return
        yield first
        yield from ({**first, key: value} for key, values in ends.items() for value in values[1:])

    @property
    def example(self) -> config.Settings:
        """The settings of a trial: those of the first corner."""
        return self.settings(next(self.corners()))

    @property
    def pruner(self) -> Halving | None:
        """What gives trials up; nothing where several processes train together, see ``check``."""
        return self.file.pruner if self.example.strategy.cluster is None else None


def _ends(parameter: Parameter) -> Sequence[Any]:
    return (parameter.low, parameter.high) if isinstance(parameter, Range) else parameter


def spaces(root: Path) -> dict[str, Path]:
    """Return the spaces of the project by name."""
    return {path.stem: path for path in sorted((root / FOLDER).glob("*.yaml"))}


def load(name: str, prepared: PreparedDataset | None = None) -> Space:
    """Return a space, checked as far as that is possible before anything starts.

    Args:
        name: one of ``recipes/sweeps/``, or a path.
        prepared: the data, by which settings that nobody gives are chosen.

    Raises:
        UserError: there is none; or names the first thing that is wrong with it, what is allowed and what to do.
    """
    path = _find(name)
    values = config.read_yaml(path)
    try:
        config.refuse_secrets(values)  # First: a message about what else is wrong would show the value.
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    known = SpaceFile.model_fields
    for key in values:
        if key not in known:
            raise UserError(
                f"{path}: {one_of('key', key, known)}. What is swept stands under `space:`, what is the same for all "
                "under `set:`"
            )
    try:
        file = SpaceFile.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {_explain(error)}") from None
    space = Space(path, file, {key: _parameter(path, key, value) for key, value in file.space.items()}, prepared)
    for key in space.parameters:
        _refuse_key(path, key, file)
    space.check()
    return space


def _find(name: str) -> Path:
    known = spaces(config.project_root())
    if name in known:
        return known[name]
    path = Path(name)
    try:
        if path.suffix in (".yaml", ".yml") and path.is_file():
            return path
    except (OSError, ValueError):  # Too long for a name, or with a character that no name has.
        pass
    raise UserError(f"{one_of('space', name, known)}, or the path of a YAML file")


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return (
            f"{key} is missing: give the settings to sweep, such as "
            "`space: {schedule.learning_rate: {low: 1.0e-4, high: 0.1, log: true}}`"
        )
    if first["type"] == "extra_forbidden":
        return one_of("key", key, [f"{first['loc'][0]}.{name}" for name in Halving.model_fields])
    return f"{key} = {shown(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}"


def _parameter(path: Path, key: str, value: Any) -> Parameter:
    """Return what a parameter may be.

    Raises:
        UserError: it is neither a range nor choices, or there is nothing to choose.
    """
    where = f"{path}: space.{key}"
    if isinstance(value, list):
        texts = [json.dumps(one, sort_keys=True) for one in value]
        if len(texts) < 2 or len(texts) > MAX_CHOICES:
            raise UserError(
                f"{where} = {shown(value)}: a list of choices has 2 to {MAX_CHOICES:,}. One value for all trials "
                "stands under `set:`"
            )
        if len(set(texts)) < len(texts):
            raise UserError(f"{where} = {shown(value)}: a choice is there twice. Leave it out once")
        return tuple(value)
    if not isinstance(value, Mapping):
        raise UserError(
            f"{where} = {shown(value)}: give a range such as {{low: 0.001, high: 0.1, log: true}}, or a list of "
            "choices. One value for all trials stands under `set:`"
        )
    if wrong := next((name for name in value if name not in Range.model_fields), None):
        raise UserError(f"{path}: {one_of(f'key of space.{key}', wrong, Range.model_fields)}")
    numbers = {name: _number(one) if name != "log" else one for name, one in value.items()}
    try:
        found = Range.model_validate(numbers)
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0]
        allowed = "neither true nor false" if name == "log" else "not a finite number"
        what = "is missing" if first["type"] == "missing" else f"= {shown(value.get(name))} is {allowed}"
        raise UserError(f"{where}: {name} {what}. Write {{low: 0.001, high: 0.1, log: true}}") from None
    if problem := found.problem():
        raise UserError(f"{where}: {problem}")
    return found


def _number(value: Any) -> Any:
    """Return the number of a text such as 1e-4, which YAML takes for one."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _refuse_key(path: Path, key: str, file: SpaceFile) -> None:
    """Refuse a key that is none, is given twice, or may not be swept.

    Raises:
        UserError: says why.
    """
    marks = config.marks_of(config.Settings)
    known = key in marks or key.startswith("model.options.")
    for name, why in NOT_SWEPT.items():
        if key == name or (key.startswith(f"{name}.") and known):
            raise UserError(f"{path}: space.{key} cannot be swept: {why}. Leave it out, or give one value under `set:`")
    if not known:
        swept = [one for one, mark in marks.items() if mark.what == "result" and not one.startswith(tuple(NOT_SWEPT))]
        raise UserError(f"{path}: {one_of('key', key, swept)}, and model.options.NAME")
    if key in marks and marks[key].what != "result":
        raise UserError(
            f"{path}: space.{key} cannot be swept: it changes no result. Leave it out, or give one value under `set:`"
        )
    for other in config.flat(file.set):
        if other == key or key.startswith(f"{other}.") or other.startswith(f"{key}."):
            raise UserError(f"{path}: {key} is swept, and {other} is set for all trials: leave one of them out")
