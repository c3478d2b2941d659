"""A table: CSV, TSV, Parquet or JSON lines, with a target column; the others are numbers, words or images."""

import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tasks import config, encoding, machine
from tasks.dataset_kinds import Block, Examples, most_frequent, split_rows, text_length
from tasks.dataset_kinds.image_folder import Header, common_size, read_header
from tasks.encoding import BadValue, Encoder, Repeated, Values
from tasks.errors import UserError, cut, listed, one_of
from tasks.records import Column, Feature, HeldOut, Target
from tasks.table_columns import SPLITS, fill_in, open_file, top_of
from tasks.table_files import TableFile, Wanted

WANTED: dict[str, Wanted] = {
    "number": "number",
    "datetime": "text",
    "category": "repeated",
    "text": "text",
    "image": "text",
}
OWN_NAMES = {"number", "category", "label", "weight"}
"""No column becomes a feature of these names: other arrays have them."""
CHUNK_BYTES = 8 * 2**20

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


def guess(dataset: config.Table) -> tuple[config.Table, list[str]]:
    """Return the dataset with what the data say of its columns and its task, and lines that tell it.

    Raises:
        UserError: the file cannot be read, or no column has the name of one that the dataset names.
    """
    return fill_in(dataset, open_file(dataset), may_guess=True)


def examples(dataset: config.Table) -> Examples:
    """Return the rows of a table, in their order.

    All numbers and datetimes together are the feature ``number``, all categories ``category``; each column of texts and
    each of images is a feature by itself. Vocabularies, what stands for a missing number, and the length of texts are
    taken of the training split alone.

    Raises:
        UserError: no such file or columns, a value that its column cannot hold, rows that no split can have.
    """
    file = open_file(dataset)
    dataset, _ = fill_in(dataset, file, may_guess=False)
    table = _Table(dataset, file)
    splits = table.split()
    fitted = _Fitted.of(table, splits)
    held_out = None
    if dataset.split_column is None and dataset.time is None:
        held_out = HeldOut(num_examples=int((splits == table.names.index("test")).sum()), seed=dataset.seed)

    # Images are large: of them, few rows at once.
    image_bytes = sum(math.prod(one.shape) for one in fitted.features.values() if one.kind == "image")
    at_once = max(1, CHUNK_BYTES // image_bytes) if image_bytes else sys.maxsize

    def blocks() -> Iterator[Block]:
        with ThreadPoolExecutor(machine.usable_cores()) as pool:
            encoder = _Encoder(fitted, table.folder, pool)
            for first, chunk in table.chunks(table.features):
                of_row = splits[first : first + _length(chunk)]
                for number, name in enumerate(table.names):
                    rows = np.flatnonzero(of_row == number)
                    for place in range(0, len(rows), at_once):
                        some = rows[place : place + at_once]
                        own = {column: encoding.take(values, some) for column, values in chunk.items()}
                        try:
                            encoded, whole = encoder.encode_whole(own)
                        except BadValue as bad:
                            raise table.refused(bad, first + int(some[bad.row])) from None
                        missing = {
                            column: int(encoding.is_missing(values)[whole].sum()) for column, values in own.items()
                        }
                        used = first + some[whole]
                        weights = None if table.weights is None else table.weights[used]
                        yield Block(name, encoded, table.labels[used], weights, missing)
        table.refuse_broken(encoder.broken)

    return Examples(
        version="1",
        features=fitted.features,
        target=table.target,
        splits=tuple(name for number, name in enumerate(table.names) if (splits == number).any()),
        blocks=blocks,
        vocabularies=fitted.vocabularies,
        held_out=held_out,
    )


class _Encoder(Encoder):
    """Encodes rows without those of which an image is not whole, and knows which images those are."""

    def __init__(self, fitted: "_Fitted", folder: Path, pool: ThreadPoolExecutor) -> None:
        features = {name: one.model_dump() for name, one in fitted.features.items()}
        super().__init__(features, fitted.vocabularies, folder, pool.map)
        self.broken: dict[str, str] = {}
        self._rows: set[int] = set()

    def encode_whole(self, table: Mapping[str, Values]) -> tuple[dict[str, npt.NDArray[Any]], Rows]:
        """Return what ``encode`` does of the rows that are whole, and which these are, int64 (n,)."""
        self._rows.clear()
        encoded = self.encode(table)
        rows = np.setdiff1d(np.arange(_length(table)), sorted(self._rows)).astype(np.int64)
        return {name: one[rows] for name, one in encoded.items()} if self._rows else encoded, rows

    def image(self, column: str, row: int, value: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return the image of a row; of one that is not whole zeros, and remember it."""
        try:
            return super().image(column, row, value, shape)
        except BadValue as bad:
            self.broken[str(value)] = bad.reason.removeprefix("is no whole image ").strip("()")
            self._rows.add(row)
            return np.zeros(shape, np.uint8)


class _Table:
    """What all rows must be looked at for before one can be encoded: targets, groups, times, weights, missing values.

    Attributes:
        labels: of each row, as in ``records.PreparedSplit``; of one that cannot be used, anything.
        weights: float32 (n,) or None.
        names: of the splits; ``split`` gives their places.
    """

    names = ("train", "validation", "test")

    def __init__(self, dataset: config.Table, file: TableFile) -> None:
        self.dataset, self._file = dataset, file
        self.kinds = {name: one for name, one in (dataset.columns or {}).items() if one.kind != "ignore"}
        self.features: dict[str, Wanted] = {name: WANTED[one.kind] for name, one in self.kinds.items()}
        if not self.features:
            raise self._refuse("columns", "leaves no column to learn from: give one a kind other than ignore")
        roles = self._roles()
        self.folder = (config.project_root() / dataset.source).parent
        strict = {name: self.features[name] for name, one in self.kinds.items() if one.missing != "fill"}
        images = {name: self.features[name] for name, one in self.kinds.items() if one.kind == "image"}
        self._wanted = {**self.features, **{name: how for name, how in roles.items() if name not in self.features}}
        parts: dict[str, list[Values]] = {name: [] for name in {**roles, **strict, **images}}
        self._length = 0
        for first, chunk in self.chunks({name: self._wanted[name] for name in parts}):
            self._length = first + _length(chunk)
            for name, values in chunk.items():
                parts[name].append(values)
        self.usable = np.ones(self._length, bool)
        self._use_missing({name: parts[name] for name in strict})
        self.shapes = self._look_at_images({name: parts[name] for name in images})
        self.target, self.labels = self._read_target({name: parts[name] for name in dataset.target})
        weights = None if dataset.weight is None else self._numbers(dataset.weight, parts[dataset.weight])
        if weights is not None and (weights < 0).any():
            raise self._refuse("weight", f"has a value below 0 in row {int((weights < 0).argmax()) + 1}")
        self.weights = None if weights is None else weights.astype(np.float32)
        self._parts = parts
        for key in ("weight", "group", "time", "split_column"):
            if (name := getattr(dataset, key)) is not None:
                self._need(key, name, _joined_missing(parts[name]))

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
        return roles | {name: how for name, how in read_as.items() if name is not None}

    def chunks(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[int, dict[str, Values]]]:
        """Yield the number of the first row, and the values of these columns."""
        first = 0
        whole = self._wanted if self._file.is_kept else wanted
        for chunk in self._file.chunks(whole):
            length = _length(chunk)
            yield first, {name: chunk[name] for name in wanted}
            first += length

    def _refuse(self, key: str, reason: str) -> UserError:
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

    def _numbers(self, column: str, parts: Sequence[Values]) -> encoding.Numbers:
        found, first = [], 0
        for part in parts:
            try:
                found.append(encoding.numbers(part, column))
            except BadValue as bad:
                raise self.refused(bad, first + bad.row) from None
            first += encoding.num_rows(part)
        return np.concatenate(found)

    def _use_missing(self, strict: Mapping[str, Sequence[Values]]) -> None:
        """Refuse or leave out the rows that miss a value which nothing stands for."""
        for name, parts in strict.items():
            missing = _joined_missing(parts)
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
            texts, places = _texts(own)
            headers = {}
            for place in np.unique(places[self.usable]).tolist():
                if (header := self._header(texts[place], broken)) is not None:
                    headers[place] = header
            wrong = [place for place, text in enumerate(texts) if text in broken]
            self.usable &= ~np.isin(places, wrong)
            found[name] = places, headers
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
            path = encoding.inside(self.folder, text)
        except ValueError as error:
            broken[text] = str(error)
            return None
        if not path.is_file():
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
            print(f"left out, with their rows, as no whole image ({len(broken)}): {named}", file=sys.stderr)
            return
        raise UserError(
            f"dataset.source = '{self.dataset.source}': {len(broken)} of its images cannot be used: {named}. "
            "Mend them, or leave their rows out: dataset.on_broken=skip"
        )

    def _need(self, key: str, name: str, missing: Mask) -> None:
        """Refuse rows that miss a value of what is not a feature; or leave them out."""
        if not missing.any():
            return
        if self.dataset.on_broken == "skip":
            self.usable &= ~missing
            return
        rows = listed([str(row + 1) for row in np.flatnonzero(missing).tolist()])
        raise UserError(
            f"dataset.{key} = '{name}': {int(missing.sum()):,} of {len(missing):,} rows have no value, in the rows "
            f"{rows}, counted without the header. Mend them, or leave them out: dataset.on_broken=skip "
            f"(dataset.source = '{self.dataset.source}')"
        )

    def _read_target(self, parts: Mapping[str, Sequence[Values]]) -> tuple[Target, npt.NDArray[Any]]:
        dataset = self.dataset
        if dataset.separator is None:  # With one, a row without a value has no label.
            for name, own in parts.items():
                self._need("target", name, _joined_missing(own))
        if not self.usable.any():
            raise self._refuse("target", "no row is left that has a value in each column that needs one")
        if dataset.task == "classification":
            texts, places = _texts(parts[dataset.target[0]])
            used = np.unique(places[self.usable])
            names = sort_classes([texts[place] for place in used.tolist()])
            if len(names) < 2:
                raise self._refuse("target", f"has one value alone, '{names[0]}': a classification needs two classes")
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
                raise self._refuse(
                    "target",
                    f"the column '{dataset.target[place]}' has in row {row + 1} {numbers[row, place]:g}, and labels "
                    "are 0 or 1. Give dataset.task=regression for other numbers",
                )
            return list(dataset.target), np.nan_to_num(numbers).astype(np.uint8)
        if dataset.separator is None:
            raise self._refuse(
                "target", "holds several labels: say what stands between them, such as dataset.separator=';'"
            )
        texts, places = _texts(parts[dataset.target[0]])
        sets = [{label for one in text.split(dataset.separator) if (label := one.strip())} for text in texts]
        names = sorted(set().union(*sets))
        if len(names) < 2:
            raise self._refuse("target", f"has {len(names)} labels: several are wanted")
        of_text = np.array([[name in own for name in names] for own in sets], np.uint8)
        return names, of_text[places]

    def split(self) -> npt.NDArray[np.int8]:
        """Return the place of each row's split in ``names``, int8 (n,), or -1 for a row that is left out.

        Raises:
            UserError: a split would be empty, or one group lies in two.
        """
        dataset = self.dataset
        rows = np.flatnonzero(self.usable)
        if dataset.split_column is not None:
            parts = self._given(rows, dataset.split_column)
        elif dataset.group is not None:
            parts = self._by_group(rows, dataset.group)
        elif dataset.time is not None:
            parts = self._by_time(rows, dataset.time)
        else:
            classes = self.target.class_names if self.target.task == "classification" else ("",)
            strata = np.zeros(len(rows), np.int64) if classes == ("",) else self.labels[rows]
            parts = {name: rows[own] for name, own in _drawn(strata, classes, dataset).items()}
        splits = np.full(self._length, -1, np.int8)
        for name, own in parts.items():
            splits[own] = self.names.index(name)
        return splits

    def _given(self, rows: Rows, column: str) -> dict[str, Rows]:
        dataset = self.dataset
        texts, places = _texts(self._parts[column])
        used = [texts[place] for place in np.unique(places[rows]).tolist()]
        if unknown := [text for text in used if text.strip().lower() not in SPLITS]:
            raise self._refuse("split_column", one_of("split", unknown[0], SPLITS))
        of_text = np.array([self.names.index(SPLITS.get(text.strip().lower(), "train")) for text in texts])
        parts = {name: rows[of_text[places[rows]] == number] for number, name in enumerate(self.names)}
        parts = {name: own for name, own in parts.items() if len(own)}
        if "train" not in parts or len(parts) < 2:
            raise self._refuse("split_column", f"has {', '.join(parts)} alone: rows to train and to test on are needed")
        if dataset.group is not None:
            groups, of_row = _texts(self._parts[dataset.group])
            seen = np.stack([np.bincount(of_row[own], minlength=len(groups)) > 0 for own in parts.values()])
            if (leaking := np.flatnonzero(seen.sum(0) > 1)).size:
                raise self._refuse(
                    "group",
                    f"{leaking.size} of its values lie in several splits of '{column}', such as "
                    f"'{groups[leaking[0]]}': put all rows of each into one",
                )
        return parts

    def _by_group(self, rows: Rows, column: str) -> dict[str, Rows]:
        dataset = self.dataset
        groups, of_row = _texts(self._parts[column])
        used = sorted({groups[place] for place in np.unique(of_row[rows]).tolist()})
        number = {text: place for place, text in enumerate(used)}
        own = np.array([number.get(text, -1) for text in groups])[of_row[rows]]
        wanted = _counts(dataset, len(rows))
        if len(used) < len(wanted) + 1:
            raise self._refuse("group", f"has {len(used)} values, and {len(wanted) + 1} splits need one each")
        words = np.random.Philox(key=[dataset.seed, 0], counter=[0, 0, 0, 3]).random_raw(len(used))
        drawn = np.argsort(words, kind="stable")
        sizes = np.bincount(own, minlength=len(used))[drawn]
        parts, first = {}, 0
        for place, (name, count) in enumerate(wanted.items()):
            sums = np.cumsum(sizes[first:])
            # As near to the number as whole groups come, and one left for each split after it.
            most = len(drawn) - first - (len(wanted) - place)
            taken = int(np.abs(sums[:most] - count).argmin()) + 1
            parts[name] = rows[np.isin(own, drawn[first : first + taken])]
            first += taken
        parts["train"] = rows[np.isin(own, drawn[first:])]
        return parts

    def _by_time(self, rows: Rows, column: str) -> dict[str, Rows]:
        dataset = self.dataset
        times = self._times(column)[rows]
        ordered = np.sort(times)
        parts, last = {}, len(rows)
        for name, count in _counts(dataset, len(rows)).items():
            # Rows of one time stay together.
            first = int(np.searchsorted(ordered, ordered[max(last - count, 0)]))
            if not 0 < first < last:
                raise self._refuse(
                    "time", f"nothing is left to train on before the {count} newest rows: give a smaller dataset.{name}"
                )
            upper = ordered[last] if last < len(rows) else np.inf
            parts[name] = rows[(times >= ordered[first]) & (times < upper)]
            last = first
        parts["train"] = rows[times < ordered[last]]
        return parts

    def _times(self, name: str) -> encoding.Numbers:
        """Return what rows are ordered by: numbers, or days since 1970."""
        parts, found, first = self._parts[name], [], 0
        try:
            return np.concatenate([encoding.numbers(part, name) for part in parts])
        except BadValue:
            pass
        for part in parts:
            try:
                found.append(encoding.days(part, name))
            except BadValue as bad:
                raise self._refuse(
                    "time", f"row {first + bad.row + 1} has {cut(repr(bad.value), 80)}, which {bad.reason}"
                ) from None
            first += encoding.num_rows(part)
        return np.concatenate(found)


@dataclass(frozen=True)
class _Fitted:
    """The features of a table, with what is taken of its training split."""

    features: dict[str, Feature]
    vocabularies: dict[str, list[list[str]]]

    @classmethod
    def of(cls, table: _Table, splits: npt.NDArray[np.int8]) -> "_Fitted":
        columns = {name: _Statistics(name, one.kind) for name, one in table.kinds.items() if one.kind != "image"}
        for first, chunk in table.chunks(table.features):
            rows = np.flatnonzero(splits[first : first + _length(chunk)] == 0)
            for name, statistics in columns.items():
                try:
                    statistics.add(encoding.take(chunk[name], rows))
                except BadValue as bad:
                    raise table.refused(bad, first + int(rows[bad.row])) from None
        features: dict[str, Feature] = {}
        vocabularies: dict[str, list[list[str]]] = {}
        numbers = [own.column(table) for own in columns.values() if own.kind in ("number", "datetime")]
        if numbers:
            width = sum(column.width for column in numbers)
            features["number"] = Feature(kind="number", shape=(width,), dtype="float32", columns=tuple(numbers))
        dataset = table.dataset
        if categories := [own for own in columns.values() if own.kind == "category"]:
            vocabularies["category"] = [own.vocabulary(dataset.max_vocabulary) for own in categories]
            features["category"] = Feature(
                kind="category",
                shape=(len(categories),),
                dtype="int32",
                columns=tuple(own.column(table) for own in categories),
                vocabulary_sizes=tuple(len(texts) + encoding.FIRST for texts in vocabularies["category"]),
            )
        for own in columns.values():
            if own.kind == "text":
                name = feature_name(own.name, features)
                vocabularies[name] = [own.vocabulary(dataset.max_vocabulary)]
                if not vocabularies[name][0]:
                    raise UserError(
                        f"dataset.columns.{own.name} = text: no text of the training split has a word. Give the column "
                        f"the kind ignore (dataset.source = '{dataset.source}')"
                    )
                features[name] = Feature(
                    kind="text",
                    shape=(dataset.text_length or text_length(own.lengths),),
                    dtype="int32",
                    columns=(own.column(table),),
                    vocabulary_sizes=(len(vocabularies[name][0]) + encoding.FIRST,),
                )
        for column, shape in table.shapes.items():
            features[feature_name(column, features)] = Feature(
                kind="image", shape=shape, dtype="uint8", columns=(Column(name=column, kind="image"),)
            )
        return cls(features, vocabularies)


@dataclass
class _Statistics:
    """What is counted of a column's values in the training split."""

    name: str
    kind: str
    sums: list[float] = field(default_factory=list)
    count: int = 0
    texts: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, values: Values) -> None:
        if self.kind in ("number", "datetime"):
            found = (encoding.days if self.kind == "datetime" else encoding.numbers)(values, self.name)
            found = found[~np.isnan(found)]
            self.count += len(found)
            self.sums.append(float(found.sum()))
        elif self.kind == "category":
            if not isinstance(values, Repeated):
                rows = encoding.rows_of(values)
                values = Repeated(rows, np.arange(len(rows)))
            counts = np.bincount(values.rows, minlength=len(values.values)).tolist()
            missing = encoding.is_missing(values.values).tolist()
            for value, count, absent in zip(values.values, counts, missing, strict=True):
                if count and not absent:
                    self.texts[encoding.spelled(value)] += count
        else:
            words, lengths = encoding.words_of(encoding.rows_of(values))
            self.texts.update(words)
            self.lengths.update(lengths.tolist())

    def column(self, table: _Table) -> Column:
        """Return the record of the column."""
        width = encoding.DATETIME_WIDTH if self.kind == "datetime" else 1
        if self.kind not in ("number", "datetime"):
            return Column.model_validate({"name": self.name, "kind": self.kind, "width": width})
        if not self.count:
            raise UserError(
                f"dataset.columns.{self.name} = {self.kind}: no row of the training split has a value. Give the column "
                f"the kind ignore (dataset.source = '{table.dataset.source}')"
            )
        fill = math.fsum(self.sums) / self.count if table.kinds[self.name].missing == "fill" else None
        return Column.model_validate({"name": self.name, "kind": self.kind, "width": width, "fill": fill})

    def vocabulary(self, most: int) -> list[str]:
        """Return the most frequent texts; of those that are as frequent, the first in the order of the alphabet."""
        return most_frequent(self.texts, most)


def feature_name(column: str, others: Mapping[str, object]) -> str:
    """Return a name for the feature of a column: small letters, digits and _, not one of others, safe in a file's."""
    word = re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_")[:60] or "column"
    word = word if word[0].isalpha() else f"column_{word}"
    name, number = word, 1
    while name in others or name in OWN_NAMES:
        number += 1
        name = f"{word}_{number}"
    return name


def sort_classes(texts: Sequence[str]) -> list[str]:
    """Return classes in the order of numbers where all are numbers, else of the alphabet."""
    try:
        return sorted(texts, key=lambda text: (float(text), text))
    except ValueError:
        return sorted(texts)


def _length(chunk: Mapping[str, Values]) -> int:
    return encoding.num_rows(next(iter(chunk.values())))


def _joined_missing(parts: Sequence[Values]) -> Mask:
    return np.concatenate([encoding.is_missing(part) for part in parts])


def _texts(parts: Sequence[Values]) -> tuple[list[str], Rows]:
    """Return the texts of a column, each once, and the place of each row's in them, int64 (n,). A missing one is ''."""
    places: dict[str, int] = {}
    found = []
    for part in parts:
        values = part if isinstance(part, Repeated) else Repeated(encoding.rows_of(part), np.arange(len(part)))
        missing = encoding.is_missing(values.values).tolist()
        spelled = ["" if absent else encoding.spelled(one) for one, absent in zip(values.values, missing, strict=True)]
        own = np.array([places.setdefault(text, len(places)) for text in spelled], np.int64)
        found.append(own[values.rows])
    return list(places), np.concatenate(found)


def _counts(dataset: config.Table, total: int) -> dict[str, int]:
    """Return how many rows the splits other than `train` are to have."""
    wanted = {"test": dataset.test, "validation": dataset.validation}
    counts = {
        name: count if isinstance(count, int) else max(1, round(total * count))
        for name, count in wanted.items()
        if count is not None
    }
    if sum(counts.values()) >= total:
        raise UserError(
            f"dataset.test = {dataset.test} and dataset.validation = {dataset.validation}: they take "
            f"{sum(counts.values())} of the {total} rows, and one must be left to train on "
            f"(dataset.source = '{dataset.source}')"
        )
    return counts


def _drawn(strata: Rows, names: Sequence[str], dataset: config.Table) -> dict[str, Rows]:
    """Return rows drawn by the seed, the same share of each class."""
    counts = _counts(dataset, len(strata))
    parts = split_rows(strata, names, dataset)
    if "validation" in counts:
        train = parts["train"]
        # Another seed, as the first rows of both draws would have the same words.
        again = dataset.model_copy(update={"test": counts["validation"], "seed": dataset.seed + 1})
        own = split_rows(strata[train], names, again)
        parts |= {"validation": train[own["test"]], "train": train[own["train"]]}
    return parts
