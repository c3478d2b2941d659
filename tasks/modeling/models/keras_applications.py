"""An architecture of keras.applications without its top, under one dense layer; ``model.initial`` can be the file of
its weights (``FILE.h5``: those that Keras offers end in ``_notop.h5`` or ``_no_top.h5``)."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import keras

NORMALIZATION = "none"
"""Each architecture has a preprocessing of its own, of pixels as they are."""


def build(
    input_shape: tuple[int, ...],
    num_classes: int,
    architecture: str = "MobileNetV2",
    arguments: Mapping[str, Any] | None = None,
    dropout: float = 0.0,
) -> keras.Model:
    """Return images (batch, height, width, channels), 0 to 255 -> logits (batch, num_classes), of the policy's variable
    dtype.

    The architecture is the layer ``backbone``: ``model.freeze=[backbone]`` trains the last layer alone.

    Args:
        input_shape: height and width, which Keras wants to be 32 at least (for some 71 or 75), and 1 or 3 channels; a
            single one is taken for red, green and blue alike, for weights are of coloured images.
        num_classes: outputs.
        architecture: a function of keras.applications, such as ``ResNet50``.
        arguments: more for that function, such as ``{alpha: 0.35}`` for ``MobileNetV2``.
        dropout: before the last layer.

    Raises:
        ValueError: no such architecture, or it cannot have this shape.
        TypeError: it takes no such argument.
    """
    makes = getattr(keras.applications, architecture, None)
    if not inspect.isfunction(makes):
        raise ValueError(f"'{architecture}' is none of keras.applications: {', '.join(architectures())}")
    if input_shape[2] not in (1, 3):
        raise ValueError("it takes images of 1 or 3 channels")
    coloured = (*input_shape[:2], 3)
    made = makes(include_top=False, weights=None, input_shape=coloured, pooling="avg", **(arguments or {}))
    # Not every function takes a name.
    backbone = keras.Model(made.input, made.output, name="backbone")
    images = keras.Input(input_shape, name="image")
    x = images if input_shape[2] == 3 else keras.layers.Concatenate(name="coloured")([images] * 3)
    x = backbone(importlib.import_module(makes.__module__).preprocess_input(x))
    if dropout:
        x = keras.layers.Dropout(dropout, name="dropout")(x)
    full = keras.config.dtype_policy().variable_dtype
    logits = keras.layers.Dense(num_classes, dtype=full, name="logits")(x)
    return keras.Model(images, logits, name="keras_applications")


def architectures() -> list[str]:
    """Return the names that ``architecture`` can be."""
    return [name for name, _ in inspect.getmembers(keras.applications, inspect.isfunction)]
