"""A prepared dataset as the checks see it: its arrays block by block, and what several checks need of each example."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tasks.data.checks import _hashes
from tasks.records import DataStatistics, PreparedDataset
from tasks.system import background, machine

MOST_ROWS = 1_000_000
MOST_BYTES = 2 * 2**30
"""Of a split's arrays, so much is looked at: more would take longer than it took to write them."""
BLOCK_BYTES = 4 * 2**20
MOST_THREADS = 4
"""However many cores there are: each takes its own memory."""
RUN_ROWS = 1024
"""Of what is larger, runs of so many rows are taken, evenly spread."""
ORDER = {"train": 0, "validation": 1, "test": 2}
Rows = npt.NDArray[np.int64]
Found = TypeVar("Found")
Place = tuple[str, int]
"""A split and a row."""


class Looks(NamedTuple):
    """What is kept of the images of a split, (rows,) each."""

    hashes: npt.NDArray[np.uint64]
    coarse: npt.NDArray[np.int8]
    """(rows, k), as the others see ``Look`` of ``_hashes``."""
    brightness: npt.NDArray[np.float32]
    contrast: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Data:
    """A prepared dataset.

    Attributes:
        prepared: its record.
        folder: where its arrays lie, which may be another place than the record says.
        before: the statistics of the data version before; None where there is none.
        name_of: what the source calls the example of a split and row; None where it has no names.
        block_bytes: so much of a feature is looked at at once.
    """

    prepared: PreparedDataset
    folder: Path
    before: DataStatistics | None = None
    name_of: Callable[[str, int], str] | None = None
    block_bytes: int = BLOCK_BYTES
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of a classification, or of the labels of several."""
        return self.prepared.target.class_names

    @cached_property
    def _arrays(self) -> dict[str, dict[str, Any]]:
        return {
            split: {
                name: np.load(self.folder / Path(path).name, mmap_mode="r")
                for name, path in (*part.features.items(), ("", part.labels))
            }
            for split, part in self.prepared.splits.items()
        }

    def array(self, split: str, feature: str) -> Any:
        """Return a feature of a split, ``np.memmap`` (n, *shape)."""
        return self._arrays[split][feature]

    def labels(self, split: str) -> npt.NDArray[Any]:
        """Return the labels of a split as ``records.PreparedSplit`` has them, mapped."""
        found: npt.NDArray[Any] = self._arrays[split][""]
        return found

    @cached_property
    def rows(self) -> dict[str, Rows]:
        """The rows of each split that are looked at, rising: all, or evenly spread runs of a larger one."""
        found = {}
        # A repeated example is reported for the later split, so the training split comes first.
        for split, part in sorted(self.prepared.splits.items(), key=lambda one: ORDER.get(one[0], len(ORDER))):
            arrays = self._arrays[split].values()
            width = sum(math.prod(array.shape[1:]) * array.itemsize for array in arrays)
            most = min(MOST_ROWS, max(1, MOST_BYTES // max(1, width)))
            rows = np.arange(part.num_examples)
            if len(rows) > most:
                runs, wanted = math.ceil(len(rows) / RUN_ROWS), max(1, most // RUN_ROWS)
                chosen = np.unique(np.linspace(0, runs - 1, wanted).astype(np.int64))
                rows = rows[np.isin(rows // RUN_ROWS, chosen)]
            found[split] = rows
        return found

    @property
    def num_rows(self) -> int:
        """How many examples are looked at in all splits."""
        return sum(map(len, self.rows.values()))

    def blocks(self, split: str, feature: str) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows of a feature that are looked at, some MB at once."""
        array, rows = self.array(split, feature), self.rows[split]
        shape = array.shape[1:]
        width = math.prod(shape) * array.itemsize
        rows_a_block = max(1, self.block_bytes // max(1, width))
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else ():
            for first in range(int(run[0]), int(run[-1]) + 1, rows_a_block):
                count = min(rows_a_block, int(run[-1]) + 1 - first)
                # Read, not mapped: the pages of a map stay resident, and grow with the dataset.
                place = array.offset + first * width
                yield np.fromfile(array.filename, array.dtype, count * math.prod(shape), offset=place).reshape(
                    -1, *shape
                )

    def of_blocks(self, split: str, feature: str, find: Callable[[npt.NDArray[Any]], Found]) -> Iterator[Found]:
        """Yield what is found of each of ``blocks``, in their order, by as many threads as there are cores."""
        cores = min(machine.usable_cores(), MOST_THREADS)
        return background.in_order(find, self.blocks(split, feature), threads=cores, ahead=cores)

    def features(self, *kinds: str) -> list[str]:
        """Return the names of the features of these kinds."""
        return [name for name, feature in self.prepared.features.items() if feature.kind in kinds]

    def digests(self, split: str) -> npt.NDArray[np.uint64]:
        """Return 64 bits for each example, equal where all its features are: uint64 (rows,)."""

        def digests() -> npt.NDArray[np.uint64]:
            total = np.zeros(len(self.rows[split]), np.uint64)
            for number, name in enumerate(self.prepared.features):
                hashed = [*self.of_blocks(split, name, partial(_hashes.of_rows, salt=number))]
                total += np.concatenate(hashed) if hashed else total
            return total

        found: npt.NDArray[np.uint64] = self.cached(("digests", split), digests)
        return found

    def looks(self, split: str, feature: str) -> Looks:
        """Return what is kept of the images of a split."""

        def looks() -> Looks:
            shape = self.prepared.features[feature].shape
            look = _hashes.Look(shape[0], shape[1])
            parts = [*self.of_blocks(split, feature, look.of)]
            parts = parts or [look.of(np.zeros((0, *shape), np.uint8))]  # A split of TFDS may be empty.
            return Looks(*(np.concatenate(own) for own in zip(*parts, strict=True)))

        found: Looks = self.cached(("looks", split, feature), looks)
        return found

    def all_of(self, find: Callable[[str], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return what is found for each split, one after the other, as ``where`` counts them."""
        return np.concatenate([find(split) for split in self.rows])

    def where(self, places: Rows) -> list[Place]:
        """Return the split and row of examples, counted over all that are looked at."""
        ends = np.cumsum([len(rows) for rows in self.rows.values()])
        of_split = np.searchsorted(ends, places, side="right").tolist()
        rows = np.concatenate(list(self.rows.values()))[places].tolist()
        names = list(self.rows)
        return [(names[split], row) for split, row in zip(of_split, rows, strict=True)]

    def gather(self, feature: str, places: Rows) -> npt.NDArray[Any]:
        """Return a feature of examples, counted over all that are looked at, rising: (n, *shape)."""
        found, end = [], 0
        for split, rows in self.rows.items():
            own = places[(places >= end) & (places < end + len(rows))] - end
            found.append(self.array(split, feature)[rows[own]])
            end += len(rows)
        return np.concatenate(found)

    def label_of(self, split: str, row: int) -> str:
        """Return what an example teaches, for a person."""
        label = self.labels(split)[row]
        task = self.prepared.target.task
        if task == "classification":
            return self.class_names[int(label)]
        if task == "multilabel":
            return ", ".join(name for name, own in zip(self.class_names, label, strict=True) if own) or "none"
        return ", ".join(f"{value:.6g}" for value in label)

    def named(self, split: str, row: int) -> str:
        """Return what an example is called: as the source does, else its row."""
        own = self.name_of(split, row) if self.name_of else ""
        return f"{own} ({split})" if own else f"row {row} of {split}"

    def columns(self, feature: str) -> list[str]:
        """Return what the places of a feature of numbers or categories are called."""
        own = self.prepared.features[feature]
        if own.columns:
            return [
                f"{column.name}{f' {number}' if column.width > 1 else ''}"
                for column in own.columns
                for number in range(column.width)
            ]
        return [f"{feature} {number}" for number in range(own.shape[0])]

    def vocabulary(self, feature: str) -> list[list[str]]:
        """Return the texts of each column of a feature of categories or words, from place 0 on."""

        def read() -> list[list[str]]:
            path = self.prepared.features[feature].vocabulary
            texts = json.loads((self.folder / Path(path).name).read_text(encoding="utf-8")) if path else []
            return [["(missing)", "(unknown)", *own] for own in texts]

        found: list[list[str]] = self.cached(("vocabulary", feature), read)
        return found

    def shown(self, split: str, row: int) -> str:
        """Return the values of an example that are not images, for a person."""
        parts = []
        for name in self.features("number"):
            values = self.array(split, name)[row].tolist()
            parts += [f"{column} {value:.4g}" for column, value in zip(self.columns(name), values, strict=True)]
        for name in self.features("category", "text"):
            texts, values = self.vocabulary(name), self.array(split, name)
            if self.prepared.features[name].kind == "text":
                parts.append(" ".join(texts[0][place] for place in values[row].tolist() if place))
            else:
                own = zip(self.columns(name), texts, values[row].tolist(), strict=True)
                parts += [f"{column} {known[place]}" for column, known, place in own]
        return ", ".join(parts)

    def cached(self, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns, which is called once for each key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]
