"""Named columns -> features, with statistics of the training split; for every kind whose examples have columns."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tasks import config
from tasks.data.encoding import cells
from tasks.data.encoding.cells import Values
from tasks.records import Column, Feature
from tasks.system.errors import UserError

OWN_NAMES = {"number", "category", "label", "weight"}
"""Names that a column's feature never gets, because other arrays have them."""
NUM_QUANTILES = 256
"""The quantiles of a column with ``scale: quantiles``, saved with each model: less than half a percent of the rows lies
between two of them. A column with fewer values has one for each value."""
LONGEST_TEXT = 512
TEXTS_WHOLE = 0.95
"""The share of the training texts that are not truncated."""


@dataclass
class Statistics:
    """Statistics of a column's values in the training split."""

    name: str
    described: config.TableColumn
    dataset: config.Table
    sums: list[float] = field(default_factory=list)
    count: int = 0
    numbers: list[cells.Numbers] = field(default_factory=list)
    """All numbers of a column with ``scale: quantiles``."""
    texts: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        return self.described.kind

    def add(self, values: Values) -> None:
        """Count some values.

        Raises:
            BadValue: a value that the column cannot hold.
        """
        if self.kind in ("number", "datetime"):
            if self.kind == "datetime":
                found = cells.days(values, self.name, self.described.format)
            else:
                found = cells.numbers(values, self.name, self.dataset.decimal or ".", self.described.unit)
            found = found[~np.isnan(found)]
            self.count += len(found)
            self.sums.append(float(found.sum()))
            if self.described.scale == "quantiles":
                self.numbers.append(found)
        elif self.kind == "category":
            different, rows = cells.different(values)
            counts = np.bincount(rows, minlength=len(different)).tolist()
            missing = cells.is_missing(different, self.dataset.not_missing).tolist()
            for value, count, absent in zip(different, counts, missing, strict=True):
                if count and not absent:
                    self.texts[cells.spelled(value)] += count
        else:
            words, lengths = cells.words_of(cells.rows_of(values))
            self.texts.update(words)
            self.lengths.update(lengths.tolist())

    def column(self) -> Column:
        """Return the record of the column.

        Raises:
            UserError: the column has no value.
        """
        width = cells.DATETIME_WIDTH if self.kind == "datetime" else 1
        if self.kind != "text" and not self.count and not self.texts:
            raise UserError(
                f"dataset.columns.{self.name} = {self.kind}: no row of the training split has a value. Set its kind "
                f"to ignore (dataset.source = '{self.dataset.source}')"
            )
        found = {"name": self.name, "kind": self.kind, "width": width}
        found["na_values"] = tuple(cells.spelled(one) for one in self.dataset.na_values)
        if self.kind not in ("number", "datetime"):
            return Column.model_validate(found)
        fill = math.fsum(self.sums) / self.count if self.described.missing == "fill" else None
        written = {"decimal": self.dataset.decimal or "."} | self.described.model_dump(include={"format", "unit"})
        quantiles: list[float] = []
        if self.numbers:
            shares = np.linspace(0, 1, min(NUM_QUANTILES, self.count))
            # Interpolation may lose a last digit between equal values.
            quantiles = np.maximum.accumulate(np.quantile(np.concatenate(self.numbers), shares)).tolist()
        return Column.model_validate({**found, "fill": fill, "quantiles": quantiles, **written})

    def vocabulary(self) -> list[str]:
        """Return the most frequent texts; ties are in alphabetical order."""
        ordered = sorted(self.texts, key=lambda text: (-self.texts[text], text))
        return ordered[: self.dataset.max_vocabulary]

    def text_length(self) -> int:
        """Return the number of words at which the share ``TEXTS_WHOLE`` of the texts is not truncated."""
        total, seen = sum(self.lengths.values()), 0
        for length, count in sorted(self.lengths.items()):
            seen += count
            if seen >= TEXTS_WHOLE * total:
                return min(max(length, 1), LONGEST_TEXT)
        raise AssertionError("there is no text")


def features_of(
    dataset: config.Table, columns: Sequence[Statistics], shapes: Mapping[str, tuple[int, int, int]]
) -> tuple[dict[str, Feature], dict[str, list[list[str]]]]:
    """Return the features of some columns, and the vocabularies of those that have one.

    All numbers and datetimes together form the feature ``number``, all categories ``category``; each column of texts or
    images is a separate feature.

    Args:
        dataset: its settings.
        columns: all columns except images, in their order.
        shapes: height, width and channels of each column of images.

    Raises:
        UserError: a column has no values, or no words.
    """
    features: dict[str, Feature] = {}
    vocabularies: dict[str, list[list[str]]] = {}
    if numbers := tuple(own.column() for own in columns if own.kind in ("number", "datetime")):
        width = sum(column.width for column in numbers)
        features["number"] = Feature(kind="number", shape=(width,), dtype="float32", columns=numbers)
    categories = [own for own in columns if own.kind == "category"]
    for group in (categories, *([own] for own in columns if own.kind == "text")):
        if not group:
            continue
        is_text = group[0].kind == "text"
        name = feature_name(group[0].name, features) if is_text else "category"
        described = tuple(own.column() for own in group)
        vocabularies[name] = [own.vocabulary() for own in group]
        if not all(vocabularies[name]):
            raise UserError(
                f"dataset.columns.{group[0].name} = text: no text of the training split has a word. Set its "
                f"kind to ignore (dataset.source = '{dataset.source}')"
            )
        features[name] = Feature(
            kind="text" if is_text else "category",
            shape=(dataset.text_length or group[0].text_length(),) if is_text else (len(group),),
            dtype="int32",
            columns=described,
            vocabulary_sizes=tuple(len(texts) + cells.FIRST for texts in vocabularies[name]),
        )
    for column, shape in shapes.items():
        features[feature_name(column, features)] = Feature(
            kind="image", shape=shape, dtype="uint8", columns=(Column(name=column, kind="image"),)
        )
    return features, vocabularies


def feature_name(column: str, others: Mapping[str, object]) -> str:
    """Return a new name for the feature of a column: lowercase letters, digits and _, safe in a file name."""
    word = re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_")[:60] or "column"
    word = word if word[0].isalpha() else f"column_{word}"
    name, number = word, 1
    while name in others or name in OWN_NAMES:
        number += 1
        name = f"{word}_{number}"
    return name


def sort_classes(texts: Sequence[str]) -> list[str]:
    """Return classes in numerical order if all are numbers, else in alphabetical order."""
    try:
        return sorted(texts, key=lambda text: (float(text), text))
    except ValueError:
        return sorted(texts)
