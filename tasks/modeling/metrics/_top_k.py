"""The share of examples whose class is among the k largest logits."""

from typing import Any

import numpy as np

from tasks.modeling.metrics import Labels, Metric, Predictions
from tasks.records import Target


def top_k(k: int) -> Metric:
    """Return ``top_<k>_accuracy``; it says nothing about up to k classes, of which all would be right."""

    def of_predictions(labels: Labels, logits: Predictions) -> float | None:
        if logits.shape[1] <= k:
            return None
        best = np.argsort(logits, axis=1, kind="stable")[:, -k:]
        return float((best == labels[:, None]).any(axis=1).mean())

    def in_training(name: str, target: Target) -> Any:
        import keras

        metric = keras.metrics.SparseTopKCategoricalAccuracy(k=k, name=name)
        update = metric.update_state

        def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            # TensorFlow's operation knows no other precision.
            return update(y_true, keras.ops.cast(y_pred, "float32"), sample_weight)

        metric.update_state = update_state
        return metric

    return Metric(
        better="higher",
        tasks=("classification",),
        of_predictions=of_predictions,
        in_training=in_training,
        more_outputs_than=k,
    )
