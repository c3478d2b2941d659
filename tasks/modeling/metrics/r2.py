"""The coefficient of determination: 1 without errors, 0 for the error of the split's mean; averaged over the outputs.

It is undefined for a split with a constant target; a training then measures 0.
"""

from typing import Any

import numpy as np

from tasks.modeling.metrics import Labels, Metric, Predictions
from tasks.records import Target


def _of_predictions(labels: Labels, outputs: Predictions) -> float | None:
    wanted = labels.astype(np.float64)
    total = np.square(wanted - wanted.mean(axis=0)).sum(axis=0)
    if not total.all():
        return None
    return float((1 - np.square(wanted - outputs).sum(axis=0) / total).mean())


def _in_training(name: str, target: Target) -> Any:
    import keras

    class R2(keras.metrics.Metric):
        """Sums standardized targets. Keras' own R2Score sums raw values and loses all float32 digits if they are a
        thousand times as large as their spread, such as years."""

        def __init__(self) -> None:
            super().__init__(name=name)
            self.count = self.add_variable((), "zeros", name="count")
            shape = (target.num_outputs,)
            self.total, self.squares, self.errors = (
                self.add_variable(shape, "zeros", name=what) for what in ("total", "squares", "errors")
            )

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            y_true, y_pred = (keras.ops.cast(one, self.dtype) for one in (y_true, y_pred))
            wanted, error = (y_true - mean) / deviation, (y_pred - y_true) / deviation
            weight = keras.ops.ones_like(wanted[:, :1])
            if sample_weight is not None:
                weight *= keras.ops.reshape(keras.ops.cast(sample_weight, self.dtype), [-1, 1])
            self.count.assign(self.count + keras.ops.sum(weight))
            for variable, each in (
                (self.total, wanted),
                (self.squares, keras.ops.square(wanted)),
                (self.errors, keras.ops.square(error)),
            ):
                variable.assign(variable + keras.ops.sum(weight * each, axis=0))

        def result(self) -> Any:
            spread = self.squares - keras.ops.square(self.total) / keras.ops.maximum(self.count, 1)
            # With a constant target, rounding leaves a small spread.
            varies = spread > 1e-6 * self.squares
            return keras.ops.mean(keras.ops.where(varies, 1 - self.errors / keras.ops.where(varies, spread, 1), 0))

    mean = np.array(target.mean or [0.0])
    deviation = np.array([one or 1.0 for one in target.deviation or [1.0]])
    return R2()


METRIC = Metric(better="higher", tasks=("regression",), of_predictions=_of_predictions, in_training=_in_training)
