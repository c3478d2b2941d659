"""The mean over labels of the average precision: that at each place of the ranking where an example has the label.

A label that no example has is left out.
"""

import numpy as np

from tasks.metrics import Labels, Metric, Predictions


def _of_predictions(labels: Labels, logits: Predictions) -> float | None:
    found = []
    for number in range(logits.shape[1]):
        order = np.argsort(-logits[:, number], kind="stable")
        scores, own = logits[order, number], labels[order, number] == 1
        if own.any():
            # Examples with the same score have one place, the last of theirs.
            last = np.flatnonzero(np.append(np.diff(scores) != 0, True))
            hits = own.cumsum()[last]
            found.append(float((np.diff(hits, prepend=0) * hits / (last + 1)).sum() / own.sum()))
    return float(np.mean(found)) if found else None


METRIC = Metric(better="higher", tasks=("multilabel",), of_predictions=_of_predictions)
