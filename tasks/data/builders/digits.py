"""1,797 handwritten digits of 8x8 pixels from scikit-learn: real data that needs no network."""

from typing import Any

import numpy as np

from tasks.data.builders._images import Images, Splits

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


class Digits(Images):
    """Raise VERSION with every change of this file that changes an image, a label or a split."""

    SHAPE, NUM_CLASSES = (8, 8, 1), 10
    ABOUT = {
        "description": _DESCRIPTION,
        "homepage": "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
        "citation": _CITATION,
        "license": "CC BY 4.0",
    }

    def _split_generators(self, dl_manager: Any) -> Splits:
        # Imported here, because scikit-learn takes a second, and `prepare` does not need it.
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
        rows = np.arange(len(digits.target))
        train, test = train_test_split(rows, test_size=0.2, random_state=0, stratify=digits.target)
        return self._divided(images, digits.target, train=train, test=test)
