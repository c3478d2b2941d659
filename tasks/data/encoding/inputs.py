"""Reads raw examples for a trained model in parts, from the files and folders that the user gives, or standard input.

The inputs are images, texts, tables or arrays. A broken input becomes an example with the reason, so that all others
get their predictions. No part is kept, so memory use does not grow with the length of a file.
"""

import codecs
import contextlib
import csv
import io
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .answers import as_taken
from .cells import Values, open_parquet, rows_of, values_of

if TYPE_CHECKING:
    from . import Arrays, Encoder

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
ARRAYS = (".npy", ".npz")
PICTURES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"),
    *(".tif", ".tiff", ".jp2", ".avif", ".ppm", ".pgm", ".ico", ".heic", ".heif"),
)
BY_PRODUCTS = {
    *("@eadir", "@__thumb", "@recycle", "#recycle", "__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini"),
    *("$recycle.bin", "system volume information", "lost+found", "icon\r", "picasa.ini", "zbthumbnail.info"),
}
"""Names, in lowercase, of files and folders that operating systems create among the user's files."""
DELIMITERS = ",;\t|"
NAMED_BY_PLACE = re.compile(r"column_\d+")
"""A column of CSV without a header."""
LINES_ABOVE = 20
"""The most lines of CSV that may precede the header."""
NAMING_ROWS = 1_000
"""The number of first rows of JSON lines whose keys define the columns, for any size of parts."""
MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
"""Codecs by byte order mark."""
PEEKED = 4096
SHOWN = 20
"""The most columns in a message."""


class BadInput(ValueError):
    """An input that a model cannot take at all."""


def is_by_product(name: str) -> bool:
    """Return whether a file or folder is not data but was created by a system (a NAS, Windows, macOS): hidden ones such
    as .DS_Store and ._1.jpg, and ``BY_PRODUCTS``."""
    return name.startswith(".") or name.lower() in BY_PRODUCTS


@dataclass(frozen=True)
class RawExamples:
    """Consecutive examples."""

    places: Sequence[tuple[str, int | None]]
    """For each example, its file and its row from 1 on, without the header; None for a file that is one example."""
    columns: Mapping[str, Values]
    """The model's columns by name; or its prepared features, if ``prepared`` is true."""
    broken: dict[int, str] = field(default_factory=dict)
    """Why an example cannot be used, by its index in ``places``. Its values in the columns are then meaningless."""
    folder: Path = Path()
    """Relative paths of images in columns start here."""
    prepared: bool = False


@dataclass(frozen=True)
class Wanted:
    """What a model takes."""

    columns: dict[str, str]
    """Kinds by name, as in ``records.Column``; empty for a model that takes only arrays."""
    features: tuple[str, ...]
    """Arrays as prepared, by name."""
    delimiters: str = DELIMITERS
    """The possible delimiters of CSV."""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL
    header_rows: Sequence[Mapping[str, str]] = ()
    """Rows of CSV by column that belong to the header, such as units; a file may lack them."""
    encodings: Mapping[str, str] = field(default_factory=dict)
    """The encoding of CSV and other text (``csv``), or of JSON lines (``json``), if it is not UTF-8."""

    @classmethod
    def of(cls, known: Mapping[str, Any], takes: Iterable[str]) -> "Wanted":
        """Return what a model takes, from its encoding.json and the names of its arrays."""
        columns = {one["name"]: one["kind"] for feature in known["features"].values() for one in feature["columns"]}
        written = known.get("csv", {})
        quoting: Literal[0, 3] = csv.QUOTE_NONE if written.get("quoting") == "none" else csv.QUOTE_MINIMAL
        delimiters, header_rows = written.get("delimiter", "") + DELIMITERS, written.get("header_rows", ())
        return cls(columns, tuple(takes), delimiters, quoting, header_rows, written.get("encodings", {}))

    def count(self, lines: Sequence[str], delimiter: str, columns: Sequence[str]) -> int:
        """Return how many of the columns occur in the first row of CSV; without columns, its number of values."""
        try:
            skips = skips_spaces(lines, delimiter)
            rows = csv.reader(lines, delimiter=delimiter, quoting=self.quoting, skipinitialspace=skips)
            found = names_of(next(rows, []), [])
        except csv.Error:  # A row with a value that is too long.
            return 0
        return sum(column in found for column in columns) if columns else len(found)

    def delimiter(self, lines: Sequence[str], columns: Sequence[str]) -> str:
        """Return the delimiter of CSV: the one that yields most of the columns."""
        return max(self.delimiters, key=lambda one: self.count(lines, one, columns))

    @property
    def takes_files(self) -> bool:
        """Whether an example is a file of an image."""
        return list(self.columns.values()) == ["image"]

    @property
    def takes_lines(self) -> bool:
        """Whether an example is a line of text, or a file of a folder."""
        return list(self.columns.values()) == ["text"]

    @property
    def in_words(self) -> str:
        """The allowed inputs, for a message."""
        if not self.columns:
            return f"arrays (.npy; .npz with {', '.join(self.features)})"
        columns = [f"{name!r} ({kind})" for name, kind in self.columns.items()]
        more = f" and {len(columns) - SHOWN:,} more" if len(columns) > SHOWN else ""
        tables = f"tables (.csv, .tsv, .jsonl, .parquet) with {', '.join(columns[:SHOWN])}{more}"
        if self.takes_files:
            return f"images, folders of images, {tables}"
        return f"files of lines of text, folders of texts, {tables}" if self.takes_lines else tables


def codec_of(encoding: str) -> str:
    """Return the codec of a text file; for UTF-8 it drops the byte order mark that Windows writes."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def has_foreign_bytes(text: str) -> bool:
    """Return whether a text has bytes of another encoding, which ``surrogateescape`` keeps as surrogates."""
    return not text.isascii() and any("\udc80" <= sign <= "\udcff" for sign in text)


Row: TypeAlias = "Sequence[Any] | str"
"""The values of the model's columns, or the reason why they cannot be used."""


@dataclass(frozen=True)
class Reader:
    """Reads the files that the user gives, at most ``part_rows`` examples at a time."""

    wanted: Wanted
    folder: Path
    """Relative paths start here."""
    part_rows: int
    encoding: str | None = None
    """Of all texts, instead of a file's byte order mark or the model's encoding."""
    stdin: io.FileIO | None = None
    """Unbuffered: a read returns the bytes that are already in the pipe."""

    def _encoding(self, kind: str) -> str:
        return self.encoding or self.wanted.encodings.get(kind, "utf-8")

    def _contradiction(self, kind: str = "csv") -> str:
        """Return why a text with bytes of another encoding is broken; ``kind`` is a key of ``Wanted.encodings``."""
        encoding = self._encoding(kind)
        other = "latin-1" if codec_of(encoding) == "utf-8-sig" else "utf-8"
        return f"is not {encoding}: set its encoding, such as --encoding {other}"

    def _codec_of(self, start: bytes, kind: str = "csv") -> str:
        """Return the codec of a text that begins with these bytes, perhaps a byte order mark."""
        codec = codec_of(self._encoding(kind))
        if self.encoding is None or codec == "utf-8-sig":
            codec = next((own for mark, own in MARKS.items() if start.startswith(mark)), codec)
        return codec

    def _open_text(self, file: "io.BufferedReader[Any]", kind: str = "csv") -> io.TextIOWrapper:
        """Return the text of a file; a byte of another encoding breaks only its own row."""
        return io.TextIOWrapper(file, self._codec_of(file.peek(3), kind), "surrogateescape", newline="")

    def check(self, inputs: Sequence[str]) -> None:
        """Refuse inputs that the model cannot take, before any computation.

        Raises:
            BadInput: names the input, and the allowed ones.
        """
        takes_folders = self.wanted.takes_files or self.wanted.takes_lines
        for name in inputs:
            path = self.folder / name
            if name != "-" and path.is_dir() and not takes_folders:
                raise BadInput(f"'{name}' is a folder, but this model takes {self.wanted.in_words}")
            is_table = path.suffix.lower() in TABLES and self.wanted.columns
            if not (name == "-" or takes_folders or is_table or path.suffix.lower() in ARRAYS):
                raise BadInput(f"'{name}': this model takes {self.wanted.in_words}")

    def read(self, inputs: Sequence[str]) -> Iterator[RawExamples]:
        """Yield the examples of all inputs, in their order.

        Raises:
            BadInput: a table lacks columns of the model, or a file cannot be read.
        """
        for are_pictures, names in itertools.groupby(inputs, self._names_pictures):
            if are_pictures:
                yield from self._of_files(file for name in names for file in _walk(name, self.folder / name))
                continue
            for name in names:
                try:
                    yield from self._of_stdin() if name == "-" else self._of_one(name, self.folder / name)
                except BadInput:
                    raise
                except (OSError, OverflowError, TypeError, ValueError, csv.Error) as error:
                    # Only some encodings keep their foreign bytes.
                    hint = ". Set its encoding, such as --encoding utf-8" if isinstance(error, UnicodeError) else ""
                    raise BadInput(f"'{name}' cannot be read ({_in_one_line(error)}){hint}") from None

    def _names_pictures(self, name: str) -> bool:
        """Return whether an input is an image file or a folder of images."""
        path = self.folder / name
        is_table = path.suffix.lower() in (*TABLES, *ARRAYS) and not path.is_dir()
        return self.wanted.takes_files and name != "-" and not is_table

    def _examples(self, rows: Iterator[tuple[str, int | None, Row]], folder: Path = Path()) -> Iterator[RawExamples]:
        """Yield rows, each with its file and number, as examples."""
        nothing = (None,) * len(self.wanted.columns)
        while some := list(itertools.islice(rows, self.part_rows)):
            files, numbers, given = zip(*some, strict=True)
            broken = {place: row for place, row in enumerate(given) if isinstance(row, str)}
            columns = zip(
                *(nothing if isinstance(row, str) else row for row in given) if broken else given, strict=True
            )
            named = dict(zip(self.wanted.columns, map(list, columns), strict=True))
            yield RawExamples(list(zip(files, numbers, strict=True)), named, broken, folder)

    def _of_rows(self, name: str, rows: Iterator[Row], folder: Path) -> Iterator[RawExamples]:
        """Yield the rows of a file, counted from 1, as examples."""
        return self._examples(zip(itertools.repeat(name), itertools.count(1), rows, strict=False), folder)

    def _of_files(self, files: Iterator[str]) -> Iterator[RawExamples]:
        # Absolute, because a file may be called NA, which is a missing value in a table.
        return self._examples((file, None, [os.path.abspath(self.folder / file)]) for file in files)

    def _of_one(self, name: str, path: Path) -> Iterator[RawExamples]:
        suffix = path.suffix.lower()
        if path.is_dir():
            yield from self._examples((file, None, self._text_of(self.folder / file)) for file in _walk(name, path))
        elif suffix in ARRAYS:
            yield from self._of_arrays(name, path)
        elif suffix == ".parquet":
            yield from self._of_rows(name, self._of_parquet(name, path), path.parent)
        else:
            with path.open("rb") as file:
                if suffix in (".jsonl", ".ndjson"):
                    rows = self._of_json(name, file)
                else:
                    rows = self._of_csv(name, file) if suffix in TABLES else self._of_lines(file)
                yield from self._of_rows(name, rows, path.parent)

    def _of_stdin(self) -> Iterator[RawExamples]:
        """Yield the examples in standard input, whose kind is detected."""
        if self.stdin is None:
            raise BadInput("there is no standard input")
        if not self.wanted.columns:
            raise BadInput(f"'-': this model takes {self.wanted.in_words}, but not from standard input")
        with io.BufferedReader(self.stdin, 2**20) as file:
            start = file.peek(PEEKED)[:PEEKED]
            # An image has zeros in its header, and a path has none.
            if self.wanted.takes_files and b"\0" in start:
                yield from self._examples(iter([("-", None, [file.read()])]))
            elif start.decode(self._codec_of(start), "ignore").lstrip().startswith("{"):
                yield from self._of_rows("-", self._of_json("-", file), self.folder)
            elif self.wanted.takes_files:
                names = (line.rstrip(b"\n").decode("utf-8", "surrogateescape") for line in file)
                yield from self._of_files(name for name in names if name)
            else:
                rows = self._of_lines(file) if self.wanted.takes_lines else self._of_csv("-", file)
                yield from self._of_rows("-", rows, self.folder)

    def _of_lines(self, file: "io.BufferedReader[Any]") -> Iterator[Row]:
        with self._open_text(file) as text:
            for line in text:
                yield self._contradiction() if has_foreign_bytes(line) else [line.rstrip("\r\n")]

    def _text_of(self, path: Path) -> Row:
        """Return the content of a file, or the reason why it is not text."""
        if not path.is_file():  # A pipe would be waited for.
            return "no such file"
        if (suffix := path.suffix.lower()) in (*PICTURES, *TABLES, *ARRAYS):
            return f"a {suffix} file is not text"
        try:
            content = path.read_bytes()
            return [content.decode(self._codec_of(content))]
        except UnicodeError:
            return self._contradiction()
        except OSError as error:
            return f"cannot be read ({error.strerror})"

    def _of_csv(self, name: str, file: "io.BufferedReader[Any]") -> Iterator[Row]:
        """Yield the rows of CSV.

        The header is the first line that has the model's columns; a title or comments may precede it. If the columns
        are named by their places (``column_1``), a file needs no header. The delimiter is the one that yields most of
        the model's columns.
        """
        columns, delimiters = [_name(one) for one in self.wanted.columns], self.wanted.delimiters
        read = partial(csv.reader, quoting=self.wanted.quoting)
        csv.field_size_limit(2**26)  # An unclosed quote turns the rest of the file into one value.
        with self._open_text(file) as text:
            above = list(itertools.islice(text, LINES_ABOVE))
            counts = [max(self.wanted.count(above[n:], one, columns) for one in delimiters) for n in range(len(above))]
            header = counts.index(len(columns)) if len(columns) in counts else 0
            by_place = not any(counts) and all(map(NAMED_BY_PLACE.fullmatch, columns))
            delimiter = self.wanted.delimiter(above[header:], () if by_place else columns)
            of_row: list[str] = []
            lines, skips = noted(itertools.chain(above[header:], text), of_row), skips_spaces(above[header:], delimiter)
            reader = read(lines, delimiter=delimiter, skipinitialspace=skips, strict=True)
            top = next(reader, [])
            below: list[list[str]] = []
            with contextlib.suppress(csv.Error):  # A value that is too long spoils only its row, later.
                below.extend(read(above[header + reader.line_num :], delimiter=delimiter, skipinitialspace=skips))
            names = names_of(top, below)
            if by_place:
                names = [f"column_{place}" for place in range(1, len(top) + 1)]
            check_columns(name, columns, names, self._encoding("csv"))
            places = [names.index(column) for column in columns]
            # Two places, because itemgetter returns no sequence for one.
            header_row = [] if by_place else top
            other_headers = [tuple(map(row.get, self.wanted.columns)) for row in self.wanted.header_rows]
            pick, rows = itemgetter(*places, places[0]), _rows_of_csv(reader, of_row, len(names), delimiter, header_row)
            for row in itertools.chain([top] if by_place else [], rows):
                if isinstance(row, str):
                    yield row
                elif (values := pick(row)[:-1]) not in other_headers:
                    yield self._contradiction() if has_foreign_bytes("".join(values)) else values

    def _of_json(self, name: str, file: "io.BufferedReader[Any]") -> Iterator[Row]:
        """Yield the objects of JSON lines; a row may omit missing values, but each column must be in one of the first
        ``NAMING_ROWS``."""
        columns = list(self.wanted.columns)
        with self._open_text(file, "json") as text:
            rows = (
                self._contradiction("json") if has_foreign_bytes(line) else parsed_json(line, columns)
                for line in text
                if line.strip()
            )
            naming = list(itertools.islice(rows, NAMING_ROWS))
            if there := sorted(set().union(*(row for row in naming if isinstance(row, dict)))):
                check_columns(name, columns, there)
            for row in itertools.chain(naming, rows):
                yield row if isinstance(row, str) else [row.get(column) for column in columns]

    def _of_parquet(self, name: str, path: Path) -> Iterator[Row]:
        """Yield the rows of Parquet."""
        kinds = self.wanted.columns
        with open_parquet(path) as file:
            check_columns(name, list(kinds), list(file.schema_arrow.names))
            for batch in file.iter_batches(self.part_rows, columns=list(kinds)):
                frame = batch.to_pandas(ignore_metadata=True)  # A stored index is a column like the others.
                read = (values_of(frame[one], "number" if kind == "number" else "text") for one, kind in kinds.items())
                yield from zip(*map(rows_of, read), strict=True)

    def _of_arrays(self, name: str, path: Path) -> Iterator[RawExamples]:
        features = self.wanted.features
        names = (*features, "x", "X") if len(features) == 1 else features  # As `data add` reads it.
        try:
            found = load_arrays(path, names)
        except BadInput as error:
            raise BadInput(f"'{name}' {error}, but this model takes {self.wanted.in_words}") from None
        if len(features) == len(found) == 1:  # Whatever it is called.
            found = dict(zip(features, found.values(), strict=True))
        if absent := [one for one in features if one not in found]:
            raise BadInput(f"'{name}': these arrays are missing: {', '.join(absent)}{' or x' * (len(features) == 1)}")
        arrays = {one: found[one] for one in features}
        lengths = {array.shape[0] if array.shape else 0 for array in arrays.values()}
        if len(lengths) > 1:
            raise BadInput(f"'{name}': its arrays have different lengths: {', '.join(map(str, sorted(lengths)))}")
        for first in range(0, max(lengths), self.part_rows):
            some = {one: array[first : first + self.part_rows] for one, array in arrays.items()}
            rows = range(first + 1, first + 1 + len(next(iter(some.values()))))
            yield RawExamples([(name, row) for row in rows], some, {}, path.parent, prepared=True)


def encode_part(
    examples: RawExamples, encoder: "Encoder | None", takes: Mapping[str, tuple[tuple[Any, ...], Any]], who: str
) -> "tuple[Arrays, dict[int, str]]":
    """Return the features of the valid examples, and the reasons why others are invalid, by place.

    Args:
        examples: as a ``Reader`` yields them.
        encoder: None if the model takes only arrays.
        takes: shape and dtype of each array of an example.
        who: names the model, for a message.

    Raises:
        BadInput: the model does not take these arrays.
    """
    if examples.prepared or encoder is None:
        given = {name: np.asarray(array) for name, array in examples.columns.items()}
        try:
            return as_taken(takes, given, who), {}
        except ValueError as error:
            raise BadInput(f"'{examples.places[0][0]}': {error}") from None
    columns = examples.columns
    rows = [row for row in range(len(examples.places)) if row not in examples.broken]
    if examples.broken:
        columns = {name: [values[row] for row in rows] for name, values in columns.items()}
    features, broken = encoder.encode_whole(columns, examples.folder)
    return features, examples.broken | {rows[row]: why for row, why in broken.items()}


def load_arrays(source: Path, wanted: Collection[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a .npz archive, a .npy file or a folder of .npy files, by name; never unpickle any.

    Arrays of .npy files are memory-mapped; those of an archive are read into memory.

    Args:
        source: the file or folder.
        wanted: the names of the arrays to return if there are several; by default all.

    Raises:
        BadInput: no such file, or an array that is damaged or contains objects.
    """
    try:
        if source.suffix.lower() == ".npz" and not source.is_dir():
            with source.open("rb") as file, np.lib.npyio.NpzFile(file) as archive:
                return {name: archive[name] for name in _chosen(archive.files, wanted)}
        files = {one.stem: one for one in (sorted(source.glob("[!.]*.npy")) if source.is_dir() else [source])}
        return {name: np.lib.format.open_memmap(files[name], mode="r") for name in _chosen(files, wanted)}
    except FileNotFoundError:
        raise BadInput("no such file") from None
    except Exception as error:  # NumPy and zipfile raise many kinds for a damaged file.
        is_pickled = re.search("allow_pickle|Python objects", str(error))
        hint = ". Save words with .astype(str), which needs no pickle" if is_pickled else ""
        raise BadInput(f"cannot be read ({_in_one_line(error)}){hint}") from None


def _chosen(names: Collection[str], wanted: Collection[str]) -> list[str]:
    return [name for name in names if name in wanted or not wanted or len(names) == 1]


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def check_columns(name: str, columns: Sequence[str], there: Sequence[str], encoding: str = "utf-8") -> None:
    """Refuse a table without the columns that a model takes, or with one of them more than once; ``encoding`` is that
    in which its text is read.

    Raises:
        BadInput: names them.
    """
    if absent := [one for one in columns if one not in there]:
        first, names, hint = "".join(there[:1]), "".join(there), ""
        is_utf8 = codec_of(encoding) == "utf-8-sig"
        if "\0" in first:
            order = "be" if first.startswith("\0") else "le"
            hint = f". It seems to be UTF-16 without a byte order mark: --encoding utf-16-{order}"
        elif has_foreign_bytes(names) or not (is_utf8 or names.isascii()):
            other = "cp1252" if is_utf8 else "utf-8"
            hint = f". Its text is read as {encoding}: if it is not, set --encoding, such as {other}"
        raise BadInput(
            f"'{name}' is missing the {'column' if len(absent) == 1 else 'columns'} {', '.join(map(repr, absent))}. "
            f"It has: {', '.join(map(repr, there))[:1000] or 'nothing'}{hint}"
        )
    if twice := [one for one in columns if there.count(one) > 1]:
        raise BadInput(f"'{name}' has the column {', '.join(map(repr, twice))} more than once: keep only one")


def names_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of the columns of CSV from its header and some of the rows below it.

    pandas writes an index without a name, and Excel a column that was once used; R writes nothing for row names, which
    all differ, so that its header has one value less. Rows may end with delimiters that the header does not have.
    """
    rows = [row for row in rows if row]
    rows = rows[:-1] if len(rows) > 2 else rows  # The last one of many may end within a value.
    are_names = len({row[0] for row in rows}) == len(rows) > 0
    if are_names and any(row[-1] for row in rows) and all(len(row) == len(header) + 1 for row in rows):
        header = ["", *header]
    elif len(widths := {len(row) for row in rows}) == 1 and not any("".join(row[len(header) :]) for row in rows):
        header = [*header, *[""] * (widths.pop() - len(header))]
    return [_name(text) or f"column {place}" for place, text in enumerate(header, 1)]


def _name(text: str) -> str:
    """Return the name of a column; a line break in it, as of Excel's Alt+Enter, is a space."""
    return unicodedata.normalize("NFC", re.sub(r"\s*[\r\n]\s*", " ", text.strip()))


def skips_spaces(lines: Sequence[str], delimiter: str) -> bool:
    """Return whether one of the first lines has spaces between a delimiter and a quote: ``name, "age"``."""
    return any(re.search(rf'{re.escape(delimiter)} +"', line) for line in lines[:LINES_ABOVE])


def repeated(header: Sequence[str]) -> tuple[str, ...]:
    """Return the first name of a header as rows repeat it, perhaps with the byte order mark of a joined file."""
    return tuple(form for name in header[:1] for form in (name, f"\ufeff{name}", f'\ufeff"{name}"'))


def noted(lines: Iterable[str], notes: list[str]) -> Iterator[str]:
    """Yield lines, each after it was added to ``notes``."""
    for line in lines:
        notes.append(line)
        yield line


def _rows_of_csv(
    reader: Any, of_row: list[str], width: int, delimiter: str, header: list[str]
) -> Iterator[list[str] | str]:
    """Yield the values of each row, or the reason why it is invalid; ``of_row`` gets the lines that are read."""
    first_names = repeated(header)
    while True:
        of_row.clear()
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:  # A quote that is not closed is a character, as with dataset.quoting=none.
            for line in of_row:
                row = line.rstrip("\r\n").split(delimiter)
                yield row if len(row) == width else f"not a valid CSV row ({error})"
            continue
        if len(row) > 1 and row[0] in first_names and row[1:] == header[1:]:
            yield "repeats the header"
        elif len(row) == width:
            yield row
        elif row:
            yield f"the number of values is {len(row)}, but the header has {width}"


def parsed_json(line: str, columns: Sequence[str] = ()) -> dict[str, Any] | str:
    """Return the object in a line of JSON, or the reason why it is invalid; ``columns`` must not be nested."""
    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode() if "\\ud" in line.lower() else None
    except UnicodeEncodeError:
        return "not valid text: it has half of a character, such as \\ud83d alone. Write the whole character"
    except (ValueError, RecursionError) as error:
        return f"not JSON ({_in_one_line(error)})"
    if not isinstance(found, dict):
        return f"not a JSON object: {repr(found)[:80]}"
    nested = [column for column in columns if isinstance(found.get(column), dict | list)]
    return f"column '{nested[0]}': contains a list or an object" if nested else found


def _walk(name: str, path: Path) -> Iterator[str]:
    """Yield a file, or all files in a folder and its subfolders, sorted, without those of ``is_by_product``."""
    if not path.is_dir():
        yield name
        return

    def unreadable(error: OSError) -> None:
        raise BadInput(f"'{error.filename}' cannot be read ({error.strerror}): make it readable") from None

    for place, folders, files in os.walk(path, onerror=unreadable):
        folders[:] = sorted(one for one in folders if not is_by_product(one))
        for file in sorted(files):
            if not is_by_product(file):
                yield os.path.join(name, os.path.relpath(os.path.join(place, file), path))
