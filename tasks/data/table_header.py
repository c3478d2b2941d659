"""Finds the delimiter of a CSV file and the line that names its columns."""

import codecs
import csv
import re
import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from tasks import config
from tasks.data.table_files import TableFile
from tasks.system.errors import cut, listed

LINES_LOOKED_AT, LINES_ABOVE = 50, 20
"""The lines of CSV that are searched for the header, and the most that may stand above it."""
EXCEL_DELIMITER = re.compile(r"\"?sep=(.)\"?", re.IGNORECASE)
DELIMITERS = (";", "\t", "|", ",")


def open_file(dataset: config.Table) -> TableFile:
    """Return a dataset's file, with the delimiter that the description gives or the first lines show.

    Raises:
        UserError: it cannot be read as a table.
    """
    path = config.project_root() / dataset.source
    delimiter = dataset.delimiter
    if delimiter is None and path.suffix.lower() == ".csv" and path.is_file():
        delimiter = _delimiter(_first_lines(path, dataset.encoding)[(dataset.header or 1) - 1 :])
    decimal, is_quoted = dataset.decimal or ".", dataset.quoting == "minimal"
    return TableFile(path, dataset.source, delimiter, decimal, dataset.encoding, dataset.header, is_quoted)


def find_header(dataset: config.Table) -> tuple[config.Table, list[str]]:
    """Return a dataset with the line of CSV that names its columns, unless the user gave it, and lines that say so.

    Blank lines, comments, a title and ``sep=;``, Excel's note of the delimiter, may stand above it.
    """
    path = config.project_root() / dataset.source
    if path.suffix.lower() not in (".csv", ".tsv") or not path.is_file():
        return dataset, []
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) and "encoding" not in dataset.model_fields_set:
            dataset = dataset.model_copy(update={"encoding": "utf-16"})
    if "header" in dataset.model_fields_set:
        return dataset, []
    lines = _first_lines(path, dataset.encoding)
    named = [match[1] for line in lines[:LINES_ABOVE] if (match := EXCEL_DELIMITER.fullmatch(line.strip()))]
    given = dataset.delimiter or ("\t" if path.suffix.lower() == ".tsv" else None)
    delimiter = given or (named[0] if named else _delimiter(lines))
    reader = csv.reader(lines, delimiter=delimiter)
    rows, ends = [], [0]  # A row may have several lines.
    for row in reader:
        rows.append(row)
        ends.append(reader.line_num)
    width = statistics.mode([len(row) for row in rows if row] or [0])
    for place, row in zip(ends[:LINES_ABOVE], rows, strict=False):
        line, filled = lines[place], sum(bool(value.strip()) for value in row)
        if EXCEL_DELIMITER.fullmatch(line.strip()) or not filled or (line.startswith("#") and len(row) != width):
            continue
        # A title, or a sentence with commas. R writes a header that has one name less, for the names of rows.
        if len(row) < width - 1 or (filled == 1 and row[0].strip() and (len(row) < width or width > 2)):
            continue
        if not place:
            break
        above = [cut(repr(text.strip()), 60) for text in lines[:place] if text.strip()]
        said = f"line {place + 1} names the columns; above it: {listed(above) or 'blank lines'}"
        update = {"header": place + 1, "delimiter": delimiter if named and delimiter != "," else dataset.delimiter}
        return dataset.model_copy(update=update), [said]
    return dataset, []


def doubtful_header(file: TableFile) -> str | None:
    """Return a remark if the first line looks like values and not like names of columns."""
    if file.suffix not in (".csv", ".tsv") or not file.header:
        return None
    numbers = [float(name) for name in file.names if re.fullmatch(r"\s*[+-]?\d+([.]\d+)?\s*", name)]
    # 2023, 2024, 2025 and 0, 1, 2 are names of columns.
    if not numbers or (all(map(float.is_integer, numbers)) and len(set(np.diff(numbers))) < 2):
        return None
    return (
        f"the first line is taken for the header: {cut(', '.join(file.names), 60)}. A file without one: --set "
        "dataset.header=null, and its columns are column_1, column_2, ..."
    )


def _first_lines(path: Path, encoding: str) -> list[str]:
    """Return the first lines of a file; none if it cannot be read, which TableFile explains."""
    try:
        with path.open(encoding=encoding, newline="") as file:
            csv.field_size_limit(2**31 - 1)  # As TableFile reads them.
            return [line.lstrip("\ufeff") for line in islice(file, LINES_LOOKED_AT)]
    except (OSError, ValueError, LookupError):
        return []


def _delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter of the first line with several values: the one that gives the most; a comma, which may stand
    in numbers, only if no other gives as many."""
    for line in lines:
        widths = {one: len(next(csv.reader([line], delimiter=one), [])) for one in DELIMITERS}
        if max(widths.values()) > 1 and not line.startswith("#"):
            return max(DELIMITERS, key=widths.__getitem__)
    return ","
