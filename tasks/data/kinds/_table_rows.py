"""The rows of a table: which can be used, what each is to teach, and which split it belongs to."""

import ast
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tasks import config
from tasks.data.encoding import cells
from tasks.data.encoding.cells import BadValue, Values
from tasks.data.encoding.pictures import inside
from tasks.data.kinds._columns import sort_classes
from tasks.data.kinds.image_folder import Header, common_size, decode_rest, read_header
from tasks.data.table_columns import top_of
from tasks.data.table_files import TableFile, Wanted, num_rows_of
from tasks.records import Target
from tasks.system.errors import UserError, cut, listed

WANTED: dict[str, Wanted] = {
    "number": "number",
    "datetime": "text",
    "category": "repeated",
    "text": "text",
    "image": "text",
}
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


class ScannedTable:
    """What all rows must be looked at for before one can be encoded: targets, groups, times, weights, missing values.

    Attributes:
        labels: of each row, as in ``records.PreparedSplit``; of one that cannot be used, anything.
        weights: float32 (n,) or None.
        usable: bool (n,), whether each row becomes an example.
        metadata: of each row by column: an array of texts, '' for a missing one, or of numbers, NaN for a missing one.
        parts: in chunks, the values of the columns that are looked at here.
    """

    def __init__(self, dataset: config.Table, file: TableFile) -> None:
        self.dataset, self._file = dataset, file
        self.kinds = {name: one for name, one in (dataset.columns or {}).items() if one.kind != "ignore"}
        roles = self._roles()
        self.features: dict[str, Wanted] = {
            # Rows are grouped by what is written.
            name: one.format or "datetime" if one.kind == "datetime" and name not in roles else WANTED[one.kind]
            for name, one in self.kinds.items()
        }
        if not self.features:
            raise self.refuse("columns", "leaves no column to learn from: give one a kind other than ignore")
        self.folder = (config.project_root() / dataset.source).parent
        strict = {name: self.features[name] for name, one in self.kinds.items() if one.missing != "fill"}
        images = {name: self.features[name] for name, one in self.kinds.items() if one.kind == "image"}
        self._wanted = {**self.features, **{name: how for name, how in roles.items() if name not in self.features}}
        parts: dict[str, list[Values]] = {name: [] for name in {**roles, **strict, **images}}
        length = 0
        for first, chunk in self.chunks({name: self._wanted[name] for name in parts}):
            length = first + num_rows_of(chunk)
            for name, values in chunk.items():
                parts[name].append(values)
        self.usable = np.ones(length, bool)
        self._use_missing({name: self._missing(name, parts[name]) for name in strict})
        self.shapes = self._look_at_images({name: parts[name] for name in images})
        self.target, self.labels = self._read_target({name: parts[name] for name in dataset.target})
        weights = None if dataset.weight is None else self._numbers(dataset.weight, parts[dataset.weight])
        if weights is not None and (weights < 0).any():
            raise self.refuse("weight", f"has a value below 0 in row {int((weights < 0).argmax()) + 1}")
        self.weights = None if weights is None else weights.astype(np.float32)
        self.metadata = {name: self._read_metadata(name, kind, parts[name]) for name, kind in dataset.metadata.items()}
        self.parts = parts
        for key in ("weight", "group", "time", "split_column"):
            if (name := getattr(dataset, key)) is not None:
                self._need(key, name, parts[name])

    def is_missing(self, name: str, values: Values) -> Mask:
        """Return which rows have no value in a column, bool (n,), by what the column is read as."""
        is_datetime = name in self.kinds and self.kinds[name].kind == "datetime"
        if (self._wanted[name] == "number" or is_datetime) and values.dtype == object:
            return np.fromiter(map(cells.is_no_number, values), bool, len(values))
        return cells.is_missing(values, self.dataset.not_missing)

    def _missing(self, name: str, parts: Sequence[Values]) -> Mask:
        return np.concatenate([self.is_missing(name, part) for part in parts])

    def _roles(self) -> dict[str, Wanted]:
        dataset = self.dataset
        numbers = dataset.task == "regression" or len(dataset.target) > 1
        roles: dict[str, Wanted] = dict.fromkeys(dataset.target, "number" if numbers else "repeated")
        read_as: dict[str | None, Wanted] = {
            dataset.split_column: "repeated",
            dataset.group: "repeated",
            dataset.time: "text",
            dataset.weight: "number",
        }
        roles |= {name: how for name, how in read_as.items() if name is not None}
        return {**{name: WANTED[kind] for name, kind in dataset.metadata.items()}, **roles}

    def chunks(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[int, dict[str, Values]]]:
        """Yield the number of the first row, and the values of some columns."""
        first = 0
        # Values that are kept are read once, so all columns together.
        for chunk in self._file.chunks(self._wanted if self._file.fits(self._wanted) else wanted):
            yield first, {name: chunk[name] for name in wanted}
            first += num_rows_of(chunk)

    def refuse(self, key: str, reason: str) -> UserError:
        """Return the one message for a setting that these data contradict."""
        value = getattr(self.dataset, key)
        shown = ", ".join(value) if isinstance(value, tuple) else value
        named = f"dataset.{key}" if isinstance(shown, dict) else f"dataset.{key} = '{shown}'"
        return UserError(f"{named}: {reason} (dataset.source = '{self.dataset.source}')")

    def refused(self, bad: BadValue, row: int) -> UserError:
        """Return the one message for a value that a column cannot hold, in a row that is counted from 0."""
        kind = self.kinds[bad.column].kind if bad.column in self.kinds else "number"
        return UserError(
            f"dataset.source = '{self.dataset.source}': the column '{bad.column}', of kind {kind}, has in row "
            f"{row + 1}, counted without the header, {cut(repr(bad.value), 80)}, which {bad.reason}. Mend it, or give "
            f"the column another kind: dataset.columns.{bad.column} = category, text or ignore"
        )

    def _numbers(self, column: str, parts: Sequence[Values]) -> cells.Numbers:
        found, first = [], 0
        for part in parts:
            try:
                found.append(cells.numbers(part, column, self.dataset.decimal or "."))
            except BadValue as bad:
                raise self.refused(bad, first + bad.row) from None
            first += len(part)
        return np.concatenate(found)

    def _read_metadata(self, column: str, kind: str, parts: Sequence[Values]) -> npt.NDArray[Any]:
        if kind == "category":
            texts, places = self.texts_of(parts)
            return np.array(texts, object)[places]
        found, first = [], 0
        for part in parts:
            try:
                found.append(
                    cells.days(part, column)
                    if kind == "datetime"
                    else cells.numbers(part, column, self.dataset.decimal or ".")
                )
            except BadValue as bad:
                raise UserError(
                    f"dataset.metadata.{column} = {kind}: the column has in row {first + bad.row + 1}, counted without "
                    f"the header, {cut(repr(bad.value), 80)}, which {bad.reason}. Mend it, or say "
                    f"dataset.metadata.{column} = category (dataset.source = '{self.dataset.source}')"
                ) from None
            first += len(part)
        return np.concatenate(found)

    def _use_missing(self, strict: Mapping[str, Mask]) -> None:
        """Refuse or leave out the rows that miss a value which nothing stands for."""
        for name, missing in strict.items():
            if self.kinds[name].missing == "drop":
                self.usable &= ~missing
            elif missing.any():
                raise UserError(
                    f"dataset.columns.{name}.missing = 'stop': {int(missing.sum()):,} of {len(missing):,} values are "
                    f"missing, the first in row {int(missing.argmax()) + 1}. Mend them, or give missing: fill or drop "
                    f"(dataset.source = '{self.dataset.source}')"
                )

    def _look_at_images(self, parts: Mapping[str, Sequence[Values]]) -> dict[str, tuple[int, int, int]]:
        """Return height, width and channels of each column of images; rows of broken ones are refused, or left out."""
        broken: dict[str, str] = {}
        found: dict[str, tuple[Rows, dict[int, Header]]] = {}
        for name, own in parts.items():
            texts, places = self.texts_of(own)
            headers = {}
            for place in np.unique(places[self.usable]).tolist():
                if (header := self._header(texts[place], broken)) is not None:
                    headers[place] = header
            wrong = [place for place, text in enumerate(texts) if text in broken]
            self.usable &= ~np.isin(places, wrong)
            found[name] = places, headers
        if broken and self.dataset.on_broken == "stop":
            whole = {one.path: one for _, headers in found.values() for one in headers.values()}
            reasons: dict[Path, str] = {}
            decode_rest(list(whole.values()), self.dataset.image_size, reasons)
            for name, (_, headers) in found.items():
                texts, _ = self.texts_of(parts[name])
                broken |= {
                    texts[place]: reasons[path] for place, one in headers.items() if (path := Path(one.path)) in reasons
                }
        self.refuse_broken(broken)
        shapes = {}
        for name, (places, headers) in found.items():
            used = [headers[place] for place in np.unique(places[self.usable]).tolist() if place in headers]
            if not used:
                raise UserError(
                    f"dataset.columns.{name} = image: no row has an image that can be used. Give the column the kind "
                    f"ignore (dataset.source = '{self.dataset.source}')"
                )
            shapes[name] = (*common_size(self.dataset, used), 1 if all(one.is_grey for one in used) else 3)
        return shapes

    def _header(self, text: str, broken: dict[str, str]) -> Header | None:
        """Return what the first bytes of an image say; None for a missing one, or one that is now in ``broken``."""
        if not text:
            return None
        try:
            path = inside(self.folder, text)
        except ValueError as error:
            broken[text] = str(error)
            return None
        if not os.path.isfile(path):  # Also of a name that is too long for one.
            broken[text] = "no such file"
            return None
        if top_of(text) not in self.dataset.images and "." not in self.dataset.images:
            broken[text] = "not in dataset.images, at which DVC looks"
            return None
        reasons: dict[Path, str] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            header = read_header(path, reasons)
        if reasons:
            broken[text] = reasons[path]
        return header

    def refuse_broken(self, broken: Mapping[str, str]) -> None:
        """End with the names of images that cannot be used; or say which are left out."""
        if not broken:
            return
        named = listed([f"{text} ({reason})" for text, reason in sorted(broken.items())])
        if self.dataset.on_broken == "skip":
            print(
                f"left out with their rows because they are not whole images ({len(broken)}): {named}", file=sys.stderr
            )
            return
        raise UserError(
            f"dataset.source = '{self.dataset.source}': {len(broken)} of its images cannot be used: {named}. "
            "Mend them, or leave their rows out: dataset.on_broken=skip"
        )

    def _need(self, key: str, name: str, parts: Sequence[Values]) -> None:
        """Refuse rows that miss a value of what is not a feature; or leave them out, and say how many."""
        missing = self._missing(name, parts)
        if not missing.any():
            return
        texts = {text for part in parts for text in set(_texts_in(part)) & cells.MISSING_TEXTS if text}
        keep = ", ".join(f"'{text}'" for text in sorted(texts))
        hint = f' ({keep} is read as missing; --set "dataset.not_missing=[{keep}]" keeps it as a value)' if keep else ""
        count, rows = int(missing.sum()), listed([str(row + 1) for row in np.flatnonzero(missing).tolist()])
        has, where, them = ("has", "row", "it") if count == 1 else ("have", "the rows", "them")
        if self.dataset.on_broken == "skip":
            self.usable &= ~missing
            gone = f", which is then not a class: {keep}" if keep and key == "target" else ""
            said = (
                f"left out: {count:,} of {len(missing):,} rows without a value of dataset.{key} = '{name}'{gone}{hint}"
            )
            print(said, file=sys.stderr)
            return
        raise UserError(
            f"dataset.{key} = '{name}': {count:,} of {len(missing):,} rows {has} no value{hint}, in {where} {rows}, "
            f"counted without the header. Mend {them}, or leave {them} out: dataset.on_broken=skip "
            f"(dataset.source = '{self.dataset.source}')"
        )

    def texts_of(self, parts: Sequence[Values]) -> tuple[list[str], Rows]:
        """Return the texts of a column, each once, and the place of each row's in them, int64 (n,); '' is missing."""
        places: dict[str, int] = {}
        found = []
        for part in parts:
            values, rows = cells.different(part)
            missing = cells.is_missing(values, self.dataset.not_missing).tolist()
            texts = ["" if absent else cells.spelled(one) for one, absent in zip(values, missing, strict=True)]
            own = np.array([places.setdefault(text, len(places)) for text in texts], np.int64)
            found.append(own[rows])
        return list(places), np.concatenate(found)

    def _read_target(self, parts: Mapping[str, Sequence[Values]]) -> tuple[Target, npt.NDArray[Any]]:
        dataset = self.dataset
        if dataset.separator is None:  # With one, a row without a value has no label.
            for name, own in parts.items():
                self._need("target", name, own)
        if not self.usable.any():
            raise self.refuse("target", "no row is left that has a value in each column that needs one")
        if dataset.task == "classification":
            texts, places = self.texts_of(parts[dataset.target[0]])
            used = np.flatnonzero(np.bincount(places[self.usable]))
            names = sort_classes([texts[place] for place in used.tolist()])
            if len(names) < 2:
                raise self.refuse("target", f"has one value alone, '{names[0]}': a classification needs two classes")
            numbers = {name: number for number, name in enumerate(names)}
            of_text = np.array([numbers.get(text, 0) for text in texts], np.int64)
            return Target(
                task="classification", num_outputs=len(names), class_names=tuple(names), columns=dataset.target
            ), of_text[places]
        if dataset.task == "multilabel":
            names, labels = self._labels(parts)
            return Target(
                task="multilabel", num_outputs=len(names), class_names=tuple(names), columns=dataset.target
            ), labels
        values = np.stack([self._numbers(name, own) for name, own in parts.items()], 1)
        target = Target(task="regression", num_outputs=values.shape[1], columns=dataset.target)
        return target, values.astype(np.float32)

    def _labels(self, parts: Mapping[str, Sequence[Values]]) -> tuple[list[str], npt.NDArray[np.uint8]]:
        dataset = self.dataset
        if len(parts) > 1:
            numbers = np.stack([self._numbers(name, own) for name, own in parts.items()], 1)
            if (wrong := ~np.isin(numbers, (0, 1)) & self.usable[:, np.newaxis]).any():
                row, place = np.argwhere(wrong)[0].tolist()
                raise self.refuse(
                    "target",
                    f"the column '{dataset.target[place]}' has in row {row + 1} {numbers[row, place]:g}, and labels "
                    "are 0 or 1. Give dataset.task=regression for other numbers",
                )
            return list(dataset.target), np.nan_to_num(numbers).astype(np.uint8)
        if dataset.separator is None:
            raise self.refuse(
                "target", "holds several labels: say what stands between them, such as dataset.separator=';'"
            )
        texts, places = self.texts_of(parts[dataset.target[0]])
        sets = [set(_labels_of(text, dataset.separator)) for text in texts]
        names = sorted(set().union(*sets))
        if len(names) < 2:
            raise self.refuse("target", f"has {len(names)} labels: several are wanted")
        of_text = np.array([[name in own for name in names] for own in sets], np.uint8)
        return names, of_text[places]


def _labels_of(text: str, separator: str) -> list[str]:
    """Return the labels in a text: what stands between separators, or the elements of a list of Python or JSON."""
    if cells.LIST.fullmatch(text):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return [cells.spelled(label) for label in ast.literal_eval(text.strip())]
        text = text.strip()[1:-1]
    return [label for one in text.split(separator) if (label := one.strip().strip("'\""))]


def _texts_in(values: Values) -> list[str]:
    return [value.strip() for value in cells.different(values)[0] if isinstance(value, str)]
