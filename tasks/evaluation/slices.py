"""Slices of the test split by name: a report shows the metric of each, and the gate may set limits."""

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data import prepared_data
from tasks.records import Feature, PreparedDataset, Task
from tasks.system import units

if TYPE_CHECKING:
    from tasks.data.kinds import Metadata

FEWEST = 10
"""The fewest examples of a slice."""
MOST_VALUES = 30
"""The most categories of a column that become slices: the most frequent ones."""
MOST_COLUMNS = 50
PIXELS = 64
"""The approximate number of rows and columns of an image from which its brightness is computed."""
QUARTERS = ("lowest quarter", "second quarter", "third quarter", "highest quarter")
MEASURES: dict[Task, str] = {"classification": "accuracy", "multilabel": "labels right", "regression": "mae"}
"""The name of a slice's mean of ``scores``."""
MISSING, UNKNOWN = "missing", "unknown"
"""Names of the slices for a missing category, and for categories that the training split does not have."""


class Slice(NamedTuple):
    """A part of the test split."""

    by: str
    name: str
    rows: npt.NDArray[np.bool_]
    """Whether each example belongs to it, (n,)."""
    ends: str = ""
    """The range of a quarter. It is not part of the name, because it depends on the test rows."""

    @property
    def full_name(self) -> str:
        """The name in a report and in ``register.floors``."""
        return f"{self.by}: {self.name}"

    @property
    def shown(self) -> str:
        """The name with the range of a quarter."""
        return f"{self.full_name} ({self.ends})" if self.ends else self.full_name


@dataclass(frozen=True)
class TestExamples:
    """The test split as prepared."""

    prepared: PreparedDataset
    arrays: Mapping[str, npt.NDArray[Any]]
    """By feature, memory-mapped: (n, *shape)."""
    vocabularies: Mapping[str, list[list[str]]]
    """By feature: the texts of each column, from place 2 on."""
    sizes: npt.NDArray[np.int32] | None = None
    """Height and width of the original images, (n, 2); None if unknown."""
    metadata: "Mapping[str, Metadata]" = field(default_factory=dict)
    """By column."""

    def columns(self, name: str) -> list[tuple[str, int, int]]:
        """Return name, first place and width of each column of a feature; a text is one column."""
        feature, found, first = self.prepared.features[name], [], 0
        if feature.kind == "text":
            return [(feature.columns[0].name if feature.columns else name, 0, feature.shape[0])]
        for column in feature.columns:
            found.append((column.name, first, column.width))
            first += column.width
        return found or [(f"{name} {place}", place, 1) for place in range(feature.shape[0])]

    def category(self, name: str, column: int, place: int) -> str:
        """Return the name of a category from its number."""
        known = (MISSING, UNKNOWN)
        return known[place] if place < 2 else told_apart(self.word(name, column, place), known)

    def word(self, name: str, column: int, place: int) -> str:
        """Return the text of a category or word from its number, which is 2 or more."""
        words = self.vocabularies[name][column]
        return words[place - 2] if place - 2 < len(words) else str(place)


def load(prepared: PreparedDataset) -> TestExamples | None:
    """Return the test split; None if a file is missing or damaged."""
    root = config.project_root()
    split = prepared.splits["test"]
    try:
        arrays = {
            name: np.load(root / path, mmap_mode="r", allow_pickle=False) for name, path in split.features.items()
        }
        vocabularies = {
            name: json.loads((root / feature.vocabulary).read_text(encoding="utf-8"))
            for name, feature in prepared.features.items()
            if feature.vocabulary is not None
        }
        beside = metadata(prepared)
    except (OSError, ValueError):
        return None
    return TestExamples(prepared, arrays, vocabularies, _sizes(prepared), beside)


def metadata(prepared: PreparedDataset) -> "dict[str, Metadata]":
    """Return the metadata columns of the test examples.

    Raises:
        OSError: their file is missing.
        ValueError: their file is damaged.
    """
    if prepared.metadata is None:
        return {}
    content = (config.project_root() / prepared.metadata).read_bytes()
    if hashlib.sha256(content).hexdigest() != prepared.sha256[prepared.metadata]:
        raise ValueError(f"{prepared.metadata}: damaged")
    from tasks.data.kinds import Metadata

    return {name: Metadata(**one) for name, one in json.loads(content).items()}


def _sizes(prepared: PreparedDataset) -> npt.NDArray[np.int32] | None:
    """Return the sizes of the original images if the report of these data contains them."""
    if prepared_data.load_quality(prepared) is None:
        return None
    report = config.project_root() / "data" / prepared.name / "report"
    try:
        sizes: npt.NDArray[np.int32] = np.load(report / prepared_data.SIZES, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return sizes if sizes.shape == (prepared.splits["test"].num_examples, 2) else None


def told_apart(category: str, names: Collection[str]) -> str:
    """Return a category, in quotes if it equals one of the names, with or without quotes."""
    return f"'{category}'" if category.strip("'") in names else category


def scores(task: Task, labels: npt.NDArray[Any], outputs: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the score of each example, (n,): 1 if the class is right, else 0; the share of labels that are right; or
    the mean absolute error of a regression."""
    if task == "classification":
        each: npt.NDArray[Any] = outputs.argmax(axis=1) == labels
    elif task == "multilabel":
        each = ((outputs > 0) == (labels == 1)).mean(axis=1)
    else:
        each = np.abs(outputs.astype(np.float64) - labels).mean(axis=1)
    return each.astype(np.float64)


def every(
    task: Task, class_names: Sequence[str], labels: npt.NDArray[Any], test: TestExamples | None
) -> Iterator[Slice]:
    """Yield all slices, even with few examples: by class, by column, by brightness and original size of an image.
    If the test rows are unavailable, ``test`` is None and all slices are by class."""
    if task == "classification":
        for place, name in enumerate(class_names):
            yield Slice("class", name, labels == place)
    elif task == "multilabel":
        for place, name in enumerate(class_names):
            yield Slice("label", name, labels[:, place] == 1)
    else:
        yield from quarters("target", labels[:, 0])
    if test is not None:
        for name in test.prepared.features:
            yield from map(_of_column, _by_feature(test, name))
        for name, column in test.metadata.items():
            yield from map(_of_column, _by_metadata(name, column))


def _of_column(one: Slice) -> Slice:
    """Return a slice under a name that differs from slices by target, because a column may also be called `class`."""
    if one.by in ("class", "label", "target"):
        return Slice(f"column {one.by}", one.name, one.rows, one.ends)
    return one


def is_image(feature: Feature) -> bool:
    """Return whether a feature can be shown as an image."""
    return feature.kind == "image" and len(feature.shape) == 3


def _by_feature(test: TestExamples, name: str) -> Iterator[Slice]:
    feature, array = test.prepared.features[name], test.arrays[name]
    if is_image(feature):
        yield from quarters(f"brightness of {name}", _brightness(array))
        if test.sizes is not None:
            yield from quarters(f"original pixels of {name}", test.sizes.astype(np.int64).prod(axis=1))
    elif feature.kind == "text":
        yield from quarters(f"words of {name}", np.count_nonzero(array.reshape(len(array), -1), axis=1))
    elif len(feature.shape) == 1:
        for place, (column, first, _) in enumerate(test.columns(name)[:MOST_COLUMNS]):
            values = np.asarray(array[:, first])
            if feature.kind == "number":
                isday = bool(feature.columns) and feature.columns[place].kind == "datetime"
                yield from quarters(column, values, day if isday else _number)
                continue
            different, counts = np.unique(values, return_counts=True)
            for value in different[np.argsort(-counts, kind="stable")][:MOST_VALUES]:
                yield Slice(column, test.category(name, place, int(value)), values == value)


def _by_metadata(name: str, column: "Metadata") -> Iterator[Slice]:
    if column.kind == "category":
        named = [MISSING if value is None else told_apart(str(value), (MISSING,)) for value in column.values]
        values = np.array(named, object)
        for value, _ in sorted(Counter(values.tolist()).items(), key=lambda one: (-one[1], one[0]))[:MOST_VALUES]:
            yield Slice(name, value, values == value)
    else:
        numbers = np.array(column.values, np.float64)  # None is NaN.
        yield from quarters(name, numbers, day if column.kind == "datetime" else _number)


def _number(value: float) -> str:
    return units.number(value, 4)


def day(value: float) -> str:
    """Return the date for a number of days since 1970."""
    return str(np.datetime64(math.floor(value), "D"))


def _written(values: npt.NDArray[np.float64], said: Callable[[float], str]) -> list[str]:
    """Return each value as text; with all digits, or the time of the day, if two texts would be equal."""
    texts = [said(value) for value in values]
    if len(set(texts)) == len(texts):
        return texts
    if said is day:
        return [str(np.datetime64(round(value * 86_400), "s")) for value in values]
    return [repr(float(value)) for value in values]


def _brightness(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return the mean pixel of each image, (n,), using every second, third ... row and column of large ones."""
    down, across = (max(1, side // PIXELS) for side in images.shape[1:3])
    seen = images[:, ::down, ::across]
    # 256 images at a time, so that the memory-mapped array need not fit into memory.
    parts = [seen[first : first + 256].mean(axis=(1, 2, 3)) for first in range(0, len(seen), 256)]
    return np.concatenate(parts)


def quarters(by: str, values: npt.NDArray[Any], said: Callable[[float], str] = _number) -> Iterator[Slice]:
    """Yield the slices between the distinct quartiles of a number; if it has few values, a slice for each value.

    If quartiles are equal, slices are named by their ends, not as quarters. ``said`` formats a value.
    """
    values = np.asarray(values, np.float64)
    different = np.unique(values[np.isfinite(values)])
    if 1 < len(different) <= len(QUARTERS):
        for value, text in zip(different, _written(different, said), strict=True):
            yield Slice(by, text, values == value)
        return
    if len(different) < 2:
        return
    edges = np.unique(np.quantile(values[np.isfinite(values)], [0, 0.25, 0.5, 0.75, 1]))
    texts = _written(edges, said)
    for place, (low, high) in enumerate(itertools.pairwise(edges)):
        last = place == len(edges) - 2
        inside = (values >= low) & ((values <= high) if last else (values < high))
        ends = f"{texts[place]} to {texts[place + 1]}"
        yield Slice(by, QUARTERS[place], inside, ends) if len(edges) > len(QUARTERS) else Slice(by, ends, inside)
