"""Kinds of datasets: the file name is the key, and ``examples(dataset)`` returns the ``Examples`` for `prepare`.

``kind`` in data/<name>/params.yaml is the file name; all other keys are a section of ``tasks/config/datasets.py``. If
that section ``is_guessed``, ``guess(dataset)`` returns the description that `data add` writes into params.yaml, with
unset values guessed from the data, and lines that report the guesses. Both raise UserError for data that they cannot
read. If a change to a file changes the prepared data, it sets ``VERSION = 2``: data of version 1 are prepared again.
"""

import importlib
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data.encoding import cells
from tasks.data.splits import Rows, split_rows
from tasks.records import Feature, HeldOut, PreparedDataset, Target
from tasks.system.errors import UserError


class Block(NamedTuple):
    """Consecutive examples of a split, after those of the previous block."""

    split: str
    features: Mapping[str, npt.NDArray[Any]]
    """By name: (n, *shape), of the feature's dtype."""
    labels: npt.NDArray[Any]
    """As in ``records.PreparedSplit``."""
    weights: npt.NDArray[np.float32] | None = None
    """The weight of each example in the training loss, float32 (n,); either all blocks have weights, or none."""
    missing: Mapping[str, int] = MappingProxyType({})
    """The number of missing values by column."""


class Metadata(NamedTuple):
    """A column of a split that is not a feature."""

    kind: str
    values: list[Any]


@dataclass(frozen=True)
class Examples:
    """The examples of a dataset before preparation."""

    version: str
    features: dict[str, Feature]
    """Without mean and deviation, which `prepare` computes from the training split."""
    target: Target
    splits: tuple[str, ...]
    blocks: Callable[[], Generator[Block]]
    """Reads all examples, always in the same order; the blocks of different splits may alternate."""
    encoded: Callable[[Mapping[str, Feature], Mapping[str, Sequence[Sequence[str]]]], Generator[Block]] | None = None
    """Takes other features and vocabularies, such as an older model's; reads like ``blocks``. None for arrays."""
    vocabularies: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """For features of categories and words, by name: the texts of each column from place 2 on."""
    held_out: HeldOut | None = None
    """The test split that was drawn from the training split if the source has none."""
    rows_of: Callable[[str], Rows] | None = None
    """Takes a split, returns each example's row in the source; available after all blocks were read."""
    name_of: Callable[[str, int], str] | None = None
    """Takes split and row, returns the example's name in the source after all blocks were read; None without names."""
    sizes_of: Callable[[str], npt.NDArray[np.int32]] | None = None
    """Height and width of the original images of a split, (n, 2), after all blocks were read; None without images."""
    metadata_of: Callable[[str], Mapping[str, Metadata]] | None = None
    """The columns of a split that are stored but are not features, after all blocks were read."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ``records.PreparedDataset``."""


def of_images(
    images: npt.NDArray[np.uint8],
    labels: npt.NDArray[np.int64],
    names: Sequence[str],
    dataset: config.LocalDescription,
) -> Examples:
    """Return the examples of a kind that reads all images at once, divided by ``splits.split_rows``.

    Args:
        images: uint8 (n, height, width, channels).
        labels: the class of each, int64 (n,).
        names: of the classes.
        dataset: as in ``splits.split_rows``.
    """
    rows = split_rows(labels, names, dataset)
    blocks = [Block(split, {"image": images[own]}, labels[own]) for split, own in rows.items()]
    return Examples(
        version="1",
        features={"image": Feature(kind="image", shape=images.shape[1:], dtype="uint8")},
        target=Target.of_classes(names),
        splits=tuple(rows),
        blocks=lambda: (block for block in blocks),
        held_out=HeldOut(num_examples=len(rows["test"]), seed=dataset.seed),
        name_of=lambda split, row: f"row {rows[split][row]}",
    )


def with_class_names(found: Examples, names: Sequence[str]) -> Examples:
    """Return examples of a table with these classes, in this order, including classes without examples."""
    places = {cells.spelled(name): number for number, name in enumerate(names)}
    order = np.array([places[name] for name in found.target.class_names], np.int64)

    def named(read: Callable[..., Generator[Block]], *encoding: Any) -> Generator[Block]:
        for block in read(*encoding):
            yield block._replace(labels=order[block.labels])

    update = {"class_names": tuple(names), "num_outputs": len(names)}
    return replace(
        found,
        blocks=partial(named, found.blocks),
        encoded=partial(named, found.encoded) if found.encoded else None,
        target=found.target.model_copy(update=update),
    )


def encode_test_rows(prepared: PreparedDataset, encoding: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Encode the test rows of a dataset's source for a model that learned other columns, categories or image sizes.

    Args:
        prepared: the dataset. The rows keep the order of its test split.
        encoding: the arguments of ``encoding.Encoder`` that were saved with the model.
        folder: for an array of each feature of the model.

    Returns:
        The files by feature, each (n, *shape).

    Raises:
        UserError: the source is missing, has changed, lacks a column, or has no raw values.
    """
    root = config.project_root()
    source = config.read_description(root / "data" / prepared.name)
    found = find_kind(prepared.kind).examples(source)
    if found.encoded is None:
        raise UserError(f"data of the kind {prepared.kind} have no raw values to encode")
    features = {name: Feature.model_validate(feature) for name, feature in encoding["features"].items()}
    try:
        blocks = [one for one in found.encoded(features, encoding["vocabularies"]) if one.split == "test"]
    except ValueError as error:  # A column is missing.
        raise UserError(f"dataset.source = '{source.source}': {error}") from None
    labels = np.load(root / prepared.splits["test"].labels, allow_pickle=False)
    if not blocks or not np.array_equal(np.concatenate([one.labels for one in blocks]), labels):
        raise UserError(f"dataset.source = '{source.source}' has changed since {prepared.folder} was made")
    places = {name: folder / f"test_{name}s.npy" for name in features}
    for name, place in places.items():
        np.save(place, np.concatenate([one.features[name] for one in blocks]))
    return places


def missing_words(names: Sequence[str]) -> tuple[str, ...]:
    """Return the classes whose names usually mean that a value is missing: ``dataset.not_missing``."""
    return tuple(itertools.compress(names, cells.is_missing(list(names))))


def find_kind(kind: str) -> Any:
    """Return the module of a kind, a file of this folder; see the module's docstring for its functions."""
    return importlib.import_module(f"tasks.data.kinds.{kind}")
