"""The root of the mean squared error, in the target's unit."""

from typing import Any

import numpy as np

from tasks.metrics import Metric
from tasks.records import Target


def _in_training(name: str, target: Target) -> Any:
    import keras

    return keras.metrics.RootMeanSquaredError(name=name)


METRIC = Metric(
    better="lower",
    tasks=("regression",),
    of_predictions=lambda labels, outputs: float(np.sqrt(np.square(outputs - labels).mean())),
    in_training=_in_training,
)
