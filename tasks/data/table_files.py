"""Files of tables, read by pandas a part at a time: CSV, TSV, Parquet and JSON lines."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from tasks.data.encoding.cells import MISSING_TEXTS, NO_NUMBER, Repeated, Values, num_rows
from tasks.system.errors import UserError, cut, listed
from tasks.system.files import is_encoding, is_utf8

CHUNK_ROWS = 65_536
KEPT_BYTES = 256 * 2**20
"""A smaller file is read once and kept; a larger one is read again by each that looks at it."""
NOT_READ = (pd.errors.ParserError, OSError, OverflowError, TypeError, ValueError)
"""What pandas raises on a damaged file, on a type that it cannot hold, or on a date beyond the year 9999."""
Wanted = Literal["number", "repeated", "text"]
"""What a column is read as: numbers, values of which many are the same, or each by itself."""
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
        self._rows_are_checked = False
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
            self._kept = (dict(wanted), list(self._read(dict(wanted))))
        for chunk in self._kept[1]:
            yield {name: chunk[name] for name in wanted}

    def first(self, wanted: Mapping[str, Wanted], rows: int) -> Iterator[Chunk]:
        """Yield the values of some columns of so many rows or a few more; nothing is kept."""
        seen = 0
        for chunk in self._read(dict(wanted), rows):
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
                names = list(open_parquet(self.path).schema_arrow.names)
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
        csv.field_size_limit(2**31 - 1)  # A value may be a book: pandas knows no limit either.
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

    def _read(self, wanted: dict[str, Wanted], chunk_rows: int | None = None) -> Iterator[Chunk]:
        read = {".parquet": self._read_parquet, ".jsonl": self._read_json}.get(self.suffix, self._read_csv)
        rows = 0
        for chunk in read(wanted, min(chunk_rows or CHUNK_ROWS, CHUNK_ROWS)):
            rows += next((num_rows(values) for values in chunk.values()), 0)
            yield chunk
        if not rows:
            raise self.refused("it has no rows")

    def _read_csv(self, wanted: dict[str, Wanted], chunk_rows: int) -> Iterator[Chunk]:
        self._check_rows()
        done = 0
        while True:
            try:
                for place, frame in enumerate(self._csv_frames(wanted, chunk_rows)):
                    if place == done:
                        yield {name: values_of(frame[name], how) for name, how in wanted.items()}
                        done += 1
                return
            except pd.errors.EmptyDataError:
                return
            except UnicodeError:
                raise self._wrong_encoding() from None
            except NOT_READ as error:
                # A column with something else than numbers is read as text, and who wants numbers names the value.
                if not (
                    words := [name for name, how in wanted.items() if how == "number" and not self._are_numbers(name)]
                ):
                    raise self.refused(f"cannot be read ({cut(str(error))})") from None
                wanted = {name: "text" if name in words else how for name, how in wanted.items()}

    def _csv_frames(self, wanted: Mapping[str, Wanted], chunk_rows: int) -> Iterator[Any]:
        kinds = {"number": "float64", "repeated": "category", "text": "object"}
        with pd.read_csv(
            self.path,
            sep=self.delimiter,
            header=None,
            names=self.names,
            index_col=False,
            usecols=list(wanted),
            dtype={name: kinds[how] for name, how in wanted.items()},
            skiprows=self._header_lines,
            na_values={name: sorted(MISSING_TEXTS | NO_NUMBER) for name, how in wanted.items() if how == "number"},
            keep_default_na=False,
            decimal=self.decimal,
            quoting=csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE,
            encoding=self._python_encoding,
            chunksize=chunk_rows,
        ) as frames:
            yield from frames

    def _are_numbers(self, name: str) -> bool:
        try:
            for _ in self._csv_frames({name: "number"}, CHUNK_ROWS):
                pass
        except NOT_READ:
            return False
        return True

    def _check_rows(self) -> None:
        """Refuse rows with fewer or more values than the header, and a quote that nothing closes, which makes one value
        of all rows up to the next quote: pandas accepts both silently.

        Where there are no quotes, counting is enough: Python's reader takes a second for 60 MB.
        """
        if self._rows_are_checked:
            return
        self._rows_are_checked = True
        if self._is_even():
            return
        ragged: list[list[str]] = []
        count, line = 0, self._header_lines
        with self.path.open(encoding=self._python_encoding, newline="") as file:
            rows = self._csv_reader(islice(file, self._header_lines, None), strict=True)
            try:
                for row in rows:
                    line = self._header_lines + rows.line_num
                    if row and len(row) != len(self.names):
                        count += 1
                        ragged = ragged or [row]
            except UnicodeError:
                raise self._wrong_encoding() from None
            except csv.Error as error:
                raise self.refused(
                    f"line {line + 1} opens a quote that no delimiter follows ({error}), so that lines {line + 1} to "
                    f"{self._header_lines + rows.line_num} would be one row. Mend it, or take quotes for characters "
                    "like any other: --set dataset.quoting=none"
                ) from None
        if ragged:
            (first,), have = ragged, "has" if count == 1 else "have"
            raise self.refused(
                f"{count} of its rows {have} not the {len(self.names)} values of its header: the first has "
                f"{len(first)}: {cut(self.delimiter.join(first), 80)!r}. Mend them, quote what has {self.delimiter!r} "
                "in it, say what stands between values: --set dataset.delimiter=';', or which line names the columns: "
                "--set dataset.header=2"
            )

    def _is_even(self) -> bool:
        """Return whether each line below the header has as many delimiters, and no quote, as far as bytes tell."""
        if not is_ascii_based(self.encoding):
            return False
        delimiter, expected = self.delimiter.encode(), len(self.names) - 1
        with self.path.open("rb") as file:
            lines = islice(file, self._header_lines, None)
            return all(
                (line.count(delimiter) == expected and b'"' not in line) or not line.strip(b"\r\n") for line in lines
            )

    def _read_parquet(self, wanted: dict[str, Wanted], chunk_rows: int) -> Iterator[Chunk]:
        try:
            for batch in open_parquet(self.path).iter_batches(chunk_rows, columns=list(wanted)):
                frame = batch.to_pandas()
                yield {name: values_of(frame[name], how) for name, how in wanted.items()}
        except NOT_READ as error:
            raise self.refused(f"cannot be read ({cut(str(error))})") from None

    def _read_json(self, wanted: dict[str, Wanted], chunk_rows: int) -> Iterator[Chunk]:
        rows: list[dict[str, Any]] = []
        for row in self._json_rows():
            rows.append(row)
            if len(rows) == chunk_rows:
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


def open_parquet(path: Path) -> Any:
    """Return a Parquet file, as pandas' own reader opens it."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path)


def is_ascii_based(encoding: str) -> bool:
    """Return whether a byte below 128 is one character of ASCII wherever it stands."""
    try:
        return is_utf8(encoding) or bytes(range(128)).decode(encoding) == "".join(map(chr, range(128)))
    except UnicodeError:
        return False


def values_of(column: Any, wanted: Wanted) -> Values:
    """Return a column of pandas as an array of numbers or instants, as repeated values, or as a list with None where a
    value is missing."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        codes = column.cat.codes.to_numpy().astype(np.int64)
        categories = column.cat.categories.tolist()
        return Repeated([*categories, None], np.where(codes < 0, len(categories), codes))
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        plain = column.dt.tz_convert("UTC").dt.tz_localize(None) if column.dt.tz is not None else column
        found: np.ndarray[Any, Any] = plain.to_numpy("datetime64[us]")
        return found
    is_number = pd.api.types.is_numeric_dtype(column.dtype) and not pd.api.types.is_bool_dtype(column.dtype)
    if wanted == "number" and is_number:
        found = column.to_numpy(np.float64)
        return found
    given = column.astype(object).where(column.notna(), None)
    listed_values = [value.tolist() if isinstance(value, np.ndarray) else value for value in given]
    if wanted == "repeated" and not any(isinstance(value, list | dict) for value in listed_values):
        places: dict[Any, int] = {}
        rows = np.array([places.setdefault(value, len(places)) for value in listed_values], np.int64)
        return Repeated(list(places), rows)
    return listed_values
