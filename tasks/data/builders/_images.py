"""The base class of the datasets in this folder whose images are one array in memory."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow_datasets as tfds

Splits = dict[str, Iterator[tuple[int, dict[str, Any]]]]
"""The examples of each split: what ``_split_generators`` of a builder returns."""


class Images(tfds.core.GeneratorBasedBuilder):
    """Images of one shape and their classes; the ``_split_generators`` of a subclass returns them."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    SHAPE: tuple[int, int, int]
    """Height, width, channels."""
    NUM_CLASSES: int
    ABOUT: dict[str, str] = {}
    """Further arguments of ``tfds.core.DatasetInfo``: description, homepage, citation, license."""

    def _info(self) -> Any:
        image, label = tfds.features.Image(shape=self.SHAPE), tfds.features.ClassLabel(num_classes=self.NUM_CLASSES)
        features = tfds.features.FeaturesDict({"image": image, "label": label})
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("image", "label"), **self.ABOUT)

    def _generate_examples(
        self, images: npt.NDArray[np.uint8], labels: npt.NDArray[Any], rows: Iterable[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield these rows of the arrays; TFDS derives the order of a split's examples from the row numbers."""
        for row in map(int, rows):
            yield row, {"image": images[row], "label": int(labels[row])}

    def _divided(self, images: npt.NDArray[np.uint8], labels: npt.NDArray[Any], **rows: Iterable[int]) -> Splits:
        """Return the splits with the given rows of the arrays."""
        return {split: self._generate_examples(images, labels, own) for split, own in rows.items()}
