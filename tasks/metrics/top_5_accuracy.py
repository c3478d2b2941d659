"""The share of examples whose class is among the five largest logits; it says nothing about up to five classes."""

import numpy as np

from tasks.metrics import Labels, Metric, Predictions, of_keras


def _of_predictions(labels: Labels, logits: Predictions) -> float | None:
    if logits.shape[1] <= 5:
        return None
    best = np.argsort(logits, axis=1, kind="stable")[:, -5:]
    return float((best == labels[:, None]).any(axis=1).mean())


METRIC = Metric(
    better="higher",
    tasks=("classification",),
    of_predictions=_of_predictions,
    in_training=of_keras("SparseTopKCategoricalAccuracy", k=5),
)
