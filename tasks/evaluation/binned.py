"""Predictions by how sure the model is of them."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BINS = 15
"""As many as Guo et al. (2017) have."""


class Bins(NamedTuple):
    """Predictions by their confidence, in equal parts of 0 to 1, each (BINS,)."""

    counts: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float64]
    """The mean; 0 in an empty bin."""
    accuracy: npt.NDArray[np.float64]
    means: str
    """What that is: the accuracy, or the share that has the label."""

    @property
    def error(self) -> float:
        """The expected calibration error: by how far confidence and accuracy are apart, over all predictions.

        Source: Guo, Pleiss, Sun and Weinberger, On Calibration of Modern Neural Networks (2017), equation 3.
        """
        gaps = np.abs(self.confidence - self.accuracy)
        return float((self.counts * gaps).sum() / max(self.counts.sum(), 1))


def bins(confidence: npt.NDArray[Any], right: npt.NDArray[Any], means: str = "accuracy") -> Bins:
    """Return the bins of predictions: how sure each is, in 0 to 1, and whether it is right, both (n,)."""
    # A confidence on an edge belongs to the lower bin, as in the paper: (m - 1) / M < p <= m / M.
    places = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    counts = np.bincount(places, minlength=BINS)
    sums = [np.bincount(places, weights=values, minlength=BINS) for values in (confidence, right)]
    confidences, shares = (one / np.maximum(counts, 1) for one in sums)
    return Bins(counts, confidences, shares, means)
