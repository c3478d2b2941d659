"""The mean absolute error, in the target's unit."""

import numpy as np

from tasks.modeling.metrics import Metric, of_keras

METRIC = Metric(
    better="lower",
    tasks=("regression",),
    of_predictions=lambda labels, outputs: float(np.abs(outputs - labels).mean()),
    in_training=of_keras("MeanAbsoluteError"),
)
