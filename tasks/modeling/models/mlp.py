"""Multilayer perceptron 784-256-256-10 of the Keras distributed-training guide, shaped by the dataset."""

from collections.abc import Sequence

import keras


def build(
    input_shape: tuple[int, ...], num_classes: int, units: Sequence[int] = (256, 256), dropout: float = 0.0
) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype."""
    images = keras.Input(input_shape, name="image")
    x = keras.layers.Flatten(name="flatten")(images)
    for i, width in enumerate(units, start=1):
        x = keras.layers.Dense(width, activation="relu", name=f"dense{i}")(x)
        if dropout:
            x = keras.layers.Dropout(dropout, name=f"dropout{i}")(x)
    # Not of half precision under a mixed policy: the loss needs the logits' full precision.
    full = keras.config.dtype_policy().variable_dtype
    logits = keras.layers.Dense(num_classes, dtype=full, name="logits")(x)
    return keras.Model(images, logits, name="mlp")
