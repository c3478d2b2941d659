"""Losses by name: the Keras loss that a training minimizes. An evaluation computes the same loss for each example."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.modeling import models, own_code
from tasks.modeling.metrics import Labels, Predictions
from tasks.records import PreparedDataset, Target, Task
from tasks.system.errors import UserError


class SoftmaxSquaredError(keras.losses.Loss):
    """Mean squared error of the softmax of logits (n, classes) against one-hot classes from int (n,), or against shares
    of classes, float (n, classes)."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.square(keras.ops.softmax(y_pred) - _shares(y_true, y_pred)), axis=-1)


class SmoothedCrossentropy(keras.losses.CategoricalCrossentropy):
    """Cross-entropy of logits (n, classes) against classes, int (n,), or shares of classes, float (n, classes), with
    label smoothing (Szegedy et al., "Rethinking the Inception architecture", 2015, section 7).
    """

    def __init__(self, smoothing: float) -> None:
        super().__init__(from_logits=True, label_smoothing=smoothing, name="sparse_categorical_crossentropy")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(_shares(y_true, y_pred), y_pred)


def _shares(y_true: Any, y_pred: Any) -> Any:
    """Return the share of each class in each example, in the dtype of the predictions."""
    if len(y_true.shape) == 1:
        return keras.ops.one_hot(y_true, y_pred.shape[-1], dtype=y_pred.dtype)
    return keras.ops.cast(y_true, y_pred.dtype)


def _crossentropy(smoothing: float) -> keras.losses.Loss:
    if smoothing:
        return SmoothedCrossentropy(smoothing)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


LOSSES: dict[Task, dict[str, Callable[[float], keras.losses.Loss]]] = {
    "classification": {
        "sparse_categorical_crossentropy": _crossentropy,
        "mean_squared_error": lambda smoothing: SoftmaxSquaredError(name="mean_squared_error"),
    },
    "multilabel": {
        "binary_crossentropy": lambda smoothing: keras.losses.BinaryCrossentropy(
            from_logits=True, label_smoothing=smoothing
        ),
    },
    "regression": {
        "mean_squared_error": lambda smoothing: keras.losses.MeanSquaredError(),
        "mean_absolute_error": lambda smoothing: keras.losses.MeanAbsoluteError(),
        "huber": lambda smoothing: keras.losses.Huber(),
    },
}
"""Allowed values of ``train.loss`` for each task; each function takes the label smoothing."""
USUAL: dict[Task, str] = {
    "classification": "sparse_categorical_crossentropy",
    "multilabel": "binary_crossentropy",
    "regression": "mean_squared_error",
}
"""The loss of ``train.loss=auto``."""
SMOOTHED = ("sparse_categorical_crossentropy", "binary_crossentropy")


def find_loss(section: config.Train, prepared: PreparedDataset, shares: bool = False) -> keras.losses.Loss:
    """Return the loss of a training.

    Args:
        section: ``loss`` and ``label_smoothing`` are read.
        prepared: determines the task.
        shares: whether labels can be shares of classes, because images are mixed.

    Raises:
        UserError: the loss does not apply to the task; or a custom loss does not exist, cannot be computed, or would
            receive shares of classes.
    """
    target, smoothing = prepared.target, section.label_smoothing
    allowed = LOSSES[target.task]
    name = USUAL[target.task] if section.loss == "auto" else section.loss
    if ":" not in name and name not in allowed:
        raise UserError(
            f"train.loss = '{name}': {prepared.name} is a {target.task}, whose losses are {', '.join(allowed)}. Set "
            "train.loss to auto, one of these, or your own module:function"
        )
    if smoothing and name not in SMOOTHED:
        raise UserError(
            f"train.label_smoothing = {smoothing}: {name} cannot use it. Set train.label_smoothing=0, or "
            f"train.loss to one of {', '.join(SMOOTHED)}"
        )
    if ":" in name:
        if shares and target.task == "classification":
            raise UserError(
                f"train.loss = '{name}': needs one class per example, but input.augmentation.mixup and cutmix mix "
                f"classes. Set both to 0, or train.loss to one of {', '.join(allowed)}"
            )
        return _own_loss(name, prepared)
    if shares and name == "sparse_categorical_crossentropy":
        return SmoothedCrossentropy(smoothing)
    loss = allowed[name](smoothing)
    return loss if target.task != "regression" else _in_deviations(loss, target)


def _in_deviations(loss: keras.losses.Loss, target: Target) -> keras.losses.Loss:
    """Return a loss in units of the target's standard deviation in the training split: the same learning rates suit
    any unit, and ``huber`` becomes linear at one deviation."""
    deviation = np.array([one or 1.0 for one in target.deviation or (1.0,)])

    class InDeviations(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            scale = keras.ops.convert_to_tensor(1 / deviation, y_pred.dtype)
            return loss.call(keras.ops.cast(y_true, y_pred.dtype) * scale, y_pred * scale)

    return InDeviations(name=loss.name)


def _own_loss(name: str, prepared: PreparedDataset) -> keras.losses.Loss:
    """Return a custom loss: its function maps tensors (labels, outputs), classes as int32 and numbers in the target's
    unit, to the loss of each example, float (n,)."""
    function = own_code.load_measure(name, "train.loss", example(prepared, 2), "do not average over them")

    class OwnLoss(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            # Keras converts classes to floats.
            whole = prepared.target.task == "classification"
            outputs = keras.ops.cast(y_pred, keras.config.floatx())
            return function(keras.ops.cast(y_true, "int32") if whole else y_true, outputs)

    return OwnLoss(name=name.partition(":")[2])


def of_examples(loss: keras.losses.Loss, labels: Labels, outputs: Predictions) -> npt.NDArray[np.float64]:
    """Return the loss of each example, (n,), computed in float64; on JAX, in the floats of the training."""
    dtype = "float64" if keras.backend.backend() == "tensorflow" else keras.config.floatx()
    with models.in_host_memory():
        tensors = keras.ops.convert_to_tensor(labels), keras.ops.convert_to_tensor(outputs, dtype)
        return np.asarray(keras.ops.convert_to_numpy(loss.call(*tensors)), np.float64)


def example(prepared: PreparedDataset, num_examples: int) -> tuple[Any, Any]:
    """Return labels and outputs of zeros with the shapes and dtypes of a training."""
    target = prepared.target
    dtype = "int32" if target.task == "classification" else target.label_dtype
    labels = keras.ops.zeros([num_examples, *target.label_shape], dtype)
    return labels, keras.ops.zeros([num_examples, target.num_outputs])
