"""Section on calibration: whether examples of which a model is sure to 80 % are right in 80 of 100 cases."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.evaluation.binned import BINS, Bins
from tasks.reports import intervals, svg
from tasks.reports.blocks import Figure, ReportSection, TableBlock, Text
from tasks.reports.material import Material


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


def calibration(material: Material) -> ReportSection | None:
    """Return the reliability diagram, the expected calibration error and the Brier score."""
    found = material.binned
    if found is None:
        return None
    what = "predicted class" if material.task == "classification" else "label"
    scores = brier(material.probabilities, material.predicted.labels)
    low, high = intervals.of_scores(scores)
    rows = [
        ["expected calibration error", f"{found.error:.4f}", ""],
        ["Brier score", f"{scores.mean():.4f}", f"{low:.4f} to {high:.4f}"],
    ]
    caption = (
        f"Predictions by the probability that the model gives to the {what}. A bar should end at the dashed line: "
        "of the predictions that have 80 %, 80 % should be right. Where it ends above the line, the model is too "
        "careful, below it too sure."
    )
    return ReportSection(
        "Calibration",
        [
            TableBlock(("measure", "value", "95 % interval"), rows),
            Figure([_reliability(found), _counts(found)], caption),
            Text(
                f"The expected calibration error is how far the {BINS} bars are from the line, on average over the "
                "predictions (Guo et al., 2017). The Brier score is the squared distance between probabilities and "
                "truth, on average over the test examples (Brier, 1950). Of both 0 is the best."
            ),
        ],
        {
            "calibration/expected_calibration_error": found.error,
            "calibration/brier_score": float(scores.mean()),
            "interval/calibration/brier_score/low": low,
            "interval/calibration/brier_score/high": high,
        },
    )


def _reliability(found: Bins) -> Any:
    frame = svg.Frame((0, 1), (0, 1), "probability", found.means)
    for place in range(BINS):
        if found.counts[place]:
            frame.box(place / BINS, (place + 1) / BINS, float(found.accuracy[place]), "f0")
    frame.line([(0, 0), (1, 1)], "mark")
    return frame.drawing(f"reliability diagram: {found.means} by probability")


def _counts(found: Bins) -> Any:
    frame = svg.Frame((0, 1), (0, float(found.counts.max())), "probability", "predictions")
    for place in range(BINS):
        frame.box(place / BINS, (place + 1) / BINS, float(found.counts[place]), "f2")
    return frame.drawing("how many predictions have which probability")
