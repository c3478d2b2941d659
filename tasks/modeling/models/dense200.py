"""Flatten-Dense200-Dropout-Dense, the model of Keras' guide to model parallelism: its layers are called d1 and d2."""

import keras


def build(input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype.

    ``d1`` has no bias; ``d2`` gives the logits.
    """
    images = keras.Input(input_shape, name="image")
    x = keras.layers.Flatten(name="flatten")(images)
    x = keras.layers.Dense(200, use_bias=False, activation="relu", name="d1")(x)
    if dropout:
        x = keras.layers.Dropout(dropout, name="dropout")(x)
    full = keras.config.dtype_policy().variable_dtype
    logits = keras.layers.Dense(num_classes, dtype=full, name="d2")(x)
    return keras.Model(images, logits, name="dense200")
