"""The commands about a project and its machine: `init`, `doctor`, `recipes`, `strategies`."""

from collections import Counter
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import completion, tables
from flows.cli.command import Debug, Json, command

if TYPE_CHECKING:
    from tasks.records import Health


def init(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder; or one without files of these names.")],
    git: Annotated[
        bool | None,
        typer.Option("--git/--no-git", help="Make a git repository there. Without either, where it is in none."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be made; nothing is.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a new project: params.yaml, recipes, the dataset digits, what DVC and Prefect need.

    The code is not part of it, and stays where it is installed.
    """
    with command(debug):
        from shlex import quote

        from tasks.operations import new_project
        from tasks.system.errors import UserError

        if not folder:  # A variable of a shell that is not set: as a path it would be the current folder.
            raise UserError("FOLDER is empty: name the folder of the new project; . is this one")
        made = new_project.make(Path(folder), git, dry_run)
        if json:
            print(made.model_dump_json())
            return
        if dry_run:
            print(f"would make {made.folder}" + (", a git repository, with" if made.git else " with"))
            print("\n".join(made.files))
            return
        print(f"made {made.folder}: {len(made.files)} files" + (", and a git repository" if made.git else ""))
        print(f"next: cd {quote(folder)} && stratagem run")
        if made.git:
            print("      git add --all && git commit -m 'The project', so that runs name a commit")


def doctor(
    checks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECK", help="Such as disk or dvc; without one, all.", autocompletion=completion.checks
        ),
    ] = None,
    devices: Annotated[
        bool, typer.Option("--devices", help="Also ask TensorFlow which devices it sees: some seconds.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Look at this machine and this project, and say what is wrong and which command mends it.

    It changes nothing. The exit code is 1 where there is an error; a warning alone is 0.
    """
    with command(debug):
        from tasks.operations import doctor

        health = doctor.examine(checks or (), devices)
        print(health.model_dump_json()) if json else print_health(health)
    if health.worst == "error":
        raise typer.Exit(1)


def print_health(health: "Health") -> None:
    """Print a finding a line, and below one that is no good what mends it."""
    from rich.text import Text

    from tasks.records import LEVELS
    from tasks.system.errors import printable

    rows: list[tuple[Text, ...]] = []
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in health.findings:
        level = Text(finding.level, style=colours[finding.level])
        rows.append((level, Text(finding.check), Text(printable(finding.text))))
        if finding.mend is not None:
            rows.append((Text(), Text(), Text(printable(f"-> {finding.mend}"))))
    tables.print_table(("level", "check", "text"), rows, whole=("level", "check"), show_header=False)
    counts = Counter(finding.level for finding in health.findings)
    print(", ".join(f"{counts[level]} {level}" for level in reversed(LEVELS) if counts[level]))


def recipes(json: Json = False) -> None:
    """List the recipes."""
    with command(False):
        from tasks import config

        known = config.recipes(config.project_root())
        if json:
            print(dumps({name: str(path) for name, path in known.items()}))
            return
        tables.print_table(("recipe", "what it is"), [(name, _description(path)) for name, path in known.items()])


def _description(recipe: Path) -> str:
    """Return what a recipe's first comment says it is: all of its lines, up to the first command to type."""
    from tasks.system import files

    try:
        text = files.read_text(recipe)
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read ({error})"
    lines = []
    for line in text.splitlines():
        said = line.removeprefix("#")
        if said == line or said.startswith("  ") or not said.strip():
            break
        lines.append(said.strip())
    return " ".join(lines)


def strategies(
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table that docs/strategies.md has.")] = False,
) -> None:
    """List the strategies and what each offers, with the reasons for what it does not."""
    with command(False):
        from tasks import config

        if json:
            offered_by, kinds = offers(), config.strategy_kinds()
            offered = {
                kind: {
                    "backend": section.backend,
                    "loops": section.loops,
                    "offers": [feature for feature, by in offered_by.items() if by[kind] is None],
                    "refuses": {feature: by[kind] for feature, by in offered_by.items() if by[kind] is not None},
                }
                for kind, section in kinds.items()
            }
            print(dumps(offered))
        elif markdown:
            print(offers_page(), end="")
        else:
            print_strategies()


def print_strategies() -> None:
    """Print what each strategy offers, with the reasons for what it does not."""
    from tasks import config

    rows, reasons = offers_cells()
    kinds = config.strategy_kinds()
    headings = [kind.replace("_", "_\n") for kind in kinds]
    cells = [(_fold(feature, 22), *marks) for feature, *marks in rows]
    tables.print_table(("--set", *headings), cells, bottom=headings, gap=1)
    tables.print_rows(reasons)
    for backend in dict.fromkeys(section.backend for section in kinds.values()):
        print(f"on {backend}: {', '.join(kind for kind in kinds if kinds[kind].backend == backend)}")


def offers() -> dict[str, dict[str, str | None]]:
    """Return by feature and kind of strategy why the strategy does not offer it; None if it does."""
    from tasks import config

    kinds = config.strategy_kinds()
    loops = dict.fromkeys(loop for section in kinds.values() for loop in section.loops)
    table = {
        f"train.loop={loop}": {
            kind: None if loop in section.loops else f"its only loop is {' and '.join(section.loops)}"
            for kind, section in kinds.items()
        }
        for loop in loops
    }
    for feature in dict.fromkeys(["train.steps_per_execution", *config.FEATURES]):
        table[feature] = {kind: section.refuses.get(feature) for kind, section in kinds.items()}
    return table


def offers_cells() -> tuple[list[list[str]], dict[str, str]]:
    """Return one row per feature (its name, then a cell per strategy), and the reasons by the number in a cell."""
    reasons: dict[str, int] = {}
    rows = []
    for feature, by_kind in offers().items():
        marks = [
            "yes" if reason is None else f"no ({reasons.setdefault(reason, len(reasons) + 1)})"
            for reason in by_kind.values()
        ]
        rows.append([feature, *marks])
    return rows, {f"({number})": reason for reason, number in reasons.items()}


def offers_page() -> str:
    """Return the table of docs/strategies.md: what each strategy offers."""
    from tasks import config
    from tasks.reports.tables import markdown_table

    rows, reasons = offers_cells()
    kinds = config.strategy_kinds()
    header = ["", *(f"`{kind}`" for kind in kinds)]
    backends = ["Keras backend", *(section.backend for section in kinds.values())]
    rows = [[f"`{feature}`", *marks] for feature, *marks in rows]
    lines = [*markdown_table(header, [backends, *rows], num_texts=len(header)), ""]
    lines += [f"- {number} {reason}" for number, reason in reasons.items()]
    return "\n".join(lines) + "\n"


def _fold(name: str, width: int) -> str:
    """Return a long name in two lines, broken after `=`, `_` or `.`."""
    if len(name) <= width:
        return name
    cut = max(name.rfind(sign, 0, width) for sign in "=_.") + 1
    return f"{name[:cut]}\n {name[cut:]}"
