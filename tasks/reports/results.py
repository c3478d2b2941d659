"""Sections on classes: precision, recall and F1 of each, and what is taken for what."""

import math

import numpy as np
from markupsafe import Markup

from tasks.reports import svg
from tasks.reports.blocks import Block, Figure, ReportSection, TableBlock, Text
from tasks.reports.material import Material

SHOWN = 20
"""Classes up to which a table stands open."""
WITH_COUNTS = 20
"""Classes up to which a square of the matrix has room for a number."""
MAX_SIDE = 1000
MAX_PAIRS = 20
SHADES = 10


def by_class(material: Material) -> ReportSection | None:
    """Return precision, recall and F1 of each class, or label, with its examples: the worst F1 first."""
    if material.evaluation is None or not material.evaluation.classes:
        return None
    entries = sorted(material.evaluation.classes, key=lambda entry: entry.f1)
    one, word = ("label", "labels") if material.task == "multilabel" else ("class", "classes")
    rows = [
        [
            svg.escaped(entry.name),
            *(f"{value:.4f}" for value in (entry.precision, entry.recall, entry.f1)),
            f"{entry.support:,}",
        ]
        for entry in entries
    ]
    header = (one, "precision", "recall", "F1", "examples")
    blocks: list[Block] = [TableBlock(header, rows[:SHOWN], title=f"The worst F1 first, of {len(rows):,} {word}")]
    if len(rows) > SHOWN:
        blocks.append(TableBlock(header, rows[SHOWN:], title=f"The other {len(rows) - SHOWN:,}", folded=True))
    return ReportSection("By label" if one == "label" else "By class", blocks)


def confusion(material: Material) -> ReportSection | None:
    """Return the confusion matrix, and its largest mistakes by name."""
    if material.evaluation is None or not material.evaluation.confusion_matrix:
        return None
    counts = np.array(material.evaluation.confusion_matrix)
    names = material.class_names
    wrong = counts * (1 - np.eye(len(counts), dtype=np.int64))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_PAIRS]
    rows = []
    for place in order:
        true, given = divmod(int(place), len(counts))
        if count := int(wrong[true, given]):
            share = count / max(int(counts[true].sum()), 1)
            rows.append([svg.escaped(names[true]), svg.escaped(names[given]), f"{count:,}", f"{share:.1%}"])
    caption = "A row is a true class, a column what it was taken for; the darker, the larger the share of the row."
    blocks: list[Block] = [Figure([_matrix(counts, names)], caption, wide=True)]
    if rows:
        blocks.append(
            TableBlock(("true", "taken for", "examples", "share of the class"), rows, 2, "The most frequent mistakes")
        )
    else:
        blocks.append(Text("No test example is taken for another class."))
    return ReportSection("Confusion matrix", blocks)


def _matrix(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]], names: list[str]) -> Markup:
    """Draw the matrix; with many classes only some have a name, and a square no number."""
    num = len(names)
    with_counts = num <= WITH_COUNTS
    side = 34 if with_counts else max(MAX_SIDE / num, 1.0) if num > 100 else 10
    size = 11 if with_counts else 9
    step = max(1, math.ceil(9 / side))
    most = max(len(svg.short(name)) for name in names)
    left, top = 14 + size * 0.62 * most + 10, 14 + size * 0.62 * most + 10
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    parts = [
        Markup('<text x="{:.0f}" y="12" class="mid">predicted</text>').format(left + num * side / 2),
        Markup('<text transform="translate(12 {:.0f}) rotate(-90)" class="mid">true</text>').format(
            top + num * side / 2
        ),
        Markup('<rect class="ground" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
            left, top, num * side, num * side
        ),
    ]
    shade = np.ceil(np.minimum(shares, 1) * SHADES).astype(int)
    for level in range(1, SHADES + 1):
        squares = "".join(
            f"M{left + column * side:.1f} {top + row * side:.1f}h{side:.1f}v{side:.1f}h-{side:.1f}z"
            for row, column in np.argwhere(shade == level)
        )
        parts.append(Markup('<path class="shade{}" d="{}"/>').format(level, squares))
    for place in range(0, num, step):
        name, middle = svg.short(names[place]), (place + 0.5) * side
        parts.append(
            Markup('<text x="{:.1f}" y="{:.1f}" class="end" style="font-size:{}px">{}</text>').format(
                left - 5, top + middle + size * 0.35, size, name
            )
        )
        parts.append(
            Markup('<text transform="translate({:.1f} {:.1f}) rotate(-90)" style="font-size:{}px">{}</text>').format(
                left + middle + size * 0.35, top - 5, size, name
            )
        )
    if with_counts:
        for row, column in np.argwhere(counts):
            kind = "mid on" if shade[row, column] > SHADES // 2 else "mid"
            parts.append(
                Markup('<text x="{:.1f}" y="{:.1f}" class="{}" style="font-size:11px">{}</text>').format(
                    left + (column + 0.5) * side, top + (row + 0.5) * side + 4, kind, f"{counts[row, column]}"
                )
            )
    right, every = int(np.trace(counts)), int(counts.sum())
    alt = f"confusion matrix of {num} classes, {right:,} of {every:,} examples on its diagonal"
    return svg.svg(left + num * side + 8, top + num * side + 8, alt, parts)
