"""The commands about a project and its machine: `init`, `doctor`, `recipes`, `strategies`."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from flows.cli import completion, tables
from flows.cli.command import Result, argument, option
from tasks.system.errors import UserError, printable

if TYPE_CHECKING:
    from tasks.config import StrategySection


def init(
    folder: str = argument("FOLDER", "A new folder, or one that has none of the project's files."),
    git: bool | None = option(
        "--git/--no-git", "Create a git repository; by default, if the folder is not in one.", default=None
    ),
    dry_run: bool = option("--dry-run -n", "Only list the files that it would create."),
) -> Result:
    """Create a new project.

    It has params.yaml, recipes, the dataset digits, and the files of DVC and Prefect. The code stays where it is
    installed.
    """
    from shlex import quote

    from tasks.operations import new_project

    if not folder:  # From an unset shell variable; as a path it would mean the current folder.
        raise UserError("FOLDER is empty: name the folder of the new project; . is the current folder")
    made = new_project.make(Path(folder), git, dry_run)
    yield made
    if dry_run:
        print(f"would create {made.folder}" + (", a git repository, with" if made.git else " with"))
        print("\n".join(made.files))
        return
    print(f"created {made.folder}: {len(made.files)} files" + (", and a git repository" if made.git else ""))
    print(f"next: cd {quote(folder)} && stratagem run")
    if made.git:
        print("      git add --all && git commit -m 'The project', so that runs name a commit")


def doctor(
    checks: list[str] | None = argument(
        "CHECK", "A check such as disk or dvc; by default all.", complete=completion.checks, default=None
    ),
    devices: bool = option("--devices", "Also ask TensorFlow which devices it sees; takes some seconds."),
) -> Result:
    """Check this machine and this project.

    Reports problems and the commands that fix them, and changes nothing. The exit code is 1 if there is an error, and 0
    if there are only warnings.
    """
    from tasks.operations import doctor
    from tasks.records import LEVELS

    health = doctor.examine(checks or (), devices)
    yield health
    rows: list[tuple[Text, ...]] = []
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in health.findings:
        level = Text(finding.level, style=colours[finding.level])
        rows.append((level, Text(finding.check), Text(printable(finding.text))))
        if finding.fix is not None:
            rows.append((Text(), Text(), Text(printable(f"-> {finding.fix}"))))
    tables.print_table(("level", "check", "text"), rows, whole=("level", "check"), show_header=False)
    counts = Counter(finding.level for finding in health.findings)
    print(", ".join(f"{counts[level]} {level}" for level in reversed(LEVELS) if counts[level]))
    if health.worst == "error":
        raise SystemExit(1)


def recipes() -> Result:
    """List the recipes."""
    from tasks import config

    known = config.recipes(config.project_root())
    yield known
    tables.print_table(("recipe", "what it is"), [(name, _description(path)) for name, path in known.items()])


def _description(recipe: Path) -> str:
    """Return the description in a recipe's first comment, up to its first example command."""
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


def strategies() -> Result:
    """List the strategies and what each supports.

    Gives the reason for each setting that a strategy does not support.
    """
    from tasks import config

    kinds = config.strategy_kinds()
    yield {
        kind: {
            "backend": section.backend,
            "loops": section.loops,
            "offers": [feature for feature, reason in _features(section).items() if reason is None],
            "refuses": {feature: reason for feature, reason in _features(section).items() if reason is not None},
        }
        for kind, section in kinds.items()
    }
    rows, numbered = offers_cells()
    headings = [kind.replace("_", "_\n") for kind in kinds]
    cells = [(_fold(feature, 22), *marks) for feature, *marks in rows]
    tables.print_table(("--set", *headings), cells, bottom=headings, gap=1)
    tables.print_rows(numbered)
    for backend in dict.fromkeys(section.backend for section in kinds.values()):
        print(f"on {backend}: {', '.join(kind for kind in kinds if kinds[kind].backend == backend)}")


def _features(section: "type[StrategySection]") -> dict[str, str | None]:
    """Return, by feature, the reason why a strategy does not support it; None if it does."""
    from tasks import config

    only = f"its only loop is {' and '.join(section.loops)}"
    loops = {f"train.loop={loop}": None if loop in section.loops else only for loop in config.StrategySection.loops}
    return loops | {one: section.refuses.get(one) for one in ("train.steps_per_execution", *config.FEATURES)}


def offers_cells() -> tuple[list[list[str]], dict[str, str]]:
    """Return one row per feature (its name and a cell per strategy), and the reasons by their number in the cells."""
    from tasks import config

    by_kind = [_features(section) for section in config.strategy_kinds().values()]
    numbers: dict[str, int] = {}
    rows = []
    for feature in by_kind[0]:
        reasons = [found[feature] for found in by_kind]
        marks = ["yes" if why is None else f"no ({numbers.setdefault(why, len(numbers) + 1)})" for why in reasons]
        rows.append([feature, *marks])
    return rows, {f"({number})": reason for reason, number in numbers.items()}


def _fold(name: str, width: int) -> str:
    """Return a long name on two lines, split after `=`, `_` or `.`."""
    if len(name) <= width:
        return name
    cut = max(name.rfind(sign, 0, width) for sign in "=_.") + 1
    return f"{name[:cut]}\n {name[cut:]}"
