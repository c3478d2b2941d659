"""Losses by name: what a training lowers, and the same of each example in float64, which an evaluation reports.

An evaluation gives the same number on every backend. JAX computes in float32, so it cannot use Keras' loss: a test
compares the two of each entry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax, softmax


@dataclass(frozen=True)
class Loss:
    """A loss of classes int (n,) and logits (n, classes)."""

    in_training: Callable[[], keras.losses.Loss]
    of_predictions: Callable[[npt.NDArray[np.int64], npt.NDArray[np.float64]], npt.NDArray[np.float64]]
    """The loss of each example, (n,)."""


class SoftmaxSquaredError(keras.losses.Loss):
    """Mean squared error of the softmax of logits (n, classes) against the one-hot of classes int (n,)."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        one_hot = keras.ops.one_hot(y_true, y_pred.shape[-1], dtype=y_pred.dtype)
        return keras.ops.mean(keras.ops.square(keras.ops.softmax(y_pred) - one_hot), axis=-1)


LOSSES = {
    "sparse_categorical_crossentropy": Loss(
        in_training=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        of_predictions=lambda labels, logits: -log_softmax(logits, axis=1)[np.arange(len(labels)), labels],
    ),
    "mean_squared_error": Loss(
        in_training=lambda: SoftmaxSquaredError(name="mean_squared_error"),
        of_predictions=lambda labels, logits: np.square(softmax(logits, axis=1) - np.eye(logits.shape[1])[labels]).mean(
            axis=1
        ),
    ),
}
"""What ``train.loss`` can be."""
