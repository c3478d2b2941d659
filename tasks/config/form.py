"""The settings as parameters of a deployment: the schema of Prefect's form, and how a run reads its values."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler, RootModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from tasks.config.project import project_root, recipes
from tasks.config.schema import Settings, kinds_of
from tasks.config.section import fields_of, leaves, marks_of
from tasks.config.sources import load
from tasks.system.errors import UserError

# Names of types in the form.
NAMES = {"string": "text", "integer": "number", "number": "fraction", "array": "list", "object": "mapping"}


# The settings that the form shows first, in the section COMMON.
FIRST = (
    "dataset.name",
    "model.name",
    "strategy.kind",
    "train.epochs",
    "train.per_replica_batch_size",
    "train.loop",
    "train.seed",
    "optimizer.kind",
    "schedule.learning_rate",
    "input.validation",
)
COMMON = "common"
BOOLEANS = {"true": True, "false": False}
# Keys of a schema that are not bounds.
ABOUT = ("title", "description", "default")


class Overrides(RootModel[dict[str, Any]]):
    """Single settings: as sections, which the form shows, or as ``{"train.epochs": 3}``.

    The form sends null for an empty field, so in a section null means "not given". ``{"input.validation": null}`` sets
    a setting to null.
    """

    def given(self) -> dict[str, Any]:
        """Return the given settings, as ``config.load`` takes them."""
        dotted = {key: value for key, value in self.root.items() if "." in key}
        given = _without_null(self.root)
        common = given.pop(COMMON, {})
        return {**given, **common, **dotted}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return overrides_schema()


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values without null and without empty sections; "true" and "false" become booleans."""
    kept = {
        name: _without_null(value)
        if isinstance(value, Mapping)
        else BOOLEANS.get(value, value)
        if isinstance(value, str)
        else value
        for name, value in values.items()
    }
    return {name: value for name, value in kept.items() if value is not None and value != {}}


def overrides_schema() -> dict[str, Any]:
    """Return the JSON schema of ``Overrides`` for the form: the ten common settings, then the others by section, with
    meaning, bounds and choices.

    Other keys, such as ``train.epochs``, are allowed: the run checks them, and suggests the nearest key.
    """
    today: dict[str, Any] = {}
    with suppress(UserError):  # A run refuses these settings with the reason.
        today = dict(leaves(load().to_json(), whole=marks_of(Settings)))
    fields: dict[str, list[tuple[str, FieldInfo]]] = {}  # By key: kinds of one section share their keys.
    for attribute, of_section in Settings.model_fields.items():
        section = of_section.alias or attribute
        variants: dict[str, Any] = {**kinds_of(section)} or {"": of_section.annotation}
        for kind, variant in variants.items():
            for key, field in fields_of(variant, f"{section}."):
                fields.setdefault(key, []).append((kind, field))
    common: dict[str, Any] = {"type": "object", "title": "common settings", "properties": {}}
    form: Any = {}
    for key, known in fields.items():
        place, (*sections, name) = form, key.split(".")
        for section in sections:
            place = place.setdefault(section, {"type": "object", "title": section, "properties": {}})["properties"]
        if name in place or key in common["properties"]:
            continue
        types: list[dict[str, Any]] = []
        for _, field in known:
            types += [one for one in _types(field) if one not in types]
        kinds = [kind for kind, _ in known if kind and name != "kind"]
        notes = [
            " ".join((known[0][1].description or "").split()).replace("<", "\\<"),  # It is shown as Markdown.
            f"Only for {', '.join(kinds)}." if kinds else "",
            f"params.yaml: {json.dumps(today[key])}." if key in today else "",
        ]
        shown = _choice(types) | {"description": " ".join(filter(None, notes))}
        if key in FIRST:
            common["properties"][key] = shown | {"title": key}
        else:
            place[name] = shown | {"title": name}
    common["properties"] = {key: common["properties"][key] for key in FIRST}
    return {"title": "Overrides", "type": "object", "properties": {COMMON: common, **form}}


def _types(field: FieldInfo) -> list[dict[str, Any]]:
    """Return the schemas of a setting's types, with only their bounds."""
    whole: Any = Annotated[field.annotation, field]
    schema = TypeAdapter(whole).json_schema()
    return [{key: value for key, value in one.items() if key not in ABOUT} for one in schema.get("anyOf", [schema])]


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe: one or several of those that exist when the flow is deployed."""
    names: list[str] = []
    with suppress(UserError):
        names = sorted(recipes(project_root()))
    choice = {"type": "string", "title": "recipe"} | ({"enum": names} if names else {})
    several = {"type": "array", "title": "recipes", "items": choice}
    return {"anyOf": [choice, {"type": "null", "title": "params.yaml alone"}, several]}


def _choice(types: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one schema for the form: a choice of texts, a single type, or a choice of named types. Null means "not
    given" there, and Prefect allows it for each optional value."""
    types = [one for one in types if one != {"type": "null"}]
    texts = [text for one in types for text in one.get("enum", [one["const"]] if "const" in one else [])]
    # An untouched checkbox would send false.
    texts += [text for one in types if one.get("type") == "boolean" for text in BOOLEANS]
    others = [one for one in types if "enum" not in one and "const" not in one and one.get("type") != "boolean"]
    choices: list[dict[str, Any]] = [{"type": "string", "enum": [*texts, None]}] if texts else []
    choices += others
    if len(choices) == 1:
        return choices[0]
    named = [one | {"title": "choice" if "enum" in one else NAMES[one["type"]]} for one in choices]
    return {"anyOf": [*named, {"type": "null", "title": "not given"}]}
