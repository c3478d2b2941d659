"""Flatten-Dense200-Dropout-Dense, the model of Keras' guide to model parallelism, with dense layers d1 and d2."""

import keras

from tasks.modeling.models._layers import dropped, output_layer


def build(input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype.

    ``d1`` has no bias; ``d2`` computes the logits.
    """
    images = keras.Input(input_shape, name="image")
    x = keras.layers.Flatten(name="flatten")(images)
    x = keras.layers.Dense(200, use_bias=False, activation="relu", name="d1")(x)
    x = dropped(x, dropout, "dropout")
    return keras.Model(images, output_layer(num_classes, "d2")(x), name="dense200")
