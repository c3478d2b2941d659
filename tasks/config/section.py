"""What a section of the settings is, and the bounds that several of them have."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tasks.system.errors import shown

# Larger numbers are slips of the keyboard: they are refused before anything is made in their size.
MAX_COUNT = 1_000_000_000
MAX_PIXELS = 32_768
MAX_DEVICES = 4096
MAX_FLOAT32 = 3e38
# What a user's own code is named by, and what a message says in place of the pattern.
OWN_CODE = r"^[\w.]+:\w+$"
TOP_K = r"top_[1-9][0-9]{0,8}_accuracy"
OTHER_METRIC = rf"^{TOP_K}$|^[\w.]+:\w+$"
OTHER_TRAINING_METRIC = rf"^(train|validation)/{TOP_K}$|^(train|validation)/[\w.]+:\w+$"
OTHER_TEST_METRIC = rf"^test/{TOP_K}$|^test/[\w.]+:\w+$"
IN_WORDS = {
    OWN_CODE: "your own module:function",
    OTHER_METRIC: "top_K_accuracy with any K, or your own module:function",
    OTHER_TRAINING_METRIC: "train/ or validation/ and top_K_accuracy with any K, or your own module:function",
    OTHER_TEST_METRIC: "test/ and top_K_accuracy with any K, or your own module:function",
}
Text = Annotated[str, Field(max_length=250)]
Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
Pixels = Annotated[int, Field(gt=0, le=MAX_PIXELS)]
Devices = Annotated[int, Field(gt=0, le=MAX_DEVICES)]


def _takes_bool(field: FieldInfo) -> bool:
    return bool in (field.annotation, *get_args(field.annotation))


def refusal(key: str, value: object, errors: Iterable[ErrorDetails], field: FieldInfo | None) -> str:
    """Return what is wrong with a value, with the meaning of its key. A union of types reports one error for each
    type."""
    patterns = ((IN_WORDS.get(error.get("ctx", {}).get("pattern", "")), error["msg"]) for error in errors)
    reasons = dict.fromkeys(words or message[:1].lower() + message[1:] for words, message in patterns)
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
