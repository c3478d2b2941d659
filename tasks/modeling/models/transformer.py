"""A small transformer encoder for a text, with the sizes of Keras' example "Text classification with Transformer"
(https://keras.io/examples/nlp/text_classification_with_transformer/); padding is masked."""

from collections.abc import Mapping
from typing import Any

import keras

from tasks.modeling.models._layers import dropped, inputs_of, mean_of_words, output_layer
from tasks.records import Feature, as_input


def build(
    features: Mapping[str, Feature],
    num_outputs: int,
    blocks: int = 1,
    embedding: int = 32,
    heads: int = 2,
    units: int = 32,
    dropout: float = 0.1,
) -> keras.Model:
    """Return words int32 (batch, length) -> outputs (batch, num_outputs), of the policy's variable dtype.

    The arguments with a default are ``model.options``.

    Raises:
        ValueError: the features are not a single text.
    """
    if len(features) != 1 or next(iter(features.values())).kind != "text":
        raise ValueError(f"takes only one text, not {', '.join(features)}: set model.name=mixed")
    inputs = inputs_of(features)
    words, feature = next(iter(inputs.values())), next(iter(features.values()))
    places = keras.ops.cumsum(keras.ops.ones_like(words), axis=1) - 1
    x = keras.layers.Embedding(feature.vocabulary_sizes[0], embedding, name="words")(words)
    x = x + keras.layers.Embedding(feature.shape[0], embedding, name="places")(places)
    there = keras.ops.not_equal(words, 0)[:, None, :]
    for block in range(1, blocks + 1):
        x = _block(x, there, f"block{block}", heads, units, dropout)
    x = mean_of_words(words, x)
    x = dropped(x, dropout, "dropout1")
    x = keras.layers.Dense(20, activation="relu", name="dense")(x)
    x = dropped(x, dropout, "dropout2")
    return keras.Model(as_input(inputs), output_layer(num_outputs)(x), name="transformer")


def _block(x: Any, there: Any, name: str, heads: int, units: int, dropout: float) -> Any:
    embedding = x.shape[-1]
    attention = keras.layers.MultiHeadAttention(heads, embedding, name=f"{name}_attention")
    attended = dropped(attention(x, x, attention_mask=there), dropout, f"{name}_dropout1")
    x = keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x + attended)
    dense = keras.layers.Dense(units, activation="relu", name=f"{name}_dense1")(x)
    dense = keras.layers.Dense(embedding, name=f"{name}_dense2")(dense)
    dense = dropped(dense, dropout, f"{name}_dropout2")
    return keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x + dense)
