"""A table: CSV, TSV, Parquet or JSON lines, with target columns and columns of numbers, words or images."""

import ast
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.types import union_categoricals

from tasks import config
from tasks.data import splits
from tasks.data.columns import check_complete, checked, fill_in, top_of
from tasks.data.encoding import BrokenImages, Encoder, cells
from tasks.data.encoding.cells import BadValue, Values, Wanted
from tasks.data.encoding.pictures import inside
from tasks.data.fitting import Statistics, features_of, sort_classes
from tasks.data.images import Header, common_size, read_header, refuse_broken
from tasks.data.kinds import Block, Examples, Metadata
from tasks.data.samples import na_option
from tasks.data.splits import NAMES, Rows
from tasks.data.tables import TableFile, doubtful_header, find_header, num_rows_of
from tasks.records import Feature, HeldOut, Target
from tasks.system import background, machine
from tasks.system.errors import UserError, cut, listed, one_of

BLOCK_BYTES = 8 * 2**20
"""The size of a block of encoded rows, all features together."""
AHEAD = 4
"""The most blocks that are encoded while one is written, on any number of cores, because each needs memory."""
IMAGES_AT_ONCE = 4
"""The number of images that a thread decodes before it takes the next ones."""
TEXTS: dict[str, Wanted] = dict.fromkeys(("datetime", "text", "image"), "text")
WANTED: dict[str, Wanted] = {"number": "number", "category": "repeated"} | TEXTS
ROLES: dict[str, Wanted] = {"weight": "number", "group": "repeated", "time": "text", "split_column": "repeated"}
COMMA = re.compile(r"[^,.]*\d,\d{3}[^\d,.]*")
"""A number whose only mark is a comma before three digits."""
BETWEEN_QUOTES = re.compile(r"(?<=['\"])\s+(?=['\"])")
"""The gaps in NumPy's lists, which have no commas: Python would join the strings around them."""
Mask = npt.NDArray[np.bool_]


def guess(dataset: config.Table) -> tuple[config.Table, list[str]]:
    """Return the dataset with its columns and task guessed from the data, and lines that report the guesses.

    Raises:
        UserError: the file cannot be read, a column of the description is missing, no input column is left, or
            the target is ambiguous.
    """
    dataset, said = find_header(dataset)
    file = TableFile(dataset)
    said += [text for text in [doubtful_header(file)] if text]
    try:
        filled, lines = fill_in(checked(dataset, file), file)
    except UserError as error:
        raise UserError("; ".join([*said, str(error)])) from None
    if lines and all(column.kind == "ignore" for column in (filled.columns or {}).values()):
        if not filled.columns:
            raise UserError(f"dataset.source = '{dataset.source}': besides the target, it has no column to learn from")
        # Refused here, because only the guesses contain the reasons; params.yaml does not.
        taken = cut(re.sub(r"\n {3,}", " ", "\n".join(lines[1:])).strip().replace("\n", ";"), 300)
        raise UserError(
            f"dataset.source = '{dataset.source}': no column is left to learn from. Their kinds: {taken}. "
            "Set the kind of one: --set dataset.columns.NAME=number, datetime, category, text or image"
        )
    return filled, [*said, *lines]


def examples(dataset: config.Table) -> Examples:
    """Return the rows of a table, in their order, in blocks of ``BLOCK_BYTES``, or of one row if it is larger.

    All numbers and datetimes together form the feature ``number``, all categories ``category``; each column of texts or
    images is a separate feature. Vocabularies, replacements of missing numbers and text lengths are computed from the
    training split only.

    Raises:
        UserError: no such file or columns, a value that its column cannot hold, or rows that cannot be split.
    """
    file = TableFile(dataset)
    dataset = checked(dataset, file)
    if dataset.columns is not None:
        check_complete(dataset, file)
    if dataset.columns is None or dataset.task == "auto":
        dataset, _ = fill_in(dataset, file)
    return of_rows(ScannedTable(dataset, file))


def of_rows(table: "ScannedTable") -> Examples:
    """Return the rows of a table after its first pass, see ``examples``."""
    dataset = table.dataset
    try:
        parts, made = split(table)
    except UserError:  # Perhaps because of the broken ones.
        refuse_broken(dataset, table.broken)
        raise

    def rows_of(split: str) -> Rows:
        """Return the rows of a split; after all blocks were read, without the rows of broken images."""
        return np.flatnonzero(parts == NAMES.index(split))

    if table.weights is not None and not table.weights[rows_of("train")].any():
        raise table.refuse("weight", "all rows of the training split have the weight 0")
    features, vocabularies = features_of(dataset, _fitted(table, parts), table.shapes)
    held_out = None
    if "test" in made and dataset.time is None:
        held_out = HeldOut(num_examples=len(rows_of("test")), seed=dataset.seed)
    return Examples(
        version="1",
        features=features,
        target=table.target,
        splits=tuple(name for name in NAMES if len(rows_of(name))),
        blocks=partial(_blocks, table, parts, made, features, vocabularies),
        encoded=partial(_blocks, table, parts, made),
        vocabularies=vocabularies,
        held_out=held_out,
        rows_of=rows_of,
        name_of=lambda split, row: f"row {rows_of(split)[row] + 1}",
        metadata_of=(lambda split: _metadata(table, rows_of(split))) if dataset.metadata else None,
        origin={"csv": table.csv},
    )


class ScannedTable:
    """The first pass over a table, before rows are encoded: targets, groups, times, weights, missing values.

    Attributes:
        labels: of each row, as in ``records.PreparedSplit``, but classes in fewer bytes; arbitrary for unusable rows.
        weights: float32 (n,) or None.
        usable: bool (n,), whether each row becomes an example.
        broken: the reasons why images are damaged, by path, which are not yet reported.
        shapes: height, width and channels of each column of images.
        sizes: height and width of each row's image before it is resized, (n, 2), by column; zeros without one.
        columns: the values of the columns that this pass reads.
    """

    def __init__(self, dataset: config.Table, file: Any) -> None:
        self.dataset, self._file = dataset, file
        self.folder: Path = file.folder
        self.kinds = {name: one for name, one in (dataset.columns or {}).items() if one.kind != "ignore"}
        are_numbers = dataset.task == "regression" or len(dataset.target) > 1
        roles = {name: WANTED[kind] for name, kind in dataset.metadata.items()}
        roles |= dict.fromkeys(dataset.target, "number" if are_numbers else "repeated")
        roles |= {name: how for role, how in ROLES.items() if (name := getattr(dataset, role)) is not None}
        self.features: dict[str, Wanted] = {
            # Rows are grouped by the text of a value.
            name: one.format or "datetime" if one.kind == "datetime" and name not in roles else WANTED[one.kind]
            for name, one in self.kinds.items()
        }
        if not self.features:
            raise self.refuse("columns", "leaves no column to learn from: set one to a kind other than ignore")
        self._wanted = roles | self.features
        self.named_target = f", dataset.target = '{dataset.target[0]}'" if isinstance(file, TableFile) else ""
        self.csv = file.as_written if isinstance(file, TableFile) else {}
        strict = {name: one.missing for name, one in self.kinds.items() if one.missing != "fill"}
        images = [name for name, one in self.kinds.items() if one.kind == "image"]
        parts = [chunk for _, chunk in self.chunks({*roles, *strict, *images})]
        self.columns = {name: _joined([part[name] for part in parts]) for name in parts[0]}
        self.usable = np.ones(sum(map(num_rows_of, parts)), bool)
        self.empty = self._empty_rows()
        self.usable &= ~self.empty
        for name, how in strict.items():
            missing = self.is_missing(name, self.columns[name]) & ~self.empty
            if how == "drop":
                self.usable &= ~missing
            elif missing.any():
                raise UserError(
                    f"dataset.columns.{name}.missing = 'stop': {int(missing.sum()):,} of {len(missing):,} values are "
                    f"missing, the first in row {int(missing.argmax()) + 1}. Fix them, or set missing: fill or drop "
                    f"(dataset.source = '{dataset.source}')"
                )
        self.broken: dict[str, str] = {}
        self.sizes: dict[str, npt.NDArray[np.int32]] = {}
        self.shapes = self._look_at_images(images)
        self.target, self.labels = self._read_target()
        self.weights: npt.NDArray[np.float32] | None = None
        if dataset.weight is not None:
            weights = self.read(dataset.weight, self.numbers)
            if (weights < 0).any():
                raise self.refuse("weight", f"has a value below 0 in row {int((weights < 0).argmax()) + 1}")
            self.weights = weights.astype(np.float32)
        for key in ROLES:
            if (name := getattr(dataset, key)) is not None:
                self._need(key, name)

    def is_missing(self, name: str, values: Values) -> Mask:
        """Return which rows have no value in a column, bool (n,), depending on how the column is read."""
        is_datetime = name in self.kinds and self.kinds[name].kind == "datetime"
        if (self._wanted[name] == "number" or is_datetime) and values.dtype == object:
            return np.fromiter(map(cells.is_no_number, values), bool, len(values))
        return cells.is_missing(values, self.dataset.not_missing)

    def chunks(self, wanted: Collection[str]) -> Iterator[tuple[int, dict[str, Values]]]:
        """Yield the number of the first row, and the values of some columns."""
        first = 0
        for chunk in self._file.chunks(self._wanted, wanted):
            yield first, chunk
            first += num_rows_of(chunk)

    def refuse(self, key: str, reason: str) -> UserError:
        """Return the message for a setting that contradicts the data."""
        value = getattr(self.dataset, key)
        shown = ", ".join(value) if isinstance(value, tuple) else value
        named = f"dataset.{key}" if isinstance(shown, dict) else f"dataset.{key} = '{shown}'"
        return UserError(f"{named}: {reason} (dataset.source = '{self.dataset.source}')")

    def refused(self, bad: BadValue, row: int, setting: str = "") -> UserError:
        """Return the message for a value that does not fit its column, in a row counted from 0.

        Args:
            bad: the value.
            row: its row.
            setting: another value of the setting that decides how the column is read.
        """
        if bad.column in self.dataset.target:
            setting = "dataset.task=classification" if len(self.dataset.target) == 1 else "another dataset.target"
        setting = setting or f"dataset.columns.{bad.column} = category, text or ignore"
        is_word = isinstance(bad.value, str) and len(bad.value) < 40
        missing = f"; if it means that there is no value: {na_option([str(bad.value)])}" if is_word else ""
        return UserError(
            f"dataset.source = '{self.dataset.source}': the column '{bad.column}' has the value "
            f"{cut(repr(bad.value), 80)} in row {row + 1}, counted without the header, which {bad.reason}. Fix it, or "
            f"set {setting}{missing}"
        )

    def read(self, name: str, read: Callable[[Values, str], cells.Numbers], setting: str = "") -> cells.Numbers:
        """Return the numbers of a column; ``setting`` is that of ``refused``."""
        try:
            return read(self.columns[name], name)
        except BadValue as bad:
            raise self.refused(bad, bad.row, setting) from None

    def numbers(self, values: Values, name: str) -> cells.Numbers:
        """Return values of a column as numbers; the error is that of ``cells.numbers``."""
        self.refuse_comma(values, name)
        column = (self.dataset.columns or {}).get(name)
        return cells.numbers(values, name, self.dataset.decimal or ".", column.unit if column else None)

    def refuse_comma(self, values: Values, name: str, first: int = 0) -> None:
        """Refuse a comma in a number if none of the first rows, which decide the decimal mark, has a mark.

        Args:
            values: some of a column's values.
            name: the column.
            first: the row of the first value.
        """
        if self.dataset.decimal is None and getattr(values, "dtype", None) in (None, object):
            for row, value in enumerate(values, first + 1):
                if isinstance(value, str) and COMMA.fullmatch(value):
                    raise UserError(
                        f"dataset.source = '{self.dataset.source}': the column '{name}' has {cut(repr(value), 80)} in "
                        f"row {row} below the header. Its comma may be a decimal mark or separate thousands: "
                        "--set \"dataset.decimal=','\" or --set \"dataset.decimal='.'\""
                    )

    def truths(self, values: Values, name: str) -> cells.Numbers:
        """Return the values of a target as numbers: 0 for False, 1 for True."""
        return self.numbers(values if values.dtype != object else [*map(cells.truth, values)], name)

    def times(self, name: str) -> cells.Numbers:
        """Return the keys by which rows are ordered: numbers, or days since 1970."""
        column = (self.dataset.columns or {}).get(name)
        with contextlib.suppress(BadValue):
            return self.numbers(self.columns[name], name)
        return self.read(name, partial(cells.days, form=column.format if column else None), "another dataset.time")

    def _empty_rows(self) -> Mask:
        """Return which rows have no value in any column that is used, bool (n,), as below a table of Excel's."""
        if self.dataset.separator is not None:  # Such a row is an example without a label.
            return np.zeros(len(self.usable), bool)
        empty: Mask = np.all([self.is_missing(name, self.columns[name]) for name in self.dataset.target], 0)
        for first, chunk in self.chunks(self._wanted) if empty.any() else ():
            rows = slice(first, first + num_rows_of(chunk))
            for name, values in chunk.items() if empty[rows].any() else ():
                empty[rows] &= self.is_missing(name, values)
        if empty.any():
            count = f"{int(empty.sum()):,} of {len(empty):,} rows"
            print(
                f"left out: {count} without a value in the columns that are used, or that repeat the header",
                file=sys.stderr,
            )
        return empty

    def _look_at_images(self, names: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        """Return height, width and channels of each column of images; leave out the rows of broken ones."""
        found: dict[str, tuple[Rows, dict[int, Header]]] = {}
        for name in names:
            # Unchanged, because a file name may have another Unicode form than NFC.
            values = cells.rows_of(self.columns[name])
            missing = cells.is_missing(values).tolist()
            paths = ["" if absent else str(value) for value, absent in zip(values, missing, strict=True)]
            places, texts = pd.factorize(np.array(paths, object))
            used = np.unique(places[self.usable]).tolist()
            seen = {place: self._header(texts[place]) for place in used if texts[place]}
            self.broken |= {texts[place]: one for place, one in seen.items() if isinstance(one, str)}
            headers = {place: one for place, one in seen.items() if isinstance(one, Header)}
            self.usable &= ~np.isin(places, [place for place, text in enumerate(texts) if text in self.broken])
            sizes = np.array([headers[n].size if n in headers else (0, 0) for n in range(len(texts))], np.int32)
            self.sizes[name] = sizes[places]
            found[name] = places, headers
        if self.dataset.on_broken == "skip":
            refuse_broken(self.dataset, self.broken)
            self.broken = {}
        shapes = {}
        for name, (places, headers) in found.items():
            shown = [headers[place] for place in np.unique(places[self.usable]).tolist() if place in headers]
            if not shown:
                refuse_broken(self.dataset, self.broken)
                raise UserError(
                    f"dataset.columns.{name} = image: no row has an image that can be used. Set its kind to ignore "
                    f"(dataset.source = '{self.dataset.source}')"
                )
            shapes[name] = (*common_size(self.dataset, shown), 1 if all(one.is_grey for one in shown) else 3)
        return shapes

    def _header(self, text: str) -> Header | str:
        """Return the header of an image, or why it cannot be used."""
        try:
            path = inside(self.folder, text)
        except ValueError as error:
            return str(error)
        if not os.path.isfile(path):  # Also of a name that is too long for one.
            return "no such file"
        if top_of(text) not in self.dataset.images and "." not in self.dataset.images:
            return "not in dataset.images, which DVC tracks"
        return read_header(path)

    def _need(self, key: str, name: str) -> None:
        """Refuse rows without a value in a column that is not a feature; or leave them out, and print how many."""
        missing = self.is_missing(name, self.columns[name]) & ~self.empty
        if not missing.any():
            return
        texts = {value.strip() for value in cells.different(self.columns[name])[0] if isinstance(value, str)}
        keep = ", ".join(f"'{text}'" for text in sorted(texts & cells.MISSING_TEXTS - {""}))
        hint = f' ({keep} is read as missing; --set "dataset.not_missing=[{keep}]" keeps it as a value)' if keep else ""
        count = f"{int(missing.sum()):,} of {len(missing):,} rows"
        if self.dataset.on_broken == "skip":
            self.usable &= ~missing
            gone = f", and with them the class {keep}" if keep and key == "target" else ""
            print(f"left out: {count} without a value of dataset.{key} = '{name}'{gone}{hint}", file=sys.stderr)
            return
        raise UserError(
            f"dataset.{key} = '{name}': no value in {count}{hint}. Counted without the header, they are "
            f"{listed([str(row + 1) for row in np.flatnonzero(missing).tolist()])}. Fix them, or leave them out: "
            f"dataset.on_broken=skip (dataset.source = '{self.dataset.source}')"
        )

    def texts_of(self, name: str) -> tuple[list[str], Rows]:
        """Return the distinct texts of a column, and each row's index among them, int64 (n,); '' is missing."""
        values, rows = cells.different(self.columns[name])
        missing = cells.is_missing(values, self.dataset.not_missing).tolist()
        places: dict[str, int] = {}
        texts = ["" if absent else cells.spelled(one) for one, absent in zip(values, missing, strict=True)]
        of_value = np.array([places.setdefault(text, len(places)) for text in texts], np.int64)
        return list(places), of_value[rows]

    def _read_target(self) -> tuple[Target, npt.NDArray[Any]]:
        dataset = self.dataset
        if dataset.separator is None:  # With one, a row without a value has no label.
            for name in dataset.target:
                self._need("target", name)
        if not self.usable.any():
            raise self.refuse("target", "no row is left that has a value in each column that needs one")
        if dataset.task == "regression":
            values = np.stack([self.read(name, self.truths) for name in dataset.target], 1)
            if not np.ptp(values[self.usable], 0).any():
                raise self.refuse(
                    "target", f"has only the value {values[self.usable][0, 0]:g}: nothing is left to learn"
                )
            target = Target(task="regression", num_outputs=values.shape[1], columns=dataset.target)
            return target, values.astype(np.float32)
        names, labels = self._classes() if dataset.task == "classification" else self._labels()
        found = {"task": dataset.task, "num_outputs": len(names), "class_names": names, "columns": dataset.target}
        return Target.model_validate(found), labels

    def _classes(self) -> tuple[list[str], npt.NDArray[Any]]:
        texts, places = self.texts_of(self.dataset.target[0])
        used = np.flatnonzero(np.bincount(places[self.usable]))
        names = sort_classes([texts[place] for place in used.tolist()])
        if len(names) < 2:
            refuse_broken(self.dataset, self.broken)
            raise self.refuse("target", f"has only the value '{names[0]}': a classification needs two classes")
        numbers = {name: number for number, name in enumerate(names)}
        of_text = np.array([numbers.get(text, 0) for text in texts], np.min_scalar_type(len(names)))
        return names, of_text[places]

    def _labels(self) -> tuple[list[str], npt.NDArray[np.uint8]]:
        dataset = self.dataset
        if len(dataset.target) > 1:
            numbers = np.stack([self.read(name, self.truths) for name in dataset.target], 1)
            if (wrong := ~np.isin(numbers, (0, 1)) & self.usable[:, np.newaxis]).any():
                row, place = np.argwhere(wrong)[0].tolist()
                raise self.refuse(
                    "target",
                    f"the column '{dataset.target[place]}' has {numbers[row, place]:g} in row {row + 1}, but labels "
                    "are 0 or 1. For other numbers, set dataset.task=regression",
                )
            return list(dataset.target), np.nan_to_num(numbers).astype(np.uint8)
        if dataset.separator is None:
            raise self.refuse("target", "contains several labels: set their separator, such as dataset.separator=';'")
        texts, places = self.texts_of(dataset.target[0])
        sets = [set(_labels_of(text, dataset.separator)) for text in texts]
        names = sorted(set().union(*sets))
        if len(names) < 2:
            raise self.refuse("target", f"has {len(names)} labels, but needs at least two")
        return names, np.array([[name in own for name in names] for own in sets], np.uint8)[places]


def _labels_of(text: str, separator: str) -> list[str]:
    """Return the labels in a text: the parts between separators, or the elements of a Python or JSON list."""
    if cells.LIST.fullmatch(text):
        elements = BETWEEN_QUOTES.sub(", ", text.strip())
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return [cells.spelled(label) for label in ast.literal_eval(elements) if label is not None]
        text = text.strip()[1:-1]
    return [label for one in text.split(separator) if (label := one.strip().strip("'\""))]


def _joined(parts: Sequence[Values]) -> Values:
    """Return the values of all parts of a column."""
    if not all(hasattr(one, "codes") for one in parts):
        return np.concatenate(parts)
    if len({one.categories.dtype for one in parts}) > 1:  # Numbers, and words in a later chunk of JSON.
        parts = [pd.Categorical.from_codes(one.codes, one.categories.astype(object)) for one in parts]
    return union_categoricals(parts)


def split(table: ScannedTable) -> tuple[npt.NDArray[np.int8], set[str]]:
    """Return the index of each row's split in ``NAMES``, int8 (n,), or -1 for a row that is left out; and the splits
    that no column defines, which were drawn.

    Raises:
        UserError: a split would be empty, or a group would be in two splits.
    """
    dataset = table.dataset
    parts = {} if dataset.split_column is None else _by_column(table, dataset.split_column)
    # A split without rows in the split column is drawn from the training rows.
    train = parts.get("train", table.usable)
    absent = [name for name in ("test", "validation") if name not in parts]
    wanted = splits.counts_of(dataset, int(train.sum()), absent)
    of_row = np.full(len(train), -1, np.int8)
    for name, mask in parts.items():
        of_row[mask] = NAMES.index(name)
    divided = _divided(table, train, wanted) if wanted else {}
    rows = np.flatnonzero(train)  # Not earlier, because it takes as much memory as what is drawn.
    for name, own in divided.items():
        of_row[rows[own]] = NAMES.index(name)
    return of_row, set(wanted)


def _divided(table: ScannedTable, rows: Mask, wanted: dict[str, int]) -> splits.Parts:
    """Return the places, among some rows, of the training split and of each wanted split with its number of rows."""
    dataset, count = table.dataset, int(rows.sum())
    if dataset.group is not None:
        groups, of_row = table.texts_of(dataset.group)
        used, of_row = np.unique(of_row[rows], return_inverse=True)
        if len(used) < len(wanted) + 1:
            raise table.refuse("group", f"has {len(used)} values, but {len(wanted) + 1} splits need at least one each")
        order = sorted(range(len(used)), key=lambda place: groups[used[place]])
        return splits.by_group(np.argsort(order)[of_row], dataset.seed, wanted)
    if dataset.time is not None:
        try:
            return splits.by_time(table.times(dataset.time)[rows], wanted)
        except ValueError as error:
            name, count = error.args
            raise table.refuse(
                "time", f"no rows older than the {count} newest are left to train on: set a smaller dataset.{name}"
            ) from None
    if table.target.task == "classification":
        return splits.by_class(table.labels[rows], table.target.class_names, dataset, wanted, table.named_target)
    return splits.by_class(np.zeros(count, np.uint8), ("",), dataset, wanted)


def _by_column(table: ScannedTable, column: str) -> dict[str, Mask]:
    """Return which rows are in each split that a column of the table defines."""
    dataset = table.dataset
    texts, places = table.texts_of(column)
    names = [splits.WORDS.get(text.lower()) for text in texts]
    if unknown := [texts[place] for place in np.unique(places[table.usable]).tolist() if names[place] is None]:
        raise table.refuse("split_column", one_of("split", unknown[0], splits.WORDS))
    parts = {name: np.array([one == name for one in names])[places] & table.usable for name in NAMES}
    parts = {name: mask for name, mask in parts.items() if mask.any()}
    if "train" not in parts:
        raise table.refuse("split_column", f"has {', '.join(parts)}: it also needs rows to train on")
    if dataset.group is not None:
        groups, of_row = table.texts_of(dataset.group)
        seen = np.stack([np.bincount(of_row[mask], minlength=len(groups)) > 0 for mask in parts.values()])
        if (leaking := np.flatnonzero(seen.sum(0) > 1)).size:
            raise table.refuse(
                "group",
                f"{leaking.size} of its values are in several splits of '{column}', such as "
                f"'{groups[leaking[0]]}': put all rows of each into one split",
            )
    return parts


def _metadata(table: ScannedTable, rows: Rows) -> dict[str, Metadata]:
    """Return the metadata columns of some rows, with None for a missing value."""
    found = {}
    for name, kind in table.dataset.metadata.items():
        values: list[Any]
        if kind == "category":
            texts, places = table.texts_of(name)
            values = [texts[place] or None for place in places[rows].tolist()]
        else:
            read = cells.days if kind == "datetime" else table.numbers
            numbers = table.read(name, read, f"dataset.metadata.{name} = category")[rows]
            values = [None if math.isnan(number) else number for number in numbers.tolist()]
        found[name] = Metadata(kind, values)
    return found


def _fitted(table: ScannedTable, parts: npt.NDArray[np.int8]) -> list[Statistics]:
    """Return the statistics of the training split for each column except images."""
    columns = [Statistics(name, one, table.dataset) for name, one in table.kinds.items() if one.kind != "image"]
    for first, chunk in table.chunks(table.features):
        rows = np.flatnonzero(parts[first : first + num_rows_of(chunk)] == 0)
        for column in columns:
            if column.kind == "number":
                table.refuse_comma(chunk[column.name], column.name, first)
            try:
                column.add(chunk[column.name][rows])
            except BadValue as bad:
                raise table.refused(bad, first + int(rows[bad.row])) from None
    return columns


def _blocks(
    table: ScannedTable,
    parts: npt.NDArray[np.int8],
    made: set[str],
    features: Mapping[str, Feature],
    vocabularies: Mapping[str, Sequence[Sequence[str]]],
) -> Generator[Block]:
    """Yield the examples of all splits; the next blocks are encoded while one is written."""
    width = sum(np.dtype(one.dtype).itemsize * math.prod(one.shape) for one in features.values())
    rows_a_block = max(1, BLOCK_BYTES // width)

    def some_rows() -> Iterator[tuple[str, Rows, dict[str, Values]]]:
        for first, chunk in table.chunks(table.features):
            of_row = parts[first : first + num_rows_of(chunk)]
            for number, name in enumerate(NAMES):
                rows = np.flatnonzero(of_row == number)
                for place in range(0, len(rows), rows_a_block):
                    some = rows[place : place + rows_a_block]
                    yield name, first + some, {column: values[some] for column, values in chunk.items()}

    threads = min(machine.usable_cores(), AHEAD)
    with ThreadPool(machine.usable_cores()) as pictures:
        described = {name: one.model_dump() for name, one in features.items()}
        decode = partial(pictures.imap, chunksize=IMAGES_AT_ONCE)
        encoder, broken = Encoder(described, vocabularies, table.folder, decode), dict(table.broken)

        def encode(given: tuple[str, Rows, dict[str, Values]]) -> Block:
            name, places, own = given
            images: BrokenImages = {}
            try:
                encoded = encoder.encode(own, images)
            except BadValue as bad:
                raise table.refused(bad, int(places[bad.row])) from None
            for (column, row), reason in images.items():
                broken[str(own[column][row])] = reason.removeprefix("is not a whole image (").removesuffix(")")
            whole = np.ones(len(places), bool)
            whole[[row for _, row in images]] = False
            if images:
                encoded = {feature: one[whole] for feature, one in encoded.items()}
            missing = {column: int(table.is_missing(column, values)[whole].sum()) for column, values in own.items()}
            used = places[whole]
            parts[places[~whole]] = -1
            weights = None if table.weights is None else table.weights[used]
            labels = table.labels[used].astype(table.target.label_dtype, copy=False)
            return Block(name, encoded, labels, weights, missing)

        yield from background.in_order(encode, some_rows(), threads, ahead=threads)
    refuse_broken(table.dataset, broken)
    if "validation" in made:
        count = int((parts == NAMES.index("validation")).sum())
        print(
            f"the table has no validation split, so {count:,} of its rows become the validation split",
            file=sys.stderr,
        )
