"""What sections of the settings share: marks, names, bounds and messages.

Each setting has one mark, which says what another value changes. The marks determine which runs count as the same:

===========  ===============================================================================  ======================
mark         what another value changes                                                       a resumed run
===========  ===============================================================================  ======================
Result       the weights, the best model or its test metrics                                  must keep its value
Course       the same, through how long, how or where the training continues                  may change it
Speed        the speed, and the last bits of the result                                       may change it
Bookkeeping  neither: only what is recorded, kept or named, and how lost processes restart    may change it
===========  ===============================================================================  ======================
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag, WithJsonSchema, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tasks.config.project import names_of
from tasks.system.errors import shown

T = TypeVar("T")
What = Literal["result", "speed", "bookkeeping"]
# Larger numbers are typing errors: they are refused before anything of that size is allocated.
MAX_COUNT = 1_000_000_000
MAX_PIXELS = 32_768
MAX_DEVICES = 4096
MAX_FLOAT32 = 3e38
# Patterns of names; messages say IN_WORDS instead.
OWN_CODE = r"^[\w.]+:\w+$"
OWN_KIND = "module:name"
"""The kind of a section that is the user's own code."""
TOP_K = r"top_[1-9][0-9]{0,8}_accuracy"
OTHER_METRIC = rf"^{TOP_K}$|^[\w.]+:\w+$"
OTHER_TRAINING_METRIC = rf"^(train|validation)/{TOP_K}$|^(train|validation)/[\w.]+:\w+$"
OTHER_TEST_METRIC = rf"^test/{TOP_K}$|^test/[\w.]+:\w+$"
# MLflow would refuse `.` and names that begin with `..`, but only after the training.
MODEL_NAME = r"^\.?[\w-][\w.-]*$"
DATASET_NAME = r"^[a-z][a-z0-9_-]*([/.][A-Za-z0-9][A-Za-z0-9_.-]*)?$"
ALIAS = r"^[a-z][\w-]*$"
EXPERIMENT = r"^\w[\w .-]*$"
ONE_DEVICE = r"^(cpu|gpu(:\d+)?)$"
GPU = r"^gpu:\d+$"
DEVICE = r"^(cpu|gpu|tpu):\d+$"
MESH_AXIS = r"^[A-Za-z_]\w*$"
WEIGHTS = r"^([0-9a-f]{32}|models:/[^/@]+(@[^/@]+|/\d+)|.+\.(keras|h5))$"
IN_WORDS = {
    DATASET_NAME: "lowercase letters, digits, '_' and '-', a letter first; '/' and a configuration may follow",
    ALIAS: "letters, digits, '_' and '-', beginning with a lowercase letter",
    EXPERIMENT: "letters, digits, '_', '-', '.' and spaces, beginning with a letter, a digit or '_'",
    ONE_DEVICE: "cpu, gpu or gpu:N",
    GPU: "gpu:N",
    DEVICE: "cpu:N, gpu:N or tpu:N",
    MESH_AXIS: "letters, digits and '_', not beginning with a digit",
    WEIGHTS: "a run's id, FILE.keras, FILE.h5, models:/NAME@ALIAS or models:/NAME/VERSION",
    MODEL_NAME: "letters, digits, '_', '-' and '.', but not '..' at the start",
    OWN_CODE: "your own module:function",
    OTHER_METRIC: "top_K_accuracy with any K, or your own module:function",
    OTHER_TRAINING_METRIC: "train/ or validation/ and top_K_accuracy with any K, or your own module:function",
    OTHER_TEST_METRIC: "test/ and top_K_accuracy with any K, or your own module:function",
}
Text = Annotated[str, Field(max_length=250)]
Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
Pixels = Annotated[int, Field(gt=0, le=MAX_PIXELS)]
Devices = Annotated[int, Field(gt=0, le=MAX_DEVICES)]
METRICS = names_of("modeling/metrics")
WHOLE = ("strategy.layout", "register.floors", "register.ceilings")
"""Keys whose value is a mapping with the user's own names: another mapping replaces it as a whole."""


class Affects(NamedTuple):
    """What another value of a setting changes."""

    what: What
    free_on_resume: bool = True
    """Whether a resumed run may change it."""


Result = Annotated[T, Affects("result", free_on_resume=False)]
Course = Annotated[T, Affects("result")]
Speed = Annotated[T, Affects("speed")]
Bookkeeping = Annotated[T, Affects("bookkeeping")]

OwnCode = Annotated[str, Field(pattern=OWN_CODE, max_length=250)]
"""A user's own `module:function`."""


if TYPE_CHECKING:
    Options: TypeAlias = dict[str, Any]
    TrainingMetric: TypeAlias = str
    TestMetric: TypeAlias = str
    MetricName: TypeAlias = str
else:
    # Keyword arguments of a function or a class.
    Options = Annotated[dict[str, JsonValue], WithJsonSchema({"type": "object", "additionalProperties": True})]
    # A user's own metric is `module:function`, such as validation/my_code:within_ten.
    TrainingMetric = (
        Literal[*(f"{part}/{name}" for part in ("train", "validation") for name in ("loss", *METRICS))]
        | Annotated[str, Field(pattern=OTHER_TRAINING_METRIC, max_length=250)]
    )
    TestMetric = (
        Literal[*(f"test/{name}" for name in (*METRICS, "loss"))]
        | Annotated[str, Field(pattern=OTHER_TEST_METRIC, max_length=250)]
    )
    MetricName = Literal[*METRICS] | Annotated[str, Field(pattern=OTHER_METRIC, max_length=250)]


def top_k_of(name: str) -> int | None:
    """Return the k of ``top_<k>_accuracy``; None of another metric."""
    found = re.fullmatch(TOP_K, name)
    return int(found[0].split("_")[1]) if found else None


def refusal(key: str, value: object, errors: Iterable[ErrorDetails], field: FieldInfo | None) -> str:
    """Return what is wrong with a value, and the meaning of its key. A union of types gives one error for each type."""
    reason = ", or ".join(dict.fromkeys(_reason(error) for error in errors))
    if reason in IN_WORDS.values():
        reason = f"write {reason}"
    meaning = " ".join((field.description or "").split()) if field else ""
    return f"{key} = {shown(value)}: {reason}. {meaning}".rstrip()


def _reason(error: ErrorDetails) -> str:
    if (words := IN_WORDS.get(error.get("ctx", {}).get("pattern", ""))) is not None:
        return words
    message = error["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def true_is_not_one(cls, values: Any) -> Any:
        # Python's True is 1: without this, `epochs: true` trains one epoch.
        for name, field in cls.model_fields.items():
            takes_bool = bool in (field.annotation, *get_args(field.annotation))
            if isinstance(values, Mapping) and isinstance(values.get(name), bool) and not takes_bool:
                raise ValueError(f"{name} = {str(values[name]).lower()}: true and false have no meaning here")
        return values


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``("section.key", field)`` for every key of every kind."""
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        inner = sections_in(field.annotation)
        for variant in inner:
            yield from fields_of(variant, f"{key}.")
        if not inner or type(None) in get_args(field.annotation):
            yield key, field


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings as ``{"section.key": value}``."""
    return dict(leaves(values, whole=WHOLE))


def written(value: object) -> str:
    """Return a setting in the spelling of params.yaml and ``--set``: null, true, 0.1, or a text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@cache
def marks_of(section: type[BaseModel]) -> Mapping[str, Affects]:
    """Return what each key of a section affects, by ``section.key``."""
    return {key: next(m for m in field.metadata if isinstance(m, Affects)) for key, field in fields_of(section)}


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the sections in a type: itself, or the members of a union."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = (get_args(part)[0] if get_origin(part) is Annotated else part for part in parts)
    return [one for one in plain if isinstance(one, type) and issubclass(one, Section)]


def by_kind(union: Any) -> Any:
    """Return a union of sections that pydantic discriminates by ``kind_of``."""
    tagged = [Annotated[one, Tag(kind)] for kind, one in kinds_in(union).items()]
    return Annotated[Union[tuple(tagged)], Discriminator(kind_of)]  # noqa: UP007  # `|` cannot join a list.


def kinds_in(union: Any) -> dict[str, type[Section]]:
    """Return the sections of a union by their kind."""
    return {next(iter(get_args(one.model_fields["kind"].annotation)), OWN_KIND): one for one in sections_in(union)}


def kind_of(value: Any) -> str | None:
    """Return the kind of a section, or of a mapping for one; all of the user's own code is one kind."""
    if isinstance(value, Mapping) and "kind" not in value:
        return None
    kind = value["kind"] if isinstance(value, Mapping) else getattr(value, "kind", None)
    return OWN_KIND if ":" in str(kind) else str(kind)


def leaves(values: Mapping[str, Any], prefix: str = "", whole: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield ``("section.key", value)``; a mapping under a key in ``whole`` is one value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and prefix + name not in whole:
            yield from leaves(value, f"{prefix}{name}.", whole)
        else:
            yield prefix + name, value
