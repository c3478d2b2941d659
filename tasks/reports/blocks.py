"""The parts of a report: sections with texts, tables, charts and images."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeAlias

from tasks.reports.charts import Chart
from tasks.reports.tables import markdown_table
from tasks.system import files
from tasks.system.errors import printable


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class TableBlock:
    """A table; the columns after the first ``num_texts`` contain numbers, aligned to the right."""

    kind: ClassVar[str] = "table"
    header: tuple[str, ...]
    rows: list[list[str]]
    num_texts: int = 1
    title: str = ""
    folded: bool = False
    """Whether it is collapsed until a click on its title."""


@dataclass(frozen=True)
class Figure:
    """Charts side by side, stacked on a narrow page."""

    kind: ClassVar[str] = "figure"
    charts: Sequence[Chart]
    caption: str = ""
    wide: bool = False
    """Whether its chart keeps its size, in a scrollable box."""


@dataclass(frozen=True)
class Picture:
    """An inlined image."""

    uri: str
    """``data:image/...``."""
    alt: str
    caption: tuple[str, ...] = ()
    """One line for each entry."""


@dataclass(frozen=True)
class Pictures:
    """Images side by side; ``large`` images are as wide as the page."""

    kind: ClassVar[str] = "pictures"
    pictures: list[Picture]
    large: bool = False


Block: TypeAlias = Text | TableBlock | Figure | Pictures


@dataclass(frozen=True)
class ReportSection:
    """A part of the report under a heading."""

    title: str
    blocks: list[Block] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Its measurements by name, for MLflow's table of runs."""
    brief: dict[str, str] = field(default_factory=dict)
    """Its entries in the first section of the page."""
    pictures: dict[str, Chart] = field(default_factory=dict)
    """Its charts that are logged to MLflow as files, by file name."""

    @property
    def anchor(self) -> str:
        """Its anchor in the page."""
        return self.title.lower().replace(" ", "-")


def facts(rows: dict[str, str], title: str = "", folded: bool = False) -> TableBlock:
    """Return a table of names and values."""
    return TableBlock(("", ""), [[name, value] for name, value in rows.items()], 2, title, folded)


def write(path: Path, title: str, sections: Sequence[ReportSection], partial: str = "") -> Path:
    """Write a page with a title, the reason if it is partial, and sections. Return its path."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("tasks.reports", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A browser would not show control characters, so they become visible escapes.
        finalize=lambda value: type(value)(printable(value, keep="\n")) if isinstance(value, str) else value,
    )
    template = environment.get_template("report.html.j2")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        temporary.write_text(template.render(title=title, partial=partial, sections=sections), encoding="utf-8")
    return path


def as_markdown(title: str, sections: Sequence[ReportSection]) -> str:
    """Return the texts and tables of a page as Markdown."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            if isinstance(block, Text):
                lines += [block.text, ""]
            elif isinstance(block, TableBlock):
                lines += [*markdown_table(block.header, block.rows, block.num_texts), ""]
    return "\n".join(lines)
