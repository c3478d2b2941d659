"""Models by name: the file is the key, and its ``build`` makes the model from the dataset's shape."""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tasks import config, upstream
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


def set_precision(policy: str) -> None:
    """Make a dtype policy that of every model built from here on, and of losses, metrics and inputs too."""
    import keras

    keras.config.set_dtype_policy(policy)
    # Keras makes what is not a layer in floatx, whatever the policy says.
    keras.config.set_floatx("float64" if policy == "float64" else "float32")


def build(model: config.Model, prepared: PreparedDataset, normalization: str) -> Any:
    """Return a ``keras.Model``, uncompiled: uint8 (batch, height, width, channels) -> logits (batch, classes).

    Logits are float32 also under a mixed policy, and float64 under float64. Each build in a process gives the same
    names.

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

    upstream.reset_names()
    function = find(model.name)
    known = [f"model.options.{name}" for name in list(inspect.signature(function).parameters)[2:]]
    for option in model.options:
        if f"model.options.{option}" not in known:
            raise UserError(one_of("key", f"model.options.{option}", known or ["no options"]))
    try:
        core = function(prepared.features["image"].shape, prepared.target.num_outputs, **model.options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"model.name = '{model.name}' with model.options = {model.options} cannot be built for images of shape "
            f"{prepared.features['image'].shape} ({_one_line(error)})"
        ) from error
    images = keras.Input(prepared.features["image"].shape, dtype="uint8", name="pixels")
    return keras.Model(images, core(_normalization(normalization, prepared)(images)), name="classifier")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _normalization(kind: str, prepared: PreparedDataset) -> Any:
    import keras

    scale, offset = np.array([1.0]), np.array([0.0])
    if kind == "scale":
        scale = np.array([1 / 255])
    elif kind == "standardize":
        image = prepared.features["image"]
        deviations = np.array([deviation or 1.0 for deviation in image.deviation])
        scale, offset = 1 / deviations, -np.array(image.mean) / deviations
    # Rescaling holds constants, no weights: a checkpoint of one normalisation loads into a model of another.
    # Lists in arrays: TensorFlow makes Python's numbers float32 before it makes them float64, which is 6e-8 off, and an
    # exported model gets such numbers for arrays without a dimension.
    return keras.layers.Rescaling(scale, offset, name="normalization")
