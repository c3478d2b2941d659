"""Models by name: the file is the key, and its ``build`` makes the model of a dataset.

A model of images takes ``build(input_shape, num_classes, **options)`` and gives images (batch, height, width, channels)
-> outputs (batch, num_classes). One of any features takes ``build(features, num_outputs, **options)``, with
``records.Feature`` by name, and its inputs are named as they are: numbers float (batch, k), categories and words int32
(batch, k), images float (batch, height, width, channels), numbers and images normalised. A file that says
``NORMALIZATION`` takes images of no other ``input.normalization``.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tasks import config
from tasks.modeling import own_code
from tasks.records import Feature, PreparedDataset, as_input
from tasks.system import upstream
from tasks.system.errors import UserError, one_line, one_of


def find_build(name: str) -> Callable[..., Any]:
    """Return the ``build`` function that a name stands for.

    Args:
        name: a file of this folder, or a user's own ``module:function``, looked for from the project's folder too.

    Raises:
        UserError: the module or the function does not exist, or importing it failed.
    """
    if ":" in name:
        return own_code.load(name, "model.name")
    build: Callable[..., Any] = importlib.import_module(f"tasks.modeling.models.{name}").build
    return build


def set_precision(policy: str) -> None:
    """Make a dtype policy that of every model built from here on, and of losses, metrics and inputs too."""
    import keras

    keras.config.set_dtype_policy(policy)
    # Keras makes what is not a layer in floatx, whatever the policy says.
    keras.config.set_floatx("float64" if policy == "float64" else "float32")


def takes_features(build: Callable[..., Any]) -> bool:
    """Return whether a ``build`` takes any features, and not the shape of images."""
    return next(iter(inspect.signature(build).parameters), None) == "features"


def build(model: config.Model, prepared: PreparedDataset, normalization: str) -> Any:
    """Return a ``keras.Model``, uncompiled: the features of a batch, as prepared -> outputs (batch, num_outputs).

    Outputs are logits of classes or labels, or the numbers of a regression in their own unit; float32 also under a
    mixed policy, and float64 under float64. Each build in a process gives the same names.

    What normalises images and numbers is the model's first layer, so a batch travels as prepared, one byte a pixel, and
    whoever loads the model later feeds it the values as they are.

    Args:
        model: the model's name and the keyword arguments of its ``build``.
        prepared: gives the features with their statistics, and the target.
        normalization: of images, see ``config.Input.normalization``.

    Raises:
        UserError: the model knows no such option, cannot be built with these options and this shape, or takes no such
            features.
    """
    import keras

    upstream.reset_names()
    function = find_build(model.name)
    features, target = prepared.features, prepared.target
    only_image = len(features) == 1 and next(iter(features.values())).kind == "image"
    _refuse_unfit(model, function, prepared, normalization, only_image)
    shape = features if takes_features(function) else next(iter(features.values())).shape
    try:
        core = function(shape, target.num_outputs, **model.options)
    except (TypeError, ValueError) as error:
        if upstream.is_lost_peer(error):
            raise
        raise UserError(
            f"model.name = '{model.name}' with model.options = {model.options} cannot be built for "
            f"{_described(features)} ({one_line(error)})"
        ) from error
    inputs = {
        name: keras.Input(feature.shape, dtype=feature.dtype, name="pixels" if only_image else name)
        for name, feature in features.items()
    }
    normalized = {name: _normalized(inputs[name], name, feature, normalization) for name, feature in features.items()}
    outputs = core(as_input(normalized))
    if target.mean:
        # The model learns numbers about 0 and 1, whatever the target's unit is.
        deviation, full = np.array([one or 1.0 for one in target.deviation]), keras.config.dtype_policy().variable_dtype
        outputs = _rescaling(deviation, np.array(target.mean), "unit", dtype=full)(outputs)
    return keras.Model(as_input(inputs), outputs, name=NAMES[target.task])


def _refuse_unfit(
    model: config.Model, function: Callable[..., Any], prepared: PreparedDataset, normalization: str, only_image: bool
) -> None:
    """Refuse options that the model's function does not know, features that it does not take, and a normalisation that
    its weights were not trained with."""
    known = [f"model.options.{name}" for name in list(inspect.signature(function).parameters)[2:]]
    for option in model.options:
        if f"model.options.{option}" not in known:
            raise UserError(one_of("key", f"model.options.{option}", known or ["no options"]))
    if not takes_features(function) and not only_image:
        raise UserError(
            f"model.name = '{model.name}' takes images, and {prepared.name} has {_described(prepared.features)}. Give "
            f"model.name={' or '.join(of_features())}, or a module:function of your own with build(features, "
            "num_outputs, ...)"
        )
    only = getattr(sys.modules[function.__module__], "NORMALIZATION", normalization)
    if only != normalization:
        raise UserError(
            f"input.normalization = {normalization}: model.name = '{model.name}' takes images of no other than "
            f"'{only}'. Give input.normalization={only}"
        )


NAMES = {"classification": "classifier", "multilabel": "labeler", "regression": "regressor"}


def of_features() -> list[str]:
    """Return the names of the models that take any features."""
    return [name for name in config.names_of("modeling/models") if takes_features(find_build(name))]


def _described(features: Mapping[str, Feature]) -> str:
    kinds = {"image": "images", "number": "numbers", "category": "categories", "text": "texts"}
    return ", ".join(f"{kinds[feature.kind]} of shape {feature.shape}" for feature in features.values())


def _normalized(values: Any, name: str, feature: Feature, normalization: str) -> Any:
    """Return what the core takes of a feature."""
    import keras

    if feature.kind == "image":
        layer = "normalization" if name == "image" else f"{name}_normalization"
        scale, offset = np.array([1.0]), np.array([0.0])
        if normalization == "scale":
            scale = np.array([1 / 255])
        elif normalization == "standardize":
            scale, offset = _standardizing(feature.mean, feature.deviation)
        return _rescaling(scale, offset, layer)(values)
    if feature.kind == "number":
        full = keras.config.dtype_policy().variable_dtype
        standardizing = _standardizing(feature.mean, feature.deviation)
        return _rescaling(*standardizing, f"{name}_normalization", dtype=full)(values)
    return values


def _standardizing(mean: Sequence[float], deviation: Sequence[float]) -> tuple[Any, Any]:
    deviations = np.array([one or 1.0 for one in deviation])
    return 1 / deviations, -np.array(mean) / deviations


def _rescaling(scale: Any, offset: Any, name: str, dtype: str | None = None) -> Any:
    import keras

    # Rescaling holds constants, no weights: a checkpoint of one normalisation loads into a model of another.
    # Lists in arrays: TensorFlow makes Python's numbers float32 before it makes them float64, which is 6e-8 off, and an
    # exported model gets such numbers for arrays without a dimension.
    return keras.layers.Rescaling(scale, offset, name=name, dtype=dtype)
