"""What models of any features are made of."""

from collections.abc import Mapping
from typing import Any

import keras

from tasks.records import Feature


def inputs_of(features: Mapping[str, Feature]) -> dict[str, Any]:
    """Return an input (batch, *shape) for each feature, of its name: int32 for categories and words, else the
    numbers that the normalisation gives."""
    whole = ("category", "text")
    return {
        name: keras.Input(feature.shape, dtype="int32" if feature.kind in whole else None, name=name)
        for name, feature in features.items()
    }


def embed_categories(categories: Any, feature: Feature, units: int, name: str) -> list[Any]:
    """Return an embedding (batch, units) of each column of a category feature int32 (batch, columns)."""
    return [
        keras.layers.Embedding(size, units, name=f"{name}_{place}")(categories[:, place])
        for place, size in enumerate(feature.vocabulary_sizes)
    ]


def mean_of_words(words: Any, vectors: Any) -> Any:
    """Return the mean (batch, units) of the vectors (batch, length, units) of the words that are there; zeros where
    there are none, for which Keras' pooling gives no number."""
    there = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(words, 0), vectors.dtype), -1)
    count = keras.ops.maximum(keras.ops.sum(there, axis=1), 1)
    return keras.ops.sum(vectors * there, axis=1) / count


def output_layer(num_outputs: int, name: str = "logits") -> Any:
    """Return the last layer: not of half precision under a mixed policy, because the loss needs full precision."""
    return keras.layers.Dense(num_outputs, dtype=keras.config.dtype_policy().variable_dtype, name=name)
