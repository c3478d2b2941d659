"""Models by name: each file is named after its model, and its ``build`` makes the model for a dataset.

An image model has ``build(input_shape, num_classes, **options)`` and maps images (batch, height, width, channels) ->
outputs (batch, num_classes). A model of any features has ``build(features, num_outputs, **options)``, with
``records.Feature`` by name; its inputs have the features' names: numbers float (batch, k), categories and words int32
(batch, k), images float (batch, height, width, channels), with numbers and images normalised. A file that defines
``NORMALIZATION`` requires this ``input.normalization``.
"""

import contextlib
import importlib
import inspect
import json
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tasks import config
from tasks.modeling import own_code
from tasks.records import Feature, PreparedDataset, as_input
from tasks.system import machine, units, upstream
from tasks.system.errors import UserError, last_line, one_of


def find_build(name: str) -> Callable[..., Any]:
    """Return the ``build`` function of a model.

    Args:
        name: a file of this folder, or a user's ``module:function``; the project's folder is searched, too.

    Raises:
        UserError: the module or the function does not exist, or importing it failed.
    """
    if ":" in name:
        return own_code.load(name, "model.name")
    build: Callable[..., Any] = importlib.import_module(f"tasks.modeling.models.{name}").build
    return build


def set_precision(policy: str) -> None:
    """Set the dtype policy of all models built from here on, and of losses, metrics and inputs."""
    import keras

    keras.config.set_dtype_policy(policy)
    # Keras uses floatx, not the policy, for everything that is not a layer.
    keras.config.set_floatx("float64" if policy == "float64" else "float32")


def in_host_memory() -> contextlib.AbstractContextManager[Any]:
    """Create variables in host memory, and compute there, within the block: a model or the outputs for all examples may
    not fit on one device."""
    import keras

    number = 0
    if keras.backend.backend() == "jax":
        import jax

        with contextlib.suppress(RuntimeError):
            number = jax.local_devices(backend="cpu")[0].id  # Of several processes each has numbers of its own.
    try:
        device: contextlib.AbstractContextManager[Any] = keras.device(f"cpu:{number}")
    except RuntimeError:  # The user's JAX_PLATFORMS leaves the CPU out.
        return contextlib.nullcontext()
    return device


def takes_features(build: Callable[..., Any]) -> bool:
    """Return whether a ``build`` takes features of any kind instead of the shape of images."""
    return next(iter(inspect.signature(build).parameters), None) == "features"


def build(model: config.Model, prepared: PreparedDataset, normalization: str) -> Any:
    """Return an uncompiled ``keras.Model``: features of a batch, as prepared -> outputs (batch, num_outputs).

    Outputs are logits of classes or labels, or a regression's numbers in their own unit; float32, also under a mixed
    policy, and float64 under float64. Every build in a process has the same names.

    The model's first layer normalises images and numbers, so a batch is transferred as prepared, one byte per pixel,
    and users of the saved model pass raw values.

    Args:
        model: the model's name and the keyword arguments of its ``build``.
        prepared: provides the features with their statistics, and the target.
        normalization: for images, see ``config.Input.normalization``.

    Raises:
        UserError: the model has no such option, cannot be built with these options and this shape, does not accept
            these features, or does not end in one number per class, label or number of the target.
    """
    import keras

    upstream.reset_names()
    function = find_build(model.name)
    features, target = prepared.features, prepared.target
    only_image = len(features) == 1 and next(iter(features.values())).kind == "image"
    _refuse_unfit(model, function, prepared, normalization, only_image)
    shape = features if takes_features(function) else next(iter(features.values())).shape
    what = f"model.name = '{model.name}' with model.options = {model.options}"
    with own_code.blamed(f"{what} cannot be built for {_described(features)}"):
        core = function(shape, target.num_outputs, **model.options)
        if not callable(core):
            raise UserError(f"{what} returns a {type(core).__name__}, but must return a Keras model")
        inputs = {
            name: keras.Input(feature.shape, dtype=feature.dtype, name="pixels" if only_image else name)
            for name, feature in features.items()
        }
        normalized = {name: _normalized(inputs[name], name, one, normalization) for name, one in features.items()}
        outputs = core(as_input(normalized))
        _refuse_outputs(what, core, keras.tree.map_structure(lambda one: tuple(one.shape), outputs), prepared)
    if target.mean:
        # The model learns standardized numbers, whatever the target's unit is.
        deviation, full = np.array([one or 1.0 for one in target.deviation]), keras.config.dtype_policy().variable_dtype
        outputs = _rescaling(deviation, np.array(target.mean), "unit", dtype=full)(outputs)
    built = keras.Model(as_input(inputs), outputs, name=NAMES[target.task])
    with own_code.blamed(f"{what} cannot be saved"):
        built.get_config()
    return built


def _refuse_unfit(
    model: config.Model, function: Callable[..., Any], prepared: PreparedDataset, normalization: str, only_image: bool
) -> None:
    """Refuse options or features that the model's function does not accept, and a normalisation other than the one its
    weights were trained with."""
    known = [f"model.options.{name}" for name in list(inspect.signature(function).parameters)[2:]]
    for option in model.options:
        if f"model.options.{option}" not in known:
            raise UserError(one_of("key", f"model.options.{option}", known or ["no options"]))
    if not takes_features(function) and not only_image:
        raise UserError(
            f"model.name = '{model.name}' takes images, and {prepared.name} has {_described(prepared.features)}. Set "
            f"model.name={' or '.join(of_features())}, or your own module:function with build(features, "
            "num_outputs, ...)"
        )
    only = getattr(sys.modules[function.__module__], "NORMALIZATION", normalization)
    if only != normalization:
        raise UserError(
            f"input.normalization = {normalization}: model.name = '{model.name}' works only with "
            f"'{only}'. Set input.normalization={only}"
        )


def _refuse_outputs(what: str, core: Any, shape: Any, prepared: PreparedDataset) -> None:
    """Refuse outputs of another shape than the target's, which a loss may broadcast, and a last layer that limits them:
    losses and metrics would take probabilities for logits, and a regression's standardized numbers have both signs."""
    import keras

    target, of = prepared.target, "logit per class or label"
    limiting = ["softmax", "sigmoid"]
    if target.task == "regression":
        of, limiting = "number in standard deviations from the mean", [*limiting, "relu", "softplus"]
    if shape[1:] not in ((target.num_outputs,), (None,)):
        raise UserError(
            f"{what} returns outputs of shape {shape}, but {prepared.name} needs (None, {target.num_outputs}), one {of}"
        )
    while isinstance(core, keras.Sequential | keras.Function):
        core = core.layers[-1] if isinstance(core, keras.Sequential) else core.operations[-1]
    activation = getattr(getattr(core, "activation", core), "__name__", type(core).__name__).lower()
    if activation in limiting:
        raise UserError(
            f"{what} ends with {activation} in '{core.name}', but must return one {of}: give this layer "
            "activation=None, or remove it"
        )


NAMES = {"classification": "classifier", "multilabel": "labeler", "regression": "regressor"}


def of_features() -> list[str]:
    """Return the names of the models that take features of any kind."""
    return [name for name in config.names_of("modeling/models") if takes_features(find_build(name))]


def _described(features: Mapping[str, Feature]) -> str:
    kinds = {"image": "images", "number": "numbers", "category": "categories", "text": "texts"}
    return ", ".join(f"{kinds[feature.kind]} of shape {feature.shape}" for feature in features.values())


def _normalized(values: Any, name: str, feature: Feature, normalization: str) -> Any:
    """Return the normalised values of a feature for the core model."""
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

    # Rescaling holds constants, no weights, so checkpoints do not depend on the normalisation.
    # Arrays with a dimension: TensorFlow converts Python numbers to float32 before float64, an error of 6e-8, and an
    # exported model stores arrays without a dimension as such numbers.
    return keras.layers.Rescaling(scale, offset, name=name, dtype=dtype)


def check_loadable(name: str, built: Any) -> None:
    """Raise ``UserError`` if Keras' safe mode could not load a built model from its file, as a registration does."""
    import keras

    try:
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(built), safe_mode=True)
    except Exception as error:  # Whatever a class raises.
        reason = last_line(error).partition(". ")[0].replace("Exception encountered: ", "")
        raise UserError(
            f"model.name = '{name}': Keras could not load the trained model ({reason}). Register its classes and "
            "functions with @keras.saving.register_keras_serializable(), use no Python lambda, or set "
            "register.enabled=false"
        ) from error


def load(what: str, path: Path, advice: str, own_code: bool) -> Any:
    """Return the Keras model of a file, in Keras' safe mode; refuse one that is too large before it creates a variable.

    Args:
        what: the name of the model in messages.
        path: its .keras file.
        advice: the end of the message if a class is missing, which may be the user's own.
        own_code: whether classes of the user's own may belong to it, which need not tell their sizes in advance.

    Raises:
        UserError: Keras cannot load it, or its variables need more than the free memory.
    """
    import keras

    wanted, free = 0, machine.free_memory()
    try:
        with suppress(Exception) if own_code else nullcontext(), zipfile.ZipFile(path) as archive:
            wanted = upstream.bytes_of_variables(json.loads(archive.read("config.json")))
        if wanted <= free:
            return keras.models.load_model(path, compile=False)
    except Exception as error:  # Whatever a class or a file of somebody else's raises.
        lacks = advice if "Could not locate" in str(error) else ""
        raise UserError(f"{what}: Keras cannot load {path} ({last_line(error)}){lacks}") from error
    raise UserError(
        f"{what}: {path} describes a model whose variables take {units.size(wanted)}, but only {units.size(free)} of "
        "memory are free"
    )
