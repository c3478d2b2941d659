"""Multilayer perceptron 784-256-256-10 of Keras' guide to distributed training, adapted to the dataset's shape."""

from collections.abc import Sequence

import keras

from tasks.modeling.models._layers import dropped, output_layer


def build(
    input_shape: tuple[int, ...], num_classes: int, units: Sequence[int] = (256, 256), dropout: float = 0.0
) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype."""
    images = keras.Input(input_shape, name="image")
    x = keras.layers.Flatten(name="flatten")(images)
    for i, width in enumerate(units, start=1):
        x = keras.layers.Dense(width, activation="relu", name=f"dense{i}")(x)
        x = dropped(x, dropout, f"dropout{i}")
    return keras.Model(images, output_layer(num_classes)(x), name="mlp")
