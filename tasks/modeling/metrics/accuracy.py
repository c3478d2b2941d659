"""The share of examples whose class has the largest logit."""

from tasks.modeling.metrics import Metric, of_keras

METRIC = Metric(
    better="higher",
    tasks=("classification",),
    of_predictions=lambda labels, logits: float((logits.argmax(axis=1) == labels).mean()),
    in_training=of_keras("SparseCategoricalAccuracy"),
)
