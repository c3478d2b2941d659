"""What the datasets of this folder share whose images lie in memory as one array."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow_datasets as tfds

Splits = dict[str, Iterator[tuple[int, dict[str, Any]]]]
"""The examples of each split: what ``_split_generators`` of a builder returns."""


class Images(tfds.core.GeneratorBasedBuilder):
    """Images of one shape and their classes; a subclass says which, and its ``_split_generators`` returns them."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    SHAPE: tuple[int, int, int]
    """Height, width, channels."""
    NUM_CLASSES: int
    ABOUT: dict[str, str] = {}
    """More of ``tfds.core.DatasetInfo``: description, homepage, citation, license."""

    def _info(self) -> Any:
        image, label = tfds.features.Image(shape=self.SHAPE), tfds.features.ClassLabel(num_classes=self.NUM_CLASSES)
        features = tfds.features.FeaturesDict({"image": image, "label": label})
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("image", "label"), **self.ABOUT)

    def _generate_examples(
        self, images: npt.NDArray[np.uint8], labels: npt.NDArray[Any], rows: Iterable[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield these rows of the arrays; TFDS lays the examples of a split in an order that follows from the rows."""
        for row in map(int, rows):
            yield row, {"image": images[row], "label": int(labels[row])}

    def _divided(self, images: npt.NDArray[np.uint8], labels: npt.NDArray[Any], **rows: Iterable[int]) -> Splits:
        """Return the splits of arrays, of the rows of each by its name."""
        return {split: self._generate_examples(images, labels, own) for split, own in rows.items()}
