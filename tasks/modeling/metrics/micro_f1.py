"""F1 of all labels of all examples together: twice those found, divided by those taken and those that there are."""

from typing import Any

from tasks.modeling import metrics
from tasks.modeling.metrics import Labels, Metric, Predictions
from tasks.records import Target


def _of_predictions(labels: Labels, logits: Predictions) -> float:
    counts = metrics.count_classes(labels, logits)
    return float(2 * counts.right.sum() / max(counts.taken.sum() + counts.support.sum(), 1))


def _in_training(name: str, target: Target) -> Any:
    return metrics.f1_in_training(name, target, "micro")


METRIC = Metric(
    better="higher",
    tasks=("multilabel",),
    of_predictions=_of_predictions,
    in_training=_in_training,
)
