"""The share of examples whose class has the largest logit."""

from typing import Any

from tasks.metrics import Metric
from tasks.records import Target


def _in_training(name: str, target: Target) -> Any:
    import keras

    return keras.metrics.SparseCategoricalAccuracy(name=name)


METRIC = Metric(
    better="higher",
    tasks=("classification",),
    of_predictions=lambda labels, logits: float((logits.argmax(axis=1) == labels).mean()),
    in_training=_in_training,
)
