"""What a person names: files and folders, of images, texts, tables or arrays, and standard input."""

import io
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from tasks.data.encoding import num_rows
from tasks.data.table_files import NOT_READ
from tasks.serving.raw_inputs.examples import (
    ARRAYS,
    PICTURES,
    TABLES,
    RawExamples,
    TextEncoding,
    Wanted,
    has_foreign_bytes,
    in_parts,
    places_of,
)
from tasks.serving.raw_inputs.tables import TableReader
from tasks.system import machine
from tasks.system.errors import UserError, cut, listed
from tasks.system.files import DAMAGED_FILE

PEEKED = 4096
_GAP = rb"(?:\s|#[^\r\n]*[\r\n])+"
NETPBM = re.compile(rb"P(?:[14]|[2356](?=(?:GAP\d+){3}\s))(?:GAP\d+){2}\s".replace(b"GAP", _GAP))
"""How an image of PPM or PGM begins, which may have no zero in its header: width, height, and the largest value of all
but black and white, with comments between. A list of paths does not begin so."""
MAX_TEXT = 16 * 2**20
"""Bytes of a file in a folder that is one text: twenty thick books."""


@dataclass(frozen=True)
class Reader:
    """Reads what a person names, so many examples at once."""

    wanted: Wanted
    folder: Path
    """Where paths begin."""
    part_rows: int
    encoding: str
    stdin: io.FileIO | None = None
    """Without a buffer, so that no answer waits for more than a pipe has."""
    max_field: int = 64 * 2**20
    """As `tables.TableReader` has it."""

    @property
    def _encoding(self) -> TextEncoding:
        return TextEncoding(self.encoding)

    @property
    def _tables(self) -> TableReader:
        return TableReader(self.wanted, self.part_rows, self._encoding, self.max_field)

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
            yield from self._tables.read_parquet(name, path)
        else:
            with path.open("rb") as file:
                if suffix in (".jsonl", ".ndjson"):
                    yield from self._tables.read_json(name, file, path.parent)
                elif suffix in TABLES:
                    yield from self._tables.read_csv(name, file, path.parent)
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
                yield from self._tables.read_json("-", file, self.folder)
            elif self.wanted.takes_files:
                names = (line.rstrip(b"\n").decode("utf-8", "surrogateescape") for line in file)
                for some in in_parts((name for name in names if name), self.part_rows):
                    yield self._of_files(some)
            elif self.wanted.takes_lines:
                yield from self._of_lines("-", file)
            else:
                yield from self._tables.read_csv("-", file, self.folder)

    def _of_lines(self, name: str, file: IO[bytes]) -> Iterator[RawExamples]:
        (column,) = self.wanted.columns
        first, why = 1, self._encoding.contradiction
        with self._encoding.open(file) as text:
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
        """Return what a file says, or why it is no text."""
        if not path.is_file():  # A pipe would be waited for.
            return "", "no such file"
        if (suffix := path.suffix.lower()) in self.wanted.refused_suffixes:
            return "", f"a {suffix} is no text{'' if suffix in PICTURES else ': name it by itself, or call it .txt'}"
        try:
            with path.open("rb") as file:
                content = file.read(MAX_TEXT + 1)
            if len(content) > MAX_TEXT:
                return "", f"has more than {MAX_TEXT:,} bytes: cut it, or name it by itself, as a file of lines"
            return content.decode(self._encoding.codec), None
        except UnicodeError:
            return "", self._encoding.contradiction
        except OSError as error:
            return "", f"cannot be read ({error.strerror})"

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
            places = places_of(name, first + 1, num_rows(next(iter(some.values()))))
            yield RawExamples(places, dict(some), prepared=True)


def _walk(name: str, path: Path) -> Iterator[str]:
    """Yield a file, or those in a folder and below it, sorted; hidden ones and Windows' Thumbs.db do not count."""
    if not path.is_dir():
        yield name
        return

    def unreadable(error: OSError) -> None:
        raise UserError(f"'{error.filename}' cannot be read ({error.strerror}): make it readable") from None

    for place, folders, files in os.walk(path, onerror=unreadable):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        for file in sorted(files):
            if not file.startswith(".") and file != "Thumbs.db":
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
