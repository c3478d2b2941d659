"""The parts of docs/ that are written from the code: `make docs` writes them anew, a test says when one is stale.

Each page has a beginning by hand; what stands between its two comments is written here: of each setting what
tasks/config says, of each command its help, of each message tasks/system/messages.yaml.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from re import _constants, _parser  # What `sre_parse` was; there is no other reader of regular expressions.
from typing import Any, NamedTuple

import yaml
from typer.main import get_command

from flows.cli import main, project
from tasks import config
from tasks.config.datasets import LocalDescription
from tasks.config.schema import kinds_of
from tasks.config.section import IN_WORDS, Affects
from tasks.reports.tables import markdown_table
from tasks.system import messages

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- begin: written by `make docs` from {source} -->\n"
END = "<!-- end -->\n"
AFFECTS = {
    ("result", False): "result, fixed",
    ("result", True): "result",
    ("speed", True): "speed",
    ("bookkeeping", True): "records",
}
"""The beginning of the page explains these words."""
EVERYWHERE = ("json", "quiet", "verbose", "debug")
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
    "These keys describe a dataset, by its kind. `stratagem data add` writes the file and accepts each key as "
    "`--set dataset.KEY=VALUE`; if you change a value, the data are prepared again, with a new data version."
)


def settings() -> str:
    """Return a table for each part of the settings, and one for the kinds of dataset."""
    given = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    today = {**config.flat(given), "model.options": given["model"]["options"]}
    lines: list[str] = []
    for name, field in config.Settings.model_fields.items():
        section = field.alias or name
        lines += [f"## {section}", "", *_section(f"{section}.", kinds_of(name) or {"": field.annotation}, today)]
    lines += ["## data/NAME/params.yaml", "", DESCRIPTION, ""]
    kinds = {kind: one for kind, one in config.description_kinds().items() if one is not LocalDescription}
    return "\n".join([*lines, *_section("dataset.", kinds, {})])


def _section(prefix: str, kinds: Mapping[str, Any], today: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a section: what each kind is, and a row for each key that its kinds have.

    Args:
        prefix: what the keys begin with.
        kinds: by kind, its settings; a section without kinds has one, without a name.
        today: the values of params.yaml.
    """
    if "" not in kinds:
        default = f" (default `{today[f'{prefix}kind']}`)" if today else ""
        yield from (f"`{prefix}kind`{default} is one of:", "")
        yield from (f"- `{kind}`: {_one_line(model.__doc__)}" for kind, model in kinds.items())
        yield ""
    of: dict[Key, list[str]] = {}
    for kind, model in kinds.items():
        for key in _of_model(model, prefix, today):
            of.setdefault(key, []).append(kind)
    yield from ("| key | meaning | default | allowed | affects |", "|---|---|---|---|---|")
    for key, having in of.items():
        only = f"Only {', '.join(f'`{kind}`' for kind in having)}: " if len(having) < len(kinds) else ""
        cells = (f"`{key.name}`", only + key.meaning.replace("|", "\\|"), *key[2:])
        yield f"| {' | '.join(cells)} |"
    yield ""


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
                "required" if default is ... else f"`{_written(default)}`",
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
        return IN_WORDS[schema["pattern"]]
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
    models = top.commands["models"].commands
    for name, command in sorted(top.commands.items()):
        if command.hidden:  # An older name.
            continue
        below = getattr(command, "commands", {})
        if name in models and command.help == models[name].help:
            lines += [f"## stratagem {name}", "", f"Short for `stratagem models {name}`.", ""]
            continue
        if not below or command.invoke_without_command:
            lines += _command(f"stratagem {name}", command)
        for own, inner in sorted(below.items()):
            lines += _command(f"stratagem {name} {own}", inner)
    return "\n".join(lines)


def _command(called: str, command: Any) -> Iterator[str]:
    context = command.make_context(called, [], resilient_parsing=True)
    yield from (f"## {called}", "")
    yield from (_one_line(command.help), "")
    parameters = [one for one in command.get_params(context) if one.name not in ("help", *EVERYWHERE)]
    lines = []
    for parameter in sorted(parameters, key=lambda one: one.param_type_name != "argument"):
        value = parameter.metavar or (parameter.name or "").upper()
        shown = value if parameter.param_type_name == "argument" else ", ".join(parameter.opts)
        if parameter.param_type_name == "option" and not parameter.is_flag:
            shown += f" {value}"
        default = parameter.default
        told = not parameter.required and not getattr(parameter, "is_flag", False) and default not in (None, [], ())
        lines.append(f"- `{shown}`: {_one_line(parameter.help)}{f' Default `{default}`.' if told else ''}")
    has = {one.name for one in command.get_params(context)}
    if missing := [name for name in EVERYWHERE if name not in has]:
        lines.append(f"- Without {', '.join(f'`--{name}`' for name in missing)}.")
    if lines:
        yield from (*lines, "")


# ---- The messages.


def troubleshooting() -> str:
    """Return a section for each library, with each of its messages that is known."""
    by_library: dict[str, list[messages.KnownMessage]] = {}
    for entry in messages.entries():
        by_library.setdefault(entry.name.partition("_")[0], []).append(entry)
    lines: list[str] = []
    for name, entries in by_library.items():
        lines += [f"## {LIBRARIES[name]}", "", "| message | meaning | what to do |", "|---|---|---|"]
        for entry in entries:
            said = like(entry.pattern.pattern)
            shown = f"`` {said} ``" if "`" in said else f"`{said}`"
            cells = (shown, f"{_sentence(entry.says)}.", f"{_sentence(entry.do)}.")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
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


# ---- The strategies.


def strategies() -> str:
    """Return the table of what each strategy supports, and the reasons for what it does not."""
    rows, reasons = project.offers_cells()
    kinds = config.strategy_kinds()
    header = ["", *(f"`{kind}`" for kind in kinds)]
    backends = ["Keras backend", *(section.backend for section in kinds.values())]
    named = [[f"`{feature}`", *marks] for feature, *marks in rows]
    lines = [*markdown_table(header, [backends, *named], num_texts=len(header)), ""]
    return "\n".join([*lines, *(f"- {number} {reason}" for number, reason in reasons.items())])


# ---- The pages.


PAGES = {
    "reference.md": ("tasks/config/", settings),
    "commands.md": ("flows/", commands),
    "strategies.md": ("tasks/config/strategies.py", strategies),
    "troubleshooting.md": ("tasks/system/messages.yaml", troubleshooting),
}


def renewed(name: str, page: str) -> str:
    """Return a page with its written part anew."""
    source, write = PAGES[name]
    begin = BEGIN.format(source=source)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(END)
    assert found, f"docs/{name} has no line {begin}"
    assert closed, f"docs/{name} has no line {END}"
    return f"{before}{begin}\n{write().strip()}\n\n{END}{after}"


if __name__ == "__main__":
    for name in PAGES:
        place = ROOT / "docs" / name
        place.write_text(renewed(name, place.read_text(encoding="utf-8")), encoding="utf-8")
