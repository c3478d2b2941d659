"""What a report is made of: sections, each of a few texts, tables, figures and pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from markupsafe import Markup

from tasks.system.errors import printable

Cell: TypeAlias = str | Markup


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: Cell


@dataclass(frozen=True)
class TableBlock:
    """A table; what its columns after the first ``num_texts`` hold are numbers, which stand at the right."""

    kind: ClassVar[str] = "table"
    header: tuple[str, ...]
    rows: list[list[Cell]]
    num_texts: int = 1
    title: str = ""
    folded: bool = False
    """Shown by a click, under its title."""


@dataclass(frozen=True)
class Figure:
    """Drawings beside each other, under one another where the page is narrow."""

    kind: ClassVar[str] = "figure"
    drawings: list[Markup]
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

    @property
    def anchor(self) -> str:
        """Its place in the page."""
        return self.title.lower().replace(" ", "-")


def facts(rows: dict[str, Cell], title: str = "", folded: bool = False) -> TableBlock:
    """Return a table of names and what they are."""
    return TableBlock(("", ""), [[name, value] for name, value in rows.items()], 2, title, folded)


def render(title: str, sections: Sequence[ReportSection], partial: str = "") -> str:
    """Return a page: a title, why it is not whole if it is not, and sections."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("tasks.reports", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_written_out,
    )
    return environment.get_template("report.html.j2").render(title=title, partial=partial, sections=sections)


def _written_out(value: Any) -> Any:
    """Return a text or markup in which a character that a browser obeys instead of showing it is written out."""
    return type(value)(printable(value, keep="\n")) if isinstance(value, str) else value
