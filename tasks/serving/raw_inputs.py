"""Raw examples for a trained model, a part at a time: what a person names, as what the model takes.

That is files and folders, of images, texts, tables or arrays, and standard input. What is broken is an example with the
reason, so that the others have their predictions. Nothing is kept of what was read before, however long a file is.
"""

import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from tasks.data.encoding.cells import Values
from tasks.data.encoding.rows import BadTable, check_columns, csv_rows, encoding_of, json_rows
from tasks.data.source_files import is_by_product
from tasks.data.table_files import NOT_READ, open_parquet, values_of
from tasks.system import machine
from tasks.system.errors import UserError, cut, listed
from tasks.system.files import DAMAGED_FILE, is_utf8

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
ARRAYS = (".npy", ".npz")
PICTURES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"),
    *(".tif", ".tiff", ".jp2", ".avif", ".ppm", ".pgm", ".ico", ".heic", ".heif"),
)
TEXTS = (".txt", ".text", ".md")
PEEKED = 4096
_GAP = rb"(?:\s|#[^\r\n]*[\r\n])+"
NETPBM = re.compile(rb"P(?:[14]|[2356](?=(?:GAP\d+){3}\s))(?:GAP\d+){2}\s".replace(b"GAP", _GAP))
"""How an image of PPM or PGM begins, which may have no zero in its header: width, height, and the largest value of all
but black and white, with comments between. A list of paths does not begin so."""
MAX_TEXT = 16 * 2**20
"""Bytes of a file in a folder that is one text: twenty thick books."""


@dataclass(frozen=True)
class RawExamples:
    """Some examples, in their order."""

    places: Sequence[tuple[str, int | None]]
    """Of each: the file, and the row in it from 1 on without the header; None for a file that is one example."""
    columns: Mapping[str, Values]
    """The model's columns by name; or its features as prepared, if ``prepared`` is true."""
    broken: dict[int, str] = field(default_factory=dict)
    """Why an example cannot be used, by its index in ``places``. Its values in the columns then mean nothing."""
    prepared: bool = False
    folder: Path = Path()
    """Relative paths of images in columns start here."""


@dataclass(frozen=True)
class Wanted:
    """What a model takes."""

    columns: dict[str, str]
    """Kinds by name, as in ``records.Column``; empty for a model that takes only arrays."""
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


def places_of(name: str, first: int, count: int) -> list[tuple[str, int | None]]:
    """Return the places of ``count`` rows of a file, from row ``first`` on."""
    return [(name, row) for row in range(first, first + count)]


def in_parts(rows: Iterator[Any], part_rows: int) -> Iterator[list[Any]]:
    """Yield lists of at most ``part_rows`` rows."""
    while some := list(islice(rows, part_rows)):
        yield some


def has_foreign_bytes(text: str) -> bool:
    """Return whether a text has bytes of another encoding, which ``surrogateescape`` keeps as half signs."""
    return not text.isascii() and any("\udc80" <= sign <= "\udcff" for sign in text)


@dataclass(frozen=True)
class Reader:
    """Reads the files that a person names, at most ``part_rows`` examples at a time."""

    wanted: Wanted
    folder: Path
    """Relative paths start here."""
    part_rows: int
    encoding: str
    stdin: io.FileIO | None = None
    """Without a buffer, so that no answer waits for more than a pipe has."""
    max_field: int = 2**26
    """Characters of a value in CSV."""

    @property
    def _codec(self) -> str:
        """What decodes a text: without the mark that Windows writes before UTF-8."""
        return "utf-8-sig" if is_utf8(self.encoding) else self.encoding

    @property
    def _contradiction(self) -> str:
        """Why a text with bytes of another encoding is broken."""
        return f"is not {self.encoding}: say what it is with --encoding, such as latin-1"

    def _open_text(self, file: "io.BufferedReader[Any]") -> io.TextIOWrapper:
        """Return the text of a file; a byte of another encoding breaks only its own row."""
        codec = encoding_of(file.peek(2), self._codec) if is_utf8(self.encoding) else self.encoding
        return io.TextIOWrapper(file, codec, "surrogateescape", newline="")

    def check(self, inputs: Sequence[str]) -> None:
        """Refuse what no model of this kind takes, before any of it is computed.

        Raises:
            UserError: names it, and what is taken.
        """
        for name in inputs:
            path = self.folder / name
            if name != "-" and path.is_dir():
                self._check_folder(name, path)
                continue
            if name == "-" or (path.suffix.lower() in TABLES and self.wanted.columns):
                continue
            if path.suffix.lower() in ARRAYS or self.wanted.takes_files or self.wanted.takes_lines:
                continue
            raise UserError(f"'{name}': this model takes {self.wanted.in_words}")

    def _check_folder(self, name: str, path: Path) -> None:
        if not (self.wanted.takes_files or self.wanted.takes_lines):
            raise UserError(f"'{name}' is a folder, and this model takes {self.wanted.in_words}")
        ends = set()
        for file in _walk(name, path):
            ends.add(Path(file).suffix.lower())
            if not ends <= set(self.wanted.refused_suffixes):
                return
        if ends:
            raise UserError(
                f"'{name}' has nothing but {listed(sorted(ends))}, and this model takes {self.wanted.in_words}: name a "
                "folder of these, or each table by itself"
            )

    def read(self, inputs: Sequence[str]) -> Iterator[RawExamples]:
        """Yield the examples of all inputs, in their order.

        Raises:
            UserError: a table has no such columns, or a file cannot be read at all.
        """
        files: list[str] = []
        for name in inputs:
            path = self.folder / name
            is_folder = name != "-" and path.is_dir()
            is_file = name != "-" and path.suffix.lower() not in (*TABLES, *ARRAYS)
            if self.wanted.takes_files and (is_folder or is_file):
                for file in _walk(name, path):
                    files.append(file)
                    if len(files) == self.part_rows:
                        yield self._of_files(files)
                        files = []
                continue
            if files:
                yield self._of_files(files)
                files = []
            if is_folder and self.wanted.takes_lines:
                yield from self._of_texts(name, path)
                continue
            try:
                yield from self._of_stdin() if name == "-" else self._of_one(name, path)
            except BadTable as error:
                raise UserError(str(error)) from None
            except NOT_READ as error:
                raise UserError(f"'{name}' cannot be read ({cut(str(error))})") from None
        if files:
            yield self._of_files(files)

    def _of_files(self, files: Sequence[str]) -> RawExamples:
        (column,) = self.wanted.columns
        # Absolute: a file may be called NA, which as a value of a table is a missing one.
        paths = [str(Path(os.path.abspath(self.folder / file))) for file in files]
        return RawExamples([(file, None) for file in files], {column: paths})

    def _of_one(self, name: str, path: Path) -> Iterator[RawExamples]:
        suffix = path.suffix.lower()
        if suffix in ARRAYS:
            yield from self._of_arrays(name, path)
        elif suffix == ".parquet":
            yield from self._of_parquet(name, path)
        else:
            with path.open("rb") as file:
                if suffix in (".jsonl", ".ndjson"):
                    yield from self._of_json(name, file, path.parent)
                elif suffix in TABLES:
                    yield from self._of_csv(name, file, path.parent)
                else:
                    yield from self._of_lines(name, file)

    def _of_stdin(self) -> Iterator[RawExamples]:
        """Yield what standard input has, whatever of these it is."""
        if self.stdin is None:
            raise UserError("there is no standard input")
        if not self.wanted.columns:
            raise UserError(f"'-': this model takes {self.wanted.in_words}, and these cannot come by standard input")
        with io.BufferedReader(self.stdin, 2**20) as file:
            start = file.peek(PEEKED)[:PEEKED]
            # An image has zeros in its header, and a path has none.
            if self.wanted.takes_files and (b"\0" in start or NETPBM.match(start)):
                (column,) = self.wanted.columns
                yield RawExamples([("-", None)], {column: [file.read()]})
            elif start.lstrip().startswith(b"{"):
                yield from self._of_json("-", file, self.folder)
            elif self.wanted.takes_files:
                names = (line.rstrip(b"\n").decode("utf-8", "surrogateescape") for line in file)
                for some in in_parts((name for name in names if name), self.part_rows):
                    yield self._of_files(some)
            elif self.wanted.takes_lines:
                yield from self._of_lines("-", file)
            else:
                yield from self._of_csv("-", file, self.folder)

    def _of_lines(self, name: str, file: "io.BufferedReader[Any]") -> Iterator[RawExamples]:
        (column,) = self.wanted.columns
        first, why = 1, self._contradiction
        with self._open_text(file) as text:
            for lines in in_parts((one.rstrip("\r\n") for one in text), self.part_rows):
                broken = {place: why for place, line in enumerate(lines) if has_foreign_bytes(line)}
                yield RawExamples(places_of(name, first, len(lines)), {column: lines}, broken)
                first += len(lines)

    def _of_texts(self, name: str, folder: Path) -> Iterator[RawExamples]:
        """Yield the files of a folder, each of which is a text; a part of them ends with ``MAX_TEXT`` signs, too."""
        (column,) = self.wanted.columns
        files: list[str] = []
        texts: list[str] = []
        broken: dict[int, str] = {}
        for file in _walk(name, folder):
            text, why = self._text_of(self.folder / file)
            if why is not None:
                broken[len(files)] = why
            files.append(file)
            texts.append(text)
            if len(files) == self.part_rows or sum(map(len, texts)) >= MAX_TEXT:
                yield RawExamples([(file, None) for file in files], {column: texts}, broken)
                files, texts, broken = [], [], {}
        if files:
            yield RawExamples([(file, None) for file in files], {column: texts}, broken)

    def _text_of(self, path: Path) -> tuple[str, str | None]:
        """Return what a file says, or why it is not text."""
        if not path.is_file():  # A pipe would be waited for.
            return "", "no such file"
        if (suffix := path.suffix.lower()) in self.wanted.refused_suffixes:
            return "", f"a {suffix} is not text{'' if suffix in PICTURES else ': name it by itself, or call it .txt'}"
        try:
            with path.open("rb") as file:
                content = file.read(MAX_TEXT + 1)
            if len(content) > MAX_TEXT:
                return "", f"has more than {MAX_TEXT:,} bytes: cut it, or name it by itself, as a file of lines"
            return content.decode(self._codec), None
        except UnicodeError:
            return "", self._contradiction
        except OSError as error:
            return "", f"cannot be read ({error.strerror})"

    def _of_csv(self, name: str, file: "io.BufferedReader[Any]", folder: Path) -> Iterator[RawExamples]:
        """Yield the rows of CSV; paths of images in them begin at ``folder``."""
        with self._open_text(file) as text:
            rows = csv_rows(name, text, list(self.wanted.columns), self.max_field)
            why = self._contradiction
            yield from self._of_rows(
                name,
                (why if isinstance(row, dict) and any(map(has_foreign_bytes, row.values())) else row for row in rows),
                folder,
            )

    def _of_json(self, name: str, file: IO[bytes], folder: Path) -> Iterator[RawExamples]:
        """Yield the objects of JSON lines."""
        rows = json_rows(name, iter(file), list(self.wanted.columns), self.part_rows)
        yield from self._of_rows(name, rows, folder)

    def _of_rows(self, name: str, rows: Iterator[dict[str, Any] | str], folder: Path) -> Iterator[RawExamples]:
        """Yield rows, each of which is its values by column, or the reason why there are none."""
        first = 1
        for some in in_parts(rows, self.part_rows):
            broken = {place: row for place, row in enumerate(some) if isinstance(row, str)}
            columns = {
                column: [None if isinstance(row, str) else row.get(column) for row in some]
                for column in self.wanted.columns
            }
            yield RawExamples(places_of(name, first, len(some)), columns, broken, folder=folder)
            first += len(some)

    def _of_parquet(self, name: str, path: Path) -> Iterator[RawExamples]:
        """Yield the rows of Parquet."""
        with open_parquet(path) as file:
            check_columns(name, list(self.wanted.columns), list(file.schema_arrow.names))
            first = 1
            for batch in file.iter_batches(self.part_rows, columns=list(self.wanted.columns)):
                frame = batch.to_pandas()
                columns = {
                    column: values_of(frame[column], "number" if kind == "number" else "text")
                    for column, kind in self.wanted.columns.items()
                }
                yield RawExamples(places_of(name, first, batch.num_rows), columns, folder=path.parent)
                first += batch.num_rows

    def _of_arrays(self, name: str, path: Path) -> Iterator[RawExamples]:
        features = self.wanted.features
        try:
            with path.open("rb") as file:  # NumPy would leave a damaged archive open.
                is_archive = file.read(2) == b"PK"  # Whatever its name says.
                if is_archive and not zipfile.is_zipfile(file):
                    raise zipfile.BadZipFile("the archive is cut off")
                file.seek(0)
                if is_archive:
                    _refuse_too_large(name, path, features)
                found = np.load(file if is_archive else path, None if is_archive else "r", allow_pickle=False)
                arrays = {one: found[one] for one in features} if is_archive else {features[0]: found}
        except DAMAGED_FILE as error:
            raise UserError(f"'{name}' cannot be read as {self.wanted.in_words} ({cut(str(error))})") from None
        if len(arrays) < len(features):
            raise UserError(f"'{name}' is one array, and the model takes {', '.join(features)}: give an .npz of them")
        lengths = {len(array) if array.ndim else 0 for array in arrays.values()}
        if len(lengths) > 1:
            raise UserError(f"'{name}': its arrays have different lengths: {', '.join(map(str, sorted(lengths)))}")
        for first in range(0, lengths.pop(), self.part_rows):
            some = {one: np.asarray(array[first : first + self.part_rows]) for one, array in arrays.items()}
            places = places_of(name, first + 1, len(next(iter(some.values()))))
            yield RawExamples(places, dict(some), prepared=True)


def _walk(name: str, path: Path) -> Iterator[str]:
    """Yield a file, or those in a folder and below it, sorted; what ``is_by_product`` names does not count."""
    if not path.is_dir():
        yield name
        return

    def unreadable(error: OSError) -> None:
        raise UserError(f"'{error.filename}' cannot be read ({error.strerror}): make it readable") from None

    for place, folders, files in os.walk(path, onerror=unreadable):
        folders[:] = sorted(one for one in folders if not is_by_product(one))
        for file in sorted(files):
            if not is_by_product(file):
                yield os.path.join(name, os.path.relpath(os.path.join(place, file), path))


def _refuse_too_large(name: str, path: Path, wanted: Sequence[str]) -> None:
    """Refuse an archive whose arrays are larger than the memory: of one kilobyte it may hold a gigabyte."""
    with zipfile.ZipFile(path) as archive:
        size = sum(one.file_size for one in archive.infolist() if one.filename.removesuffix(".npy") in wanted)
    if size > (free := machine.free_memory()):
        raise UserError(
            f"'{name}' unpacks to {size:,} bytes, and {free:,} of the memory are free: give it in several files, or as "
            ".npy, which is read in parts"
        )
