"""Section on calibration: whether examples of which a model is sure to 80 % are right in 80 of 100 cases."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tasks.report import intervals, svg
from tasks.report.blocks import Figure, ReportSection, TableBlock, Text
from tasks.report.material import Material

BINS = 15
"""As many as Guo et al. (2017) have."""


class Bins(NamedTuple):
    """Predictions by their confidence, in equal parts of 0 to 1, each (BINS,)."""

    counts: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float64]
    """The mean; 0 in an empty bin."""
    accuracy: npt.NDArray[np.float64]

    @property
    def error(self) -> float:
        """The expected calibration error: by how far confidence and accuracy are apart, over all predictions.

        Source: Guo, Pleiss, Sun and Weinberger, On Calibration of Modern Neural Networks (2017), equation 3.
        """
        gaps = np.abs(self.confidence - self.accuracy)
        return float((self.counts * gaps).sum() / max(self.counts.sum(), 1))


def bins(confidence: npt.NDArray[Any], right: npt.NDArray[Any]) -> Bins:
    """Return the bins of predictions: how sure each is, in 0 to 1, and whether it is right, both (n,)."""
    # A confidence on an edge belongs to the lower bin, as in the paper: (m - 1) / M < p <= m / M.
    places = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    counts = np.bincount(places, minlength=BINS)
    sums = [np.bincount(places, weights=values, minlength=BINS) for values in (confidence, right)]
    means = [one / np.maximum(counts, 1) for one in sums]
    return Bins(counts, means[0], means[1])


def brier(probabilities: npt.NDArray[Any], labels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the Brier score of each example, (n,): of classes, the sum over them of the squared distance to what is
    true, 0 to 2; of labels the mean over them, 0 to 1.

    Source: Brier, Verification of Forecasts Expressed in Terms of Probability (1950).
    """
    if labels.ndim == 2:
        of_labels: npt.NDArray[np.float64] = np.square(probabilities - labels).mean(axis=1)
        return of_labels
    own = probabilities[np.arange(len(labels)), labels]
    scores: npt.NDArray[np.float64] = np.square(probabilities).sum(axis=1) - 2 * own + 1
    return scores


def of_predictions(material: Material) -> tuple[Bins, str] | None:
    """Return the bins of a run's predictions, and what a bin's height means; None of a regression, and where there are
    no predictions."""
    if material.predictions is None or material.task == "regression":
        return None
    labels, shares = material.predictions.labels, material.probabilities
    if material.task == "classification":
        return bins(shares.max(axis=1), material.scores), "accuracy"
    return bins(shares.ravel(), (labels == 1).ravel()), "share that has the label"


def calibration(material: Material) -> ReportSection | None:
    """Return the reliability diagram, the expected calibration error and the Brier score."""
    binned = of_predictions(material)
    if binned is None:
        return None
    found, means = binned
    what = "class that it gives" if material.task == "classification" else "label"
    scores = brier(material.probabilities, material.predicted.labels)
    low, high = intervals.of_scores(scores)
    rows = [
        ["expected calibration error", f"{found.error:.4f}", ""],
        ["Brier score", f"{scores.mean():.4f}", f"{low:.4f} to {high:.4f}"],
    ]
    caption = (
        f"By how probable the model finds the {what}: the bars should reach the line. Where one ends above it, the "
        "model is too careful, below it too sure."
    )
    return ReportSection(
        "Calibration",
        [
            TableBlock(("", "value", "95 % interval"), rows),
            Figure([_reliability(found, means), _counts(found)], caption),
            Text(f"Expected calibration error of {BINS} equal bins (Guo et al., 2017); Brier score (Brier, 1950)."),
        ],
        {
            "calibration/expected_calibration_error": found.error,
            "calibration/brier_score": float(scores.mean()),
            "interval/calibration/brier_score/low": low,
            "interval/calibration/brier_score/high": high,
        },
    )


def _reliability(found: Bins, means: str) -> Any:
    frame = svg.Frame((0, 1), (0, 1), "probability", means)
    for place in range(BINS):
        if found.counts[place]:
            frame.box(place / BINS, (place + 1) / BINS, float(found.accuracy[place]), "f0")
    frame.line([(0, 0), (1, 1)], "mark")
    return frame.drawing(f"reliability diagram: {means} by probability")


def _counts(found: Bins) -> Any:
    frame = svg.Frame((0, 1), (0, float(found.counts.max())), "probability", "predictions")
    for place in range(BINS):
        frame.box(place / BINS, (place + 1) / BINS, float(found.counts[place]), "f2")
    return frame.drawing("how many predictions have which probability")
