"""The settings as parameters of a deployment: the schema of Prefect's form, and what a run takes from it."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import GetJsonSchemaHandler, RootModel
from pydantic_core import CoreSchema

from tasks.config.project import project_root, recipes
from tasks.config.schema import Settings
from tasks.config.section import leaves, marks_of
from tasks.config.sources import load
from tasks.system.errors import UserError

# Names of types in the form.
NAMES = {"string": "text", "integer": "number", "number": "fraction", "array": "list", "object": "mapping"}


BOOLEANS = {"true": True, "false": False}
# Keys of a schema that are no bounds.
ABOUT = ("title", "description", "default")


class Overrides(RootModel[dict[str, Any]]):
    """Single settings, as sections, which the form shows, or as ``{"train.epochs": 3}``.

    The form sends null for what nobody filled in, so in a section null is "not given". ``{"input.validation": null}``
    sets a setting to null.
    """

    def given(self) -> dict[str, Any]:
        """Return what is given, as ``config.load`` takes it."""
        dotted = {key: value for key, value in self.root.items() if "." in key}
        return {**_without_null(self.root), **dotted}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return overrides_schema()


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values, with true and false of the form's choices, without those that are null and without sections
    that hold nothing then."""
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
    """Return the JSON schema of ``Overrides``: a section each, with meaning, bounds and choices; and, for what is no
    form, each key in the spelling of ``--set``."""
    whole = Settings.model_json_schema()
    today = _values_of_params()
    properties: dict[str, Any] = {}
    patterns: dict[str, Any] = {}

    def add(place: dict[str, Any], prefix: str, kind: str | None, described: dict[str, Any]) -> None:
        """Put each key of a section into the form; kinds of one section share their keys."""
        for name, schema in described["properties"].items():
            key = f"{prefix}{name}"
            types = schema.get("oneOf") or schema.get("anyOf") or [schema]
            variants = [whole["$defs"][one["$ref"].rpartition("/")[2]] for one in types if "$ref" in one]
            if variants:
                section = {"type": "object", "title": name, "properties": {}, "additionalProperties": False}
                inner = place.setdefault(name, section)["properties"]
                for variant in variants:
                    its_kind = variant["properties"].get("kind", {}).get("const")
                    add(inner, f"{key}.", its_kind, variant)
                if prefix:  # A section of a section: all of it may be given, or null.
                    patterns[f"^{re.escape(key)}$"] = {"type": ["object", "null"]}
                continue
            bounds = [{k: v for k, v in one.items() if k not in ABOUT} for one in types]
            known = patterns.setdefault(f"^{re.escape(key)}$", {"anyOf": []})["anyOf"]
            known += [one for one in bounds if one not in known]
            shown = place.setdefault(name, {"kinds": [], "meaning": schema.get("description", "")})
            shown |= {"types": known, "kinds": [*shown["kinds"], *([kind] if kind and name != "kind" else [])]}

    def finish(place: dict[str, Any], prefix: str) -> None:
        """Make what was collected of each key what the form shows."""
        for name, shown in place.items():
            if "types" not in shown:
                finish(shown["properties"], f"{prefix}{name}.")
                continue
            key = f"{prefix}{name}"
            notes = [
                " ".join(shown["meaning"].split()).replace("<", "\\<"),  # It is shown as Markdown.
                f"Of {', '.join(shown['kinds'])}." if shown["kinds"] else "",
                f"params.yaml: {json.dumps(today[key])}." if key in today else "",
            ]
            place[name] = _choice(shown["types"]) | {"title": name, "description": " ".join(filter(None, notes))}

    add(properties, "", None, whole)
    finish(properties, "")
    return {
        "title": "Overrides",
        "type": "object",
        "properties": properties,
        "patternProperties": patterns,
        "additionalProperties": False,
    }


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe's name: a choice of those that are there when a flow is deployed."""
    try:
        names = sorted(recipes(project_root()))
    except UserError:
        names = []
    choice = {"type": "string", "title": "recipe"} | ({"enum": names} if names else {})
    return {"anyOf": [choice, {"type": "null", "title": "params.yaml alone"}]}


def _choice(types: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one schema for the form: a choice of texts, the one type, or a choice of types with a name each. Null is
    "not given" there, and Prefect allows it for whatever need not be given."""
    types = [one for one in types if one != {"type": "null"}]
    texts = [text for one in types for text in one.get("enum", [one["const"]] if "const" in one else [])]
    # A box to tick says false where nobody touched it.
    texts += [text for one in types if one.get("type") == "boolean" for text in BOOLEANS]
    others = [one for one in types if "enum" not in one and "const" not in one and one.get("type") != "boolean"]
    choices: list[dict[str, Any]] = [{"type": "string", "enum": [*texts, None]}] if texts else []
    choices += others
    if len(choices) == 1:
        return choices[0]
    named = [one | {"title": "choice" if "enum" in one else NAMES[one["type"]]} for one in choices]
    return {"anyOf": [*named, {"type": "null", "title": "not given"}]}


def _values_of_params() -> dict[str, Any]:
    try:
        return dict(leaves(load().to_json(), whole=marks_of(Settings)))
    except UserError:  # The settings are refused where they are used, with the reason.
        return {}
