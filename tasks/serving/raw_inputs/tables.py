"""Rows of tables for a model: CSV, JSON lines and Parquet."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet

from tasks.data.table_files import values_of
from tasks.serving.raw_inputs.examples import RawExamples, TextEncoding, Wanted, has_foreign_bytes, in_parts, places_of
from tasks.system.errors import UserError, cut, listed

DELIMITERS = (",", ";", "\t", "|")


@dataclass(frozen=True)
class TableReader:
    """Reads the columns that a model takes, so many rows at once."""

    wanted: Wanted
    part_rows: int
    encoding: TextEncoding
    max_field: int
    """Characters of a value in CSV: a quote that nothing closes makes one value of all that follows."""

    def read_csv(self, name: str, file: IO[bytes], folder: Path) -> Iterator[RawExamples]:
        """Yield the rows of CSV, whose first line names the columns; paths of images in them begin at ``folder``."""
        csv.field_size_limit(self.max_field)
        first = 1
        with self.encoding.open(file) as text:
            header = text.readline()
            reader = csv.reader(chain([header], text), delimiter=self._delimiter(header))
            # As prepare names the one without a name, which pandas writes for its index.
            names = [one if one.strip() else f"column {place}" for place, one in enumerate(next(reader, []), 1)]
            self._need(name, [one for one in self.wanted.columns if one not in names], names)
            if twice := [one for one in self.wanted.columns if names.count(one) > 1]:
                raise UserError(f"'{name}' has the column {listed([*map(repr, twice)])} more than once: leave one")
            wanted = {column: names.index(column) for column in self.wanted.columns}
            for rows in in_parts(_csv_rows(reader), self.part_rows):
                broken = {place: why for place, row in enumerate(rows) if (why := self._why_broken(row, names, wanted))}
                columns = {
                    column: [None if place in broken else row[index] for place, row in enumerate(rows)]
                    for column, index in wanted.items()
                }
                yield RawExamples(places_of(name, first, len(rows)), columns, broken, folder=folder)
                first += len(rows)

    def _why_broken(self, row: list[str] | str, names: Sequence[str], wanted: Mapping[str, int]) -> str | None:
        if isinstance(row, str):
            return row
        if len(row) != len(names):
            return f"the row has {len(row)} values, and the header {len(names)}"
        return self.encoding.contradiction if any(has_foreign_bytes(row[index]) for index in wanted.values()) else None

    def _delimiter(self, header: str) -> str:
        """Return what stands between the names of a header: whatever makes most of the model's columns."""

        def count(delimiter: str) -> int:
            names = next(csv.reader([header], delimiter=delimiter), [])
            return sum(column in names for column in self.wanted.columns)

        return max(DELIMITERS, key=count)

    def _need(self, name: str, absent: Sequence[str], there: Sequence[str]) -> None:
        if absent:
            raise UserError(
                f"'{name}' has not the {'column' if len(absent) == 1 else 'columns'} {listed([*map(repr, absent)])}, "
                f"which the model takes. There: {cut(listed([*map(repr, there)])) or 'nothing'}"
            )

    def read_json(self, name: str, file: IO[bytes], folder: Path) -> Iterator[RawExamples]:
        """Yield the objects of JSON lines."""
        first, seen = 1, False
        for lines in in_parts((line for line in file if line.strip()), self.part_rows):
            rows, broken = [], {}
            for place, line in enumerate(lines):
                row: dict[str, Any] = {}
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        broken[place], row = f"no JSON object: {cut(repr(row), 80)}", {}
                except (ValueError, RecursionError) as error:
                    broken[place] = f"no JSON ({error})"
                rows.append(row)
            there = set().union(*rows)
            if not seen and there:
                self._need(name, [one for one in self.wanted.columns if one not in there], sorted(there))
                seen = True
            columns = {column: [row.get(column) for row in rows] for column in self.wanted.columns}
            for place, row in enumerate(rows):
                if nested := [one for one in self.wanted.columns if isinstance(row.get(one), dict | list)]:
                    broken.setdefault(place, f"column '{nested[0]}': has values in a value")
            yield RawExamples(places_of(name, first, len(rows)), columns, broken, folder=folder)
            first += len(rows)

    def read_parquet(self, name: str, path: Path) -> Iterator[RawExamples]:
        """Yield the rows of Parquet."""
        with pyarrow.parquet.ParquetFile(path) as file:
            names = list(file.schema_arrow.names)
            self._need(name, [one for one in self.wanted.columns if one not in names], names)
            first = 1
            for batch in file.iter_batches(self.part_rows, columns=list(self.wanted.columns)):
                columns = {
                    column: values_of(batch.column(column), "number" if kind == "number" else "text")
                    for column, kind in self.wanted.columns.items()
                }
                yield RawExamples(places_of(name, first, batch.num_rows), columns, folder=path.parent)
                first += batch.num_rows


def _csv_rows(reader: Any) -> Iterator[list[str] | str]:
    """Yield the rows of CSV, and the reason in place of one that cannot be read; empty lines are none."""
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"no row of CSV ({error})"
            continue
        if row:
            yield row
