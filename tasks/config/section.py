"""What a section of the settings is, and the bounds that several of them have."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tasks.errors import shown

# Larger numbers are slips of the keyboard: they are refused before anything is made in their size.
MAX_COUNT = 1_000_000_000
MAX_PIXELS = 32_768
MAX_DEVICES = 4096
MAX_FLOAT32 = 3e38
Text = Annotated[str, Field(max_length=250)]
Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
Pixels = Annotated[int, Field(gt=0, le=MAX_PIXELS)]
Devices = Annotated[int, Field(gt=0, le=MAX_DEVICES)]


def _takes_bool(field: FieldInfo) -> bool:
    return bool in (field.annotation, *get_args(field.annotation))


def refusal(key: str, value: object, errors: Iterable[ErrorDetails], field: FieldInfo | None) -> str:
    """Return what is wrong with a value, of which a union of types reports an error each, and what its key means."""
    reasons = dict.fromkeys(error["msg"][:1].lower() + error["msg"][1:] for error in errors)
    meaning = " ".join((field.description or "").split()) if field else ""
    return f"{key} = {shown(value)}: {', or '.join(reasons)}. {meaning}".rstrip()


class Section(BaseModel):
    """A frozen group of settings that knows its keys and refuses all others."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def true_is_not_one(cls, values: Any) -> Any:
        # Python's True is 1: without this, `epochs: true` trains one epoch.
        for name, field in cls.model_fields.items():
            if isinstance(values, Mapping) and isinstance(values.get(name), bool) and not _takes_bool(field):
                raise ValueError(f"{name} = {str(values[name]).lower()}: true and false have no meaning here")
        return values
