"""Any mixture of features: each feature becomes a vector, and a perceptron takes all vectors. The default for tables.

Numbers are used directly, categories and words have embeddings, a text is the mean of its words' embeddings, and images
pass through convolutions (parts from https://keras.io/examples/structured_data/).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tasks.modeling.models._layers import dropped, embed_categories, inputs_of, mean_of_words, output_layer
from tasks.records import Feature, as_input


def build(
    features: Mapping[str, Feature],
    num_outputs: int,
    units: Sequence[int] = (128, 64),
    embedding: int = 16,
    filters: Sequence[int] = (16, 32, 64),
    dropout: float = 0.1,
) -> keras.Model:
    """Return features by name -> outputs (batch, num_outputs), of the policy's variable dtype.

    ``units`` has a number per dense layer and ``filters`` a number per convolution; embeddings of words are twice as
    wide as those of categories.
    """
    inputs = inputs_of(features)
    vectors: list[Any] = []
    for name, feature in features.items():
        x = inputs[name]
        if feature.kind == "image":
            for stage, width in enumerate(filters, start=1):
                x = keras.layers.Conv2D(
                    width, 3, strides=2, padding="same", activation="relu", name=f"{name}_conv{stage}"
                )(x)
            vectors.append(keras.layers.GlobalAveragePooling2D(name=f"{name}_mean")(x))
        elif feature.kind == "category":
            vectors += embed_categories(x, feature, embedding, name)
        elif feature.kind == "text":
            words = keras.layers.Embedding(feature.vocabulary_sizes[0], 2 * embedding, name=f"{name}_words")(x)
            vectors.append(mean_of_words(x, words))
        else:
            vectors.append(x)
    x = keras.layers.Concatenate(name="together")(vectors) if len(vectors) > 1 else vectors[0]
    for place, width in enumerate(units, start=1):
        x = keras.layers.Dense(width, activation="relu", name=f"dense{place}")(x)
        x = dropped(x, dropout, f"dropout{place}")
    return keras.Model(as_input(inputs), output_layer(num_outputs)(x), name="mixed")
