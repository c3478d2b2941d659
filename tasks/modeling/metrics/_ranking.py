"""What a training sums up of a ranking, which needs all scores of a split at once to be exact: how many examples of a
class, and how many others, have a score in each of 4,096 bins. Examples in one bin count as equal.

A bin is 0.0001 wide at a score of 0, and 0.6 % of the score where that is large; scores are the logarithms of odds.
In float32, counts are whole numbers up to 2**24 examples a bin, and so far the order of batches, and who of several
workers counts, changes nothing.
"""

import math
from collections.abc import Callable
from typing import Any

from tasks.records import Target

BINS = 4096
MOST_OUTPUTS = 1_000
"""Classes or labels: each has 32 KiB of counts, which every step adds to and every checkpoint holds."""
LARGEST = 1000.0
"""Scores beyond count as this one."""
FINEST = 64.0
"""From a score of 1 divided by this on, a bin is wider the larger the score."""


def of_ranking(measure: Callable[[Any, Any], Any]) -> Callable[[str, Target], Any]:
    """Return what makes the ``keras.metrics.Metric`` of a ranking in a training.

    Args:
        measure: takes how many examples of a class, or label, and how many others are in each bin, float (classes,
            bins), the lowest scores first; returns the metric of each class, (classes,), and whether it says something
            about the class. The metric is the mean over those; 0 without any.
    """

    def in_training(name: str, target: Target) -> Any:
        import keras

        num_classes = target.num_outputs

        class Ranking(keras.metrics.Metric):
            def __init__(self) -> None:
                super().__init__(name=name)
                self.counts = self.add_variable((num_classes, BINS, 2), "zeros", name="counts")

            def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
                scores, own = keras.ops.cast(y_pred, self.dtype), keras.ops.cast(y_true, self.dtype)
                if target.task == "classification":
                    own = keras.ops.one_hot(keras.ops.reshape(y_true, [-1]), num_classes, dtype=self.dtype)
                    scores = log_odds(scores)
                pairs = keras.ops.stack([own, 1 - own], axis=-1)
                if sample_weight is not None:
                    pairs *= keras.ops.reshape(keras.ops.cast(sample_weight, self.dtype), [-1, 1, 1])
                places = keras.ops.arange(num_classes, dtype="int32") * BINS + bins(scores)
                added = keras.ops.segment_sum(
                    keras.ops.reshape(pairs, [-1, 2]), keras.ops.reshape(places, [-1]), num_classes * BINS
                )
                self.counts.assign(self.counts + keras.ops.reshape(added, self.counts.shape))

            def result(self) -> Any:
                found, known = measure(self.counts[..., 0], self.counts[..., 1])
                known = keras.ops.cast(known, self.dtype)
                return keras.ops.sum(found * known) / keras.ops.maximum(keras.ops.sum(known), 1)

        return Ranking()

    return in_training


def bins(scores: Any) -> Any:
    """Return the bin of each score, int32."""
    import keras

    share = keras.ops.arcsinh(FINEST * scores) / math.asinh(FINEST * LARGEST)
    return keras.ops.cast(keras.ops.clip((share + 1) / 2 * BINS, 0, BINS - 1), "int32")


def log_odds(logits: Any) -> Any:
    """Return the logarithm of each class' odds, float (n, classes), 0 where all classes are as likely: its order is
    that of the softmax, which is 1 in float32 from a logarithm of 17 on.
    """
    import keras

    num_classes = logits.shape[-1]
    logits = logits - keras.ops.max(logits, axis=-1, keepdims=True)
    shares = keras.ops.exp(logits)

    def before(values: Any) -> Any:
        return keras.ops.pad(keras.ops.cumsum(values, axis=-1)[:, :-1], [[0, 0], [1, 0]])

    # Of all other classes, added up from both ends: what is left of a sum of all would be rounded away.
    others = before(shares) + keras.ops.flip(before(keras.ops.flip(shares, axis=-1)), axis=-1)
    return logits - keras.ops.log(keras.ops.maximum(others / max(num_classes - 1, 1), 1e-37))
