"""The share of examples whose class is among the five largest logits; it says nothing about up to five classes."""

from typing import Any

import numpy as np

from tasks.metrics import Labels, Metric, Predictions
from tasks.records import Target


def _of_predictions(labels: Labels, logits: Predictions) -> float | None:
    if logits.shape[1] <= 5:
        return None
    best = np.argsort(logits, axis=1, kind="stable")[:, -5:]
    return float((best == labels[:, None]).any(axis=1).mean())


def _in_training(name: str, target: Target) -> Any:
    import keras

    return keras.metrics.SparseTopKCategoricalAccuracy(k=5, name=name)


METRIC = Metric(better="higher", tasks=("classification",), of_predictions=_of_predictions, in_training=_in_training)
