"""What the stages of the data leave."""

from collections.abc import Iterable
from typing import Literal, Self

from tasks.records.record import Record


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
    image_shape: tuple[int | None, int | None, int]
    num_classes: int
    class_names: tuple[str, ...]
    num_examples: dict[str, int]
    sources: tuple[SourceFile, ...]
    licence: str | None


class Feature(Record):
    """One input of a model: what the array of each split holds, and what was fitted on the training split."""

    kind: Literal["image"]
    shape: tuple[int, ...]
    """Of one example: (height, width, channels)."""
    dtype: Literal["uint8"]
    mean: tuple[float, ...] = ()
    """Of each channel, in 0..255."""
    deviation: tuple[float, ...] = ()
    """The standard deviation, as the mean."""


class Target(Record):
    """What a model learns to tell."""

    task: Literal["classification"]
    num_outputs: int
    """Numbers that a model gives for an example: one for each class."""
    class_names: tuple[str, ...]

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
    """Its file: int64 (n,)."""
    sha256: dict[str, str]
    """Of each file."""
    class_counts: tuple[int, ...]


class HeldOut(Record):
    """The test split that `prepare` took from the training split of a dataset that has none."""

    num_examples: int
    seed: int


class PreparedDataset(Record):
    """What `prepare` leaves in data/<name>/prepared/manifest.json."""

    name: str
    kind: str
    """Of the dataset, a file of ``tasks/dataset_kinds/``."""
    version: str
    folder: str
    features: dict[str, Feature]
    target: Target
    splits: dict[str, PreparedSplit]
    tfds_version: str | None = None
    raw_folder: str | None = None
    """Where TFDS' shards lie; None for a kind that has none, which cannot be streamed."""
    sources: tuple[SourceFile, ...] = ()
    licence: str | None = None
    held_out: HeldOut | None = None
    data_version: str | None = None
    """The md5 of the prepared folder in DVC's lock; not in the file itself, which is part of that md5."""
