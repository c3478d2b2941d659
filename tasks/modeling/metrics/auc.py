"""The area under the ROC curve: how often an example of a class has a higher score for it than an example of another
class; ties count half. With more than two classes, or with labels, it is the mean of one-vs-rest areas.

A class that all examples or no examples have is left out. A training measures it with the bins of ``_ranking``.
"""

from typing import Any

import numpy as np
from scipy.special import softmax

from tasks.modeling.metrics import Labels, Metric, Predictions
from tasks.modeling.metrics._ranking import MOST_OUTPUTS, of_ranking


def _of_predictions(labels: Labels, outputs: Predictions) -> float | None:
    scores = softmax(outputs, axis=1) if labels.ndim == 1 else outputs
    classes = range(1, 2) if labels.ndim == 1 and outputs.shape[1] == 2 else range(outputs.shape[1])
    areas = []
    for number in classes:
        own = labels == number if labels.ndim == 1 else labels[:, number] == 1
        num_own, num_others = int(own.sum()), int((~own).sum())
        if num_own and num_others:
            # The Mann-Whitney statistic from the ranks of the scores; ties have their mean rank. scipy.stats computes
            # the same ranks, but its import takes 1.2 s of processor time.
            _, which, counts = np.unique(scores[:, number], return_inverse=True, return_counts=True)
            ranks = (np.cumsum(counts) - (counts - 1) / 2)[which]
            above = ranks[own].sum() - num_own * (num_own + 1) / 2
            areas.append(above / (num_own * num_others))
    return float(np.mean(areas)) if areas else None


def _of_counts(own: Any, others: Any) -> tuple[Any, Any]:
    import keras

    num_own = keras.ops.sum(own, axis=-1, keepdims=True)
    num_others = keras.ops.sum(others, axis=-1, keepdims=True)
    below = keras.ops.cumsum(others, axis=-1) - others / 2  # Those in the same bin count half.
    shares = own / keras.ops.maximum(num_own, 1) * below / keras.ops.maximum(num_others, 1)
    return keras.ops.sum(shares, axis=-1), (num_own * num_others)[:, 0] > 0


METRIC = Metric(
    better="higher",
    tasks=("classification", "multilabel"),
    of_predictions=_of_predictions,
    in_training=of_ranking(_of_counts),
    most_outputs_in_training=MOST_OUTPUTS,
)
