"""Ranking metrics in a training. Exact values need all scores of a split at once, so a training counts how many
examples of a class, and how many others, have a score in each of 4,096 bins. Scores in the same bin count as equal.

Scores are log-odds. A bin is 0.0001 wide at a score of 0, and 0.6 % of the score for large scores. float32 counts are
exact up to 2**24 examples per bin; up to then, neither the order of batches nor the split over workers matters.
"""

import math
from collections.abc import Callable
from typing import Any

from tasks.records import Target

BINS = 4096
MOST_OUTPUTS = 1_000
"""Largest number of classes or labels: each has 32 KiB of counts, which every step updates and every checkpoint holds.
"""
LARGEST = 1000.0
"""Larger scores are clipped to this."""
FINEST = 64.0
"""Above a score of 1 / FINEST, bins get wider with the score."""


def of_ranking(measure: Callable[[Any, Any], Any]) -> Callable[[str, Target], Any]:
    """Return an ``in_training`` function for a ranking metric.

    Args:
        measure: takes the numbers of examples with and without a class or label in each bin, float (classes, bins),
            lowest scores first; returns the metric of each class, (classes,), and whether it is defined. The result is
            the mean over the classes with a defined value, or 0.
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
    """Return the log-odds of each class, float (n, classes), 0 if all classes are equally likely. Its order is that of
    the softmax, which float32 rounds to 1 from log-odds of 17 on.
    """
    import keras

    num_classes = logits.shape[-1]
    logits = logits - keras.ops.max(logits, axis=-1, keepdims=True)
    shares = keras.ops.exp(logits)

    def before(values: Any) -> Any:
        return keras.ops.pad(keras.ops.cumsum(values, axis=-1)[:, :-1], [[0, 0], [1, 0]])

    # The sum over all other classes, from both ends: subtracting from the total would lose it to rounding.
    others = before(shares) + keras.ops.flip(before(keras.ops.flip(shares, axis=-1)), axis=-1)
    return logits - keras.ops.log(keras.ops.maximum(others / max(num_classes - 1, 1), 1e-37))
