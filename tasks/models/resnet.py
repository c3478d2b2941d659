"""A small residual network for images of 28 to 64 pixels (He et al., "Deep Residual Learning", 2015, section 4.2)."""

from typing import Any

import keras


def build(
    input_shape: tuple[int, ...], num_classes: int, blocks_per_stage: int = 1, filters: int = 16, dropout: float = 0.0
) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype.

    Three stages of ``blocks_per_stage`` blocks with ``filters``, 2x and 4x as many filters; the paper's depth is
    6 * blocks_per_stage + 2.
    """
    images = keras.Input(input_shape, name="image")
    x = _convolution(images, filters, 3, 1, "stem")
    for stage in range(3):
        for block in range(blocks_per_stage):
            strides = 2 if stage and not block else 1
            x = _block(x, filters * 2**stage, strides, f"stage{stage + 1}_block{block + 1}")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    if dropout:
        x = keras.layers.Dropout(dropout, name="dropout")(x)
    full = keras.config.dtype_policy().variable_dtype
    logits = keras.layers.Dense(num_classes, dtype=full, name="logits")(x)
    return keras.Model(images, logits, name="resnet")


def _block(x: Any, filters: int, strides: int, name: str) -> Any:
    shortcut = x if strides == 1 else _convolution(x, filters, 1, strides, f"{name}_shortcut", activation=None)
    x = _convolution(x, filters, 3, strides, f"{name}_a")
    x = _convolution(x, filters, 3, 1, f"{name}_b", activation=None)
    return keras.layers.ReLU(name=f"{name}_relu")(keras.layers.Add(name=f"{name}_add")([x, shortcut]))


def _convolution(x: Any, filters: int, size: int, strides: int, name: str, activation: str | None = "relu") -> Any:
    x = keras.layers.Conv2D(filters, size, strides, padding="same", use_bias=False, name=f"{name}_conv")(x)
    # The mean of the last few dozen steps: that of Keras' 0.99 takes hundreds to settle, and until then the model
    # validates at chance.
    x = keras.layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return keras.layers.ReLU(name=f"{name}_relu")(x) if activation else x
