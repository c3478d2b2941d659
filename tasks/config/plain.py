"""What settings are made of: null, true and false, numbers, texts, lists, and mappings by text.

YAML can say more: tags that make other objects, anchors that make a few lines a billion values or a value that holds
itself, dates. All of it is refused here, in one sentence, before any of it is made.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tasks.system.errors import cut, shown

MAX_TEXT = 1_000_000
MAX_VALUES = 10_000
MAX_DEPTH = 20
# Control characters, and halves of characters.
UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class NotPlain(ValueError):
    """A value that no setting can hold; the message is one sentence that says which."""


class _Loader(yaml.CSafeLoader):
    """Takes no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise NotPlain(f"line {key.start_mark.line + 1} gives the key '{cut(key.value)}' once more")
                seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made


# Dates are texts.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        NotPlain: it is no YAML, or more than plain values.
    """
    if len(text) > MAX_TEXT:
        raise NotPlain(f"it has {len(text):,} characters, and settings have at most {MAX_TEXT:,}")
    try:
        _look_through(text)
        value = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise NotPlain(f"not valid YAML, {where}{(error.problem or error.context or '')[:200]}") from None
    except (yaml.YAMLError, RecursionError, OverflowError) as error:
        raise NotPlain(f"not valid YAML ({' '.join(str(error).split())[:200]})") from None
    except ValueError as error:
        if isinstance(error, NotPlain):
            raise
        raise NotPlain(f"not valid YAML ({str(error)[:200]})") from None
    return plain(value)


def _look_through(text: str) -> None:
    """Refuse what is no plain value, or too much, before any of it is made."""
    depth = count = 0
    for event in yaml.parse(text, _Loader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 0
        if isinstance(event, yaml.AliasEvent):
            raise NotPlain(f"line {line} repeats the value of an anchor, *{cut(str(event.anchor))}: write the value")
        if (tag := getattr(event, "tag", None)) is not None:
            raise NotPlain(f"line {line} has the tag {cut(tag)}: write the value without it")
        count += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        _refuse_too_deep(depth)
        if count > MAX_VALUES:
            raise NotPlain(f"it holds more than {MAX_VALUES:,} values")


def plain(value: Any, depth: int = 0) -> Any:
    """Return a copy of a value with all keys as texts.

    Raises:
        NotPlain: it holds something else than numbers, texts, true, false, null, lists and mappings.
    """
    _refuse_too_deep(depth)
    if isinstance(value, str):
        if UNWRITABLE.search(value):
            raise NotPlain(f"a text holds a character that no file can have: {shown(value)}")
        return value
    if isinstance(value, Mapping):
        return {plain(_key(key)): plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, depth + 1) for inner in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise NotPlain(f"a {type(value).__name__} is neither number, text, true, false, null, list nor mapping")


def _key(key: Any) -> str:
    if key is None or isinstance(key, str | bool | int | float):
        return str(key)
    raise NotPlain(f"a {type(key).__name__} is the key of a mapping: give it a text")


def _refuse_too_deep(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise NotPlain(f"lists and mappings lie more than {MAX_DEPTH} deep in one another")
