"""The mean over classes, or labels, of F1: twice those found, divided by those taken for it and those that are it.

A class that has no example, and that nothing is taken for, counts as 0, as in Keras and scikit-learn.
"""

from typing import Any

from tasks.modeling import metrics
from tasks.modeling.metrics import Metric
from tasks.records import Target


def _in_training(name: str, target: Target) -> Any:
    return metrics.f1_in_training(name, target, "macro")


METRIC = Metric(
    better="higher",
    tasks=("classification", "multilabel"),
    of_predictions=lambda labels, outputs: float(metrics.count_classes(labels, outputs).f1.mean()),
    in_training=_in_training,
)
