"""The settings as a deployment's parameters."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from tasks.config.schema import Settings, fields_of


def overrides_model() -> type[BaseModel]:
    """Return a model with one optional field for each ``section.key``, for a deployment's parameters.

    Its JSON schema carries the bounds, so Prefect refuses a bad value before a flow run exists.
    """
    types: dict[str, list[Any]] = {}
    for key, field in fields_of(Settings):
        types.setdefault(key, []).append(
            Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        )
    joined = {
        key.replace(".", "__"): (_union([*given, type(None)]), Field(default=None, alias=key))
        for key, given in types.items()
    }
    config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, serialize_by_alias=True)
    return create_model("Overrides", __config__=config, **joined)  # type: ignore[call-overload, no-any-return]


def _union(types: Sequence[Any]) -> Any:
    union = types[0]
    for other in types[1:]:
        union = union | other
    return union
