"""One sentence for the first of pydantic's errors: the key, its value, what is allowed, what to do."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tasks.config.schema import Settings, kinds_of
from tasks.config.section import fields_of, refusal
from tasks.system.errors import one_of, shown


def explain(error: ValidationError, values: Mapping[str, Any]) -> str:
    """Return one sentence for the first error: the key, its value, what is allowed, what to do."""
    # A key that is written wrong is also missing under its right name.
    unknown = ("extra_forbidden", "invalid_key")
    first = next((one for one in error.errors() if one["type"] in unknown), error.errors()[0])
    kinds = {kind for section in Settings.model_fields for kind in kinds_of(section)}
    # A discriminated union puts the kind into the location: ("strategy", "mirrored", "devices").
    parts = [str(part) for i, part in enumerate(first["loc"]) if not (i == 1 and part in kinds)]
    known = dict(fields_of(Settings))
    for section, given in values.items():  # Several kinds can have a key, each with a meaning of its own.
        kind = kinds_of(section).get(str(given.get("kind"))) if isinstance(given, Mapping) else None
        if kind is not None:
            known |= fields_of(kind, f"{section}.")
    if first["type"] in unknown:
        return _unknown_key(parts, known, values)
    depth = len(parts)
    # A union of plain types puts the type into the location, a list the index: ("input", "validation", "int").
    while ".".join(parts) not in known and any(".".join(parts[:end]) in known for end in range(1, len(parts))):
        parts.pop()
    key, message = ".".join(parts), first["msg"].removeprefix("Value error, ")
    if first["type"] == "union_tag_invalid":
        return one_of(f"{key}.kind", first["input"].get("kind"), kinds_of(key))
    if first["type"] == "union_tag_not_found":
        return f"{key}.kind is missing: give --set {key}.kind=VALUE, one of {', '.join(kinds_of(key))}"
    if first["type"] == "missing" and len(parts) == depth:
        return f"{key} is missing: add it to params.yaml or give --set {key}=VALUE"
    if not key:
        return message
    if first["type"] == "value_error":
        return f"{key}.{message}" if f"{key}.{message.split()[0]}" in known else f"{key}: {message}"
    value: Any = values
    for part in parts:
        value = value.get(part)
    inside = [k for k in known if k.startswith(f"{key}.")]
    if inside:
        return f"{key} = {shown(value)}: this is a section. Set its keys: {', '.join(inside)}"
    of_value = (one for one in error.errors() if one["loc"][: len(parts)] == first["loc"][: len(parts)])
    return f"{refusal(key, value, of_value, known.get(key))} Give --set {key}=VALUE."


def _unknown_key(parts: Sequence[str], known: Iterable[str], values: Mapping[str, Any]) -> str:
    key, section = ".".join(parts), ".".join(parts[:-1])
    if not section:
        return one_of("section", key, {name.partition(".")[0] for name in known})
    kinds, kind = kinds_of(section), str(values[section].get("kind")) if section in values else ""
    of_others = [other for other, variant in kinds.items() if parts[-1] in variant.model_fields]
    allowed = [f"{section}.{name}" for name in kinds[kind].model_fields] if kind in kinds else []
    if of_others and kind in kinds:
        given = f"{section}.kind={' or '.join(of_others)}"
        return f"{one_of('key', key, allowed)}; with {given} there is one: give that kind too"
    allowed = allowed or [name for name in known if name.startswith(f"{section}.")]
    elsewhere = [name for name in known if name.rpartition(".")[2] == parts[-1]]
    if elsewhere:
        return f"unknown key '{key}': did you mean '{elsewhere[0]}'? Allowed: {', '.join(sorted(allowed))}"
    return one_of("key", key, allowed)
