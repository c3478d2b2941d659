"""The mean over labels of the average precision: the precision at each rank of an example with the label, averaged.

A label without examples is left out. A training measures it with the bins of ``_ranking``.
"""

from typing import Any

import numpy as np

from tasks.modeling.metrics import Labels, Metric, Predictions
from tasks.modeling.metrics._ranking import MOST_OUTPUTS, of_ranking


def _of_predictions(labels: Labels, logits: Predictions) -> float | None:
    found = []
    for number in range(logits.shape[1]):
        order = np.argsort(-logits[:, number], kind="stable")
        scores, own = logits[order, number], labels[order, number] == 1
        if own.any():
            # Examples with equal scores share the last of their ranks.
            last = np.flatnonzero(np.append(np.diff(scores) != 0, True))
            hits = own.cumsum()[last]
            found.append(float((np.diff(hits, prepend=0) * hits / (last + 1)).sum() / own.sum()))
    return float(np.mean(found)) if found else None


def _of_counts(own: Any, others: Any) -> tuple[Any, Any]:
    import keras

    own, others = keras.ops.flip(own, axis=-1), keras.ops.flip(others, axis=-1)  # The best places first.
    num_own, places = keras.ops.sum(own, axis=-1), keras.ops.cumsum(own + others, axis=-1)
    precision = keras.ops.cumsum(own, axis=-1) / keras.ops.maximum(places, 1)
    return keras.ops.sum(own * precision, axis=-1) / keras.ops.maximum(num_own, 1), num_own > 0


METRIC = Metric(
    better="higher",
    tasks=("multilabel",),
    of_predictions=_of_predictions,
    in_training=of_ranking(_of_counts),
    most_outputs_in_training=MOST_OUTPUTS,
)
