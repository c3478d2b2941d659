"""Layers that several models share."""

from collections.abc import Mapping
from typing import Any

import keras

from tasks.records import Feature


def inputs_of(features: Mapping[str, Feature]) -> dict[str, Any]:
    """Return an input (batch, *shape) with the name of each feature: int32 for categories and words, else normalised
    floats."""
    whole = ("category", "text")
    return {
        name: keras.Input(feature.shape, dtype="int32" if feature.kind in whole else None, name=name)
        for name, feature in features.items()
    }


def embed_categories(categories: Any, feature: Feature, units: int, name: str) -> list[Any]:
    """Return an embedding (batch, units) for each column of a category feature, int32 (batch, columns)."""
    return [
        keras.layers.Embedding(size, units, name=f"{name}_{place}")(categories[:, place])
        for place, size in enumerate(feature.vocabulary_sizes)
    ]


def mean_of_words(words: Any, vectors: Any) -> Any:
    """Return the mean (batch, units) of the vectors (batch, length, units) of all words except padding; zeros for an
    empty text, for which Keras' pooling returns NaN."""
    there = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(words, 0), vectors.dtype), -1)
    count = keras.ops.maximum(keras.ops.sum(there, axis=1), 1)
    return keras.ops.sum(vectors * there, axis=1) / count


def output_layer(num_outputs: int, name: str = "logits") -> Any:
    """Return the last layer; under a mixed policy it has full precision, because the loss needs it."""
    return keras.layers.Dense(num_outputs, dtype=keras.config.dtype_policy().variable_dtype, name=name)


def dropped(x: Any, dropout: float, name: str) -> Any:
    """Return a tensor after a Dropout layer, or the unchanged tensor for a rate of 0."""
    return keras.layers.Dropout(dropout, name=name)(x) if dropout else x
