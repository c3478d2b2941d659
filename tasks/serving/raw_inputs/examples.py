"""What a model takes, and some examples that were read for it."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from tasks.data.encoding import Values
from tasks.system.errors import listed
from tasks.system.files import is_utf8

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
ARRAYS = (".npy", ".npz")
PICTURES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"),
    *(".tif", ".tiff", ".jp2", ".avif", ".ppm", ".pgm", ".ico", ".heic", ".heif"),
)
TEXTS = (".txt", ".text", ".md")


@dataclass(frozen=True)
class RawExamples:
    """Some examples, in their order."""

    places: Sequence[tuple[str, int | None]]
    """Of each: the file, and the row in it from 1 on without the header; None for a file that is one example."""
    columns: Mapping[str, Values]
    """By name, those that the model takes; or its features as prepared, where ``prepared`` says so."""
    broken: dict[int, str] = field(default_factory=dict)
    """By the place here: why an example is none. What its columns hold then means nothing."""
    prepared: bool = False
    folder: Path = Path()
    """Which paths of images in columns begin at."""


@dataclass(frozen=True)
class Wanted:
    """What a model takes."""

    columns: dict[str, str]
    """Kinds by name, as ``records.Column`` has them; none where it takes arrays alone."""
    features: tuple[str, ...]
    """Arrays as prepared, by name."""

    @property
    def takes_files(self) -> bool:
        """Whether an example is a file of an image."""
        return list(self.columns.values()) == ["image"]

    @property
    def takes_lines(self) -> bool:
        """Whether an example is a line of text, or a file of a folder."""
        return list(self.columns.values()) == ["text"]

    @property
    def refused_suffixes(self) -> tuple[str, ...]:
        """The suffixes of files that the model does not take. A folder that has nothing else is refused; beside other
        files each of them is a row: among texts with an error, among images with whatever its content is."""
        return (*(TEXTS if self.takes_files else PICTURES), *TABLES, *ARRAYS)

    @property
    def in_words(self) -> str:
        """What may be given, for a message."""
        if not self.columns:
            return f"arrays (.npy; .npz with {', '.join(self.features)})"
        columns = listed([f"'{name}' ({kind})" for name, kind in self.columns.items()])
        tables = f"tables (.csv, .tsv, .jsonl, .parquet) with {columns}"
        if self.takes_files:
            return f"images, folders of images, {tables}"
        return f"files of lines of text, folders of texts, {tables}" if self.takes_lines else tables


@dataclass(frozen=True)
class TextEncoding:
    """How texts are encoded."""

    name: str

    @property
    def codec(self) -> str:
        """What decodes a text: without the mark that Windows writes before UTF-8."""
        return "utf-8-sig" if is_utf8(self.name) else self.name

    @property
    def contradiction(self) -> str:
        """Why a text that has bytes of another encoding is none."""
        return f"is not {self.name}: say what it is with --encoding, such as latin-1"

    def open(self, file: IO[bytes]) -> io.TextIOWrapper:
        """Return the text of a file; a byte that is of another encoding breaks its own row alone."""
        return io.TextIOWrapper(file, self.codec, "surrogateescape", newline="")


def places_of(name: str, first: int, count: int) -> list[tuple[str, int | None]]:
    """Return the places of so many rows of a file, from a row on."""
    return [(name, row) for row in range(first, first + count)]


def in_parts(rows: Iterator[Any], part_rows: int) -> Iterator[list[Any]]:
    """Yield rows, so many at once."""
    while some := list(islice(rows, part_rows)):
        yield some


def has_foreign_bytes(text: str) -> bool:
    """Return whether a text has bytes of another encoding, which ``surrogateescape`` keeps as half signs."""
    return not text.isascii() and any("\udc80" <= sign <= "\udcff" for sign in text)
