"""Merges params.yaml, recipes and ``--set`` into one ``Settings``, and explains what is wrong with them."""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tasks.config.data_defaults import CHOSEN, Choice, choose
from tasks.config.project import names_of, project_root, recipes
from tasks.config.schema import Settings, folder_name, kinds_of
from tasks.config.section import WHOLE, fields_of, kind_of, leaves, refusal
from tasks.config.strategies import strategy_kinds
from tasks.config.train import BATCH_SIZES
from tasks.system import files
from tasks.system.errors import UserError, cut, one_of, shown
from tasks.system.network import holds_secret

MAX_TEXT = 1_000_000
"""Characters of a YAML file or a ``--set``."""
LATER = "dataset: after prepare"
Recipe = str | Sequence[str] | None
"""A name in ``recipes/`` or the path of a YAML file; several, each overriding those before it; or none."""
NAMING_CODE = {"model": "name", "augmentation": "custom"}
"""The key that names the code that takes a section's ``options``; by default ``kind``."""
ONE_VALUE = tuple(key.rpartition(".")[2] for key in WHOLE)


class _Loader(yaml.CSafeLoader):
    """Refuses a mapping that gives a key twice, and reads dates as texts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key '{cut(key.value)}' appears twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load(
    recipe: Recipe = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    root: Path | None = None,
    prepared: BaseModel | None = None,
) -> Settings:
    """Return the settings of params.yaml, overlaid by recipes, overlaid by single values.

    Args:
        recipe: see ``Recipe``.
        overrides: ``{"train.epochs": 3}``, or texts such as ``train.epochs=3``.
        root: the project's folder.
        prepared: the ``records.PreparedDataset`` to train on; ``choices`` for it override params.yaml. Without it
            nothing is chosen, which is enough to know the dataset and the strategy.

    Raises:
        UserError: names the first key that is wrong, its value, what is allowed and what to do.
    """
    return _read(recipe, overrides, root or project_root(), prepared)[0]


def _read(
    recipe: Recipe, overrides: Sequence[str] | Mapping[str, Any], root: Path, prepared: BaseModel | None
) -> tuple[Settings, list[tuple[str, dict[str, Any]]]]:
    """Return the settings, and the name and values of each source, which override those of earlier sources."""
    sources = [("params.yaml", _without_other_kinds(read_yaml(root / "params.yaml")))]
    names = (recipe,) if isinstance(recipe, str) else recipe or ()
    sources += [(f"recipe {name}", _read_recipe(name, root)) for name in names]
    given = _with_text_keys(overrides) if isinstance(overrides, Mapping) else read_overrides(overrides)
    # One overlay for all options: their order does not matter, and a new kind does not hide a wrong key.
    last = ("--set", _nested(given))
    settings = _parse_all([*sources, last])
    if prepared is not None and "train" not in (splits := prepared.model_dump(include={"splits"})["splits"]):
        raise UserError(
            f"dataset {settings.dataset.name} has no split 'train' (it has {', '.join(splits)}): choose another dataset"
        )
    if prepared is not None and (chosen := choices(recipe, settings, prepared, root)):
        sources += [(f"dataset: {choice.reason}", _nested(choice.values)) for choice in chosen]
        settings = _parse_all([*sources, last])
    return settings, [*sources, last]


def _parse_all(sources: Sequence[tuple[str, dict[str, Any]]]) -> Settings:
    values: dict[str, Any] = {}
    for _, over in sources:
        values = _overlay(values, over)
    return parse(values)


def sources_of(
    recipe: Recipe, overrides: Sequence[str] | Mapping[str, Any], prepared: BaseModel | None
) -> dict[str, tuple[Any, str]]:
    """Return the value of each key that ``load`` gives, and its source: `params.yaml`, `recipe NAME`, `--set`,
    `dataset: REASON`, or `default rule` if none of them has the key, such as after a change of the strategy's kind. A
    value that is chosen `LATER` is None.

    Raises:
        UserError: as ``load``.
    """
    settings, layers = _read(recipe, overrides, project_root(), prepared)
    flat = settings.flat()
    if prepared is None and follows_data(recipe, settings):
        layers.insert(-1, (LATER, _nested({key: flat[key] for key in flat if key.startswith(CHOSEN)})))
    sources = dict.fromkeys(flat, "default rule")
    for source, values in layers:
        said = dict(leaves(values, whole=flat))
        sources |= {key: source for key in flat if key in said and _same(said[key], flat[key])}
    return {key: (None if source == LATER else flat[key], source) for key, source in sources.items()}


def _same(said: Any, value: Any) -> bool:
    """Return whether a file or an option gave this value, before pydantic converted it."""
    return bool(said == value) or json.dumps(said, default=str) == json.dumps(value, default=str)


def follows_data(recipe: Recipe, settings: Settings, root: Path | None = None) -> bool:
    """Return whether settings are chosen for the data: no recipe is given, and params.yaml is for another dataset."""
    section = read_yaml((root or project_root()) / "params.yaml").get("dataset")
    given_for = section.get("name") if isinstance(section, Mapping) else None
    return not recipe and settings.dataset.name != folder_name(str(given_for))


def choices(recipe: Recipe, settings: Settings, prepared: BaseModel, root: Path | None = None) -> list[Choice]:
    """Return the choices for prepared data; none unless settings follow the data."""
    if not follows_data(recipe, settings, root):
        return []
    chosen = choose(prepared.model_dump(mode="json"))
    if not hasattr(settings.schedule, "learning_rate"):
        for one in chosen:
            one.values.pop("schedule.learning_rate", None)
    return chosen


def overruled(choice: Choice, settings: Settings) -> list[str]:
    """Return the keys whose given value differs from the chosen one."""
    flat = settings.flat()
    return [key for key, value in choice.values.items() if key in flat and not _same(value, flat[key])]


def read_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Return ``{"section.key": value}`` of texts such as ``train.epochs=3``; the value is read as YAML.

    Keys are those of ``fields_of``: ``model.options.units=[64]`` gives ``{"model.options": {"units": [64]}}``.
    """
    values = read_texts(texts)
    keys = {key for key, _ in fields_of(Settings)}
    keys |= {f"strategy.{kind}.{name}" for kind, section in strategy_kinds().items() for name in section.model_fields}
    return dict(leaves(_nested(values), whole=keys))


def read_texts(texts: Sequence[str]) -> dict[str, Any]:
    """Return ``{"section.key": value}`` of texts with any keys."""
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {cut(text)}: write it as section.key=value, such as --set train.epochs=3")
        # A single sign is a text, such as a delimiter, even if YAML gives it another meaning.
        is_sign = re.fullmatch(r"[^\w\s~]", value) is not None
        values[key.strip()] = value if is_sign else _read_text(value, f"--set {cut(text)}")
    return values


def parse(values: Mapping[str, Any]) -> Settings:
    """Return ``Settings`` of nested values; a ``UserError`` explains the first wrong one."""
    refuse_secrets(values)
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error, values)) from None
    models = names_of("modeling/models")
    if ":" not in settings.model.name and settings.model.name not in models:
        raise UserError(one_of("model.name", settings.model.name, models) + ", or your own module:function")
    return settings


def explain(error: ValidationError, values: Mapping[str, Any]) -> str:
    """Return one sentence for the first error: the key, its value, what is allowed, what to do."""
    # A misspelt key is also reported as missing under its right name.
    unknown = ("extra_forbidden", "invalid_key")
    first = next((one for one in error.errors() if one["type"] in unknown), error.errors()[0])
    kinds = {kind for section in Settings.model_fields for kind in kinds_of(section)}
    # A discriminated union puts the kind into the location: ("strategy", "mirrored", "devices").
    parts = [str(part) for i, part in enumerate(first["loc"]) if not (i == 1 and part in kinds)]
    known = dict(fields_of(Settings))
    for section, given in values.items():  # A key can have another meaning in each kind.
        if (kind := kinds_of(section).get(str(kind_of(given)))) is not None:
            known |= fields_of(kind, f"{section}.")
    if first["type"] in unknown:
        return _unknown_key(parts, known, values)
    depth = len(parts)
    # A union of plain types puts the type into the location, a list the index: ("input", "validation", "int").
    while ".".join(parts) not in known and any(".".join(parts[:end]) in known for end in range(1, len(parts))):
        parts.pop()
    key, message = ".".join(parts), first["msg"].removeprefix("Value error, ")
    if first["type"] == "union_tag_invalid" and isinstance(first["input"], Mapping):
        return one_of(f"{key}.kind", first["input"].get("kind"), kinds_of(key))
    if first["type"] == "union_tag_not_found":
        return f"{key}.kind is missing: use --set {key}.kind=VALUE, one of {', '.join(kinds_of(key))}"
    if first["type"] == "missing" and len(parts) == depth:
        return f"{key} is missing: add it to params.yaml or use --set {key}=VALUE"
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
    return f"{refusal(key, value, of_value, known.get(key))} Use --set {key}=VALUE."


def _unknown_key(parts: Sequence[str], known: Iterable[str], values: Mapping[str, Any]) -> str:
    key, section = ".".join(parts), ".".join(parts[:-1])
    if not section:
        return one_of("section", key, {name.partition(".")[0] for name in known})
    kinds, kind = kinds_of(section), str(kind_of(values.get(section)))
    of_others = [other for other, variant in kinds.items() if parts[-1] in variant.model_fields]
    allowed = [f"{section}.{name}" for name in kinds[kind].model_fields] if kind in kinds else []
    if of_others and kind in kinds:
        given = f"{section}.kind={' or '.join(of_others)}"
        return f"{one_of('key', key, allowed)}; {given} has it: set that kind too"
    allowed = allowed or [name for name in known if name.startswith(f"{section}.")]
    elsewhere = [name for name in known if name.rpartition(".")[2] == parts[-1]]
    if elsewhere:
        return f"unknown key '{key}': did you mean '{elsewhere[0]}'? Allowed: {', '.join(sorted(allowed))}"
    return one_of("key", key, allowed)


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Refuse a password: records, MLflow and reports show settings.

    Raises:
        UserError: names the key, but does not show the value.
    """
    for key, text in _texts(values, ""):
        if holds_secret(key, text):
            raise UserError(
                f"{key} seems to hold a password, which every record, report and MLflow run would show. Put it into an "
                "environment variable that your code reads, and take it out of an address"
            )


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"train": {"epochs": 3}}`` of ``{"train.epochs": 3}``."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[name] = deepcopy(value)  # The next key may lie in it.
    return nested


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the sections in a YAML file.

    Raises:
        UserError: it cannot be read, is not YAML, or is not a mapping.
    """
    try:
        text = files.read_text(path, MAX_TEXT + 1)
    except UnicodeDecodeError:
        raise UserError(f"{path}: cannot be read because it is not UTF-8. Save it in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    values = _read_text(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: must contain sections such as `train:`, got {type(values).__name__}")
    return values


def _read_text(text: str, where: str) -> Any:
    """Return the value of a YAML text without aliases, with all keys as texts; ``where`` begins a message."""
    if len(text) > MAX_TEXT:
        raise UserError(f"{where}: it has {len(text):,} characters, but settings may have at most {MAX_TEXT:,}")
    try:
        events: Iterator[Any] = yaml.parse(text, _Loader)
        for event in events:
            mark = event.start_mark
            if isinstance(event, yaml.AliasEvent):
                refused = f"*{cut(str(event.anchor))} refers to an anchor: write out its value"
                raise yaml.MarkedYAMLError(problem=refused, problem_mark=mark)
        return _with_text_keys(yaml.load(text, _Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise UserError(f"{where}: not valid YAML{place}: {cut(error.problem or error.context or '')}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # From a tag that does not fit.
        raise UserError(f"{where}: not valid YAML ({cut(str(error))})") from None


def _with_text_keys(value: Any) -> Any:
    """Return a copy of nested mappings and lists whose keys are texts."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value


def _without_other_kinds(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return params.yaml without keys that are null and belong only to another kind of their section.

    `dvc exp run -S strategy.kind=mirrored` changes only that line, so `device:` remains.
    """
    kept = dict(values)
    for name, section in values.items():
        if (kind := kinds_of(name).get(str(kind_of(section)))) is not None:
            others = {key for other in kinds_of(name).values() for key in other.model_fields} - kind.model_fields.keys()
            kept[name] = {key: value for key, value in section.items() if value is not None or key not in others}
    return kept


def _read_recipe(recipe: str, root: Path) -> dict[str, Any]:
    known = recipes(root)
    if recipe in known:
        return read_yaml(known[recipe])
    if Path(recipe).suffix in (".yaml", ".yml") and os.path.exists(recipe):
        return read_yaml(Path(recipe))
    choose = f"To choose a dataset, pass --set dataset.name={shlex.quote(recipe)}"
    raise UserError(f"{one_of('recipe', recipe, known)}, or the path of a YAML file. {choose}")


def _overlay(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base``, overridden by ``over``, section by section.

    A section whose ``kind`` changes keeps only the keys of the new kind. Other code starts without options. One batch
    size replaces the other, and a value of ``ONE_VALUE`` is replaced as a whole.
    """
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(value, Mapping) and name not in ONE_VALUE:
            key = NAMING_CODE.get(name, "kind")
            if value.get(key, old.get(key)) != old.get(key) and ("options" in old or name == "model"):
                old = {**old, "options": {}}
            if "kind" in value and value["kind"] != old.get("kind"):
                known = kinds_of(name).get(str(kind_of(value)))
                old = {key: kept for key, kept in old.items() if known is None or key in known.model_fields}
            merged[name] = _overlay(old, value)
        else:
            merged[name] = value
    for one, other in (BATCH_SIZES, BATCH_SIZES[::-1]):
        if over.get(one) is not None and other not in over and other in merged:
            merged[other] = None
    return merged
