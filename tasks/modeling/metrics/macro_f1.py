"""The mean over classes or labels of F1, the harmonic mean of precision and recall.

A class without examples and without predictions counts as 0, as in Keras and scikit-learn.
"""

from tasks.modeling.metrics import Metric, count_classes, f1_in_training

METRIC = Metric(
    better="higher",
    tasks=("classification", "multilabel"),
    of_predictions=lambda labels, outputs: float(count_classes(labels, outputs).f1.mean()),
    in_training=f1_in_training("macro"),
)
