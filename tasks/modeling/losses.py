"""Losses by name: the Keras loss that a training minimizes, and the same loss per example in float64 for evaluations.

An evaluation reports the same number on every backend. It cannot use the Keras loss, because JAX computes in float32; a
test compares the two versions of each loss. The exception is a custom loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax, softmax

from tasks import config
from tasks.modeling import own_code
from tasks.modeling.metrics import Labels, Predictions
from tasks.records import PreparedDataset, Target, Task
from tasks.system.errors import UserError


@dataclass(frozen=True)
class Loss:
    """A loss of labels and outputs."""

    in_training: Callable[[], keras.losses.Loss]
    of_predictions: Callable[[Labels, Predictions], npt.NDArray[np.float64]]
    """The loss of each example, (n,)."""


class SoftmaxSquaredError(keras.losses.Loss):
    """Mean squared error of the softmax of logits (n, classes) against one-hot classes from int (n,), or against shares
    of classes, float (n, classes)."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.square(keras.ops.softmax(y_pred) - _shares(y_true, y_pred)), axis=-1)


class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy of logits (n, classes) against classes, int (n,), or shares of classes, float (n, classes), with
    label smoothing (Szegedy et al., "Rethinking the Inception architecture", 2015, section 7).
    """

    def __init__(self, smoothing: float) -> None:
        super().__init__(name="sparse_categorical_crossentropy")
        self._smoothing = smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.losses.categorical_crossentropy(
            _shares(y_true, y_pred), y_pred, from_logits=True, label_smoothing=self._smoothing
        )


def _shares(y_true: Any, y_pred: Any) -> Any:
    """Return the share of each class in each example, in the dtype of the predictions."""
    if len(y_true.shape) == 1:
        return keras.ops.one_hot(y_true, y_pred.shape[-1], dtype=y_pred.dtype)
    return keras.ops.cast(y_true, y_pred.dtype)


def _crossentropy(smoothing: float, shares: bool = False) -> Loss:
    def of_predictions(labels: Labels, logits: Predictions) -> npt.NDArray[np.float64]:
        logs = log_softmax(logits, axis=1)
        own: npt.NDArray[np.float64] = -logs[np.arange(len(labels)), labels]
        return (1 - smoothing) * own - smoothing * logs.mean(axis=1) if smoothing else own

    if smoothing or shares:
        return Loss(lambda: SmoothedCrossentropy(smoothing), of_predictions)
    return Loss(lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True), of_predictions)


def _binary_crossentropy(smoothing: float) -> Loss:
    def of_predictions(labels: Labels, logits: Predictions) -> npt.NDArray[np.float64]:
        wanted = labels * (1 - smoothing) + smoothing / 2
        each: npt.NDArray[np.float64] = np.maximum(logits, 0) - logits * wanted + np.log1p(np.exp(-np.abs(logits)))
        return _mean(each)

    return Loss(
        lambda: keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=smoothing),
        of_predictions,
    )


def _huber(labels: Labels, outputs: Predictions) -> npt.NDArray[np.float64]:
    error = np.abs(outputs - labels)
    return _mean(np.where(error <= 1, np.square(error) / 2, error - 0.5))


def _mean(each: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    means: npt.NDArray[np.float64] = each.mean(axis=1)
    return means


LOSSES: dict[Task, dict[str, Callable[[float], Loss]]] = {
    "classification": {
        "sparse_categorical_crossentropy": _crossentropy,
        "mean_squared_error": lambda smoothing: Loss(
            in_training=lambda: SoftmaxSquaredError(name="mean_squared_error"),
            of_predictions=lambda labels, logits: np.square(
                softmax(logits, axis=1) - np.eye(logits.shape[1])[labels]
            ).mean(axis=1),
        ),
    },
    "multilabel": {"binary_crossentropy": _binary_crossentropy},
    "regression": {
        "mean_squared_error": lambda smoothing: Loss(
            in_training=keras.losses.MeanSquaredError,
            of_predictions=lambda labels, outputs: _mean(np.square(outputs - labels)),
        ),
        "mean_absolute_error": lambda smoothing: Loss(
            in_training=keras.losses.MeanAbsoluteError,
            of_predictions=lambda labels, outputs: _mean(np.abs(outputs - labels)),
        ),
        "huber": lambda smoothing: Loss(in_training=keras.losses.Huber, of_predictions=_huber),
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


def find_loss(section: config.Train, prepared: PreparedDataset, shares: bool = False) -> Loss:
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
            f"train.loss = '{name}': {prepared.name} is a {target.task}, and its losses are {', '.join(allowed)}. Give "
            "train.loss=auto, one of these, or a module:function of your own"
        )
    if smoothing and name not in SMOOTHED:
        raise UserError(
            f"train.label_smoothing = {smoothing}: {name} has no such thing. Give train.label_smoothing=0, or a "
            f"loss of {', '.join(SMOOTHED)}"
        )
    if ":" in name:
        if shares and target.task == "classification":
            raise UserError(
                f"train.loss = '{name}': takes classes, and input.augmentation.mixup and cutmix make shares of them. "
                f"Give 0 for both, or a loss of {', '.join(allowed)}"
            )
        return _own_loss(name, prepared)
    if shares and name == "sparse_categorical_crossentropy":
        return _crossentropy(smoothing, shares)
    loss = allowed[name](smoothing)
    return loss if target.task != "regression" else _in_deviations(loss, target)


def _in_deviations(loss: Loss, target: Target) -> Loss:
    """Return a loss in units of the target's standard deviation in the training split: the same learning rates suit
    any unit, and ``huber`` becomes linear at one deviation."""
    deviation = np.array([one or 1.0 for one in target.deviation or (1.0,)])
    inner = loss.in_training()

    class InDeviations(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            scale = keras.ops.convert_to_tensor(1 / deviation, y_pred.dtype)
            return inner.call(keras.ops.cast(y_true, y_pred.dtype) * scale, y_pred * scale)

    return Loss(
        in_training=lambda: InDeviations(name=inner.name),
        of_predictions=lambda labels, outputs: loss.of_predictions(labels / deviation, outputs / deviation),
    )


def _own_loss(name: str, prepared: PreparedDataset) -> Loss:
    """Return a custom loss: its function maps tensors (labels, outputs), classes as int32 and numbers in the target's
    unit, to the loss of each example, float (n,)."""
    function = own_code.load_measure(name, "train.loss", example(prepared, 2), "do not average over them")

    class OwnLoss(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            # Keras converts classes to floats.
            whole = prepared.target.task == "classification"
            return function(keras.ops.cast(y_true, "int32") if whole else y_true, y_pred)

    def of_predictions(labels: Labels, outputs: Predictions) -> npt.NDArray[np.float64]:
        tensors = keras.ops.convert_to_tensor(labels), keras.ops.convert_to_tensor(outputs, keras.config.floatx())
        return np.asarray(keras.ops.convert_to_numpy(OwnLoss().call(*tensors)), np.float64)

    return Loss(lambda: OwnLoss(name=name.partition(":")[2]), of_predictions)


def example(prepared: PreparedDataset, num_examples: int) -> tuple[Any, Any]:
    """Return labels and outputs of zeros with the shapes and dtypes of a training."""
    target = prepared.target
    dtype = "int32" if target.task == "classification" else target.label_dtype
    labels = keras.ops.zeros([num_examples, *target.label_shape], dtype)
    return labels, keras.ops.zeros([num_examples, target.num_outputs])
