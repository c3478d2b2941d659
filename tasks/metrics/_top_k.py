"""The share of examples whose class is among the k largest logits."""

import numpy as np

from tasks.metrics import Labels, Metric, Predictions, of_keras


def top_k(k: int) -> Metric:
    """Return ``top_<k>_accuracy``; it says nothing about up to k classes, of which all would be right."""

    def of_predictions(labels: Labels, logits: Predictions) -> float | None:
        if logits.shape[1] <= k:
            return None
        best = np.argsort(logits, axis=1, kind="stable")[:, -k:]
        return float((best == labels[:, None]).any(axis=1).mean())

    return Metric(
        better="higher",
        tasks=("classification",),
        of_predictions=of_predictions,
        in_training=of_keras("SparseTopKCategoricalAccuracy", k=k),
        more_outputs_than=k,
    )
