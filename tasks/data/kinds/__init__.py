"""Kinds of datasets: the file is the key, and its ``examples`` reads what `prepare` writes as arrays.

``kind`` in data/<name>/params.yaml names the file; what else stands there is a section of ``tasks/config/datasets.py``.
A file that now reads the same source in another way says ``VERSION = 2``: data of version 1 are prepared again.
"""

import importlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.records import Feature, HeldOut, Target
from tasks.system.errors import UserError

SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation"}
"""The split that a folder or a column of splits means by each of these words, in small letters."""
MAX_SIDE, STEP = 224, 8
"""Pixels, if sizes differ: the longer side is at most that of most pretrained models, and both are multiples of
``STEP``."""
LONGEST_TEXT = 512
TEXTS_WHOLE = 0.95
"""The share of the training texts that are kept whole; longer ones are cut."""


class Block(NamedTuple):
    """Some examples of a split, which follow those of the previous block."""

    split: str
    features: Mapping[str, npt.NDArray[Any]]
    """By name: (n, *shape), of the feature's dtype."""
    labels: npt.NDArray[Any]
    """As in ``records.PreparedSplit``."""
    weights: npt.NDArray[np.float32] | None = None
    """The weight of each in the training loss, float32 (n,); all blocks have weights, or none."""
    missing: Mapping[str, int] = MappingProxyType({})
    """The number of missing values by column."""


class Metadata(NamedTuple):
    """A column of a split that is not a feature."""

    kind: str
    values: list[Any]


@dataclass(frozen=True)
class Examples:
    """The examples of a dataset, before they are prepared."""

    version: str
    features: dict[str, Feature]
    """Without mean and deviation, which `prepare` computes from the training split."""
    target: Target
    splits: tuple[str, ...]
    blocks: Callable[[], Iterator[Block]]
    """Reads all, always in the same order; the blocks of different splits may alternate."""
    vocabularies: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """For features of categories and words, by name: the texts of each column from place 2 on."""
    held_out: HeldOut | None = None
    """The test split that was drawn from the training split, where the source has none."""
    name_of: Callable[[str, int], str] | None = None
    """Takes split and row, returns the source's name of that example, once all blocks are read; None without names."""
    sizes_of: Callable[[str], npt.NDArray[np.int32]] | None = None
    """Height and width of the original images of a split, (n, 2), once all blocks are read; None without images."""
    metadata_of: Callable[[str], Mapping[str, Metadata]] | None = None
    """The columns of a split that are kept but are not features, once all blocks are read."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """More fields of ``records.PreparedDataset``."""


class Kind(Protocol):
    """The interface of a file of this folder."""

    def examples(self, dataset: Any) -> Examples:
        """Return the examples of a dataset, described by the kind's section of the settings.

        Raises:
            UserError: there is none, or they cannot be read.
        """

    def guess(self, dataset: Any) -> tuple[Any, list[str]]:
        """Return the description with its open values guessed from the data, and lines that say what was guessed.

        Only kinds whose description ``is_guessed`` have it: `data add` writes the result into params.yaml.

        Raises:
            UserError: the data cannot be read.
        """


def find_kind(kind: str) -> Kind:
    """Return the kind of a name."""
    module: Any = importlib.import_module(f"tasks.data.kinds.{kind}")
    found: Kind = module
    return found


def most_frequent(texts: Mapping[str, int], most: int) -> list[str]:
    """Return the most frequent texts; equally frequent ones in alphabetical order."""
    return [text for text, _ in sorted(texts.items(), key=lambda one: (-one[1], one[0]))[:most]]


def text_length(lengths: Mapping[int, int]) -> int:
    """Return the number of words at which ``TEXTS_WHOLE`` of the texts are whole, from the count of texts by length."""
    total, seen = sum(lengths.values()), 0
    for length, count in sorted(lengths.items()):
        seen += count
        if seen >= TEXTS_WHOLE * total:
            return min(max(length, 1), LONGEST_TEXT)
    raise AssertionError("there is no text")


def of_images(
    images: npt.NDArray[np.uint8],
    labels: npt.NDArray[np.int64],
    names: Sequence[str],
    dataset: config.LocalDescription,
) -> Examples:
    """Return the examples of a kind that reads all its images at once, divided as ``split_rows`` does.

    Args:
        images: uint8 (n, height, width, channels).
        labels: the class of each, int64 (n,).
        names: of the classes.
        dataset: as ``split_rows`` takes it.
    """
    rows = split_rows(labels, names, dataset)
    blocks = [Block(split, {"image": images[own]}, labels[own]) for split, own in rows.items()]
    target = Target.of_classes(names)
    return Examples(
        version="1",
        features={"image": Feature(kind="image", shape=images.shape[1:], dtype="uint8")},
        target=target,
        splits=tuple(rows),
        blocks=lambda: iter(blocks),
        held_out=HeldOut(num_examples=len(rows["test"]), seed=dataset.seed),
        name_of=lambda split, row: f"row {rows[split][row]}",
    )


def split_rows(
    labels: npt.NDArray[np.int64], names: Sequence[str], dataset: config.LocalDescription
) -> dict[str, npt.NDArray[np.int64]]:
    """Return which rows are to train on and which to test on, rising: int64 (n,) each.

    Every class gives the same share to the test split, at least one example and never its last one, so that the two are
    alike. The same labels and seed give the same rows for ever.

    Args:
        labels: the class of each example, int64 (n,).
        names: of the classes.
        dataset: ``test`` is a fraction of the examples or a number of them, and ``seed`` chooses them.

    Raises:
        UserError: a class has fewer than two examples, or the number leaves none to train or to test on.
    """
    total, test = len(labels), dataset.test
    counts = np.bincount(labels, minlength=len(names)).tolist()
    if few := [number for number, count in enumerate(counts) if count < 2]:
        raise UserError(
            f"dataset.source = '{dataset.source}': the class '{names[few[0]]}' has {counts[few[0]]} of the examples, "
            "and needs one to train on and one to test on. Add some, or leave the class out"
        )
    count = test if isinstance(test, int) else max(1, round(total * test))
    if count >= total:
        raise UserError(
            f"dataset.test = {test}: takes {count} of the {total} examples of {dataset.name}, and both splits need at "
            f"least one. Give a number from 1 to {total - 1}, or a fraction"
        )
    # Raw words, because NumPy keeps those of a bit generator the same, and promises nothing for its permutations.
    words = np.random.Philox(key=[dataset.seed, 0], counter=[0, 0, 0, 2]).random_raw(total)
    held = np.zeros(total, bool)
    exact = np.array(counts) * (count / total)
    shares = np.floor(exact).astype(np.int64)
    # What rounding leaves goes to the classes that lost most by it.
    shares[np.argsort(shares - exact, kind="stable")[: count - shares.sum()]] += 1
    for number, share in enumerate(np.clip(shares, 1, np.array(counts) - 1).tolist()):
        own = np.flatnonzero(labels == number)
        held[own[np.argpartition(words[own], share)[:share]]] = True
    return {"test": np.flatnonzero(held), "train": np.flatnonzero(~held)}


def median_size(name: str, sizes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], str]:
    """Return the height and width for images of different sizes, and a line that says so.

    Each is the median, rounded to a multiple of ``STEP``; both shrink together until neither exceeds ``MAX_SIDE``.

    Args:
        name: of the dataset.
        sizes: the height and width of each image.
    """
    height, width = (statistics.median_low(size[side] for size in sizes) for side in (0, 1))
    scale = min(1.0, MAX_SIDE / max(height, width))
    size = (_multiple(height * scale), _multiple(width * scale))
    low, high = min(sizes, key=math.prod), max(sizes, key=math.prod)
    return size, (
        f"the images of {name} differ in size, from {low[0]} x {low[1]} to {high[0]} x {high[1]} (height x width; the "
        f"median is {height} x {width}): all are resized to {size[0]} x {size[1]}. To choose another size, set "
        f"dataset.image_size in data/{name}/params.yaml"
    )


def _multiple(side: float) -> int:
    return max(STEP, int(side + STEP / 2) // STEP * STEP)
