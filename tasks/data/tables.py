"""Table files, read by pandas in chunks: CSV, TSV, Parquet and JSON lines; and the detection of headers."""

import codecs
import contextlib
import csv
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import pandas as pd

from tasks import config
from tasks.data.encoding.cells import (
    MISSING_TEXTS,
    NO_NUMBER,
    Values,
    Wanted,
    open_parquet,
    spelled,
    values_of,
    without,
)
from tasks.data.encoding.inputs import DELIMITERS, codec_of, names_of, noted, parsed_json, repeated, skips_spaces
from tasks.system import background
from tasks.system.errors import UserError, cut, listed
from tasks.system.files import is_encoding

CHUNK_ROWS = 65_536
KEPT_BYTES = 192 * 2**20
"""The values of a text file of at most this size are kept after the first pass; others are read for each pass."""
BLOCK_BYTES = 2**18
"""The size of a block of text that is searched for delimiters: it fits into a core's cache."""
AHEAD = 2
"""The number of chunks that are converted while the next one is read."""
NOT_READ = (pd.errors.ParserError, csv.Error, OSError, OverflowError, TypeError, ValueError)
"""Errors of pandas for a damaged file, an unsupported type, or a date beyond the year 9999."""
LINES_LOOKED_AT, LINES_ABOVE = 50, 20
"""How many lines of CSV are searched for the header, and how many may precede it."""
EXCEL_DELIMITER = re.compile(r"\"?sep=(.)\"?", re.IGNORECASE)
NUMBER = re.compile(r"\s*[+-]?\d+([.]\d+)?\s*")
YEAR = re.compile(r"(19|20)\d\d")
NO_CSV = re.compile(rb'\A(?:PK\x03\x04|\xd0\xcf\x11\xe0|\x1f\x8b|\s*(?:<[!?a-z]|\[\s*[\[{]|\{\s*"))', re.IGNORECASE)
"""The start of Excel's workbooks, archives, HTML, XML and JSON, which may be called .csv."""
Chunk = dict[str, Values]


class TableFile:
    """The columns of a file, by name, and their values from the first row to the last.

    Args:
        dataset: the file and its format; without a delimiter, the first lines of a CSV file determine it.

    Raises:
        UserError: no such file, not a table, or columns without a name or with the same name.
    """

    def __init__(self, dataset: config.Table) -> None:
        self.path, self.source, self._dataset = config.project_root() / dataset.source, dataset.source, dataset
        self.folder, self.suffix = self.path.parent, self.path.suffix.lower().replace(".ndjson", ".jsonl")
        if not is_encoding(dataset.encoding):
            raise UserError(f"dataset.encoding = '{dataset.encoding}': no such encoding. Allowed: utf-8, latin-1 ...")
        self._encoding = codec_of(dataset.encoding)
        self._quoting: Literal[0, 3] = csv.QUOTE_NONE if dataset.quoting == "none" else csv.QUOTE_MINIMAL
        self._kept: list[Chunk] = []
        self.header_lines = 0
        self._header: list[str] = []
        self._header_below: list[dict[str, str]] = []
        """The texts of the header's other rows, such as units, by column."""
        self._skips_spaces = False
        self.has_row_names = False
        """Whether the header has one name fewer than the rows have values, as R writes it."""
        self._rows_are_checked = self.suffix in (".parquet", ".jsonl")
        if not self.path.is_file():
            raise self.refused("no such file")
        self.delimiter = dataset.delimiter or ("\t" if self.suffix == ".tsv" else ",")
        if self.suffix == ".csv" and dataset.delimiter is None:
            self.delimiter = _delimiter(_first_lines(self.path, self._encoding)[(dataset.header or 1) - 1 :])
        with self._explained():
            self.names = self._names()
        if not self.names:
            raise self.refused("it is empty")
        if twice := sorted(name for name, times in Counter(self.names).items() if times > 1):
            raise self.refused(
                f"{len(twice)} of its columns {'has' if len(twice) == 1 else 'have'} the name of another one: "
                f"{listed([repr(name) for name in twice])}. Rename the columns; or, if the first line contains "
                "values, --set dataset.header=null"
            )

    def refused(self, reason: str) -> UserError:
        """Return the message for a file that cannot be read."""
        return UserError(f"dataset.source = '{self.source}': {reason}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert the errors of a file that cannot be read into a message."""
        try:
            yield
        except UnicodeError as error:
            with self.path.open("rb") as file:
                start = file.read(64)
            zeros = {place % 2 for place, byte in enumerate(start) if not byte}
            if len(zeros) == 1 and not start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                order = "le" if zeros == {1} else "be"
                raise self.refused(
                    f"it seems to be UTF-16 without a byte order mark: --set dataset.encoding=utf-16-{order}"
                ) from None
            found = ""
            if isinstance(error, UnicodeDecodeError):
                found = f" ({error.object[max(0, error.start - 10) : error.end + 10]!r})"
            raise self.refused(
                f"its text is not {self._dataset.encoding}{found}. Set its encoding, such as --set dataset.encoding="
                "cp1252 (Western Europe), cp1250 (Central Europe), cp1251 (Cyrillic), gb18030 (Chinese), cp932 "
                "(Japanese) or utf-16, or save it as utf-8"
            ) from None
        except NOT_READ as error:
            raise self.refused(f"cannot be read ({cut(str(error))})") from None

    def _names(self) -> list[str]:
        if self.suffix == ".parquet":
            return list(open_parquet(self.path).schema_arrow.names)
        if self.suffix == ".jsonl":
            return list(dict.fromkeys(name for row in self._json_rows() for name in row))
        header = self._dataset.header
        with self._open() as file:
            above = (header or 1) - 1
            lines = list(islice(file, above, above + LINES_LOOKED_AT))
            self._skips_spaces = skips_spaces(lines, self.delimiter)
            reader = self._csv_reader(lines)
            first: list[str] = next(reader, [])
            if header is None:
                return [f"column_{place}" for place in range(1, len(first) + 1)]
            below = list(islice(reader, self._dataset.header_rows - 1))
            self.header_lines = above + reader.line_num
            self._header = first
            names = names_of(first, list(reader))
            self.has_row_names = len(names) > len(first) and names[: len(first)] != names_of(first, [])
        if any("\0" in name for name in names):
            raise UnicodeError  # UTF-16 without its mark.
        self._header_below = [dict(zip(names, row, strict=False)) for row in below]
        return names

    @property
    def as_written(self) -> dict[str, Any]:
        """What a model's reader would not find out about such a file, see ``records.PreparedDataset.csv``."""
        is_known = self.suffix == ".parquet" or codecs.lookup(self._encoding).name in ("utf-8-sig", "utf-16")
        kind = "json" if self.suffix == ".jsonl" else "csv"
        found = {
            "delimiter": self._dataset.delimiter,
            "quoting": self._dataset.quoting,
            "header_rows": self._header_below,
            "encodings": {} if is_known else {kind: self._dataset.encoding},
        }
        return {key: own for key, own in found.items() if own and own not in (*DELIMITERS, "minimal")}

    def _open(self) -> TextIO:
        return self.path.open(encoding=self._encoding, newline="")

    def _csv_reader(self, lines: Iterable[str], strict: bool = False) -> Any:
        csv.field_size_limit(2**31 - 1)  # A value may be a book: pandas knows no limit either.
        return csv.reader(
            lines, delimiter=self.delimiter, quoting=self._quoting, skipinitialspace=self._skips_spaces, strict=strict
        )

    def chunks(self, wanted: Mapping[str, Wanted], names: Collection[str]) -> Iterator[Chunk]:
        """Yield the values of some columns in chunks, which are the same in each pass.

        Args:
            wanted: how the columns of all passes are read, the same in each.
            names: the columns of this pass.

        Raises:
            UserError: rows of different lengths, text in another encoding, or a damaged file.
        """
        if self.suffix == ".parquet" or self.path.stat().st_size > KEPT_BYTES:
            yield from self.read({name: wanted[name] for name in names})
            return
        self._kept = self._kept or list(self.read(wanted))
        for chunk in self._kept:
            yield {name: chunk[name] for name in names}

    def read(self, wanted: Mapping[str, Wanted], rows_at_once: int | None = None) -> Iterator[Chunk]:
        """Yield the values of columns in chunks, optionally smaller ones and none ahead, and keep nothing."""
        read = {".parquet": self._read_parquet, ".jsonl": self._read_json}.get(self.suffix, self._read_csv)

        na_values = {spelled(one) for one in self._dataset.na_values}

        def converted(frame: pd.DataFrame) -> Chunk:
            frame = self._without_headers(frame)
            return {name: without(values_of(frame[name], how), na_values) for name, how in wanted.items()}

        rows = 0
        with self._explained():
            self._check_rows()
            frames = read(wanted, min(rows_at_once or CHUNK_ROWS, CHUNK_ROWS))
            for chunk in background.in_order(converted, frames, threads=AHEAD, ahead=0 if rows_at_once else AHEAD):
                rows += num_rows_of(chunk)
                yield chunk
        if not rows:
            raise self.refused("it has no rows")

    def _without_headers(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return rows in which one that repeats the header, as in files that were joined, has only missing values."""
        if self.has_row_names or not self._header:
            return frame
        are_headers = np.ones(len(frame), bool)
        for name, text in zip(self.names, self._header, strict=False):
            if name in frame:
                if frame[name].dtype.kind in "fiub":  # At once: a header would make it texts.
                    return frame
                same = frame[name].isin(repeated([text])) if name == self.names[0] else frame[name] == text
                if not (are_headers := are_headers & same.to_numpy(bool)).any():
                    return frame
        frame.loc[are_headers & frame.index.isin(self._repeats)] = None
        return frame

    @cached_property
    def _repeats(self) -> list[int]:
        """The rows that repeat the whole header, of which a pass may read only some columns."""
        with self._open() as file:
            rows = self._csv_reader(islice(file, self.header_lines, None))
            several = enumerate(row for row in rows if len(row) > 1)
            first, others = repeated(self._header), self._header[1:]
            return [place for place, row in several if row[1:] == others and row[0] in first]

    def _read_csv(
        self, wanted: Mapping[str, Wanted], chunk_rows: int, codes: frozenset[str] = frozenset(), done: int = 0
    ) -> Iterator[pd.DataFrame]:
        """Yield the rows after the first ``done`` chunks.

        pandas infers the type of each column, which takes half the time of reading texts. But it would read the code
        01067 as 1067: from the first chunk in which it takes columns for numbers that are not, they are ``codes``,
        which are read as texts.
        """
        numbers = [name for name, how in wanted.items() if how == "number"]
        others = wanted.keys() - set(numbers) - codes
        with contextlib.suppress(pd.errors.EmptyDataError), self._open() as file:
            for _ in range(self.header_lines):  # With skiprows, pandas takes half as long again.
                file.readline()
            frames = pd.read_csv(
                file,
                sep=self.delimiter,
                header=None,
                names=self.names,
                index_col=False,
                usecols=list(wanted),
                dtype=dict.fromkeys(codes, "object"),
                na_values={name: sorted(MISSING_TEXTS | NO_NUMBER) for name in numbers},
                keep_default_na=False,
                decimal=self._dataset.decimal or ".",
                quoting=self._quoting,
                skipinitialspace=self._skips_spaces,
                chunksize=chunk_rows,
                low_memory=False,
            )
            for frame in islice(frames, done, None):
                if inferred := {name for name in others if not isinstance(frame[name].dtype, pd.StringDtype)}:
                    yield from self._read_csv(wanted, chunk_rows, codes | inferred, done)
                    return
                truths = [name for name in numbers if frame[name].dtype in (bool, object)]
                yield frame.astype(dict.fromkeys(truths, str)) if truths else frame  # "True" is not a number.
                done += 1

    def _check_rows(self) -> None:
        """Refuse rows with fewer or more values than the header, and a stray quote, which turns all rows up to the next
        quote into one value: pandas accepts both silently.

        Without quotes, counting delimiters is enough: Python's reader takes a second for 60 MB.
        """
        if self._rows_are_checked:
            return
        self._rows_are_checked = True
        width, above = len(self.names), self.header_lines
        # Trailing delimiters make values beyond the header, which are empty.
        named = len(self._header) if self._header and not self.has_row_names else width
        if named == width and self._is_even():
            return
        ragged: list[tuple[int, list[str], str]] = []
        count, end = 0, above
        of_row: list[str] = []
        several: list[tuple[int, int, bool]] = []
        """Rows of several lines: the first and the last line, and whether each line alone would be a row."""
        shown = ""
        with self._open() as file:
            rows = self._csv_reader(noted(islice(file, above, None), of_row), strict=True)
            try:
                for row in rows:
                    first, end = end + 1, above + rows.line_num
                    if row and (len(row) != width or any(row[named:])):
                        count += 1
                        ragged = ragged or [(first, row, of_row[-1])]
                    if len(of_row) > 1:
                        are_rows = all(text.count(self.delimiter) == width - 1 for text in of_row)
                        several.append((first, end, are_rows))
                        shown = shown or cut(repr("".join(of_row)), 80)
                    of_row.clear()
            except csv.Error as error:
                raise self.refused(
                    f"line {end + 1} opens a quote that no delimiter follows ({error}), so that lines {end + 1} to "
                    f"{above + rows.line_num} would be one row. Write a quote within quotes as two, or read quotes as "
                    "ordinary characters: --set dataset.quoting=none"
                ) from None
        for first, row, text in ragged:
            ends = ", which a carriage return alone (\\r) ends" if text.endswith("\r") else ""
            raise self.refused(
                f"{count} of its rows {'does' if count == 1 else 'do'} not have the {named} values of its header: line "
                f"{first} has {len(row)}: {cut(self.delimiter.join(row), 80)!r}{ends}. Fix or remove them, quote "
                f"values that contain {self.delimiter!r}, or set another delimiter (--set dataset.delimiter=';') or "
                "header line (--set dataset.header=2)"
            )
        if self._dataset.quoting is None and width > 1 and several and all(are_rows for *_, are_rows in several):
            first, end, _ = several[0]
            raise self.refused(
                f"line {first} opens a quote that line {end} closes, {shown}: either each of these lines "
                "is a row, or they are one value. Use --set dataset.quoting=none if each is a row, or --set "
                "dataset.quoting=minimal if it is one value"
            )

    def _is_even(self) -> bool:
        """Return whether all lines below the header provably have the same number of delimiters and no quote."""
        delimiter, signs = self.delimiter.encode(), f'{self.delimiter}\r\n"'
        if signs.encode(self._encoding, "replace").removeprefix(codecs.BOM_UTF8) != signs.encode("ascii", "replace"):
            return False  # In UTF-16, for example.
        line, others = delimiter * (len(self.names) - 1) + b"\n", bytes({*range(256)} - {*delimiter, *b'\n"'})
        with self.path.open("rb") as file:
            for _ in range(self.header_lines):
                file.readline()
            while block := file.read(BLOCK_BYTES) + file.readline():
                if b"\r" in block and block.count(b"\r") > block.count(b"\r\n"):  # Alone, it ends a row, too.
                    return False
                if text := block.rstrip(b"\r\n"):
                    marks = text.translate(None, others) + b"\n"
                    if marks != line * (len(marks) // len(line)):
                        return False
        return True

    def _read_parquet(self, wanted: Mapping[str, Wanted], chunk_rows: int) -> Iterator[pd.DataFrame]:
        for batch in open_parquet(self.path).iter_batches(chunk_rows, columns=list(wanted)):
            yield batch.to_pandas(ignore_metadata=True)  # A stored index is a column like the others.

    def _read_json(self, wanted: Mapping[str, Wanted], chunk_rows: int) -> Iterator[pd.DataFrame]:
        rows = self._json_rows()
        while some := list(islice(rows, chunk_rows)):
            yield pd.DataFrame({name: pd.Series([row.get(name) for row in some], dtype=object) for name in wanted})

    def _json_rows(self) -> Iterator[dict[str, Any]]:
        with self._open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    if isinstance(row := parsed_json(line), str):
                        if "\0" in line[:2]:
                            raise UnicodeError  # As in _names.
                        is_array = number == 1 and line.lstrip().startswith("[")
                        hint = ". It seems to be a JSON array: write one object per line" if is_array else ""
                        raise self.refused(f"line {number} is {row}{hint}")
                    yield row


def find_header(dataset: config.Table) -> tuple[config.Table, list[str]]:
    """Return a dataset with the number of the CSV header line, unless the user gave it, and lines that report it.

    It is the first line that names the targets; blank lines, comments, a title and ``sep=;``, Excel's note of the
    delimiter, may precede it.
    """
    path = config.project_root() / dataset.source
    if not path.is_file():
        return dataset, []
    with path.open("rb") as file:
        start = file.read(64)
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) and "encoding" not in dataset.model_fields_set:
        dataset = dataset.model_copy(update={"encoding": "utf-16"})
    is_csv = path.suffix.lower() in (".csv", ".tsv")
    if is_csv and NO_CSV.match(start):
        raise UserError(
            f"dataset.source = '{dataset.source}': it is not CSV but an Excel workbook, an archive, HTML, XML or JSON. "
            "Export the table as CSV; if each line is a JSON object, rename the file to .jsonl"
        )
    if not is_csv or "header" in dataset.model_fields_set:
        return dataset, []
    lines = _first_lines(path, dataset.encoding)
    named = [match[1] for line in lines[:LINES_ABOVE] if (match := EXCEL_DELIMITER.fullmatch(line.strip()))]
    given = dataset.delimiter or ("\t" if path.suffix.lower() == ".tsv" else None)
    delimiter = given or (named[0] if named else _delimiter(lines))
    reader, rows, place = csv.reader(lines, delimiter=delimiter, skipinitialspace=skips_spaces(lines, delimiter)), [], 0
    for row in reader:
        rows.append((place, [spelled(value) for value in row]))
        place = reader.line_num  # A row may have several lines.
    width = statistics.mode([len(row) for _, row in rows if row] or [0])
    targets = {spelled(name) for one in dataset.target for name in one.split(",")}
    named_first: dict[tuple[str, ...], int] = {}  # The header may be repeated.
    widest = 0
    for place, row in rows:
        filled = sum(map(bool, row))
        # The names may be numbers, such as years, but no row of values has more of them than the header above it.
        if targets and targets <= {*row} and (filled > widest or not any(map(NUMBER.fullmatch, row))):
            named_first.setdefault((*row,), place)
        widest = max(widest, filled)
    naming = [*named_first.values()]
    if len(naming) > 1 and naming[0] > 0:
        naming = []  # The target is not a name, but one of the values.
    if not naming:  # Then it is the first line that is no title: R writes one name fewer, because row names have none.
        naming = [place for place, row in rows if len(row) >= width - 1 and sum(map(bool, row)) > (width > 2)]
    place = min(naming, default=0)
    if not 0 < place < LINES_ABOVE:
        return dataset, []
    above = [cut(repr(text.strip()), 60) for text in lines[:place] if text.strip()]
    said = f"line {place + 1} names the columns; above it: {listed(above) or 'blank lines'}"
    update = {"header": place + 1, "delimiter": delimiter if named and delimiter != "," else dataset.delimiter}
    return dataset.model_copy(update=update), [said]


def doubtful_header(file: TableFile) -> str | None:
    """Return a note if the first line looks like values and not like column names, or has one name fewer than rows."""
    if file.has_row_names:
        return f"the header has one name fewer than a row has values: the first column is '{file.names[0]}'"
    if file.suffix not in (".csv", ".tsv") or not file.header_lines:
        return None
    numbers = [name for name in file.names if NUMBER.fullmatch(name)]
    # 2023, 2024, 2025 and 0, 1, 2 are column names.
    steps = set(np.diff(np.array(numbers, float)))
    are_series = steps == {1.0} or (len(numbers) > 2 and len(steps) == 1)
    if not numbers or (all(map(str.isdigit, numbers)) and (are_series or all(map(YEAR.fullmatch, numbers)))):
        return None
    return (
        f"the first line is read as the header: {cut(', '.join(file.names), 60)}. If the file has none, --set "
        "dataset.header=null names the columns column_1, column_2, ..."
    )


def _first_lines(path: Path, encoding: str) -> list[str]:
    """Return the first lines of a file; none if it cannot be read, which TableFile reports."""
    try:
        with path.open(encoding=encoding, newline="") as file:
            csv.field_size_limit(2**31 - 1)  # As TableFile reads them.
            return [line.lstrip("\ufeff") for line in islice(file, LINES_LOOKED_AT)]
    except (OSError, ValueError, LookupError):
        return []


def _delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter of the first line with several values: the one that gives the most values; a comma, which
    numbers may contain, only if no other one gives as many."""
    for line in lines:
        widths = {one: len(next(csv.reader([line], delimiter=one), [])) for one in DELIMITERS}
        if max(widths.values()) > 1 and not line.startswith("#"):
            return max(reversed(DELIMITERS), key=widths.__getitem__)
    return ","


def num_rows_of(chunk: Mapping[str, Values]) -> int:
    """Return the number of rows of some columns."""
    return len(next(iter(chunk.values()), ()))
