"""128 random images of 28x28 pixels with random classes: to try a distribution on, with nothing to be learned."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_DESCRIPTION = """\
Uniformly random pixels and classes, always the same ones: 128 images to train on, 32 to test on. A model can learn
them by heart and nothing else, so its test accuracy is chance.
"""


class Noise(tfds.core.GeneratorBasedBuilder):
    """Raise VERSION with every change of this file that changes an image, a label or a split."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {"image": tfds.features.Image(shape=(28, 28, 1)), "label": tfds.features.ClassLabel(num_classes=10)}
            ),
            supervised_keys=("image", "label"),
            license="CC0 1.0",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples(0, 128), "test": self._generate_examples(1, 32)}

    def _generate_examples(self, key: int, num_examples: int) -> Iterator[tuple[int, dict[str, Any]]]:
        # Raw Philox words: NumPy keeps them the same for ever, and promises nothing of the kind for its distributions.
        generator = np.random.Philox(key=key)
        words = generator.random_raw(num_examples * 28 * 28 // 8).astype("<u8")
        images = words.view(np.uint8).reshape(num_examples, 28, 28, 1)
        labels = generator.random_raw(num_examples) % 10
        for row in range(num_examples):
            yield row, {"image": images[row], "label": int(labels[row])}
