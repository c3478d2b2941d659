"""The root of the mean squared error, in the target's unit."""

import numpy as np

from tasks.modeling.metrics import Metric, of_keras

METRIC = Metric(
    better="lower",
    tasks=("regression",),
    of_predictions=lambda labels, outputs: float(np.sqrt(np.square(outputs - labels).mean())),
    in_training=of_keras("RootMeanSquaredError"),
)
