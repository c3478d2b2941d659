"""F1, the harmonic mean of precision and recall, over all labels of all examples together."""

from tasks.modeling.metrics import Labels, Metric, Predictions, count_classes, f1_in_training


def _of_predictions(labels: Labels, logits: Predictions) -> float:
    counts = count_classes(labels, logits)
    return float(2 * counts.right.sum() / max(counts.taken.sum() + counts.support.sum(), 1))


METRIC = Metric(
    better="higher", tasks=("multilabel",), of_predictions=_of_predictions, in_training=f1_in_training("micro")
)
