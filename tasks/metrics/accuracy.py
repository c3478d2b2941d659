"""The share of examples whose class has the largest logit."""

from typing import Any

from tasks.metrics import Metric


def _in_training(name: str) -> Any:
    import keras

    return keras.metrics.SparseCategoricalAccuracy(name=name)


METRIC = Metric(
    better="higher",
    in_training=_in_training,
    of_predictions=lambda labels, logits: float((logits.argmax(axis=1) == labels).mean()),
)
