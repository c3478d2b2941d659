"""Files of tables, read a part at a time: CSV, TSV, Parquet and JSON lines."""

import csv
import json
import mmap
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from tasks.data.encoding import MISSING_TEXTS, NO_NUMBER, Repeated, Values, num_rows
from tasks.system.errors import UserError, cut, listed
from tasks.system.files import is_encoding, is_utf8

RAGGED = re.compile(r"Expected \d+ columns, got \d+")
"""What Arrow says of a row with fewer or more values than the header."""
CHUNK_BYTES = 8 * 2**20
CHUNK_ROWS = 65_536
COPIED_CHARACTERS = 2**20
KEPT_BYTES = 256 * 2**20
"""A smaller file is read once and kept; a larger one is read again by each that looks at it."""

NOT_READ = (pa.ArrowException, OSError, OverflowError, ValueError)
"""What Arrow raises on a damaged file, on a type that it cannot bring to Python, or on a date beyond the year 9999."""

Wanted = Literal["number", "datetime", "repeated", "text"]
"""What a column is read as: numbers, dates and times, values of which many are the same, or each by itself."""
Chunk = dict[str, Values]


class TableFile:
    """The columns of a file, by name, and their values from the first row to the last.

    Args:
        path: of the file.
        source: what the user calls it, for messages.
        delimiter: of CSV; None is a tab for .tsv, else a comma.
        decimal: what stands before the fraction of a number in CSV.
        encoding: of text.
        header: the line of CSV that names the columns, from 1; None is a file without.
        quotes: whether quotes surround values of CSV.

    Raises:
        UserError: no such file, one that is no table, or columns without a name or with the same.
    """

    def __init__(
        self,
        path: Path,
        source: str,
        delimiter: str | None = None,
        decimal: str = ".",
        encoding: str = "utf-8",
        header: int | None = 1,
        quotes: bool = True,
    ) -> None:
        self.path, self.source, self.decimal, self.encoding = path, source, decimal, encoding
        self.header, self.quotes = header, quotes
        self.suffix = path.suffix.lower()
        self.delimiter = delimiter or ("\t" if self.suffix == ".tsv" else ",")
        self._kept: tuple[dict[str, Wanted], list[Chunk]] | None = None
        self._copy: Any = None
        self._copy_has_quotes = False
        self._quotes_are_checked = False
        if not is_encoding(encoding):
            raise UserError(f"dataset.encoding = '{encoding}': no such encoding. Allowed: utf-8, latin-1 ...")
        if not path.is_file():
            raise self.refused("no such file")
        self.names = self._names()

    def refused(self, reason: str) -> UserError:
        """Return the one message for a file that cannot be read."""
        return UserError(f"dataset.source = '{self.source}': {reason}")

    def chunks(self, wanted: Mapping[str, Wanted]) -> Iterator[Chunk]:
        """Yield the values of some columns, so many rows at once, always in the same parts.

        Raises:
            UserError: rows of different lengths, text of another encoding, or damage.
        """
        if not self.is_kept:
            yield from self._read(dict(wanted))
            return
        if self._kept is None or not wanted.items() <= self._kept[0].items():
            self._kept = (dict(wanted), list(self._read(dict(wanted), at_once=True)))
        for chunk in self._kept[1]:
            yield {name: chunk[name] for name in wanted}

    def first(self, wanted: Mapping[str, Wanted], rows: int) -> Iterator[Chunk]:
        """Yield the values of some columns of so many rows or a few more; nothing is kept."""
        seen = 0
        for chunk in self._read(dict(wanted)):
            yield chunk
            seen += next((num_rows(values) for values in chunk.values()), 0)
            if seen >= rows:
                return

    @property
    def is_kept(self) -> bool:
        """Whether the file is so small that what is read of it is kept in memory: ask for all columns at once."""
        return self.path.stat().st_size <= KEPT_BYTES

    def _names(self) -> list[str]:
        try:
            if self.suffix == ".parquet":
                names = list(pa.parquet.ParquetFile(self.path).schema_arrow.names)
            elif self.suffix == ".jsonl":
                names = list(dict.fromkeys(name for row in self._json_rows() for name in row))
            else:
                with self.path.open(encoding=self._python_encoding, newline="") as file:
                    above = (self.header or 1) - 1
                    reader = self._csv_reader(islice(file, above, None))
                    names = [name.strip() for name in next(reader, [])]
                    self._header_lines = above + reader.line_num if self.header else 0
                    if not self.header:
                        names = [f"column_{place}" for place in range(1, len(names) + 1)]
        except UnicodeError:
            raise self._wrong_encoding() from None
        except (*NOT_READ, csv.Error) as error:
            raise self.refused(f"cannot be read ({cut(str(error))})") from None
        if not names:
            raise self.refused("it is empty")
        if nul := [place for place, name in enumerate(names, 1) if "\0" in name]:
            raise self.refused(
                f"the name of its column {nul[0]} has a NUL byte in it: {cut(repr(names[nul[0] - 1]), 80)}. Where its "
                "text is of another encoding, say which, such as --set dataset.encoding=utf-16-le; else take the byte "
                "out"
            )
        if unnamed := [place for place, name in enumerate(names, 1) if not name.strip()]:
            if len(unnamed) > 1 or self.suffix not in (".csv", ".tsv"):
                raise self.refused(f"the columns {', '.join(map(str, unnamed))} have no name: give each one")
            names[unnamed[0] - 1] = f"column {unnamed[0]}"  # As pandas writes its index.
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise self.refused(
                f"{len(twice)} of its columns {'has' if len(twice) == 1 else 'have'} the name of another one: "
                f"{listed([repr(name) for name in twice])}. Give each a name of its own"
            )
        return names

    def _csv_reader(self, lines: Iterable[str], strict: bool = False) -> Any:
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=self.delimiter, quoting=quoting, strict=strict)

    @property
    def _python_encoding(self) -> str:
        return "utf-8-sig" if is_utf8(self.encoding) else self.encoding

    def _wrong_encoding(self) -> UserError:
        return self.refused(
            f"its text is not {self.encoding}. Say what it is, such as --set dataset.encoding=latin-1 or utf-16, or "
            "save it as utf-8"
        )

    def _read(self, wanted: dict[str, Wanted], at_once: bool = False) -> Iterator[Chunk]:
        """Yield the chunks, of CSV in parallel where all are wanted at once."""
        other = {".parquet": self._read_parquet, ".jsonl": self._read_json}.get(self.suffix)
        rows = 0
        for chunk in other(wanted) if other else self._read_csv(wanted, at_once):
            rows += next((num_rows(values) for values in chunk.values()), 0)
            yield chunk
        if not rows:
            raise self.refused("it has no rows")

    def _read_csv(self, wanted: dict[str, Wanted], at_once: bool) -> Iterator[Chunk]:
        done = 0
        while True:
            try:
                for place, chunk in enumerate(self._open_csv(wanted, at_once)):
                    if place == done:
                        yield chunk
                        done += 1
                return
            except _NotRead as failed:
                # What Arrow does not read is read as text, and the one who wants it otherwise says which value it is.
                wanted = {name: "text" if how == failed.wanted else how for name, how in wanted.items()}

    def _open_csv(self, wanted: dict[str, Wanted], at_once: bool) -> Iterator[Chunk]:
        types = {
            "number": pa.float64(),
            "datetime": pa.timestamp("s"),
            "repeated": pa.dictionary(pa.int32(), pa.string()),
            "text": pa.string(),
        }
        source = self._for_arrow()
        options = (
            pa.csv.ReadOptions(block_size=CHUNK_BYTES, column_names=self.names, skip_rows=self._header_lines),
            pa.csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char='"' if self.quotes else False,
                # No handler of invalid rows: see `_for_arrow`.
                newlines_in_values=not at_once or self._has_quotes(),
            ),
            pa.csv.ConvertOptions(
                column_types={name: types[how] for name, how in wanted.items()},
                include_columns=list(wanted),
                decimal_point=self.decimal,
                null_values=sorted(MISSING_TEXTS | NO_NUMBER),  # Of numbers and dates; texts stay as they are.
            ),
        )
        try:
            # Both give the same parts; the former parses several of them at a time.
            batches = pa.csv.read_csv(source, *options).to_batches() if at_once else pa.csv.open_csv(source, *options)
            for batch in batches:
                if batch.num_rows:
                    self._check_quotes(batch)
                    yield {name: values_of(column, wanted[name]) for name, column in _columns(batch)}
        except pa.ArrowInvalid as error:
            for kind, how in (("double", "number"), ("timestamp", "datetime")):
                if f"error to {kind}" in str(error):
                    raise _NotRead(how) from None
            if "UTF8" in str(error):
                raise self._wrong_encoding() from None
            if RAGGED.search(str(error)):
                raise self._ragged(error) from None
            if "Empty CSV file" not in str(error):
                raise self.refused(f"cannot be read ({cut(str(error))})") from None

    def _for_arrow(self) -> Any:
        """Return what Arrow reads: the file, or a copy in UTF-8 of one that has another encoding.

        Arrow is given no function of Python's, neither to decode nor to handle a row: a thread of Arrow's frees it, and
        where the process exits meanwhile, that ends it with SIGABRT.
        """
        if is_utf8(self.encoding):
            return self.path
        if self._copy is None:
            self._copy = self._copied_as_utf8()
        return self._copy.get_stream(0, self._copy.size())

    def _copied_as_utf8(self) -> Any:
        """Return a file that is open and has no name any more, so that it goes however this process ends."""
        folder = "a temporary folder"
        try:
            folder = tempfile.gettempdir()
            with tempfile.NamedTemporaryFile() as copy:
                for part in self._texts():
                    copy.write(part.encode())
                    self._copy_has_quotes = self._copy_has_quotes or '"' in part
                copy.flush()
                return pa.OSFile(copy.name)
        except OSError as error:
            raise self.refused(
                f"a copy of it in UTF-8 cannot be made in {folder} ({error.strerror}). Make room there, set TMPDIR to "
                "another folder, or save it as utf-8"
            ) from None

    def _texts(self) -> Iterator[str]:
        """Yield what is in the file, so many characters at once."""
        try:
            with self.path.open(encoding=self.encoding, newline="") as file:
                while text := file.read(COPIED_CHARACTERS):
                    yield text
        except UnicodeError:
            raise self._wrong_encoding() from None
        except OSError as error:
            raise self.refused(f"cannot be read ({error.strerror})") from None

    def _check_quotes(self, batch: Any) -> None:
        """Refuse a quote that nothing closes, which makes one value of all the rows up to the next quote.

        Only where a value has the end of a line in it, and once: Python reads 60 MB a second.
        """
        if self._quotes_are_checked or not self.quotes or not any(_has_line_ends(column) for column in batch.columns):
            return
        self._quotes_are_checked = True
        with self.path.open(encoding=self._python_encoding, newline="") as file:
            rows = self._csv_reader(file, strict=True)
            first = 1
            try:
                for _ in rows:
                    first = rows.line_num + 1
            except csv.Error as error:
                raise self.refused(
                    f"line {first} opens a quote that no delimiter follows ({error}), so that lines {first} "
                    f"to {rows.line_num} would be one row. Mend it, or take quotes for characters like any other: "
                    "--set dataset.quoting=none"
                ) from None

    def _ragged(self, found: pa.ArrowInvalid) -> UserError:
        """Return the message that counts the rows which have fewer or more values than the header."""
        try:
            with self.path.open(encoding=self._python_encoding, newline="") as file:
                rows = self._csv_reader(islice(file, (self.header or 1) - 1, None))
                ragged = [row for row in rows if row and len(row) != len(self.names)]
        except (UnicodeError, csv.Error):
            ragged = []
        if not ragged:  # Python reads it otherwise, or not at all.
            return self.refused(f"cannot be read ({cut(str(found))})")
        first, have = ragged[0], "has" if len(ragged) == 1 else "have"
        return self.refused(
            f"{len(ragged)} of its rows {have} not the {len(self.names)} values of its header: the first has "
            f"{len(first)}: {cut(self.delimiter.join(first), 80)!r}. Mend them, quote what has {self.delimiter!r} in "
            "it, say what stands between values: --set dataset.delimiter=';', or which line names the columns: --set "
            "dataset.header=2"
        )

    def _has_quotes(self) -> bool:
        """Return whether a value may have the end of a line in it."""
        if self._copy is not None or not self.quotes:
            return self._copy_has_quotes and self.quotes
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(b'"') >= 0

    def _read_parquet(self, wanted: dict[str, Wanted]) -> Iterator[Chunk]:
        try:
            file = pa.parquet.ParquetFile(self.path)
            for batch in file.iter_batches(CHUNK_ROWS, columns=list(wanted)):
                yield {name: values_of(column, wanted[name]) for name, column in _columns(batch)}
        except NOT_READ as error:
            raise self.refused(f"cannot be read ({cut(str(error))})") from None

    def _read_json(self, wanted: dict[str, Wanted]) -> Iterator[Chunk]:
        rows: list[dict[str, Any]] = []
        for row in self._json_rows():
            rows.append(row)
            if len(rows) == CHUNK_ROWS:
                yield {name: [row.get(name) for row in rows] for name in wanted}
                rows = []
        if rows:
            yield {name: [row.get(name) for row in rows] for name in wanted}

    def _json_rows(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open(encoding=self._python_encoding) as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        row = _JSON.decode(line)
                    except _Twice as twice:
                        raise self.refused(
                            f"line {number} has the key {cut(repr(twice.key), 80)} twice, and one value is wanted. "
                            "Keep one of them"
                        ) from None
                    except (ValueError, RecursionError) as error:
                        raise self.refused(f"line {number} is no JSON ({error})") from None
                    if "\\ud" in line.lower() and _has_half_characters(row):
                        raise self.refused(
                            f"line {number} has half of a character (such as \\ud83d alone), "
                            "which no text can hold. Write the whole character"
                        )
                    if not isinstance(row, dict):
                        raise self.refused(f"line {number} is no JSON object: {cut(line, 80)!r}")
                    yield row
        except UnicodeError:
            raise self._wrong_encoding() from None


def _has_line_ends(column: Any) -> bool:
    """Return whether a text of a column of Arrow has the end of a line in it."""
    texts = column.dictionary if pa.types.is_dictionary(column.type) else column
    return pa.types.is_string(texts.type) and bool(pa.compute.any(pa.compute.match_substring(texts, "\n")).as_py())


def _has_half_characters(row: Any) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


class _Twice(Exception):
    """An object of JSON has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; by itself Python keeps the last value of a key, and says nothing of the others."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for key in keys if keys.count(key) > 1))
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_without_repeated_keys)  # Once: `json.loads` would make one for each line.


class _NotRead(Exception):
    """Arrow read columns of numbers or of datetimes, and found something else."""

    def __init__(self, wanted: str) -> None:
        super().__init__(wanted)
        self.wanted = wanted


def _columns(batch: Any) -> Iterator[tuple[str, Any]]:
    return zip(batch.schema.names, batch.columns, strict=True)


def values_of(column: Any, wanted: Wanted) -> Values:
    """Return a column of Arrow as arrays of NumPy or lists of Python's values."""
    kind = column.type
    if wanted == "repeated" and not pa.types.is_dictionary(kind) and not pa.types.is_nested(kind):
        column = column.dictionary_encode()
        kind = column.type
    if pa.types.is_dictionary(kind):
        values = column.dictionary.to_pylist()
        rows = column.indices.fill_null(len(values)).to_numpy(zero_copy_only=False).astype(np.int64)
        return Repeated([*values, None], rows)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        instants = column if kind == pa.timestamp("s") else column.cast(pa.timestamp("us"))
        found: np.ndarray[Any, Any] = instants.to_numpy(zero_copy_only=False)
        return found
    is_number = pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    if wanted == "number" and is_number:
        found = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return found
    listed: list[Any] = column.to_pylist()
    return listed
