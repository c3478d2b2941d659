"""Any mixture of features: each becomes a vector, and a perceptron takes them together. The default for tables.

Numbers stay as they are, a category and a word have an embedding, of the words of a text the mean, and images pass
convolutions (https://keras.io/examples/structured_data/ has the parts).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tasks.modeling.models._features import embed_categories, inputs_of, mean_of_words, output_layer
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

    ``units`` has one number a dense layer and ``filters`` one a convolution; words have embeddings twice as wide as
    categories.
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
        if dropout:
            x = keras.layers.Dropout(dropout, name=f"dropout{place}")(x)
    return keras.Model(as_input(inputs), output_layer(num_outputs)(x), name="mixed")
