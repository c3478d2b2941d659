"""Sections on single test examples and on parts of the test split: the most confident mistakes, and slices."""

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.evaluation import slices as evaluation_slices
from tasks.evaluation.evidence import Interval
from tasks.evaluation.slices import FEWEST, MEASURES, Slice, TestExamples, day, is_image
from tasks.reports import charts, intervals
from tasks.reports.blocks import Block, Picture, Pictures, ReportSection, TableBlock, Text
from tasks.reports.material import Material

SHOWN = 24
ROWS = 12
"""The most examples in a table."""
SIDE = 128
"""The longest side of a picture, in pixels."""
COLUMNS = 8
WORDS = 60
SHOWN_SLICES = 20
MAX_SLICES = 100
"""The most slices that are listed."""


def mistakes(material: Material) -> ReportSection | None:
    """Return the worst examples: for classes the mistakes of which the model is most sure, for labels by the
    probability of the most wrong label, for a regression by the error."""
    if material.predictions is None:
        return None
    title = "Largest errors" if material.task == "regression" else "Most confident mistakes"
    if material.test is None:
        data = "The data are not here any more" if material.prepared is None else "The test rows are others by now"
        return ReportSection(title, [Text(f"{data}, so the examples cannot be shown.")])
    rows, told = _worst(material)
    if not len(rows):
        return ReportSection(title, [Text("There is none: every test example is right.")])
    brief = {}
    if material.task == "regression":
        brief = {
            "largest error": f"test example {rows[0]}: {told[int(rows[0])][1]}, and {told[int(rows[0])][0]} is true"
        }
    elif material.task == "multilabel":
        labels, outputs = material.predicted
        wrong = ((outputs > 0) != (labels == 1)).sum(axis=0)
        name = material.class_names[int(wrong.argmax())]
        brief = {"most frequent mistake": f"the label {name}: wrong for {wrong.max():,} of {len(labels):,} examples"}
    blocks: list[Block] = []
    features = material.test.prepared.features
    for name, feature in features.items():
        if is_image(feature):
            blocks.append(Pictures([_picture(material.test, name, row, told[row]) for row in rows[:SHOWN]]))
    if len(features) > len(blocks):
        header, lines = _rows(material.test, rows[:ROWS], told)
        label = ", of the label that is most wrong" if material.task == "multilabel" else ""
        meaning = (
            f"A row of the test split, counted from 0: what is true and what was predicted{label}; then what the model "
            f"was given, up to {COLUMNS} columns of a kind"
        )
        blocks.append(TableBlock(header, lines, len(header), meaning))
    return ReportSection(title, blocks, brief=brief)


def _worst(material: Material) -> tuple[npt.NDArray[np.int64], dict[int, tuple[str, str]]]:
    """Return the rows of the worst examples, the worst first, and the true and the predicted value by row."""
    labels, outputs = material.predicted
    told: dict[int, tuple[str, str]] = {}
    if material.task == "regression":
        rows = np.argsort(-material.scores, kind="stable")[:SHOWN]
        for row in rows:
            told[int(row)] = (_numbers(labels[row]), _numbers(outputs[row]))
        return rows, told
    names, shares = material.class_names, material.probabilities
    if material.task == "multilabel":
        gaps = np.abs(shares - labels)
        wrong = np.flatnonzero(gaps.max(axis=1) > 0.5)
        rows = wrong[np.argsort(-gaps[wrong].max(axis=1), kind="stable")][:SHOWN]
        for row in rows:
            label = int(gaps[row].argmax())
            told[int(row)] = (
                f"{'not ' if not labels[row, label] else ''}{names[label]}",
                f"{shares[row, label]:.1%} for {names[label]}",
            )
        return rows, told
    taken = outputs.argmax(axis=1)
    wrong = np.flatnonzero(taken != labels)
    rows = wrong[np.argsort(-shares[wrong, taken[wrong]], kind="stable")][:SHOWN]
    for row in rows:
        told[int(row)] = (names[labels[row]], f"{names[taken[row]]}, {shares[row, taken[row]]:.1%}")
    return rows, told


def _numbers(values: npt.NDArray[Any]) -> str:
    return ", ".join(f"{value:.6g}" for value in np.atleast_1d(values)[:4])


def _picture(test: TestExamples, name: str, row: int, told: tuple[str, str]) -> Picture:
    lines = (f"true: {told[0]}", f"predicted: {told[1]}")
    return Picture(data_uri(np.asarray(test.arrays[name][row])), f"test example {row}, {'; '.join(lines)}", lines)


def data_uri(pixels: npt.NDArray[np.uint8]) -> str:
    """Return an image, uint8 (height, width, channels), as a data: URI of a PNG, or of a JPEG if it is large."""
    from PIL import Image

    shown = pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., 0]
    image = Image.fromarray(np.ascontiguousarray(shown))
    image.thumbnail((SIDE, SIDE))
    large = max(image.size) > 64
    buffer = io.BytesIO()
    image.save(buffer, **({"format": "JPEG", "quality": 85} if large else {"format": "PNG"}))
    kind = "jpeg" if large else "png"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _rows(
    test: TestExamples, rows: npt.NDArray[np.int64], told: dict[int, tuple[str, str]]
) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return header and lines of a table of examples: true value, predicted value, and features."""
    names: list[str] = []
    lines = [[f"{row}", *told[int(row)]] for row in rows]
    for name, feature in test.prepared.features.items():
        if feature.kind == "text":
            names.append(name)
            for line, row in zip(lines, rows, strict=True):
                line.append(text_of(test, name, row))
        elif feature.kind in ("number", "category") and len(feature.shape) == 1:
            for place, (column, first, _) in enumerate(test.columns(name)[:COLUMNS]):
                names.append(column)
                for line, row in zip(lines, rows, strict=True):
                    line.append(_value(test, name, place, test.arrays[name][row, first]))
    return ("row", "true", "predicted", *names), lines


def _value(test: TestExamples, name: str, place: int, value: Any) -> str:
    """Return a value of a column as text: a category's name, a day, or a number."""
    feature = test.prepared.features[name]
    if feature.kind == "category":
        return test.category(name, place, int(value))
    return day(value) if feature.columns and feature.columns[place].kind == "datetime" else f"{value:.6g}"


def text_of(test: TestExamples, name: str, row: int) -> str:
    """Return the words of a text; … for each that the vocabulary does not have."""
    places = [int(place) for place in test.arrays[name][row].ravel() if place]
    words = ["…" if place == 1 else test.word(name, 0, place) for place in places[:WORDS]]
    return " ".join(words) + (" …" if len(places) > WORDS else "")


def slices(material: Material) -> ReportSection | None:
    """Return the headline metric of each slice: by class, by column, by brightness and original size of an image."""
    if material.predictions is None:
        return None
    scores = material.scores
    known = list(evaluation_slices.every(material.task, material.class_names, material.predicted.labels, material.test))
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
    measured = [(one, float(scores[one.rows].mean()), interval_of(scores[one.rows])) for one in found[:MAX_SLICES]]
    every = [overall, *(end for _, _, interval in measured for end in interval)]
    ends = min(every), max(every)
    rows = [_slice_row(one, mean, interval, overall, ends) for one, mean, interval in measured]
    header = ("slice", "examples", MEASURES[material.task], "95 % interval", "drawn")
    title = f"The worst first. Dashed: all test examples, {overall:.4f}"
    blocks.append(TableBlock(header, rows[:SHOWN_SLICES], 1, title))
    if len(rows) > SHOWN_SLICES:
        blocks.append(TableBlock(header, rows[SHOWN_SLICES:], 1, f"The next {len(rows) - SHOWN_SLICES}", folded=True))
    left_out = [
        *([f"{len(known) - len(found)} with fewer than {FEWEST} examples"] if len(found) < len(known) else []),
        *([f"{len(found) - MAX_SLICES} that are better"] if len(found) > MAX_SLICES else []),
    ]
    said = (
        "A slice is a part of the test split. Of many slices some look bad by chance: one whose interval holds the "
        "dashed line is not a finding."
    )
    blocks.append(Text(said + (f" Not listed: {' and '.join(left_out)}." if left_out else "")))
    name, count, value, interval, _ = rows[0]
    sure = f"{value} (95 % interval: {interval}) on {count} examples, {overall:.4f} on all"
    return ReportSection("Slices", blocks, brief={"worst slice": f"{name}: {MEASURES[material.task]} {sure}"})


def _slice_row(one: Slice, mean: float, interval: Interval, overall: float, ends: tuple[float, float]) -> list[str]:
    drawn = charts.span(interval.low, mean, interval.high, overall, ends)
    return [
        one.shown, f"{int(one.rows.sum()):,}", f"{mean:.4f}",
        f"{interval.low:.4f} to {interval.high:.4f}", drawn,
    ]  # fmt: skip
