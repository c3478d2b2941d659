"""The coefficient of determination: 1 for no error, 0 for that of the split's own mean; the mean over the numbers.

It says nothing about a split whose target is one and the same number. A training does not measure it: its sums of
squares would lose too many digits in float32.
"""

import numpy as np

from tasks.metrics import Labels, Metric, Predictions


def _of_predictions(labels: Labels, outputs: Predictions) -> float | None:
    wanted = labels.astype(np.float64)
    total = np.square(wanted - wanted.mean(axis=0)).sum(axis=0)
    if not total.all():
        return None
    return float((1 - np.square(wanted - outputs).sum(axis=0) / total).mean())


METRIC = Metric(better="higher", tasks=("regression",), of_predictions=_of_predictions)
