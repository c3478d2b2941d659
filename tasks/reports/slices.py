"""Section on slices: how good a model is on parts of the test split, the worst first."""

from tasks.evaluation import slices as parts
from tasks.evaluation.evidence import Interval
from tasks.evaluation.slices import FEWEST, Slice
from tasks.reports import intervals, svg
from tasks.reports.blocks import Block, Cell, ReportSection, TableBlock, Text
from tasks.reports.material import Material

SHOWN = 20
MOST = 100
"""Slices that are listed at all."""


def slices(material: Material) -> ReportSection | None:
    """Return the headline of each part: by class, by column, by brightness and original size of an image."""
    if material.predictions is None:
        return None
    scores = material.scores
    known = list(parts.every(material.task, material.class_names, material.predicted.labels, material.test))
    found = [one for one in known if one.rows.sum() >= FEWEST]
    worst_is_high = material.task == "regression"
    found.sort(key=lambda one: float(scores[one.rows].mean()) * (-1 if worst_is_high else 1))
    blocks: list[Block] = []
    if material.test is None:
        blocks.append(Text("The test rows of this evaluation are not here, so there are slices by class alone."))
    if not found:
        blocks.append(Text(f"No part of the test split has {FEWEST} examples."))
        return ReportSection("Slices", blocks)
    overall = float(scores.mean())
    interval_of = intervals.of_share if material.task == "classification" else intervals.of_scores
    measured = [(one, float(scores[one.rows].mean()), interval_of(scores[one.rows])) for one in found[:MOST]]
    ends = svg.limits([overall, *(end for _, _, interval in measured for end in interval)])
    rows = [_row(one, mean, interval, overall, ends) for one, mean, interval in measured]
    header = ("slice", "examples", parts.MEASURES[material.task], "95 % interval", "drawn")
    title = f"The worst first. Dashed: all test examples, {overall:.4f}"
    blocks.append(TableBlock(header, rows[:SHOWN], 1, title))
    if len(rows) > SHOWN:
        blocks.append(TableBlock(header, rows[SHOWN:], 1, f"The next {len(rows) - SHOWN}", folded=True))
    left_out = [
        *([f"{len(known) - len(found)} with fewer than {FEWEST} examples"] if len(found) < len(known) else []),
        *([f"{len(found) - MOST} that are better"] if len(found) > MOST else []),
    ]
    said = (
        "A slice is a part of the test split. Of many slices some look bad by chance: one whose interval holds the "
        "dashed line is no finding."
    )
    blocks.append(Text(said + (f" Not listed: {' and '.join(left_out)}." if left_out else "")))
    return ReportSection("Slices", blocks)


def _row(one: Slice, mean: float, interval: Interval, overall: float, ends: tuple[float, float]) -> list[Cell]:
    drawn = svg.interval(interval.low, mean, interval.high, overall, ends)
    return [
        svg.escaped(one.shown), f"{int(one.rows.sum()):,}", f"{mean:.4f}",
        f"{interval.low:.4f} to {interval.high:.4f}", drawn,
    ]  # fmt: skip
