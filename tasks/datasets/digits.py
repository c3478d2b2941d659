"""1,797 handwritten digits of 8x8 pixels, which lie inside scikit-learn: real data that needs no network."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_DESCRIPTION = """\
The test part of UCI's Optical Recognition of Handwritten Digits, as scikit-learn ships it: 8x8 pixels, each the number
of inked pixels (0..16) in a 4x4 block of the scan, here scaled to 0..255.
"""
_CITATION = """\
@misc{alpaydin1998optical,
  author = {Alpaydin, E. and Kaynak, C.},
  title = {Optical Recognition of Handwritten Digits},
  year = {1998},
  howpublished = {UCI Machine Learning Repository},
  doi = {10.24432/C50P49}
}
"""


class Digits(tfds.core.GeneratorBasedBuilder):
    """Raise VERSION with every change of this file that changes an image, a label or a split."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {"image": tfds.features.Image(shape=(8, 8, 1)), "label": tfds.features.ClassLabel(num_classes=10)}
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
            citation=_CITATION,
            license="CC BY 4.0",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        # Imported here because `prepare` describes this dataset and never needs the second that scikit-learn takes.
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        rows = np.arange(len(digits.target))
        train, test = train_test_split(rows, test_size=0.2, random_state=0, stratify=digits.target)
        return {"train": self._generate_examples(digits, train), "test": self._generate_examples(digits, test)}

    def _generate_examples(self, digits: Any, rows: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
        for row in rows.tolist():
            yield row, {"image": images[row], "label": int(digits.target[row])}
