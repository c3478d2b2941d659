"""Section on the errors of a regression: given against true, and how the errors are spread."""

from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from tasks.report import svg
from tasks.report.blocks import Figure, ReportSection
from tasks.report.material import Material

POINTS = 2000
"""That a drawing shows; of more, a sample."""
MOST_NUMBERS = 4
BARS = 30


def residuals(material: Material) -> ReportSection | None:
    """Return, for each number that is learnt, a parity plot, the errors by what is given, and their histogram."""
    if material.task != "regression" or material.predictions is None:
        return None
    labels, outputs = material.predictions
    columns = material.prepared.target.columns if material.prepared is not None else ()
    shown = np.arange(len(labels))
    if len(shown) > POINTS:
        shown = np.sort(np.random.default_rng(0).choice(len(labels), POINTS, replace=False))
    sampled = f" Drawn are {POINTS:,} of {len(labels):,} test examples." if len(labels) > POINTS else ""
    caption = "Given against true, the residuals (true less given) by what is given, and how often each is." + sampled
    figures = []
    for place in range(min(labels.shape[1], MOST_NUMBERS)):
        name = columns[place] if place < len(columns) else "target"
        true, given = labels[:, place].astype(np.float64), outputs[:, place].astype(np.float64)
        drawings = [
            _parity(name, true[shown], given[shown]),
            _by_given(name, given[shown], (true - given)[shown]),
            _spread(name, true - given),
        ]
        figures.append(Figure(drawings, caption))
    return ReportSection("Residuals", [*figures])


def _parity(name: str, true: npt.NDArray[Any], given: npt.NDArray[Any]) -> Markup:
    ends = svg.limits([*true, *given])
    frame = svg.Frame(ends, ends, f"true {name}", "given")
    frame.line([(ends[0], ends[0]), (ends[1], ends[1])], "mark")
    frame.dots(zip(true, given, strict=True), "c0 small")
    return frame.drawing(f"given against true {name}, {len(true)} points")


def _by_given(name: str, given: npt.NDArray[Any], errors: npt.NDArray[Any]) -> Markup:
    ends = svg.limits(given)
    frame = svg.Frame(ends, svg.limits([0, *errors]), f"given {name}", "residual")
    frame.line([(ends[0], 0), (ends[1], 0)], "mark")
    frame.dots(zip(given, errors, strict=True), "c0 small")
    return frame.drawing(f"residuals by given {name}, {len(given)} points")


def _spread(name: str, errors: npt.NDArray[Any]) -> Markup:
    counts, edges = np.histogram(errors, BARS)
    frame = svg.Frame((float(edges[0]), float(edges[-1])), (0, float(counts.max())), f"residual of {name}", "examples")
    for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
        frame.box(float(left), float(right), float(count), "f0")
    return frame.drawing(f"how often a residual of {name} is how large")
