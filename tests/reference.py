"""The parts of docs/ that are written from the code: `make docs` writes them anew, a test says when one is stale.

Each page has a beginning by hand; what stands between its two comments is written here: of each setting what
tasks/config says, of each command its help, of each message tasks/system/messages.yaml.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from re import _constants, _parser  # What `sre_parse` was; there is no other reader of regular expressions.
from typing import Any, NamedTuple

import yaml
from typer.main import get_command

from flows.cli import main
from tasks import config
from tasks.config.datasets import LocalDescription
from tasks.config.schema import kinds_of
from tasks.config.section import IN_WORDS, Affects
from tasks.system import messages

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- begin: written by `make docs` from {source} -->\n"
END = "<!-- end -->\n"
AFFECTS = {
    ("result", False): "the result; a resumed run keeps it",
    ("result", True): "the result; a resumed run may have another one",
    ("speed", True): "how fast the result comes, and its last bits",
    ("bookkeeping", True): "what is written down, kept or named, never the result",
}
EVERYWHERE = ("json", "debug")
"""Options that the beginning of the page explains."""
LIBRARIES = {
    "keras": "Keras",
    "tensorflow": "TensorFlow",
    "jax": "JAX",
    "mlflow": "MLflow",
    "prefect": "Prefect",
    "dvc": "DVC",
}


class Key(NamedTuple):
    """What is known of a setting. Two kinds that have the same key share it."""

    name: str
    meaning: str
    default: str
    allowed: str
    affects: str


# ---- The settings.

DESCRIPTION = (
    "What a dataset is, by its kind. `stratagem data add` writes this file, and takes each key as "
    "`--set dataset.KEY=VALUE`; another value makes other data."
)


def settings(known: str) -> str:
    """Return a section for each part of the settings, and one for the kinds of dataset.

    Args:
        known: the page so far, which says since when a key is there; a new one is of the version in pyproject.toml.
    """
    today = config.flat(yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8")))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    parts = (part.partition("\n") for part in known.split("\n### ")[1:])
    since = {title: found[1] for title, _, text in parts if (found := re.search(r"Since (\d[\d.]*)\.$", text, re.M))}
    page = SettingsPage(since, version, today)
    lines: list[str] = []
    for name, field in config.Settings.model_fields.items():
        section = field.alias or name
        lines += [f"## {section}", "", *page.section(f"{section}.", kinds_of(name) or {"": field.annotation})]
    lines += ["## data/NAME/params.yaml", "", DESCRIPTION, ""]
    kinds = {kind: one for kind, one in config.description_kinds().items() if one is not LocalDescription}
    return "\n".join([*lines, *SettingsPage(since, version, {}, " in data/NAME").section("dataset.", kinds)])


class SettingsPage(NamedTuple):
    """What the lines of a key depend on beside the key itself."""

    known: Mapping[str, str]
    """Since when a key is there, by its heading in the page so far."""
    version: str
    """The version that a new key is of."""
    today: Mapping[str, Any]
    """The values of params.yaml."""
    place: str = ""
    """What a heading says of keys that are not those of params.yaml."""

    def section(self, prefix: str, kinds: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of a section: of each key that its kinds have, and of `kind` itself."""
        if "" not in kinds:
            yield from (f"### `{prefix}kind`{self.place}", "")
            for kind, model in kinds.items():
                yield f"- `{kind}`: {_one_line(model.__doc__)}"
            default = f"Default `{self.today[f'{prefix}kind']}`. " if self.today else ""
            yield from ("", f"{default}{self.since(f'`{prefix}kind`{self.place}')}", "")
        of: dict[Key, list[str]] = {}
        for kind, model in kinds.items():
            for key in _of_model(model, prefix, self.today):
                of.setdefault(key, []).append(kind)
        names = [key.name for key in of]
        for key, having in of.items():
            title = f"`{key.name}`{self.place}" + (f" of {having[0]}" if names.count(key.name) > 1 else "")
            facts = [f"Default {key.default}. Allowed: {key.allowed}."]
            facts += [f"Of {', '.join(f'`{kind}`' for kind in having)}."] if len(having) < len(kinds) else []
            facts += [f"Affects {key.affects}."] if key.affects else []
            yield from (f"### {title}", "", key.meaning, "", " ".join([*facts, self.since(title)]), "")

    def since(self, title: str) -> str:
        """Return since which version a key is there."""
        return f"Since {self.known.get(title, self.version)}."


def _of_model(model: Any, prefix: str, today: Mapping[str, Any]) -> Iterator[Key]:
    """Yield the keys of a section, and of those within it."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        own = schema["properties"][field.alias or name]
        key = f"{prefix}{field.alias or name}"
        types = own.get("anyOf") or own.get("oneOf") or [own]
        inner = [one for one in types if "$ref" in one]
        if name == "kind" and prefix.count(".") == 1:
            continue
        if not inner or {"type": "null"} in types:
            # A schema has no meaning of a key whose type has one of its own.
            default = today.get(key, field.get_default() if not field.is_required() else ...)
            mark = next((one for one in field.metadata if isinstance(one, Affects)), None)
            yield Key(
                key,
                _one_line(field.description),
                "none: it is needed" if default is ... else f"`{_written(default)}`",
                " or ".join(dict.fromkeys(_allowed(one) for one in types)),
                AFFECTS[mark.what, mark.free_on_resume] if mark else "",
            )
        for part in _sections(field.annotation):
            yield from _of_model(part, f"{key}.", today)


def _sections(annotation: Any) -> list[Any]:
    """Return the sections that a key may hold, also in a mapping that may be null."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [one for part in getattr(annotation, "__args__", ()) for one in _sections(part)]


def _written(value: Any) -> str:
    """Return a value as params.yaml has it."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def _allowed(schema: Mapping[str, Any]) -> str:
    """Return in words what a type of a key may hold."""
    if "$ref" in schema:
        return "a section: the keys below"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{_written(one)}`" for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _bounds(schema)
    if kind == "array":
        inside = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        length = schema.get("minItems", 0)
        many = f"a list of {length}" if length == schema.get("maxItems") else "a list"
        item = " or ".join(_allowed(one) for one in inside.get("anyOf", [inside]))
        return f"{many}, each {item}"
    if kind == "string" and "pattern" in schema:
        return IN_WORDS.get(schema["pattern"]) or f"a text like `{schema['pattern'].strip('^$')}`".replace("|", "\\|")
    words = {"boolean": "`true`, `false`", "null": "`null`", "object": "a mapping", "string": "a text"}
    return "a path" if schema.get("format") == "path" else words.get(kind, "anything")


def _bounds(schema: Mapping[str, Any]) -> str:
    """Return the bounds of a number, as words that follow it."""
    whole = schema["type"] == "integer"
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if whole:
        low = above + 1 if above is not None else low
        high = below - 1 if below is not None else high
        above = below = None
    begin = f"above {above:,g}" if above is not None else f"from {_figure(low)}" if low is not None else ""
    end = f"below {below:,g}" if below is not None else f"up to {_figure(high)}" if high is not None else ""
    between = " and " if begin and below is not None else " " if begin and end else ""
    return f" {begin}{between}{end}" if begin or end else ""


def _figure(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,g}"


def _one_line(text: str | None) -> str:
    """Return a docstring as a paragraph of Markdown."""
    return " ".join((text or "").split()).replace("<", "&lt;").replace("*", "\\*")


# ---- The commands.


def commands() -> str:
    """Return a section for each command, with its arguments and options, as --help has them."""
    lines: list[str] = []
    top = get_command(main.app)
    for name, command in sorted(top.commands.items()):
        below = getattr(command, "commands", {})
        if not below or command.invoke_without_command:
            lines += _command(f"stratagem {name}", command)
        for own, inner in sorted(below.items()):
            lines += _command(f"stratagem {name} {own}", inner)
    return "\n".join(lines)


def _command(called: str, command: Any) -> Iterator[str]:
    context = command.make_context(called, [], resilient_parsing=True)
    yield from (f"## {called}", "")
    for paragraph in (command.help or "").split("\n\n"):
        yield from (_one_line(paragraph), "")
    parameters = [one for one in command.get_params(context) if one.name not in ("help", *EVERYWHERE)]
    for parameter in sorted(parameters, key=lambda one: one.param_type_name != "argument"):
        value = parameter.metavar or (parameter.name or "").upper()
        shown = value if parameter.param_type_name == "argument" else ", ".join(parameter.opts)
        if parameter.param_type_name == "option" and not parameter.is_flag:
            shown += f" {value}"
        default = parameter.default
        told = not parameter.required and not getattr(parameter, "is_flag", False) and default not in (None, [], ())
        yield f"- `{shown}`: {_one_line(parameter.help)}{f' Default `{default}`.' if told else ''}"
    usual = [one.name for one in command.get_params(context) if one.name in EVERYWHERE]
    yield from (f"- {', '.join(f'`--{name}`' for name in usual)}", "")


# ---- The messages.


def troubleshooting() -> str:
    """Return a section for each library, with each of its messages that is known."""
    by_library: dict[str, list[messages.KnownMessage]] = {}
    for entry in messages.entries():
        by_library.setdefault(entry.name.partition("_")[0], []).append(entry)
    lines: list[str] = []
    for name, entries in by_library.items():
        lines += [f"## {LIBRARIES[name]}", ""]
        for entry in entries:
            said = like(entry.pattern.pattern)
            shown = f"`` {said} ``" if "`" in said else f"`{said}`"
            lines += [f"**{shown}**", "", f"{_sentence(entry.says)}. *To do:* {_sentence(entry.do)}.", ""]
    return "\n".join(lines)


def _sentence(text: str) -> str:
    """Return what is said of a message, with the parts that it quotes as <name>."""
    text = re.sub(r"\{(\w+)\}", r"&lt;\1>", text).replace("__", r"\_\_")
    return text[:1].upper() + text[1:] if text[:1] != "`" else text


def like(pattern: str) -> str:
    """Return a text such as a regular expression finds: the first way of several, <name> for what varies.

    >>> like(r"Run (?:with id=|')(?P<id>\\w+)'? not found")
    'Run with id=<id> not found'
    """
    parsed = _parser.parse(pattern)
    names = {number: name for name, number in parsed.state.groupdict.items()}
    return " ".join(re.sub(r"(?:\.\.\.)+", "...", _text(parsed, names)).split())


def _text(parsed: Any, names: Mapping[int, str]) -> str:
    made = ""
    for kind, value in parsed:
        if kind is _constants.LITERAL:
            made += chr(value)
        elif kind is _constants.SUBPATTERN:
            group, *_, inner = value
            made += f"<{names[group]}>" if group in names else _text(inner, names)
        elif kind is _constants.BRANCH:
            made += _text(value[1][0], names)
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, inner = value
            # What may be missing is left out; what repeats is anything.
            made += "" if (least, most) == (0, 1) else "..."
        elif kind is not _constants.AT:
            made += "..."
    return made


# ---- The pages.


PAGES = {
    "reference.md": ("tasks/config/", settings),
    "commands.md": ("flows/", lambda known: commands()),
    "troubleshooting.md": ("tasks/system/messages.yaml", lambda known: troubleshooting()),
}


def renewed(name: str, page: str) -> str:
    """Return a page with its written part anew."""
    source, write = PAGES[name]
    begin = BEGIN.format(source=source)
    before, found, rest = page.partition(begin)
    known, closed, after = rest.partition(END)
    assert found, f"docs/{name} has no line {begin}"
    assert closed, f"docs/{name} has no line {END}"
    return f"{before}{begin}\n{write(known).strip()}\n\n{END}{after}"


if __name__ == "__main__":
    for name in PAGES:
        place = ROOT / "docs" / name
        place.write_text(renewed(name, place.read_text(encoding="utf-8")), encoding="utf-8")
