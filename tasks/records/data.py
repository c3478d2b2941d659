"""What the stages of the data leave: a manifest, the prepared arrays, statistics, and what the checks find."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field

from tasks.records.record import Record

T = TypeVar("T")


class SourceFile(Record):
    """An archive that a dataset is built from, as TFDS registers it."""

    url: str
    sha256: str
    num_bytes: int


class DatasetManifest(Record):
    """What `download` leaves in data/<name>/raw: a TFDS dataset that is complete and whose archives were verified."""

    name: str
    version: str
    tfds_version: str
    folder: str
    image_shape: tuple[int | None, int | None, int] | None
    """None for texts, numbers and columns."""
    num_classes: int
    """0 for numbers that are learnt, and for classes that are texts."""
    class_names: tuple[str, ...]
    num_examples: dict[str, int]
    sources: tuple[SourceFile, ...]
    licence: str | None


class Column(Record):
    """A column of a table, as one place or several of a feature hold it."""

    name: str
    kind: Literal["number", "datetime", "category", "text", "image"]
    width: int = 1
    """Places that it takes in the feature."""
    fill: float | None = None
    """What stands for a missing number; None refuses a missing one."""
    quantiles: Annotated[tuple[float, ...], Field(exclude_if=lambda quantiles: not quantiles)] = ()
    """Of the training split, rising, from its smallest value to its largest: a number becomes its place among them, 0
    to 1. Without any it stays as it is."""
    decimal: Annotated[Literal[".", ","], Field(exclude_if=lambda decimal: decimal == ".")] = "."
    """What stands before the fraction of a number that is written as a text."""
    format: Annotated[str | None, Field(exclude_if=lambda form: form is None)] = None
    """How a date is written, in the codes of ``strptime``; None is ISO 8601."""


class Feature(Record):
    """One input of a model: what the array of each split holds, and what was fitted on the training split.

    An ``image`` is uint8 (height, width, channels) of pixels. ``number`` is float32 (k,): k numbers as they are, which
    the model standardises by ``mean`` and ``deviation``. ``category`` is int32 (k,): for each of k columns the place of
    its value in that column's vocabulary. ``text`` is int32 (length,): the places of its words, filled up with 0. In a
    vocabulary 0 is for what is missing and 1 for what the training split does not have; its words begin at 2.
    """

    kind: Literal["image", "number", "category", "text"]
    shape: tuple[int, ...]
    """Of one example."""
    dtype: Literal["uint8", "int32", "float32"]
    mean: tuple[float, ...] = ()
    """Of each channel of an image, in 0..255, or of each number."""
    deviation: tuple[float, ...] = ()
    """The standard deviation, as the mean."""
    columns: tuple[Column, ...] = ()
    """Of a table, in the order of their places."""
    vocabulary: str | None = None
    """Of categories or words: a JSON file of one list of texts for each column, from place 2 on."""
    vocabulary_sizes: tuple[int, ...] = ()
    """How many numbers each column has, 0 and 1 included."""


Task = Literal["classification", "multilabel", "regression"]


HEADLINES: dict[Task, str] = {"classification": "accuracy", "multilabel": "micro_f1", "regression": "mae"}
"""The metric that every training of a task measures, and that a table has room for."""


class Target(Record):
    """What a model learns to tell."""

    task: Task
    num_outputs: int
    """Numbers that a model gives for an example: a logit for each class, or the numbers of a regression."""
    class_names: tuple[str, ...] = ()
    """Without any for a regression."""
    columns: tuple[str, ...] = ()
    """Of a table: one, or one for each label or number."""
    mean: tuple[float, ...] = ()
    """Of each number of a regression in the training split."""
    deviation: tuple[float, ...] = ()

    @property
    def label_dtype(self) -> str:
        """Of the array of labels."""
        return {"classification": "int64", "multilabel": "uint8", "regression": "float32"}[self.task]

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Of the label of one example."""
        return () if self.task == "classification" else (self.num_outputs,)

    @classmethod
    def of_classes(cls, names: Iterable[str]) -> Self:
        """Return the target of a classification."""
        class_names = tuple(names)
        return cls(task="classification", num_outputs=len(class_names), class_names=class_names)


class PreparedSplit(Record):
    """One split as memory-mappable arrays of n rows."""

    num_examples: int
    features: dict[str, str]
    """The file of each feature: (n, *shape)."""
    labels: str
    """Its file: the class, int64 (n,); for several labels 0 or 1 each, uint8 (n, labels); for a regression float32 (n,
    numbers)."""
    weights: str | None = None
    """The file of how much each example counts in the training loss: float32 (n,). None is 1 for each."""
    sha256: dict[str, str]
    """Of each file."""
    class_counts: tuple[int, ...]
    """How many examples have each class; nothing for a regression."""
    num_missing: dict[str, int] = {}
    """How many values of a column were missing; a column without any is not there."""


def as_input(features: Mapping[str, T]) -> T | dict[str, T]:
    """Return what a model takes of features by name: the only one itself, or all by name, as Keras' models do."""
    return next(iter(features.values())) if len(features) == 1 else dict(features)


class HeldOut(Record):
    """The test split that `prepare` took from the training split of a dataset that has none."""

    num_examples: int
    seed: int


class PreparedDataset(Record):
    """What `prepare` leaves in data/<name>/prepared/manifest.json."""

    name: str
    kind: str
    """Of the dataset, a file of ``tasks/data/kinds/``."""
    version: str
    folder: str
    features: dict[str, Feature]
    target: Target
    splits: dict[str, PreparedSplit]
    tfds_version: str | None = None
    raw_folder: str | None = None
    """Where TFDS' shards lie; None for a kind that has none, which cannot be streamed."""
    sources: tuple[SourceFile, ...] = ()
    sha256: dict[str, str] = {}
    """Of each file that is of no split: the vocabularies, and the metadata."""
    metadata: Annotated[str | None, Field(exclude_if=lambda metadata: metadata is None)] = None
    """The file of what is known of each test example beside its features: by column {"kind", "values"}; of a category
    the values are texts, of a number numbers, of a datetime days since 1970; null is a missing one."""
    licence: str | None = None
    held_out: HeldOut | None = None
    validation_by_class: Annotated[bool, Field(exclude_if=lambda by_class: not by_class)] = False
    """Whether each class gives the same share to the validation examples that a run draws. Without it, as in a dataset
    of TFDS, they are drawn without regard to classes."""
    data_version: str | None = None
    """The md5 of the prepared folder in DVC's lock; not in the file itself, which is part of that md5."""


class KeptColumn(Record):
    """A column that no model learns from, as the test split has it."""

    kind: str
    """category, number or datetime."""
    num_missing: int
    num_different: int
    """Of the values that there are."""
    lowest: float | None = None
    """Of numbers; of datetimes in days since 1970."""
    highest: float | None = None


class DataDifference(Record):
    """What differs between two prepared datasets, or two data versions of one."""

    first: str
    """NAME or NAME@COMMIT."""
    second: str
    differences: dict[str, tuple[str | None, str | None]]
    """By what it is, such as ``train: examples``: in the first and in the second, None where it has none."""


class ColumnStatistics(Record):
    """How the values of a column are distributed in a split: of numbers, or of classes, categories or words."""

    num_values: int
    """That were counted."""
    mean: float | None = None
    deviation: float | None = None
    quantiles: tuple[float, ...] = ()
    """Of numbers: the smallest, 99 that cut them into hundredths, the largest. Nothing for what is counted."""
    counts: dict[str, int] = {}
    """Of what is counted: the most frequent values; "(others)" are the rest."""


class DataStatistics(Record):
    """The statistics of a data version: data/<name>/report/statistics.json."""

    arrays: str
    """sha256 of the digests of the arrays: the same for the same data."""
    splits: dict[str, dict[str, ColumnStatistics]]
    """By split and column: ``class``, ``image brightness``, ``age``."""


class Offender(Record):
    """One example, column or class for which a check has its finding."""

    name: str
    """A file of the source, a row, a column or a class."""
    split: str | None = None
    row: int | None = None
    """In the arrays of its split, from 0 on."""
    note: str = ""
    twin: tuple[str, int] | None = None
    """The split and row of the example that it is like."""


class CheckResult(Record):
    """What one check says."""

    action: Literal["stop", "warn"]
    threshold: float
    value: float
    """A finding is above the threshold."""
    is_finding: bool
    text: str
    num_offenders: int
    offenders: tuple[Offender, ...]
    """The worst ones, first."""
    picture: str | None = None
    """The file that shows them, beside this record."""


class DataQuality(Record):
    """What all checks say of a data version: data/<name>/report/quality.json."""

    arrays: str
    """As in ``DataStatistics``."""
    looked_at: dict[str, int]
    """How many examples of each split."""
    checks: dict[str, CheckResult]
    pictures: tuple[str, ...]
    """Files beside this record."""

    @property
    def findings(self) -> dict[str, CheckResult]:
        """The results above their thresholds, by check."""
        return {name: result for name, result in self.checks.items() if result.is_finding}
