"""An architecture of keras.applications without its top, followed by a dense layer. ``model.initial`` can be its
weights file (``FILE.h5``; names of Keras' own files end in ``_notop.h5`` or ``_no_top.h5``)."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import keras

from tasks.modeling.models._layers import dropped, output_layer

NORMALIZATION = "none"
"""Each architecture preprocesses raw pixels in its own way."""


def build(
    input_shape: tuple[int, ...],
    num_classes: int,
    architecture: str = "MobileNetV2",
    arguments: Mapping[str, Any] | None = None,
    dropout: float = 0.0,
) -> keras.Model:
    """Return images (batch, height, width, channels), 0 to 255 -> logits (batch, num_classes), of the policy's variable
    dtype.

    The architecture is the layer ``backbone``: ``model.freeze=[backbone]`` trains only the last layer.

    Args:
        input_shape: height and width, at least 32 (for some architectures 71 or 75), and 1 or 3 channels; a single
            channel is used as red, green and blue, because the weights expect colour images.
        num_classes: number of outputs.
        architecture: a function of keras.applications, such as ``ResNet50``.
        arguments: further arguments of that function, such as ``{alpha: 0.35}`` for ``MobileNetV2``.
        dropout: rate before the last layer.

    Raises:
        ValueError: the architecture does not exist or does not support this shape.
        TypeError: the architecture does not have such an argument.
    """
    makes = getattr(keras.applications, architecture, None)
    if not inspect.isfunction(makes):
        raise ValueError(f"'{architecture}' is not in keras.applications: {', '.join(architectures())}")
    if input_shape[2] not in (1, 3):
        raise ValueError("it takes images of 1 or 3 channels")
    coloured = (*input_shape[:2], 3)
    made = makes(include_top=False, weights=None, input_shape=coloured, pooling="avg", **(arguments or {}))
    # Not every function takes a name.
    backbone = keras.Model(made.input, made.output, name="backbone")
    images = keras.Input(input_shape, name="image")
    x = images if input_shape[2] == 3 else keras.layers.Concatenate(name="coloured")([images] * 3)
    x = backbone(importlib.import_module(makes.__module__).preprocess_input(x))
    x = dropped(x, dropout, "dropout")
    return keras.Model(images, output_layer(num_classes)(x), name="keras_applications")


def architectures() -> list[str]:
    """Return the allowed values of ``architecture``."""
    return [name for name, _ in inspect.getmembers(keras.applications, inspect.isfunction)]
