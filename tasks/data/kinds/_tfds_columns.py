"""The examples of a TFDS builder that gives columns by name: what each column is, and all of their rows."""

import io
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import tensorflow as tf
from PIL import Image

from tasks import config
from tasks.data import builders
from tasks.data.encoding import Encoder, cells
from tasks.data.encoding.cells import BadValue, Values
from tasks.data.kinds import Block, median_size
from tasks.data.kinds._columns import Fitted, Statistics, sort_classes
from tasks.data.table_columns import LOOKED_AT, kind_of_texts, lines_of_kinds
from tasks.records import HeldOut, Target
from tasks.system import machine
from tasks.system.errors import UserError, one_of

CHUNK_BYTES = 8 * 2**20
ROWS_AT_ONCE = 1024
MAX_VOCABULARY = 20_000
MEASURED = 10_000
"""Images whose sizes are read for the median."""
KINDS = {"class": "category", "bool": "category", "numbers": "number", "image": "image"}
"""What a column is, by what TFDS says of it; of texts the values of the training split say it, as those of a table."""


class _ColumnPlace(NamedTuple):
    """Where the values of a column stand in an example."""

    place: builders.Place
    number: int = 0
    """Of a tensor's numbers, of which each is a column."""


class Columns:
    """What all examples must be looked at for before one can be encoded.

    Attributes:
        fitted: the features.
        target: what is learnt.
    """

    def __init__(self, dataset: config.Tfds, builder: Any, splits: list[str], held_out: HeldOut | None) -> None:
        """Look at the training split.

        Raises:
            UserError: data/<name>/params.yaml contradicts the columns, or none is left to learn from.
        """
        self._dataset, self._builder, self._splits, self._held_out = dataset, builder, splits, held_out
        self._found = builders.supervised(builder)
        self._sources, unusable = self._read_names()
        self._kinds = self._read_kinds(unusable)
        self.target = self._read_target()
        shapes = {name: self._shape(name) for name, one in self._kinds.items() if one.kind == "image"}
        self.fitted = self._fit(shapes)

    def blocks(self) -> Iterator[Block]:
        """Yield the examples of all splits, in the order of their shards."""
        features = self.fitted.features
        row = sum(np.dtype(one.dtype).itemsize * math.prod(one.shape) for one in features.values())
        size = max(1, min(CHUNK_BYTES // row, ROWS_AT_ONCE))
        dumped = {name: one.model_dump() for name, one in features.items()}
        left: Counter[str] = Counter()
        with ThreadPoolExecutor(machine.usable_cores()) as pictures:
            encoder = Encoder(dumped, self.fitted.vocabularies, workers=pictures.map)
            for split in self._splits:
                for first, own, found in self._batches(split, list(self._kinds), size, with_labels=True):
                    values = {name: self._values(name, found) for name in self._kinds}
                    labels = self._labels(split, first, found)
                    for part, chosen in ((split, ~own), ("test", own)):
                        rows = np.flatnonzero(
                            chosen & labelled_rows(labels, self.target) & self._usable(split, first, values)
                        )
                        left[part] += len(rows)
                        if len(rows):
                            yield self._block(encoder, (split, first), part, rows, values, labels)

        if empty := [part for part in (*self._splits, *(["test"] if self._held_out else [])) if not left[part]]:
            raise UserError(
                f"dataset {self._dataset.name}: no example is left in the split '{empty[0]}', each misses a value. "
                f"Give columns missing: fill in data/{self._dataset.name}/params.yaml (dataset.columns)"
            )

    def _block(
        self,
        encoder: Encoder,
        begins: tuple[str, int],
        part: str,
        rows: npt.NDArray[np.int64],
        values: Mapping[str, Values],
        labels: npt.NDArray[Any],
    ) -> Block:
        some = {name: own[rows] for name, own in values.items()}
        try:
            encoded = encoder.encode(some)
        except BadValue as bad:
            raise self._refused(bad, begins[0], begins[1] + int(rows[bad.row])) from None
        missing = {name: int(cells.is_missing(own).sum()) for name, own in some.items()}
        return Block(part, encoded, labels[rows], missing=missing)

    def _read_names(self) -> tuple[dict[str, _ColumnPlace], dict[str, str]]:
        """Return the columns by name, and those that can be none, with what TFDS calls them."""
        sources: dict[str, _ColumnPlace] = {}
        unusable: dict[str, str] = {}
        for name, place in self._found.names.items():
            feature = self._found.given[place]
            if not builders.is_column(feature):
                unusable[name] = type(feature).__name__
            elif builders.kind_of(feature) == "numbers" and feature.shape:
                for number in range(math.prod(feature.shape)):
                    sources[f"{name} {number}"] = _ColumnPlace(place, number)
            else:
                sources[name] = _ColumnPlace(place)
        return sources, unusable

    def _read_kinds(self, unusable: Mapping[str, str]) -> dict[str, config.TableColumn]:
        """Return what each column is that is not ignored, and say it.

        Raises:
            UserError: params.yaml names a column that is not there or cannot be of its kind, or all are ignored.
        """
        given, where = self._dataset.columns, f"data/{self._dataset.name}/params.yaml"
        if unknown := [name for name in given if name not in self._sources]:
            raise UserError(f"{where}: dataset.columns: {one_of('column', unknown[0], self._sources)}")
        kinds = dict(given)
        texts = []
        for name in self._sources:
            is_image, own = self._tfds_kind(name) == "image", given.get(name)
            if own is not None and own.kind != "ignore" and is_image != (own.kind == "image"):
                allowed = "image or ignore" if is_image else "number, datetime, category, text or ignore"
                raise UserError(
                    f"{where}: dataset.columns.{name} = {own.kind}: its values are {'' if is_image else 'not '}images. "
                    f"Give {allowed}"
                )
            if own is None and self._tfds_kind(name) == "text":
                texts.append(name)
            elif own is None:
                kinds[name] = config.TableColumn.model_validate({"kind": KINDS[str(self._tfds_kind(name))]})
        told = {"ignore": [f"{name} ({why})" for name, why in unusable.items()]}
        for name, values in self._first_texts(texts).items():
            kinds[name], why = kind_of_texts(name, values)
            if kinds[name].kind == "image":
                kinds[name], why = config.TableColumn(kind="ignore"), "names of files"
            if kinds[name].kind == "ignore":
                told["ignore"].append(f"{name} ({why})")
        for name in self._sources:
            if kinds[name].kind != "ignore" or name in given:
                told.setdefault(kinds[name].kind, []).append(name)
        print(
            "\n".join([f"the columns; {where} may say otherwise (dataset.columns):", *lines_of_kinds(told)]),
            file=sys.stderr,
        )
        used = {name: kinds[name] for name in self._sources if kinds[name].kind != "ignore"}
        if not used:
            raise UserError(
                f"dataset {self._dataset.name}: no column is left to learn from. Give one a kind other than ignore in "
                f"{where}: dataset.columns: {{{next(iter(self._sources))}: category}}"
            )
        return used

    def _first_texts(self, names: list[str]) -> dict[str, list[Any]]:
        """Return the first values of the training split of some columns of texts."""
        found: dict[str, list[Any]] = {name: [] for name in names}
        if names and "train" in self._splits:
            for _, own, batch in self._batches("train", names, ROWS_AT_ONCE):
                rows = np.flatnonzero(~own)
                for name, values in found.items():
                    values += self._values(name, batch)[rows].tolist()
                if len(found[names[0]]) >= LOOKED_AT:
                    break
        return found

    def _fit(self, shapes: Mapping[str, tuple[int, int, int]]) -> Fitted:
        columns = {name: Statistics(name, one) for name, one in self._kinds.items() if one.kind != "image"}
        if columns and "train" in self._splits:
            # A row is left out for what any column misses, an image never does.
            for first, own, found in self._batches("train", list(columns), ROWS_AT_ONCE, with_labels=True):
                values = {name: self._values(name, found) for name in columns}
                labelled = labelled_rows(self._labels("train", first, found), self.target)
                rows = np.flatnonzero(~own & labelled & self._usable("train", first, values))
                for name, statistics in columns.items():
                    try:
                        statistics.add(values[name][rows])
                    except BadValue as bad:
                        raise self._refused(bad, "train", first + int(rows[bad.row])) from None
        where = f"data/{self._dataset.name}/params.yaml"
        return Fitted.of(columns.values(), shapes, where, MAX_VOCABULARY)

    def _batches(
        self, split: str, names: list[str], size: int, with_labels: bool = False
    ) -> Iterator[tuple[int, npt.NDArray[np.bool_], dict[builders.Place, Any]]]:
        """Yield the number of the first example, which of them are held out as test examples, and their values."""
        places = list(dict.fromkeys(self._sources[name].place for name in names))
        places += list(self._found.wanted) if with_labels else []
        held, first = held_out_rows(self._builder, split, self._held_out), 0
        for found in builders.columns(self._builder, split, places, size):
            own = held[first : first + len(found[places[0]])]
            yield first, own, found
            first += len(found[places[0]])
        if first != len(held):
            raise tf.errors.DataLossError(None, None, f"{first} of the {len(held)} examples of split '{split}'")

    def _tfds_kind(self, name: str) -> str | None:
        return builders.kind_of(self._found.given[self._sources[name].place])

    def _values(self, name: str, batch: Mapping[builders.Place, Any]) -> Values:
        """Return the values of a column as a person would give them: a class by its name."""
        source = self._sources[name]
        found, kind = batch[source.place], self._tfds_kind(name)
        if kind == "class":
            names = self._found.given[source.place].names
            return pd.Categorical.from_codes(np.maximum(found, -1), names)
        if kind == "bool":
            return pd.Categorical.from_codes(found.astype(np.int64), ["False", "True"])
        if kind == "text":
            return np.fromiter((text.decode("utf-8", "replace") for text in found), object, len(found))
        if kind == "image":
            return np.fromiter(found, object, len(found))  # They may differ in size.
        numbers: npt.NDArray[Any] = found.reshape(len(found), -1)[:, source.number]
        if numbers.dtype.kind == "f" and self._kinds[name].kind in ("category", "text"):
            # As a person writes it: a float32 of 0.1 is 0.10000000149011612 in Python, which no raw row has.
            return np.array([float(str(value)) for value in numbers])
        return numbers

    def _usable(self, split: str, first: int, values: Mapping[str, Values]) -> npt.NDArray[np.bool_]:
        """Return which rows miss no value that their columns need, bool (n,).

        Raises:
            UserError: one does, and is not to be left out.
        """
        usable = np.ones(len(next(iter(values.values()))), bool)
        for name, own in values.items():
            how = self._kinds[name].missing
            if how == "fill":
                continue
            missing = cells.is_missing(own)
            if how == "stop" and missing.any():
                raise UserError(
                    f"dataset.columns.{name}.missing = 'stop': example {first + int(missing.argmax())} of the split "
                    f"'{split}' has no value. Mend the builder, or give missing: fill or drop in "
                    f"data/{self._dataset.name}/params.yaml"
                )
            usable &= ~missing
        return usable

    def _refused(self, bad: BadValue, split: str, row: int) -> UserError:
        value = " ".join(repr(bad.value).split())[:80]
        return UserError(
            f"dataset {self._dataset.name}: the column '{bad.column}', of kind {self._kinds[bad.column].kind}, has in "
            f"example {row} of the split '{split}' {value}, which {bad.reason}. Mend the builder, or give the column "
            f"another kind in data/{self._dataset.name}/params.yaml: dataset.columns.{bad.column} = category, text or "
            "ignore"
        )

    def _read_target(self) -> Target:
        wanted, learnt = self._found.wanted, self._found.kinds[1]
        columns = tuple(place[-1] for place in wanted)
        if learnt == "numbers":
            columns = tuple(name for place, one in wanted.items() for name in target_columns(place[-1], one.shape))
            return Target(task="regression", num_outputs=len(columns), columns=columns)
        names = self._found.class_names or self._named_classes()
        return Target(
            task="classification" if learnt in ("class", "text") else "multilabel",
            num_outputs=len(names),
            class_names=tuple(names),
            columns=columns,
        )

    def _named_classes(self) -> list[str]:
        """Return the texts that are learnt, of all splits, as the classes of a table are found.

        Raises:
            UserError: they are not classes.
        """
        (place,) = self._found.wanted
        texts: set[bytes] = set()
        count = 0
        for split in self._splits:
            for found in builders.columns(self._builder, split, [place], ROWS_AT_ONCE):
                texts.update(found[place].tolist())
                count += len(found[place])
        if not 1 < len(texts) < count:
            raise UserError(
                f"dataset {self._dataset.name}: its {count:,} examples have {len(texts):,} different texts to learn as "
                f"classes in '{'/'.join(place)}': give a builder whose texts are classes, two or more, and not one each"
            )
        return sort_classes(sorted({text.decode("utf-8", "replace") for text in texts}))

    def _labels(self, split: str, first: int, batch: Mapping[builders.Place, Any]) -> npt.NDArray[Any]:
        found, learnt = [batch[place] for place in self._found.wanted], self._found.kinds[1]
        if learnt == "text":
            places = {name: number for number, name in enumerate(self.target.class_names)}
            return np.array([places[text.decode("utf-8", "replace")] for text in found[0]], np.int64)
        if learnt == "class":
            return np.asarray(found[0], np.int64)
        if learnt == "numbers":
            numbers = np.concatenate([one.reshape(len(one), -1) for one in found], 1).astype(np.float32)
            refuse_infinite(self._dataset, split, first, numbers)
            return numbers
        if len(found) > 1:
            return np.stack(found, 1).astype(np.uint8)
        hot = np.zeros((len(found[0]), self.target.num_outputs), np.uint8)
        for row, places_of_row in enumerate(found[0]):
            hot[row, np.asarray(places_of_row, np.int64)] = 1
        return hot

    def _shape(self, name: str) -> tuple[int, int, int]:
        return image_shape(self._dataset, self._builder, self._sources[name].place)


def image_shape(dataset: config.Tfds, builder: Any, place: builders.Place) -> tuple[int, int, int]:
    """Return height, width and channels of images as they are prepared.

    Images of different sizes get ``image_size``, or without it the median size of the first ``MEASURED`` images of the
    training split, and a line says so. A dataset without a training split is measured by its first split.
    """
    own = builders.supervised(builder).given[place].shape
    size = dataset.image_size or own[:2]
    if None in size:
        split = "train" if "train" in builder.info.splits else min(builder.info.splits)
        files = (file for some in builders.columns(builder, split, [place], ROWS_AT_ONCE) for file in some[place])
        size, line = median_size(dataset.name, [_size_of(file) for file in itertools.islice(files, MEASURED)])
        print(line, file=sys.stderr)
    return *size, own[2]


def _size_of(file: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(file)) as image:
        return image.height, image.width


def target_columns(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return a name for each number of a tensor: its own, or with a place behind it."""
    width = math.prod(shape)
    return (name,) if width == 1 else tuple(f"{name} {place}" for place in range(width))


def refuse_infinite(dataset: config.Tfds, split: str, first: int, values: npt.NDArray[Any]) -> None:
    """Refuse numbers (n, k) of the examples from ``first`` on that are not finite.

    Raises:
        UserError: names the example.
    """
    if not (finite := np.isfinite(values).all(1)).all():
        raise UserError(
            f"dataset {dataset.name}: example {first + int((~finite).argmax())} of the split '{split}' has a "
            "number that is not finite in float32. Mend the builder, or leave the example out there"
        )


def held_out_rows(builder: Any, split: str, held_out: HeldOut | None) -> npt.NDArray[np.bool_]:
    """Return which examples of a split become test examples, bool (n,)."""
    num_examples = builder.info.splits[split].num_examples if split in builder.info.splits else 0
    if held_out is None or split != "train":
        return np.zeros(num_examples, bool)
    return builders.is_held_out(num_examples, held_out)


def labelled_rows(labels: npt.NDArray[Any], target: Target) -> npt.NDArray[np.bool_]:
    """Return which examples have something to learn, bool (n,): those of no class have the label -1."""
    return labels >= 0 if target.task == "classification" else np.ones(len(labels), bool)
