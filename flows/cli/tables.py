"""Prints the output of commands: short tables that fit 80 columns, and readable numbers."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table

from tasks.system import units
from tasks.system.errors import cut, printable

if TYPE_CHECKING:
    from tasks.records import EvaluationResult, MetricPair, Plan, Record, Run

SHORT = 8
"""The characters of an id that tables show; commands accept any unambiguous prefix."""
DIGEST = re.compile(r"[0-9a-f]{32,64}")


class StandardOutput(Console):
    """Lets `command.ending` choose the exit code if nobody reads the output; rich exits with 1, as after an error."""

    def on_broken_pipe(self) -> None:
        """Raise the error that `print` raises."""
        raise BrokenPipeError


def print_text(what: RenderableType) -> None:
    """Print a text or an object of rich, without markup: [gpu:0] or :x: in a message stay as they are."""
    StandardOutput(highlight=False, markup=False, emoji=False).print(_printable(what))


def _printable(what: RenderableType) -> RenderableType:
    """Return a text with visible control characters; rich's own objects unchanged."""
    return printable(what, keep="\n") if isinstance(what, str) else what


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    right: Collection[str] = (),
    whole: Collection[str] = (),
    bottom: Collection[str] = (),
    gap: int = 2,
    show_header: bool = True,
) -> None:
    """Print a table without lines.

    Args:
        headings: one for each column, different ones.
        rows: a cell for each column; long ones wrap.
        right: headings of right-aligned columns.
        whole: headings of columns that never wrap.
        bottom: headings that are aligned with the last line of the others.
        gap: spaces between two columns.
        show_header: whether to print the headings.
    """
    table = Table(show_header=show_header, box=None, padding=(0, gap, 0, 0), pad_edge=gap > 1)
    for heading in headings:
        table.add_column(
            _printable(heading),
            justify="right" if heading in right else "left",
            vertical="bottom" if heading in bottom else "top",
            no_wrap=heading in whole,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(_printable, row))
    print_text(table)


def print_rows(rows: Mapping[str, str]) -> None:
    """Print one name and value per line."""
    print_table(("name", "value"), rows.items(), show_header=False)


def print_more(num_more: int, what: str) -> None:
    """Print the number of rows that a table omits, if any."""
    if num_more > 0:
        print(f"and {num_more:,} {what} more: --json shows all")


def show_record(record: "Record", fields: tuple[str, ...]) -> Iterator["Record"]:
    """Yield the result of a command, and print some of its fields as a short table."""
    from tasks.records import Judgement

    yield record
    rows = {}
    for field in fields:
        value = getattr(record, field)
        if value in (None, ()):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{name} {units.metric(number)}" for name, number in value.items())
        elif isinstance(value, tuple):
            value = ", ".join(map(str, value))
        elif isinstance(value, Judgement):
            field, value = "champion", value.told
        rows[field.replace("_", " ")] = f"{value:,.0f}" if isinstance(value, float) else str(value)
    print_rows(rows)


def show_plan(planned: "Plan") -> Iterator["Plan"]:
    """Yield the plan of a command; print what it would do, and the source of each setting."""
    from tasks import config

    yield planned
    stages = [(one.stage, one.does, one.why) for one in planned.stages]
    print_table(("stage", "does", "why"), stages, show_header=False)
    print()
    settings = [(one.key, config.written(one.value), one.source) for one in planned.settings]
    print_table(("setting", "value", "from"), settings)


def print_classes(result: "EvaluationResult", most: int | None = None) -> None:
    """Print precision, recall, f1 and the number of test examples of each class or label, or of the ``most`` with the
    lowest f1."""
    if not result.classes:
        return
    from tasks.reports.tables import class_rows

    classes = sorted(result.classes, key=lambda one: one.f1)[:most] if most is not None else result.classes
    figures = ("precision", "recall", "f1", "examples")
    print_table(("class", *figures), [(cut(name), *cells) for name, *cells in class_rows(classes)], right=figures)
    if (more := len(result.classes) - len(classes)) > 0:
        print(f"and {more:,} classes with a higher f1: the report shows all")


def print_report(run: "Run") -> None:
    """Print the path of a run's report and the number of pictures beside it."""
    from tasks import config

    root = config.project_root()
    folder = root / run.folder / "report"
    for path in folder.glob("report.html"):
        pictures = units.count(len(list(folder.glob("*.png"))), "picture")
        print(f"{path.relative_to(root)} ({pictures})")


def print_metrics(metrics: "Mapping[str, MetricPair]", names: tuple[str, str]) -> None:
    """Print the metrics of two runs with their intervals and differences."""
    rows = []
    for name, one in metrics.items():
        sides = ((one.first, one.first_interval), (one.second, one.second_interval))
        values = [f"{units.metric(value)}{_interval(ends)}" for value, ends in sides]
        apart = f"{units.metric(one.difference, '+')}{_interval(one.difference_interval, '+')}"
        rows.append((name.removeprefix("test/"), *values, apart))
    print_table(("", *names, "difference"), rows)


def print_differences(names: tuple[str, str], rows: Mapping[str, tuple[object, object]]) -> None:
    """Print the values of two runs or datasets side by side."""
    print_table(("", *names), [(what, *map(format_value, values)) for what, values in rows.items()])


def _interval(ends: tuple[float, float] | None, sign: str = "") -> str:
    return f"\n{units.interval(*ends, sign)}" if ends is not None else ""


def format_moment(moment: str) -> str:
    """Return a time in the local time zone, with the year only if it is not the current one."""
    local, now = datetime.fromisoformat(moment).astimezone(), datetime.now().astimezone()
    return local.strftime("%m-%d %H:%M" if local.year == now.year else "%Y-%m-%d")


def format_value(value: object) -> str:
    """Return a setting or a fact as a cell of a table."""
    if value is None:
        return "-"
    return units.number(value) if isinstance(value, float) else cut(shorten_digest(str(value)))


def shorten_digest(text: str) -> str:
    """Return the first letters of a digest; any other text as it is."""
    return text[:12] if DIGEST.fullmatch(text) else text
