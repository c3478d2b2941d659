"""Named columns -> features, with what is taken of the training split; for every kind whose examples have columns."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tasks import config
from tasks.data.encoding import cells
from tasks.data.encoding.cells import Values
from tasks.data.kinds import most_frequent, text_length
from tasks.records import Column, Feature
from tasks.system.errors import UserError

OWN_NAMES = {"number", "category", "label", "weight"}
"""No column becomes a feature of these names: other arrays have them."""
NUM_QUANTILES = 256
"""That are kept of a column whose numbers become their places among them, and go with each of its models: between two
of them lie less than half a percent of the rows. Of a column with fewer values, as many as it has values."""


@dataclass
class Statistics:
    """What is counted of a column's values in the training split."""

    name: str
    described: config.TableColumn
    decimal: Literal[".", ","] = "."
    not_missing: Collection[str] = ()
    sums: list[float] = field(default_factory=list)
    count: int = 0
    numbers: list[cells.Numbers] = field(default_factory=list)
    """All of them, where their quantiles are wanted."""
    texts: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        return self.described.kind

    def add(self, values: Values) -> None:
        """Count some values.

        Raises:
            BadValue: one that the column cannot hold.
        """
        if self.kind in ("number", "datetime"):
            if self.kind == "datetime":
                found = cells.days(values, self.name, self.described.format)
            else:
                found = cells.numbers(values, self.name, self.decimal)
            found = found[~np.isnan(found)]
            self.count += len(found)
            self.sums.append(float(found.sum()))
            if self.described.scale == "quantiles":
                self.numbers.append(found)
        elif self.kind == "category":
            different, rows = cells.different(values)
            counts = np.bincount(rows, minlength=len(different)).tolist()
            missing = cells.is_missing(different, self.not_missing).tolist()
            for value, count, absent in zip(different, counts, missing, strict=True):
                if count and not absent:
                    self.texts[cells.spelled(value)] += count
        else:
            words, lengths = cells.words_of(cells.rows_of(values))
            self.texts.update(words)
            self.lengths.update(lengths.tolist())

    def column(self, where: str) -> Column:
        """Return the record of the column.

        Raises:
            UserError: it has no value; ``where`` says of which data.
        """
        width = cells.DATETIME_WIDTH if self.kind == "datetime" else 1
        if self.kind != "text" and not self.count and not self.texts:
            raise UserError(
                f"dataset.columns.{self.name} = {self.kind}: no row of the training split has a value. Give the column "
                f"the kind ignore ({where})"
            )
        if self.kind not in ("number", "datetime"):
            return Column.model_validate({"name": self.name, "kind": self.kind, "width": width})
        fill = math.fsum(self.sums) / self.count if self.described.missing == "fill" else None
        form = self.described.format if self.kind == "datetime" else None
        fitted = {"fill": fill, "quantiles": self._quantiles(), "decimal": self.decimal, "format": form}
        return Column.model_validate({"name": self.name, "kind": self.kind, "width": width, **fitted})

    def _quantiles(self) -> list[float]:
        if not self.numbers:
            return []
        shares = np.linspace(0, 1, min(NUM_QUANTILES, self.count))
        # Interpolation may lose a last digit where values are equal.
        found: list[float] = np.maximum.accumulate(np.quantile(np.concatenate(self.numbers), shares)).tolist()
        return found

    def vocabulary(self, most: int) -> list[str]:
        """Return the most frequent texts; of those that are as frequent, the first in the order of the alphabet."""
        return most_frequent(self.texts, most)


@dataclass(frozen=True)
class Fitted:
    """The features of some columns, with what was counted in the training split.

    All numbers and datetimes together are the feature ``number``, all categories ``category``; each column of texts and
    each of images is a feature by itself.
    """

    features: dict[str, Feature]
    vocabularies: dict[str, list[list[str]]]

    @classmethod
    def of(
        cls,
        columns: Iterable[Statistics],
        shapes: Mapping[str, tuple[int, int, int]],
        where: str,
        max_vocabulary: int,
        length: int | None = None,
    ) -> "Fitted":
        """Return the features.

        Args:
            columns: all but those of images, in their order.
            shapes: height, width and channels of each column of images.
            where: of which data a message speaks.
            max_vocabulary: the most values or words of a column that have a place of their own.
            length: how many words of a text are taken; None takes what ``text_length`` says.

        Raises:
            UserError: a column without a value, or without a word.
        """
        columns = list(columns)
        features: dict[str, Feature] = {}
        vocabularies: dict[str, list[list[str]]] = {}
        numbers = [own.column(where) for own in columns if own.kind in ("number", "datetime")]
        if numbers:
            width = sum(column.width for column in numbers)
            features["number"] = Feature(kind="number", shape=(width,), dtype="float32", columns=tuple(numbers))
        if categories := [own for own in columns if own.kind == "category"]:
            vocabularies["category"] = [own.vocabulary(max_vocabulary) for own in categories]
            features["category"] = Feature(
                kind="category",
                shape=(len(categories),),
                dtype="int32",
                columns=tuple(own.column(where) for own in categories),
                vocabulary_sizes=tuple(len(texts) + cells.FIRST for texts in vocabularies["category"]),
            )
        for own in columns:
            if own.kind == "text":
                name = feature_name(own.name, features)
                vocabularies[name] = [own.vocabulary(max_vocabulary)]
                if not vocabularies[name][0]:
                    raise UserError(
                        f"dataset.columns.{own.name} = text: no text of the training split has a word. Give the column "
                        f"the kind ignore ({where})"
                    )
                features[name] = Feature(
                    kind="text",
                    shape=(length or text_length(own.lengths),),
                    dtype="int32",
                    columns=(own.column(where),),
                    vocabulary_sizes=(len(vocabularies[name][0]) + cells.FIRST,),
                )
        for column, shape in shapes.items():
            features[feature_name(column, features)] = Feature(
                kind="image", shape=shape, dtype="uint8", columns=(Column(name=column, kind="image"),)
            )
        return cls(features, vocabularies)


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
