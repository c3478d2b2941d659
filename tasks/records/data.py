"""Records of the data stages: the manifest, the prepared arrays, statistics and the results of the checks."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field

from tasks.records.record import Record

T = TypeVar("T")


class SourceFile(Record):
    """An archive that a dataset is built from, as TFDS registers it."""

    url: str
    sha256: str
    num_bytes: int


class DatasetManifest(Record):
    """The result of `download` in data/<name>/raw: a complete TFDS dataset with verified archives."""

    name: str
    version: str
    tfds_version: str
    folder: str
    image_shape: tuple[int | None, int | None, int] | None
    """None if the examples are texts, numbers or columns."""
    num_classes: int
    """0 for a regression, and for classes that are texts."""
    class_names: tuple[str, ...]
    num_examples: dict[str, int]
    sources: tuple[SourceFile, ...]
    licence: str | None


class Column(Record):
    """A column of a table; it fills one or several places of a feature."""

    name: str
    kind: Literal["number", "datetime", "category", "text", "image"]
    width: int = 1
    """The number of places that it fills."""
    fill: float | None = None
    """The number that replaces a missing one; with None, a missing number is an error."""
    quantiles: Annotated[tuple[float, ...], Field(exclude_if=lambda quantiles: not quantiles)] = ()
    """Quantiles of the training split, from its smallest value to its largest: a number becomes its rank among them, 0
    to 1. Without quantiles it stays as it is."""
    decimal: Annotated[Literal[".", ","], Field(exclude_if=lambda decimal: decimal == ".")] = "."
    """The decimal point or comma of numbers that are written as text."""
    format: Annotated[str | None, Field(exclude_if=lambda form: form is None)] = None
    """The format of a date for ``strptime``; None is ISO 8601."""
    unit: Annotated[str | None, Field(exclude_if=lambda unit: unit is None)] = None
    """The unit after numbers that are written as text."""
    na_values: Annotated[tuple[str, ...], Field(exclude_if=lambda values: not values)] = ()
    """Values that mean a missing value, as ``cells.spelled`` returns them."""


class Feature(Record):
    """One input of a model: the content of its array in each split, and what was fitted on the training split.

    An ``image`` holds pixels: uint8 (height, width, channels). A ``number`` holds k numbers as they are: float32 (k,);
    the model standardises them by ``mean`` and ``deviation``. A ``category`` holds the index of each of k columns'
    values in that column's vocabulary: int32 (k,). A ``text`` holds the indices of its words, padded with 0: int32
    (length,). In a vocabulary, 0 means a missing value and 1 a value that the training split does not have; the known
    values begin at 2.
    """

    kind: Literal["image", "number", "category", "text"]
    shape: tuple[int, ...]
    """The shape of one example."""
    dtype: Literal["uint8", "int32", "float32"]
    mean: tuple[float, ...] = ()
    """The mean of each channel of an image, in 0..255, or of each number."""
    deviation: tuple[float, ...] = ()
    """The standard deviation of the same."""
    columns: tuple[Column, ...] = ()
    """The columns of a table, in the order of their places."""
    vocabulary: str | None = None
    """The JSON file of the categories or words: one list of texts for each column, from index 2 on."""
    vocabulary_sizes: tuple[int, ...] = ()
    """The number of indices of each column, 0 and 1 included."""


Task = Literal["classification", "multilabel", "regression"]

HEADLINES: dict[Task, str] = {"classification": "accuracy", "multilabel": "micro_f1", "regression": "mae"}
"""The metric of each task that every training measures and every table of runs shows."""


class Target(Record):
    """What a model learns to predict."""

    task: Task
    num_outputs: int
    """The number of outputs for an example: a logit for each class, or the numbers of a regression."""
    class_names: tuple[str, ...] = ()
    """Empty for a regression."""
    columns: tuple[str, ...] = ()
    """The target columns of a table: one, or one for each label or number."""
    mean: tuple[float, ...] = ()
    """The mean of each number of a regression in the training split."""
    deviation: tuple[float, ...] = ()

    @property
    def label_dtype(self) -> str:
        """The dtype of the array of labels."""
        return {"classification": "int64", "multilabel": "uint8", "regression": "float32"}[self.task]

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of one example's label."""
        return () if self.task == "classification" else (self.num_outputs,)

    @classmethod
    def of_classes(cls, names: Iterable[str]) -> Self:
        """Return the target of a classification with these classes."""
        class_names = tuple(names)
        return cls(task="classification", num_outputs=len(class_names), class_names=class_names)


class PreparedSplit(Record):
    """One split: files with arrays of n rows, which can be memory-mapped."""

    num_examples: int
    features: dict[str, str]
    """The file of each feature, with an array of shape (n, *shape)."""
    labels: str
    """The file of the labels: classes are int64 (n,), several labels uint8 (n, labels) of 0 and 1, and the numbers of a
    regression float32 (n, numbers)."""
    weights: str | None = None
    """The file of each example's weight in the training loss, float32 (n,); None means that all weigh 1."""
    sha256: dict[str, str]
    """The sha256 of each file."""
    class_counts: tuple[int, ...]
    """The number of examples of each class; empty for a regression."""
    num_missing: dict[str, int] = {}
    """The number of missing values by column, for columns that have any."""


def as_input(features: Mapping[str, T]) -> T | dict[str, T]:
    """Return the input of a Keras model: the only feature itself, or several by name."""
    return next(iter(features.values())) if len(features) == 1 else dict(features)


class HeldOut(Record):
    """The test split that `prepare` took from the training split of a dataset that has none."""

    num_examples: int
    seed: int


class PreparedDataset(Record):
    """The result of `prepare`: data/<name>/prepared/manifest.json."""

    name: str
    kind: str
    """The kind of the dataset: a file of ``tasks/data/kinds/``."""
    version: str
    folder: str
    features: dict[str, Feature]
    target: Target
    splits: dict[str, PreparedSplit]
    tfds_version: str | None = None
    raw_folder: str | None = None
    """The folder of TFDS' shards; None for a kind without shards, which cannot be streamed."""
    sources: tuple[SourceFile, ...] = ()
    sha256: dict[str, str] = {}
    """The sha256 of each file that belongs to no split: the vocabularies and the metadata."""
    metadata: Annotated[str | None, Field(exclude_if=lambda metadata: metadata is None)] = None
    """The file with the metadata of each test example: {"kind", "values"} by column. Values are texts for a category,
    numbers for a number, days since 1970 for a datetime, and null if missing."""
    licence: str | None = None
    held_out: HeldOut | None = None
    validation_by_class: Annotated[bool, Field(exclude_if=lambda by_class: not by_class)] = False
    """Whether each class gives the same share to the validation examples that a run draws. Datasets of TFDS are drawn
    from without regard to classes."""
    csv: Annotated[dict[str, Any], Field(exclude_if=lambda csv: not csv)] = {}
    """What a model's reader would not find out about a CSV file: `delimiter`, `quoting`, the texts of the header's
    other rows, by column, and `encodings`, that of `csv` or `json`."""
    data_version: str | None = None
    """The md5 of the prepared folder in DVC's lock. The file itself does not hold it, as it is part of that md5."""


class DataDifference(Record):
    """The differences between two prepared datasets, or between two data versions of one dataset."""

    first: str
    """NAME or NAME@COMMIT."""
    second: str
    differences: dict[str, tuple[str | None, str | None]]
    """The two values by what differs, such as ``splits.train.num_examples``; None where one of the two has no value."""


class ColumnStatistics(Record):
    """The distribution of a column's values in a split: numbers, classes, categories or words."""

    num_values: int
    """The number of values that were counted."""
    mean: float | None = None
    deviation: float | None = None
    quantiles: tuple[float, ...] = ()
    """For numbers: the smallest, the 99 percentiles, the largest; empty otherwise."""
    counts: dict[str, int] = {}
    """For classes, categories and words: the counts of the most frequent values, and of all "(others)"."""


class DataStatistics(Record):
    """The statistics of a data version: data/<name>/report/statistics.json."""

    arrays: str
    """The sha256 of the arrays' digests, which identifies the data."""
    splits: dict[str, dict[str, ColumnStatistics]]
    """By split and column: ``class``, ``image brightness``, ``age``."""


class Offender(Record):
    """An example, column or class that a check reports."""

    name: str
    """A file of the source, a row, a column or a class."""
    split: str | None = None
    row: int | None = None
    """The row in the arrays of its split, from 0."""
    note: str = ""
    twin: tuple[str, int] | None = None
    """The split and row of the example that it resembles."""


class CheckResult(Record):
    """The result of one check."""

    action: Literal["stop", "warn"]
    threshold: float
    value: float
    """A value above the threshold is a finding."""
    is_finding: bool
    text: str
    num_offenders: int
    offenders: tuple[Offender, ...]
    """The worst ones, the worst first."""
    picture: str | None = None
    """The file next to this record that shows them."""


class DataQuality(Record):
    """The results of all checks of a data version: data/<name>/report/quality.json."""

    arrays: str
    """As in ``DataStatistics``."""
    looked_at: dict[str, int]
    """The number of examples that were checked in each split."""
    checks: dict[str, CheckResult]
    pictures: tuple[str, ...]
    """Files next to this record."""

    @property
    def findings(self) -> dict[str, CheckResult]:
        """The results above their thresholds, by check."""
        return {name: result for name, result in self.checks.items() if result.is_finding}
