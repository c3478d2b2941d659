"""Convolutions over words with max pooling (Kim, "Convolutional Neural Networks for Sentence Classification", 2014:
widths 3, 4 and 5 with 100 filters each, a dropout of 0.5, and learned embeddings: CNN-rand)."""

from collections.abc import Mapping, Sequence

import keras

from tasks.modeling.models._layers import dropped, inputs_of, output_layer
from tasks.records import Feature, as_input


def build(
    features: Mapping[str, Feature],
    num_outputs: int,
    embedding: int = 128,
    filters: int = 100,
    widths: Sequence[int] = (3, 4, 5),
    dropout: float = 0.5,
) -> keras.Model:
    """Return words int32 (batch, length) -> outputs (batch, num_outputs), of the policy's variable dtype.

    The paper's embeddings have 300 dimensions. Its limit on the norm of the last layer's weights is left out, because
    Zhang and Wallace found that it has little effect ("A Sensitivity Analysis", 2015).

    Raises:
        ValueError: a feature is not text.
    """
    if others := [name for name, feature in features.items() if feature.kind != "text"]:
        raise ValueError(f"takes only texts, not {', '.join(others)}: set model.name=mixed")
    inputs = inputs_of(features)
    largest = []
    for name, feature in features.items():
        words = keras.layers.Embedding(feature.vocabulary_sizes[0], embedding, name=f"{name}_words")(inputs[name])
        for width in widths:
            x = keras.layers.Conv1D(filters, width, padding="same", activation="relu", name=f"{name}_conv{width}")(
                words
            )
            largest.append(keras.layers.GlobalMaxPooling1D(name=f"{name}_largest{width}")(x))
    x = keras.layers.Concatenate(name="together")(largest) if len(largest) > 1 else largest[0]
    x = dropped(x, dropout, "dropout")
    return keras.Model(as_input(inputs), output_layer(num_outputs)(x), name="text_cnn")
