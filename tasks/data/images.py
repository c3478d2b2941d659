"""Image files of any size: their headers, the common size of a dataset, and damaged files."""

import math
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import UnidentifiedImageError

from tasks import config
from tasks.data.encoding.pictures import FORMATS, ORIENTATION, open_picture
from tasks.system.errors import UserError, listed

MAX_SIDE, STEP = 224, 8
"""In pixels, for images of different sizes: the longer side is at most MAX_SIDE, as in most pretrained models, and both
are multiples of STEP."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an image file; small, because each image has one."""

    size: tuple[int, int]
    """Height and width, after the EXIF rotation."""
    is_grey: bool
    loss: str
    """What of the image is not used, for a line that counts such images."""


def read_header(path: Path) -> Header | str:
    """Return the header of an image, or the reason why the file is not an image."""
    try:
        with warnings.catch_warnings():
            # `open_picture` refuses too many pixels; of damaged EXIF data Pillow only warns, and reads the pixels.
            warnings.filterwarnings("ignore", module=r"PIL\.")
            with open_picture(path) as image:
                width, height = image.size
                # Pillow would decode a whole PNG to look for EXIF behind its pixels.
                exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
                if exif.get(ORIENTATION, 1) >= 5:
                    width, height = height, width
                loss = "16 bits per channel, of which the upper 8 are used" if image.mode.startswith("I") else ""
                if image.format != "MPO" and getattr(image, "is_animated", False):  # MPO is a photograph and a preview.
                    loss = "several frames, of which the first is used"
                return Header((height, width), image.mode in ("1", "L", "LA") or image.mode.startswith("I"), loss)
    except Exception as error:  # Pillow's readers raise anything on a broken file.
        return _reason(path, error)


def _reason(path: Path, error: Exception) -> str:
    """Return why a file is not a complete image; raise ``UserError`` if the file cannot be read."""
    if isinstance(error, OSError) and error.errno is not None:
        raise UserError(f"{path} cannot be read ({error.strerror}): make it readable, or remove it") from None
    if path.exists() and path.stat().st_size == 0:
        return "empty"
    if isinstance(error, UnidentifiedImageError):
        return f"no image of {', '.join(FORMATS).lower()}"
    return " ".join(str(error).split())[:200] or type(error).__name__


def common_size(dataset: config.Table, headers: Sequence[Header]) -> tuple[int, int]:
    """Return the common height and width of a dataset's images; print them if none is set and sizes differ, and how
    many images lose frames or bits."""
    for loss, count in Counter(header.loss for header in headers if header.loss).items():
        print(f"{count:,} of {len(headers):,} images of {dataset.name} have {loss}", file=sys.stderr)
    if dataset.image_size is not None:
        return dataset.image_size
    if len(sizes := {header.size for header in headers}) == 1:
        return sizes.pop()
    size, line = median_size(dataset.name, [header.size for header in headers])
    print(line, file=sys.stderr)
    return size


def median_size(name: str, sizes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], str]:
    """Return the height and width for images of different sizes, and a line that reports them.

    Each is the median, rounded to a multiple of ``STEP``; both shrink together until neither exceeds ``MAX_SIDE``.
    """
    height, width = (statistics.median_low(size[side] for size in sizes) for side in (0, 1))
    scale = min(1.0, MAX_SIDE / max(height, width))
    size = (_multiple(height * scale), _multiple(width * scale))
    low, high = min(sizes, key=math.prod), max(sizes, key=math.prod)
    return size, (
        f"the images of {name} differ in size, from {low[0]} x {low[1]} to {high[0]} x {high[1]} (height x width; the "
        f"median is {height} x {width}): all are resized to {size[0]} x {size[1]}. To choose another size, set "
        f"dataset.image_size in data/{name}/params.yaml"
    )


def _multiple(side: float) -> int:
    return max(STEP, int(side + STEP / 2) // STEP * STEP)


def refuse_broken(dataset: config.Table, broken: Mapping[str, str]) -> None:
    """Refuse damaged images, with their names and reasons; with ``on_broken=skip``, print which ones are left out."""
    if not broken:
        return
    named = listed([f"{name} ({reason})" for name, reason in sorted(broken.items())])
    if dataset.on_broken == "skip":
        print(f"left out because they are not whole images ({len(broken)}): {named}", file=sys.stderr)
        return
    texts = ". Texts belong in a table, such as a .csv with a column of texts and one of classes"
    raise UserError(
        f"dataset.source = '{dataset.source}': {len(broken)} of its images cannot be used: {named}. Fix or remove "
        f"them, or leave them out: dataset.on_broken=skip{texts if all(one.endswith('.txt') for one in broken) else ''}"
    )
