"""A residual network for images of 28 to 224 pixels (He et al., "Deep Residual Learning", 2015)."""

from collections.abc import Sequence
from typing import Any

import keras

from tasks.modeling.models._layers import dropped, output_layer

LARGE = 96
"""Smallest side, in pixels, of images that use the paper's ImageNet stem."""


def build(
    input_shape: tuple[int, ...],
    num_classes: int,
    blocks_per_stage: int | Sequence[int] = 1,
    filters: int = 16,
    dropout: float = 0.0,
) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype.

    Each stage has twice as many filters as the stage before. For small images there are three stages (section 4.2: the
    depth is 6 * blocks_per_stage + 2). For images of 96 pixels a side or more, a 7 x 7 convolution and a pool reduce
    each side to a quarter, and four stages follow (table 1: with 64 filters, 2 blocks are ResNet-18, and [3, 4, 6, 3]
    are ResNet-34).

    Args:
        input_shape: height, width and channels.
        num_classes: number of outputs.
        blocks_per_stage: blocks of two convolutions; a number for all stages, or a list with a number for each.
        filters: filters of the first stage.
        dropout: rate before the last layer.

    Raises:
        ValueError: the list of blocks does not have one number per stage.
    """
    large = min(input_shape[:2]) >= LARGE
    stages = 4 if large else 3
    blocks = [blocks_per_stage] * stages if isinstance(blocks_per_stage, int) else blocks_per_stage
    images = keras.Input(input_shape, name="image")
    x = _convolution(images, filters, 7 if large else 3, 2 if large else 1, "stem")
    if large:
        x = keras.layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    for stage, count in zip(range(stages), blocks, strict=True):
        for block in range(count):
            strides = 2 if stage and not block else 1
            x = _block(x, filters * 2**stage, strides, f"stage{stage + 1}_block{block + 1}")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    x = dropped(x, dropout, "dropout")
    return keras.Model(images, output_layer(num_classes)(x), name="resnet")


def _block(x: Any, filters: int, strides: int, name: str) -> Any:
    shortcut = x if strides == 1 else _convolution(x, filters, 1, strides, f"{name}_shortcut", activation=None)
    x = _convolution(x, filters, 3, strides, f"{name}_a")
    x = _convolution(x, filters, 3, 1, f"{name}_b", activation=None)
    return keras.layers.ReLU(name=f"{name}_relu")(keras.layers.Add(name=f"{name}_add")([x, shortcut]))


def _convolution(x: Any, filters: int, size: int, strides: int, name: str, activation: str | None = "relu") -> Any:
    x = keras.layers.Conv2D(filters, size, strides, padding="same", use_bias=False, name=f"{name}_conv")(x)
    # A mean over the last few dozen steps: with Keras' 0.99 it takes hundreds of steps to settle, and until then the
    # model validates at chance level.
    x = keras.layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return keras.layers.ReLU(name=f"{name}_relu")(x) if activation else x
