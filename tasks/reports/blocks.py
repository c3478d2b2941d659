"""What a report is made of: sections, each of a few texts, tables, figures and pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

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
    """A table; what its columns after the first ``num_texts`` hold are numbers, which stand at the right."""

    kind: ClassVar[str] = "table"
    header: tuple[str, ...]
    rows: list[list[str]]
    num_texts: int = 1
    title: str = ""
    folded: bool = False
    """Shown by a click, under its title."""


@dataclass(frozen=True)
class Figure:
    """Charts beside each other, under one another where the page is narrow."""

    kind: ClassVar[str] = "figure"
    charts: Sequence[Chart]
    caption: str = ""
    wide: bool = False
    """As large as it is drawn, in a box that scrolls."""


@dataclass(frozen=True)
class Picture:
    """An image, inlined."""

    uri: str
    """``data:image/...``."""
    alt: str
    caption: tuple[str, ...] = ()
    """A line each."""


@dataclass(frozen=True)
class Pictures:
    """Images beside each other; ``large`` as wide as the page."""

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
    """What it measured, for MLflow's table of runs, by name."""
    brief: dict[str, str] = field(default_factory=dict)
    """What the first section of the page says of it."""
    pictures: dict[str, Chart] = field(default_factory=dict)
    """Its charts that MLflow gets as files, by file name."""

    @property
    def anchor(self) -> str:
        """Its place in the page."""
        return self.title.lower().replace(" ", "-")


def facts(rows: dict[str, str], title: str = "", folded: bool = False) -> TableBlock:
    """Return a table of names and what they are."""
    return TableBlock(("", ""), [[name, value] for name, value in rows.items()], 2, title, folded)


def write(path: Path, title: str, sections: Sequence[ReportSection], partial: str = "") -> Path:
    """Write a page: a title, why it is not whole if it is not, and sections. Return where to."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("tasks.reports", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_written_out,
    )
    template = environment.get_template("report.html.j2")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        temporary.write_text(template.render(title=title, partial=partial, sections=sections), encoding="utf-8")
    return path


def _written_out(value: Any) -> Any:
    """Return a text or markup in which a character that a browser obeys instead of showing it is written out."""
    return type(value)(printable(value, keep="\n")) if isinstance(value, str) else value


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
