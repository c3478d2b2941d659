"""Files of tables, read by pandas a part at a time: CSV, TSV, Parquet and JSON lines."""

import contextlib
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from tasks.data.encoding.cells import MISSING_TEXTS, NO_NUMBER, BadValue, Values, instants
from tasks.system.errors import UserError, cut, listed
from tasks.system.files import is_encoding, is_utf8

CHUNK_ROWS = 65_536
KEPT_BYTES = 192 * 2**20
"""Values that take up at most so much memory are read once and kept; others are read again for each pass."""
BLOCK_BYTES = 2**22
"""Of text that is searched for delimiters at once."""
LOOKED_ROWS, LOOKED_BYTES = 1_000, 2**20
"""The start of a file, which tells how much memory its values take up."""
NOT_READ = (pd.errors.ParserError, OSError, OverflowError, TypeError, ValueError)
"""What pandas raises on a damaged file, on a type that it cannot hold, or on a date beyond the year 9999."""
Wanted = str
"""What a column is read as: ``number``; ``repeated`` for values of which many are the same; ``text``; ``datetime`` for
those of ISO 8601; or a format of ``datetime.strptime`` for others."""
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
        UserError: no such file, one that is not a table, or columns without a name or with the same.
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
        if self._kept is not None and wanted.items() <= self._kept[0].items():
            for chunk in self._kept[1]:
                yield {name: chunk[name] for name in wanted}
            return
        if self.fits(wanted):
            self._kept = dict(wanted), list(self._read(dict(wanted)))
            yield from self._kept[1]
        else:
            yield from self._read(dict(wanted))

    def fits(self, wanted: Mapping[str, Wanted]) -> bool:
        """Return whether the values of some columns take up at most ``KEPT_BYTES``, judged by the first rows."""
        some = next(self.first(wanted, LOOKED_ROWS))
        return sum(map(_size, some.values())) / num_rows_of(some) * self._about_rows() <= KEPT_BYTES

    def _about_rows(self) -> float:
        if self.suffix == ".parquet":
            return float(open_parquet(self.path).metadata.num_rows)
        with self.path.open("rb") as file:
            start = file.read(LOOKED_BYTES)
        return self.path.stat().st_size / len(start) * max(start.count(b"\n"), 1)

    def first(self, wanted: Mapping[str, Wanted], rows: int) -> Iterator[Chunk]:
        """Yield the values of some columns of so many rows or a few more; nothing is kept."""
        seen = 0
        for chunk in self._read(dict(wanted), rows):
            yield chunk
            seen += num_rows_of(chunk)
            if seen >= rows:
                return

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
        try:
            for frame in read(wanted, min(chunk_rows or CHUNK_ROWS, CHUNK_ROWS)):
                rows += len(frame)
                yield {name: values_of(frame[name], how) for name, how in wanted.items()}
        except UnicodeError:
            raise self._wrong_encoding() from None
        except NOT_READ as error:
            raise self.refused(f"cannot be read ({cut(str(error))})") from None
        if not rows:
            raise self.refused("it has no rows")

    def _read_csv(self, wanted: Mapping[str, Wanted], chunk_rows: int) -> Iterator[pd.DataFrame]:
        self._check_rows()
        numbers = [name for name, how in wanted.items() if how == "number"]
        kinds = {"repeated": "category"}
        try:
            with pd.read_csv(
                self.path,
                sep=self.delimiter,
                header=None,
                names=self.names,
                index_col=False,
                usecols=list(wanted),
                # No type for columns of numbers: pandas reads them in half the time if it finds the type itself.
                dtype={name: kinds.get(how, "object") for name, how in wanted.items() if how != "number"},
                skiprows=self._header_lines,
                na_values={name: sorted(MISSING_TEXTS | NO_NUMBER) for name in numbers},
                keep_default_na=False,
                decimal=self.decimal,
                quoting=csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE,
                encoding=self._python_encoding,
                chunksize=chunk_rows,
                low_memory=False,
            ) as frames:
                for frame in frames:
                    truths = [name for name in numbers if frame[name].dtype in (bool, object)]
                    yield frame.astype(dict.fromkeys(truths, str)) if truths else frame  # "True" is not a number.
        except pd.errors.EmptyDataError:
            return

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
        delimiter, newline = self.delimiter.encode(), ord("\n")
        if len(delimiter) != 1:
            return False
        expected = np.array([*delimiter * (len(self.names) - 1), newline], np.uint8)
        with self.path.open("rb") as file:
            for _ in range(self._header_lines):
                file.readline()
            while block := file.read(BLOCK_BYTES) + file.readline():
                if b'"' in block:
                    return False
                if not (lines := block.rstrip(b"\r\n")):
                    continue
                signs = np.frombuffer(lines + b"\n", np.uint8)
                marks = signs[(signs == expected[0]) | (signs == newline)]
                if len(marks) % len(expected) or (marks.reshape(-1, len(expected)) != expected).any():
                    return False
        return True

    def _read_parquet(self, wanted: Mapping[str, Wanted], chunk_rows: int) -> Iterator[pd.DataFrame]:
        for batch in open_parquet(self.path).iter_batches(chunk_rows, columns=list(wanted)):
            yield batch.to_pandas()

    def _read_json(self, wanted: Mapping[str, Wanted], chunk_rows: int) -> Iterator[pd.DataFrame]:
        rows = self._json_rows()
        while some := list(islice(rows, chunk_rows)):
            yield pd.DataFrame({name: pd.Series([row.get(name) for row in some], dtype=object) for name in wanted})

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
                        raise self.refused(f"line {number} is not JSON ({error})") from None
                    if "\\ud" in line.lower() and _has_half_characters(row):
                        raise self.refused(
                            f"line {number} has half of a character (such as \\ud83d alone), "
                            "which no text can hold. Write the whole character"
                        )
                    if not isinstance(row, dict):
                        raise self.refused(f"line {number} is not a JSON object: {cut(line, 80)!r}")
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
    """Return a column of pandas as an array of numbers or instants, as a ``Categorical`` where values are repeated, or
    as an array of objects with None where a value is missing."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.array
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        plain = column.dt.tz_convert("UTC").dt.tz_localize(None) if column.dt.tz is not None else column
        return plain.to_numpy("datetime64[us]")
    is_number = pd.api.types.is_numeric_dtype(column.dtype) and not pd.api.types.is_bool_dtype(column.dtype)
    if wanted == "number" and is_number:
        return column.to_numpy(np.float64)
    values = column.astype(object).where(column.notna(), None)
    if pd.api.types.infer_dtype(values, skipna=True) != "string":
        values = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    if wanted == "repeated" and not any(isinstance(value, list | dict) for value in values):
        return pd.Categorical.from_codes(*pd.factorize(np.fromiter(values, object, len(values))))
    found = np.fromiter(values, object, len(values))
    if wanted == "datetime" or "%" in wanted:
        with contextlib.suppress(BadValue):  # Of a row that is perhaps left out; who encodes it names it.
            return instants(found, "", None if wanted == "datetime" else wanted)
    return found


def num_rows_of(chunk: Mapping[str, Values]) -> int:
    """Return how many rows some columns have."""
    return len(next(iter(chunk.values()), ()))


def _size(values: Values) -> int:
    """Return the bytes of memory that values take up; of repeated values, those of the codes."""
    stored: np.ndarray[Any, Any] = values.codes if hasattr(values, "codes") else values
    return stored.nbytes + (sum(map(sys.getsizeof, stored)) if stored.dtype.kind == "O" else 0)
