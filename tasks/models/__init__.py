"""Models by name: the file is the key, and its ``build`` makes the model from the dataset's shape."""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from tasks import config
from tasks.errors import UserError, one_of
from tasks.records import PreparedDataset


def find(name: str) -> Callable[..., Any]:
    """Return the ``build`` function that a name stands for.

    Args:
        name: a file of this folder, or a user's own ``module:function``, looked for from the project's folder too.

    Raises:
        UserError: the module or the function does not exist, or importing it failed.
    """
    module_name, colon, function = name.partition(":")
    if not colon:
        build: Callable[..., Any] = importlib.import_module(f"tasks.models.{name}").build
        return build
    root = str(config.project_root())
    if root not in sys.path:
        sys.path.insert(0, root)
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise UserError(f"model.name = '{name}': write it as module:function, such as my_models:build")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"model.name = '{name}': no module '{error.name}'. It is looked for in {root} and in the environment"
        ) from None
    except Exception as error:
        raise UserError(f"model.name = '{name}': importing {module_name} failed ({_one_line(error)})") from error
    if not callable(getattr(module, function, None)):
        raise UserError(f"model.name = '{name}': {module_name} has no function '{function}'")
    build = getattr(module, function)
    return build


def build(model: config.Model, prepared: PreparedDataset, normalization: str) -> Any:
    """Return a ``keras.Model``, uncompiled: uint8 (batch, height, width, channels) -> logits float32 (batch, classes).

    The normalisation is the model's first layer, so a batch travels as one byte a pixel and whoever loads the model
    later feeds it the pixels as they are.

    Args:
        model: the model's name and the keyword arguments of its ``build``.
        prepared: gives the shape of an image, the number of classes, and each channel's mean and deviation.
        normalization: see ``config.Input.normalization``.

    Raises:
        UserError: the model knows no such option, or cannot be built with these options and this shape.
    """
    import keras

    function = find(model.name)
    known = [f"model.options.{name}" for name in list(inspect.signature(function).parameters)[2:]]
    for option in model.options:
        if f"model.options.{option}" not in known:
            raise UserError(one_of("key", f"model.options.{option}", known or ["no options"]))
    try:
        core = function(prepared.image_shape, prepared.num_classes, **model.options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"model.name = '{model.name}' with model.options = {model.options} cannot be built for images of shape "
            f"{prepared.image_shape} ({_one_line(error)})"
        ) from error
    images = keras.Input(prepared.image_shape, dtype="uint8", name="pixels")
    return keras.Model(images, core(_normalization(normalization, prepared)(images)), name="classifier")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _normalization(kind: str, prepared: PreparedDataset) -> Any:
    import keras

    # Rescaling holds constants, no weights: a checkpoint of one normalisation loads into a model of another.
    if kind == "scale":
        return keras.layers.Rescaling(1 / 255, name="normalization")
    if kind == "standardize":
        train = prepared.splits["train"]
        deviations = [std or 1.0 for std in train.pixel_std]
        shift = [-mean / std for mean, std in zip(train.pixel_mean, deviations, strict=True)]
        return keras.layers.Rescaling([1 / std for std in deviations], shift, name="normalization")
    return keras.layers.Rescaling(1.0, name="normalization")
