"""Stages of two 3x3 convolutions and a pool (Simonyan and Zisserman, "Very deep convolutional networks", 2014, section
2.1), small, with batch normalisation, and global average pooling instead of the large dense layers."""

from collections.abc import Sequence

import keras


def build(
    input_shape: tuple[int, ...], num_classes: int, filters: Sequence[int] = (24, 40, 56), dropout: float = 0.0
) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype.

    ``filters`` has one number a stage; ``dropout`` follows each stage.
    """
    images = keras.Input(input_shape, name="image")
    x = images
    for stage, width in enumerate(filters, start=1):
        for part in "ab":
            x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"conv{stage}{part}")(x)
            # The mean of the last few dozen steps: a short training ends before that of Keras' 0.99 has settled.
            x = keras.layers.BatchNormalization(momentum=0.9, name=f"norm{stage}{part}")(x)
            x = keras.layers.ReLU(name=f"relu{stage}{part}")(x)
        x = keras.layers.MaxPooling2D(name=f"pool{stage}")(x)
        if dropout:
            x = keras.layers.Dropout(dropout, name=f"dropout{stage}")(x)
    x = keras.layers.GlobalAveragePooling2D(name="mean")(x)
    full = keras.config.dtype_policy().variable_dtype
    logits = keras.layers.Dense(num_classes, dtype=full, name="logits")(x)
    return keras.Model(images, logits, name="vgg")
