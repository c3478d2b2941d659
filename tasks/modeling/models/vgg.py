"""A small VGG: stages of two 3x3 convolutions and a pool (Simonyan and Zisserman, "Very deep convolutional networks",
2014, section 2.1), with batch normalisation, and global average pooling instead of the large dense layers."""

from collections.abc import Sequence

import keras

from tasks.modeling.models._layers import dropped, output_layer


def build(
    input_shape: tuple[int, ...], num_classes: int, filters: Sequence[int] = (24, 40, 56), dropout: float = 0.0
) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype.

    ``filters`` has a number per stage; a ``dropout`` follows each stage.
    """
    images = keras.Input(input_shape, name="image")
    x = images
    for stage, width in enumerate(filters, start=1):
        for part in "ab":
            x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"conv{stage}{part}")(x)
            # A mean over the last few dozen steps: with Keras' 0.99 a short training ends before it has settled.
            x = keras.layers.BatchNormalization(momentum=0.9, name=f"norm{stage}{part}")(x)
            x = keras.layers.ReLU(name=f"relu{stage}{part}")(x)
        x = keras.layers.MaxPooling2D(name=f"pool{stage}")(x)
        x = dropped(x, dropout, f"dropout{stage}")
    x = keras.layers.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(images, output_layer(num_classes)(x), name="vgg")
