"""The keys of the settings as ``section.key``: those that there are, what each affects, and the values under them."""

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from tasks.config.affects import Affects
from tasks.config.section import Section

WHOLE = ("strategy.layout", "register.floors", "register.ceilings")
"""Keys whose value is a mapping by names of the user's own; it is one value, which another one replaces."""


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``("section.key", field)`` for every key of every kind."""
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        inner = [t for t in (get_args(field.annotation) or (field.annotation,)) if _is_section(t)]
        for variant in inner:
            yield from fields_of(variant, f"{key}.")
        if not inner or type(None) in get_args(field.annotation):
            yield key, field


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings as ``{"section.key": value}``."""
    return dict(leaves(values, whole=WHOLE))


@cache
def marks_of(section: type[BaseModel]) -> Mapping[str, Affects]:
    """Return what each key of a section affects, by ``section.key``."""
    return {key: next(m for m in field.metadata if isinstance(m, Affects)) for key, field in fields_of(section)}


def _is_section(annotation: Any) -> bool:
    return get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, Section)


def leaves(values: Mapping[str, Any], prefix: str = "", whole: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield ``("section.key", value)``; a mapping under a key in ``whole`` is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and prefix + name not in whole:
            yield from leaves(value, f"{prefix}{name}.", whole)
        else:
            yield prefix + name, value
