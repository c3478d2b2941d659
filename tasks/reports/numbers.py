"""Section on the errors of a regression: predicted against true, and how the errors are spread."""

from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from tasks.reports import svg
from tasks.reports.blocks import Figure, ReportSection
from tasks.reports.material import Material

POINTS = 2000
"""That a drawing shows; of more, a sample."""
MOST_NUMBERS = 4
BARS = 30
LONGEST = 40
"""Letters of a name for which a drawing has room."""


def residuals(material: Material) -> ReportSection | None:
    """Return, for each number that is learnt, a parity plot, the errors by what is predicted, and their histogram."""
    if material.task != "regression" or material.predictions is None:
        return None
    labels, outputs = material.predictions
    columns = material.prepared.target.columns if material.prepared is not None else ()
    shown = np.arange(len(labels))
    if len(shown) > POINTS:
        shown = np.sort(np.random.default_rng(0).choice(len(labels), POINTS, replace=False))
    sampled = f" Drawn are {POINTS:,} of {len(labels):,} test examples." if len(labels) > POINTS else ""
    caption = (
        "A point is a test example. Predicted against true: on the dashed line the two are equal. Residuals (true less "
        "predicted) against predicted: above the dashed line the prediction was too low. Then how many test examples "
        f"have a residual of each size.{sampled}"
    )
    figures = []
    for place in range(min(labels.shape[1], MOST_NUMBERS)):
        name = svg.short(columns[place] if place < len(columns) else "target", LONGEST)
        true, predicted = labels[:, place].astype(np.float64), outputs[:, place].astype(np.float64)
        drawings = [
            _parity(name, true[shown], predicted[shown]),
            _by_predicted(name, predicted[shown], (true - predicted)[shown]),
            _spread(name, true - predicted),
        ]
        figures.append(Figure(drawings, caption if place == 0 else ""))
    return ReportSection("Residuals", [*figures])


def _parity(name: str, true: npt.NDArray[Any], predicted: npt.NDArray[Any]) -> Markup:
    ends = svg.limits([*true, *predicted])
    frame = svg.Frame(ends, ends, f"true {name}", f"predicted {name}")
    frame.line([(ends[0], ends[0]), (ends[1], ends[1])], "mark")
    frame.dots(zip(true, predicted, strict=True), "c0 small")
    return frame.drawing(f"predicted against true {name}, {len(true)} points")


def _by_predicted(name: str, predicted: npt.NDArray[Any], errors: npt.NDArray[Any]) -> Markup:
    ends = svg.limits(predicted)
    frame = svg.Frame(ends, svg.limits([0, *errors]), f"predicted {name}", f"residual of {name}")
    frame.line([(ends[0], 0), (ends[1], 0)], "mark")
    frame.dots(zip(predicted, errors, strict=True), "c0 small")
    return frame.drawing(f"residuals by predicted {name}, {len(predicted)} points")


def _spread(name: str, errors: npt.NDArray[Any]) -> Markup:
    counts, edges = np.histogram(errors, BARS)
    frame = svg.Frame((float(edges[0]), float(edges[-1])), (0, float(counts.max())), f"residual of {name}", "examples")
    for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
        frame.box(float(left), float(right), float(count), "f0")
    return frame.drawing(f"how many examples have a residual of {name} of each size")
