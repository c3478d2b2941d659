"""Two convolutions with a pool each and a dense layer: the shape of LeNet-5 (LeCun et al., "Gradient-based learning
applied to document recognition", 1998, figure 2), with 3x3 kernels, ReLU and dropout."""

from collections.abc import Sequence

import keras


def build(
    input_shape: tuple[int, ...],
    num_classes: int,
    filters: Sequence[int] = (16, 32),
    units: int = 128,
    dropout: float = 0.0,
) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype."""
    images = keras.Input(input_shape, name="image")
    x = images
    for i, width in enumerate(filters, start=1):
        x = keras.layers.Conv2D(width, 3, activation="relu", kernel_initializer="he_normal", name=f"conv{i}")(x)
        x = keras.layers.MaxPooling2D(name=f"pool{i}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    if dropout:
        x = keras.layers.Dropout(dropout, name="dropout1")(x)
    x = keras.layers.Dense(units, activation="relu", kernel_initializer="he_normal", name="dense1")(x)
    if dropout:
        x = keras.layers.Dropout(dropout, name="dropout2")(x)
    full = keras.config.dtype_policy().variable_dtype
    logits = keras.layers.Dense(num_classes, dtype=full, name="logits")(x)
    return keras.Model(images, logits, name="lenet")
