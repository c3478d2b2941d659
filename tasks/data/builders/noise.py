"""128 random images of 28x28 pixels with random classes, for tests of a distribution strategy."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.data.builders._images import Images, Splits

_DESCRIPTION = """\
Uniformly random pixels and classes, always the same ones: 128 images to train on, 32 to test on. A model can learn
them by heart and nothing else, so its test accuracy is chance.
"""


class Noise(Images):
    """Raise VERSION with every change of this file that changes an image, a label or a split."""

    SHAPE, NUM_CLASSES = (28, 28, 1), 10
    ABOUT = {"description": _DESCRIPTION, "license": "CC0 1.0"}

    def _split_generators(self, dl_manager: Any) -> Splits:
        return {
            split: self._generate_examples(*_drawn(key, num_examples), range(num_examples))
            for split, key, num_examples in (("train", 0, 128), ("test", 1, 32))
        }


def _drawn(key: int, num_examples: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
    # Raw Philox words: NumPy guarantees that they never change, but not its distributions.
    generator = np.random.Philox(key=key)
    words = generator.random_raw(num_examples * 28 * 28 // 8).astype("<u8")
    return words.view(np.uint8).reshape(num_examples, 28, 28, 1), generator.random_raw(num_examples) % 10
