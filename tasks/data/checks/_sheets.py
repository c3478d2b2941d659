"""Pictures of examples, drawn with Pillow: importing Matplotlib would take longer than all checks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from tasks.data.checks._data import Data
from tasks.records import Offender
from tasks.system.errors import cut

SIDE, GAP, LINE = 56, 4, 15
"""In pixels: the larger side of an image, the gap between images, the height of a line of text."""
MOST_CLASSES, MOST_IMAGES, MOST_OFFENDERS = 30, 12, 20
TEXT_WIDTH, WIDTH = 300, 1040
BAR, INK, FAINT = "#4c78a8", "#222222", "#777777"


def by_class(data: Data, path: Path) -> None:
    """Draw a row for each class: how many examples it has, and its first images."""
    split = "train" if "train" in data.rows else next(iter(data.rows))
    labels, part, names = data.labels(split), data.prepared.splits[split], data.class_names[:MOST_CLASSES]
    images = data.features("image")[:1]
    height = (SIDE if images else LINE) + GAP
    title = f"{data.prepared.name}: {split}, {part.num_examples:,} examples"
    if len(data.class_names) > len(names):
        title += f", the first {len(names)} of {len(data.class_names):,} classes"
    sheet, draw = _sheet(title, len(names) * height)
    most = max(1, *part.class_counts[:MOST_CLASSES])
    for number, (name, count) in enumerate(zip(names, part.class_counts, strict=False)):
        top = LINE * 2 + number * height
        _write(draw, (GAP, top), cut(name, 26))
        _write(draw, (190, top), f"{count:,}", FAINT)
        length = round(count / most * (TEXT_WIDTH - 200 if images else WIDTH - TEXT_WIDTH))
        place = (190, top + LINE + 2) if images else (TEXT_WIDTH - 40, top + 3)
        draw.rectangle((*place, place[0] + length, place[1] + 8), fill=BAR)
        own = labels == number if labels.ndim == 1 else labels[:, number] == 1
        for column, row in enumerate(np.flatnonzero(own)[:MOST_IMAGES].tolist() if images else []):
            sheet.paste(_picture(data.array(split, images[0])[row]), (TEXT_WIDTH + column * (SIDE + GAP), top))
    sheet.save(path, optimize=False, compress_level=1)


def of_offenders(data: Data, title: str, offenders: Sequence[Offender], path: Path) -> None:
    """Draw a row for each example that a check found, with its duplicate if any: images, name, values."""
    shown = [one for one in offenders if one.row is not None and one.split is not None][:MOST_OFFENDERS]
    images = data.features("image")
    height = max(SIDE, 3 * LINE) + GAP
    sheet, draw = _sheet(title, len(shown) * height)
    columns = len(images) * (1 + any(one.twin is not None for one in shown))
    for number, one in enumerate(shown):
        top, left = 2 * LINE + number * height, GAP
        places = [(one.split, one.row), *([one.twin] if one.twin else [])]
        for split, row in places:
            for name in images:
                sheet.paste(_picture(data.array(str(split), name)[row]), (left, top))
                left += SIDE + GAP
        left = 2 * GAP + columns * (SIDE + GAP)
        _write(draw, (left, top), cut(f"{one.name}, labelled {data.label_of(str(one.split), int(one.row or 0))}", 130))
        if one.note:
            label = f", labelled {data.label_of(*one.twin)}" if one.twin else ""
            _write(draw, (left, top + LINE), cut(one.note + label, 130), FAINT)
        _write(draw, (left, top + 2 * LINE), cut(data.shown(str(one.split), int(one.row or 0)), 130), FAINT)
    sheet.save(path, optimize=False, compress_level=1)


def _sheet(title: str, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    sheet = Image.new("RGB", (WIDTH, height + 2 * LINE + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    _write(draw, (GAP, 4), cut(title, 150))
    return sheet, draw


def _write(draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str, colour: str = INK) -> None:
    font: Any = ImageFont.load_default(12)
    draw.text(place, text, fill=colour, font=font)


def _picture(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    """Return an image (height, width, channels) as an RGB thumbnail."""
    colours = np.ascontiguousarray(pixels[..., :3] if pixels.shape[-1] in (3, 4) else pixels[..., 0])
    picture = Image.fromarray(colours)
    scale = SIDE / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX
    return picture.resize(size, how).convert("RGB")
