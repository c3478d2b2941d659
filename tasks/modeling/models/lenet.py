"""Two convolutions with a pool each and a dense layer: the shape of LeNet-5 (LeCun et al., "Gradient-based learning
applied to document recognition", 1998, figure 2), with 3x3 kernels, ReLU and dropout."""

from collections.abc import Sequence

import keras

from tasks.modeling.models._layers import dropped, output_layer


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
    x = dropped(x, dropout, "dropout1")
    x = keras.layers.Dense(units, activation="relu", kernel_initializer="he_normal", name="dense1")(x)
    x = dropped(x, dropout, "dropout2")
    return keras.Model(images, output_layer(num_classes)(x), name="lenet")
