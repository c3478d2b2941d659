"""A prepared dataset for the checks: its arrays in blocks, and results that several checks use."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tasks.data import prepared_data
from tasks.data.checks import _hashes
from tasks.records import ColumnStatistics, DataStatistics, PreparedDataset
from tasks.system import background, machine, units

MOST_ROWS = 1_000_000
MOST_BYTES = 2 * 2**30
"""The most bytes of a split's arrays that the checks read: more would take longer than writing the arrays did."""
BLOCK_BYTES = 4 * 2**20
MOST_THREADS = 4
"""On any number of cores, because each thread needs memory."""
ORDER = {"train": 0, "validation": 1, "test": 2}
MOST_NUMBERS = 100_000
"""The number of rows of a split, evenly spread, from which quantiles are computed."""
MOST_COLUMNS = 100
"""The most columns of a feature of numbers; more, as in a flattened image, would be redundant."""
MOST_COUNTED = 1000
OPENING = Lock()
"""NumPy reads an array's header with `ast`, which fails at random in two threads of Python 3.11.7 (SystemError)."""
OTHERS = "(others)"
Rows = npt.NDArray[np.int64]
Found = TypeVar("Found")
Place = tuple[str, int]
"""A split and a row."""


class Looks(NamedTuple):
    """Properties of the images of a split, (rows,) each."""

    hashes: npt.NDArray[np.uint64]
    coarse: npt.NDArray[np.int8]
    """(rows, k); for all four, see ``_hashes.Look``."""
    brightness: npt.NDArray[np.float32]
    contrast: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Data:
    """A prepared dataset.

    Attributes:
        prepared: its record.
        folder: the folder of its arrays, which may differ from the one in the record.
        before: the statistics of the previous data version; None without one.
        name_of: takes split and row, returns the example's name in the source; None if it has no names.
    """

    prepared: PreparedDataset
    folder: Path
    before: DataStatistics | None = None
    name_of: Callable[[str, int], str] | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes of a classification, or the labels of a multilabel task."""
        return self.prepared.target.class_names

    def array(self, split: str, feature: str) -> Any:
        """Return a feature of a split, ``np.memmap`` (n, *shape): a new map each time, because pages of a kept
        map stay resident and grow with the dataset."""
        return self._opened(self.prepared.splits[split].features[feature])

    def labels(self, split: str) -> npt.NDArray[Any]:
        """Return the memory-mapped labels of a split, as in ``records.PreparedSplit``."""
        found: npt.NDArray[Any] = self._opened(self.prepared.splits[split].labels)
        return found

    def _opened(self, place: str) -> Any:
        with OPENING:
            return np.load(self.folder / Path(place).name, mmap_mode="r")

    @cached_property
    def rows(self) -> dict[str, Rows]:
        """The rows of each split that the checks read, ascending: all rows, or evenly spread ones of a large split."""
        found = {}
        # A repeated example is reported for the later split, so the training split comes first.
        for split, part in sorted(self.prepared.splits.items(), key=lambda one: ORDER.get(one[0], len(ORDER))):
            arrays = [self.labels(split), *(self.array(split, name) for name in part.features)]
            width = sum(math.prod(array.shape[1:]) * array.itemsize for array in arrays)
            most = min(MOST_ROWS, max(1, MOST_BYTES // max(1, width)))
            found[split] = np.arange(0, part.num_examples, math.ceil(part.num_examples / most) or 1)
        return found

    @property
    def num_rows(self) -> int:
        """The number of examples of all splits that the checks read."""
        return sum(map(len, self.rows.values()))

    def blocks(self, split: str, feature: str) -> Iterator[npt.NDArray[Any]]:
        """Yield the ``rows`` of a feature in blocks of some MB."""
        rows, array = self.rows[split], self.array(split, feature)
        rows_a_block = max(1, BLOCK_BYTES // max(1, math.prod(array.shape[1:]) * array.itemsize))
        for first in range(0, len(rows), rows_a_block):
            some = rows[first : first + rows_a_block]
            # A slice of evenly spread rows is no copy.
            yield self.array(split, feature)[some[0] : some[-1] + 1 : rows[1] if len(rows) > 1 else 1]

    def of_blocks(self, split: str, feature: str, find: Callable[[npt.NDArray[Any]], Found]) -> Iterator[Found]:
        """Yield the result of ``find`` for each of ``blocks``, in order, on at most ``MOST_THREADS`` threads."""
        cores = min(machine.usable_cores(), MOST_THREADS)
        return background.in_order(find, self.blocks(split, feature), threads=cores, ahead=cores)

    def features(self, *kinds: str) -> list[str]:
        """Return the names of the features of these kinds."""
        return [name for name, feature in self.prepared.features.items() if feature.kind in kinds]

    @cached_property
    def digests(self) -> dict[str, npt.NDArray[np.uint64]]:
        """A 64-bit hash of all features of each example, by split: uint64 (rows,)."""
        found = {split: np.zeros(len(rows), np.uint64) for split, rows in self.rows.items()}
        for number, name in enumerate(self.prepared.features):
            for split, total in found.items():
                if hashed := [*self.of_blocks(split, name, partial(_hashes.of_rows, salt=number))]:
                    total += np.concatenate(hashed)
        return found

    @cached_property
    def looks(self) -> dict[str, dict[str, Looks]]:
        """The properties of the images, by feature and split."""
        found: dict[str, dict[str, Looks]] = {}
        for name in self.features("image"):
            shape = self.prepared.features[name].shape
            look, found[name] = _hashes.Look(shape[0], shape[1]), {}
            for split in self.rows:
                # A TFDS split may be empty.
                parts = [*self.of_blocks(split, name, look.of)] or [look.of(np.zeros((0, *shape), np.uint8))]
                found[name][split] = Looks(*(np.concatenate(own) for own in zip(*parts, strict=True)))
        return found

    def where(self, places: Rows) -> list[Place]:
        """Return the split and row of examples, given their indices in ``rows`` of all splits together."""
        ends = np.cumsum([len(rows) for rows in self.rows.values()])
        of_split = np.searchsorted(ends, places, side="right").tolist()
        rows = np.concatenate(list(self.rows.values()))[places].tolist()
        names = list(self.rows)
        return [(names[split], row) for split, row in zip(of_split, rows, strict=True)]

    def gather(self, feature: str, places: Rows) -> npt.NDArray[Any]:
        """Return a feature of examples, given ascending indices in ``rows`` of all splits together: (n, *shape)."""
        found, end = [], 0
        for split, rows in self.rows.items():
            own = places[(places >= end) & (places < end + len(rows))] - end
            found.append(self.array(split, feature)[rows[own]])
            end += len(rows)
        return np.concatenate(found)

    def label_of(self, split: str, row: int) -> str:
        """Return the label of an example as text."""
        label = self.labels(split)[row]
        task = self.prepared.target.task
        if task == "classification":
            return self.class_names[int(label)]
        if task == "multilabel":
            return ", ".join(name for name, own in zip(self.class_names, label, strict=True) if own) or "none"
        return ", ".join(map(units.number, label))

    def named(self, split: str, row: int) -> str:
        """Return the name of an example in the source, else its row."""
        own = self.name_of(split, row) if self.name_of else ""
        return f"{own} ({split})" if own else f"row {row} of {split}"

    def columns(self, feature: str) -> list[str]:
        """Return the names of the places of a feature of numbers or categories."""
        own = self.prepared.features[feature]
        if own.columns:
            return [
                f"{column.name}{f' {number}' if column.width > 1 else ''}"
                for column in own.columns
                for number in range(column.width)
            ]
        return [f"{feature} {number}" for number in range(own.shape[0])]

    @cached_property
    def vocabularies(self) -> dict[str, list[list[str]]]:
        """The texts of each column from place 0 on, by feature of categories or words."""
        found = {}
        for name, feature in self.prepared.features.items():
            if feature.vocabulary is not None:
                texts = json.loads((self.folder / Path(feature.vocabulary).name).read_text(encoding="utf-8"))
                found[name] = [["(missing)", "(unknown)", *own] for own in texts]
        return found

    @cached_property
    def statistics(self) -> DataStatistics:
        """How the columns of all splits are distributed."""
        return DataStatistics(
            arrays=prepared_data.arrays_of(self.prepared),
            splits={split: dict(self._columns(split)) for split, rows in self.rows.items() if len(rows)},
        )

    def shown(self, split: str, row: int) -> str:
        """Return the values of an example, except images, as text."""
        parts = []
        for name in self.features("number"):
            values = self.array(split, name)[row].tolist()
            parts += [
                f"{column} {units.number(value, 4)}" for column, value in zip(self.columns(name), values, strict=True)
            ]
        for name in self.features("category", "text"):
            texts, values = self.vocabularies[name], self.array(split, name)
            if self.prepared.features[name].kind == "text":
                parts.append(" ".join(texts[0][place] for place in values[row].tolist() if place))
            else:
                own = zip(self.columns(name), texts, values[row].tolist(), strict=True)
                parts += [f"{column} {known[place]}" for column, known, place in own]
        return ", ".join(parts)

    def _columns(self, split: str) -> Iterator[tuple[str, ColumnStatistics]]:
        target, part = self.prepared.target, self.prepared.splits[split]
        if target.class_names:
            yield "class", _counted(Counter(dict(zip(target.class_names, part.class_counts, strict=True))))
        else:
            names = target.columns or [f"label {number}" for number in range(target.num_outputs)]
            yield from numbers(names, self.labels(split)[self.rows[split]])
        for name in self.features("image"):
            looks = self.looks[name][split]
            yield from numbers(
                [f"{name} brightness", f"{name} contrast"], np.stack([looks.brightness, looks.contrast], axis=1)
            )
        for name in self.features("number"):
            yield from numbers(self.columns(name), self._some_rows(split, name))
        for name in self.features("category", "text"):
            texts = self.vocabularies[name]
            is_text = self.prepared.features[name].kind == "text"
            counts = [np.zeros(len(own), np.int64) for own in texts]
            for block in self.blocks(split, name):
                for number, own in enumerate(counts):
                    values = block if is_text else block[:, number]
                    own += np.bincount(values.ravel(), minlength=len(own))
            for column, own, known in zip([name] if is_text else self.columns(name), counts, texts, strict=True):
                first = 1 if is_text else 0  # 0 pads a short text; it is not a word.
                yield column, _counted(Counter(dict(zip(known[first:], own[first:].tolist(), strict=True))))

    def _some_rows(self, split: str, name: str) -> npt.NDArray[Any]:
        """Return the first columns of at most ``MOST_NUMBERS`` evenly spread rows of a feature of numbers."""
        rows = self.rows[split]
        some = rows[:: 1 + (len(rows) - 1) // MOST_NUMBERS]
        parts = np.array_split(some, 1 + len(some) // 5_000)  # Each part has its own map, so its pages do not stay.
        return np.concatenate([self.array(split, name)[part, :MOST_COLUMNS] for part in parts])


def numbers(
    names: list[str] | tuple[str, ...], values: npt.NDArray[np.generic]
) -> Iterator[tuple[str, ColumnStatistics]]:
    """Yield the statistics of each column of numbers, (n, columns)."""
    for name, own in zip(names, values[:, :MOST_COLUMNS].T, strict=False):
        column = own.astype(np.float64)
        # Sorting float32 first takes a fifth of the time.
        quantiles = np.quantile(np.sort(own).astype(np.float64), np.linspace(0, 1, 101))
        yield (
            name,
            ColumnStatistics(
                num_values=len(column),
                mean=float(column.mean()),
                deviation=float(column.std()),
                quantiles=tuple(float(f"{value:.7g}") for value in quantiles),
            ),
        )


def _counted(counts: Counter[str]) -> ColumnStatistics:
    most = dict(sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:MOST_COUNTED])
    total = counts.total()
    others = {OTHERS: rest} if (rest := total - sum(most.values())) else {}
    return ColumnStatistics(num_values=total, counts=most | others)
