"""Section on slices: how good a model is on parts of the test split, the worst first."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tasks.evidence import Interval
from tasks.report import intervals, svg
from tasks.report.blocks import Block, Cell, ReportSection, TableBlock, Text
from tasks.report.material import Material, TestExamples, is_image

SHOWN = 20
MOST = 100
"""Slices that are listed at all."""
FEWEST = 10
"""Examples that a slice needs to be listed."""
MOST_VALUES = 30
"""Categories of a column that are looked at: the most frequent ones."""
MOST_COLUMNS = 50
PIXELS = 64
"""Rows and columns of an image that its brightness is the mean of, at most."""
QUARTERS = 4


class Slice(NamedTuple):
    """A part of the test split."""

    by: str
    name: str
    rows: npt.NDArray[np.bool_]
    """Which examples it has, (n,)."""


def slices(material: Material) -> ReportSection | None:
    """Return the headline of each part: by class, by column, by brightness and original size of an image."""
    if material.predictions is None:
        return None
    scores = material.scores
    known = list(_all(material))
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
    name = {"classification": "accuracy", "multilabel": "labels right", "regression": "mae"}[material.task]
    header = ("slice", "examples", name, "95 % interval", "")
    blocks.append(TableBlock(header, rows[:SHOWN], 1, f"The worst first; all test examples: {overall:.4f}"))
    if len(rows) > SHOWN:
        blocks.append(TableBlock(header, rows[SHOWN:], 1, f"The next {len(rows) - SHOWN}", folded=True))
    left_out = [
        *([f"{len(known) - len(found)} with fewer than {FEWEST} examples"] if len(found) < len(known) else []),
        *([f"{len(found) - MOST} that are better"] if len(found) > MOST else []),
    ]
    said = "Of many slices some look bad by chance: read the interval, not the place in the list."
    blocks.append(Text(said + (f" Not listed: {' and '.join(left_out)}." if left_out else "")))
    return ReportSection("Slices", blocks)


def _row(one: Slice, mean: float, interval: Interval, overall: float, ends: tuple[float, float]) -> list[Cell]:
    drawn = svg.interval(interval.low, mean, interval.high, overall, ends)
    return [
        svg.escaped(f"{one.by}: {one.name}"), f"{int(one.rows.sum()):,}", f"{mean:.4f}",
        f"{interval.low:.4f} to {interval.high:.4f}", drawn,
    ]  # fmt: skip


def _all(material: Material) -> Iterator[Slice]:
    labels = material.predicted.labels
    if material.task == "classification":
        for place, name in enumerate(material.class_names):
            yield Slice("class", name, labels == place)
    elif material.task == "multilabel":
        for place, name in enumerate(material.class_names):
            yield Slice("label", name, labels[:, place] == 1)
    else:
        yield from quarters("target", labels[:, 0])
    if material.test is not None:
        for name in material.test.prepared.features:
            yield from _by_feature(material.test, name)


def _by_feature(test: TestExamples, name: str) -> Iterator[Slice]:
    feature, array = test.prepared.features[name], test.arrays[name]
    if is_image(feature):
        yield from quarters(f"brightness of {name}", _brightness(array))
        if test.sizes is not None:
            yield from quarters(f"original pixels of {name}", test.sizes.astype(np.int64).prod(axis=1))
    elif feature.kind == "text":
        yield from quarters(f"words of {name}", np.count_nonzero(array.reshape(len(array), -1), axis=1))
    elif len(feature.shape) == 1:
        for place, (column, first, _) in enumerate(test.columns(name)[:MOST_COLUMNS]):
            values = np.asarray(array[:, first])
            if feature.kind == "number":
                yield from quarters(column, values)
                continue
            different, counts = np.unique(values, return_counts=True)
            for value in different[np.argsort(-counts, kind="stable")][:MOST_VALUES]:
                yield Slice(column, test.word(name, place, int(value)), values == value)


def _brightness(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return the mean of the pixels of each image, (n,): of every second, third ... row and column of a large one."""
    down, across = (max(1, side // PIXELS) for side in images.shape[1:3])
    seen = images[:, ::down, ::across]
    # 256 images at a time: what is mapped need not be in memory as a whole.
    parts = [seen[first : first + 256].mean(axis=(1, 2, 3)) for first in range(0, len(seen), 256)]
    return np.concatenate(parts)


def quarters(by: str, values: npt.NDArray[Any]) -> Iterator[Slice]:
    """Yield the slices between the quartiles of a number, as many as are different; one of few values has each."""
    values = np.asarray(values, np.float64)
    different = np.unique(values[np.isfinite(values)])
    if 1 < len(different) <= QUARTERS:
        for value in different:
            yield Slice(by, f"{value:.4g}", values == value)
        return
    if len(different) < 2:
        return
    edges = np.unique(np.quantile(values[np.isfinite(values)], [0, 0.25, 0.5, 0.75, 1]))
    for place, (low, high) in enumerate(itertools.pairwise(edges)):
        last = place == len(edges) - 2
        inside = (values >= low) & ((values <= high) if last else (values < high))
        yield Slice(by, f"{low:.4g} to {high:.4g}", inside)
