"""What the commands print for a person: short tables that fit 80 columns, and numbers as a person reads them.

`rich` is imported by the function that prints with it, so that `--help` and `--json` do without it.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tasks.records import EvaluationResult, Explanation, MetricPair, Record, Run

SHORT = 8
"""Letters of an id; a command takes as few as no other id begins with."""
DIGEST = re.compile(r"[0-9a-f]{32,64}")


def print_text(what: "RenderableType") -> None:
    """Print text, or something of rich's, as it is: a message may hold [gpu:0] or :x:, no colour and no emoji."""
    from rich.console import Console

    Console(highlight=False, markup=False, emoji=False).print(_printable(what))


def _printable(what: "RenderableType") -> "RenderableType":
    """Return a text with what a terminal would obey written out; what is of rich's as it is."""
    from tasks.system.errors import printable

    return printable(what, keep="\n") if isinstance(what, str) else what


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence["RenderableType"]],
    right: Collection[str] = (),
    whole: Collection[str] = (),
    bottom: Collection[str] = (),
    gap: int = 2,
    show_header: bool = True,
) -> None:
    """Print a table without lines.

    Args:
        headings: one for each column, different ones.
        rows: a cell for each column; a long one is continued on the next line.
        right: headings of the columns that are aligned on the right.
        whole: headings of the columns whose cells are never continued.
        bottom: headings that stand beside the last line of the others.
        gap: blanks between two columns.
        show_header: False leaves the headings out.
    """
    from rich.table import Table

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
    """Print a name and a value a line."""
    print_table(("name", "value"), rows.items(), show_header=False)


def print_more(num_more: int, what: str) -> None:
    """Print how many rows a table has left out, if any."""
    if num_more > 0:
        print(f"and {num_more:,} {what} more: --json has all")


def print_record(record: "Record | None", json: bool, fields: tuple[str, ...]) -> None:
    """Print a record as JSON, or some of its fields as a short table."""
    from tasks.records import Judgement

    if record is None:
        return
    if json:
        print(record.model_dump_json())
        return
    rows = {}
    for field in fields:
        value = getattr(record, field)
        if isinstance(value, dict):
            value = ", ".join(f"{name} {number:.4f}" for name, number in value.items())
        elif isinstance(value, tuple):
            value = ", ".join(map(str, value))
        elif isinstance(value, Judgement):
            field, value = "champion", value.told
        rows[field.replace("_", " ")] = f"{value:,.0f}" if isinstance(value, float) else str(value)
    print_rows(rows)


def print_explanation(found: "Explanation", json: bool) -> None:
    """Print what a command would do, and where each of its settings comes from."""
    if json:
        print(found.model_dump_json())
        return
    stages = [(one.stage, one.does, one.why) for one in found.stages]
    settings = [(one.key, str(one.value), one.source) for one in found.settings]
    for headings, rows in ((("stage", "does", "why"), stages), (("key", "value", "source"), settings)):
        if rows:
            print_table(headings, rows, show_header=False)
        print()


def print_classes(result: "EvaluationResult") -> None:
    """Print precision, recall, f1 and the number of test examples of each class, or label."""
    from tasks.system.errors import cut

    if not result.classes:
        return
    figures = ("precision", "recall", "f1")
    rows = [
        (cut(one.name), *(f"{getattr(one, figure):.4f}" for figure in figures), str(one.support))
        for one in result.classes
    ]
    print_table(("class", *figures, "examples"), rows, right=(*figures, "examples"))


def print_pictures(run: "Run") -> None:
    """Print the paths of a run's pictures and of its report: a line each, as nothing shorter can be opened."""
    from tasks import config

    root = config.project_root()
    folder = root / run.folder / "report"
    for path in (*sorted(folder.glob("*.png")), *folder.glob("report.html")):
        print(path.relative_to(root))


def print_metrics(metrics: "Mapping[str, MetricPair]", names: tuple[str, str]) -> None:
    """Print the metrics of two runs with their intervals, and how far apart they are."""
    rows = []
    for name, one in metrics.items():
        sides = ((one.first, one.first_interval), (one.second, one.second_interval))
        values = ["-" if value is None else f"{value:.4f}{_interval(ends)}" for value, ends in sides]
        apart = "-" if one.difference is None else f"{one.difference:+.4f}{_interval(one.difference_interval, '+')}"
        rows.append((name.removeprefix("test/"), *values, apart))
    print_table(("", *names, "difference"), rows)


def _interval(ends: tuple[float, float] | None, sign: str = "") -> str:
    return f"\n{ends[0]:{sign}.4f} to {ends[1]:{sign}.4f}" if ends is not None else ""


def format_moment(moment: str) -> str:
    """Return a time as the clock here shows it, with the year where that is another one."""
    local, now = datetime.fromisoformat(moment).astimezone(), datetime.now().astimezone()
    return local.strftime("%m-%d %H:%M" if local.year == now.year else "%Y-%m-%d")


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as a person reads it.

    >>> format_bytes(1_234_567)
    '1.2 MB'
    """
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_seconds(seconds: float) -> str:
    """Return a time with three digits and the unit that fits it."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_value(value: object) -> str:
    """Return a setting or a fact as a cell of a table."""
    from tasks.system.errors import cut

    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else cut(shorten_digest(str(value)))


def shorten_digest(text: str) -> str:
    """Return the first letters of a digest; any other text as it is."""
    return text[:12] if DIGEST.fullmatch(text) else text
