"""Decodes image files to pixels. Functions import Pillow, because most models do not need it."""

import contextlib
import math
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
MORE_FORMATS = ("TIFF", "JPEG2000", "AVIF", "PPM", "ICO")
"""Further formats, by their names in Pillow, which are allowed only for files that the user gives on the command line.
Pillow recognizes each by its first bytes and decodes it without another program."""
HEIF = "HEIF"
"""Pillow's name for HEIC, which pi-heif decodes."""
HEIC = re.compile(rb".{4}ftyp(?:hei[cfmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)
"""The first bytes of HEIC photographs, which Pillow alone cannot read."""
SIXTEEN_BITS = 2**16 - 1
ORIENTATION = 0x0112
"""The EXIF orientation tag; values of at least 5 swap height and width."""


def register_heif() -> tuple[str, ...]:
    """Register HEIC with Pillow if pi-heif is installed; return the names of the added formats."""
    try:
        from pi_heif import register_heif_opener
    except ImportError:
        return ()
    register_heif_opener()
    return (HEIF,)


_real = lru_cache(maxsize=1024)(os.path.realpath)


def inside(folder: Path, path: str) -> Path:
    """Return a path in a folder.

    Raises:
        ValueError: the path is absolute, or leads out of the folder.
    """
    place, root = os.path.join(folder, path), _real(os.fspath(folder))
    # Most images share few folders, and each part of a path costs a call of the system.
    moves = os.path.basename(path) == ".." or os.path.islink(place)
    real = os.path.realpath(place) if moves else _real(os.path.dirname(place))
    if os.path.isabs(path) or os.path.commonpath((root, real)) != root:
        raise ValueError("it leads out of the folder")
    return Path(place)


def open_picture(source: Any, formats: tuple[str, ...] = FORMATS) -> Any:
    """Return a Pillow image whose header was read; arguments and errors are those of ``decode_picture``."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(source, formats=formats)
    except UnidentifiedImageError:
        with open(source, "rb") if isinstance(source, str | Path) else contextlib.nullcontext(source) as file:
            file.seek(0)
            if HEIC.match(file.read(12)) and HEIF not in formats:
                raise ValueError(
                    "HEIC, which Pillow cannot read: convert it to JPEG or PNG (heif-convert; sips on macOS); for "
                    "predictions, you can also install pi-heif (the extra 'heic')"
                ) from None
        raise
    # Up to twice the limit, Pillow only warns.
    if (pixels := image.width * image.height) > (most := Image.MAX_IMAGE_PIXELS or math.inf):
        image.close()
        raise ValueError(f"Image size ({pixels} pixels) exceeds limit of {most} pixels, it may be a decompression bomb")
    return image


def decode_picture(source: Any, shape: Sequence[int], formats: tuple[str, ...] = FORMATS) -> npt.NDArray[np.uint8]:
    """Return an image of any kind and size as pixels, uint8 (height, width, channels).

    The image is rotated by its EXIF orientation, composed on white if it is transparent, converted to 8 bits, and
    resized (bilinear, antialiased, without keeping the aspect ratio).

    Args:
        source: a path, a file, or an array uint8 (height, width), or (height, width, channels).
        shape: of the result; channels are 1 or 3.
        formats: the allowed file formats, by their names in Pillow.

    Raises:
        Exception: any exception of Pillow's readers on a damaged file.
    """
    from PIL import Image, ImageOps

    height, width, channels = shape
    mode = "L" if channels == 1 else "RGB"
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8:
            raise ValueError(f"an array of {source.dtype}, but uint8 is needed")
        opened: Any = Image.fromarray(source[..., 0] if source.ndim == 3 and source.shape[2] == 1 else source)
    else:
        opened = open_picture(source, formats)
    with opened:
        is_turned = opened.getexif().get(ORIENTATION, 1) >= 5
        # The JPEG decoder skips details that a smaller image does not show: photographs of 500 x 375 and 375 x 500 took
        # 1.6 ms instead of 2.1 to become 224 x 168.
        opened.draft(mode, (height, width) if is_turned else (width, height))
        ImageOps.exif_transpose(opened, in_place=True)
        image = _eight_bits(opened)
        if image.mode != mode:
            image = image.convert(mode)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image, np.uint8).reshape(height, width, channels)


def _eight_bits(image: Any) -> Any:
    """Return an image with 8 bits per channel and without transparency."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are fractions: save it with 8 or 16 bits per channel")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > SIXTEEN_BITS:
            raise ValueError("its pixels have 32 bits: save it with 8 or 16 bits per channel")
        return Image.fromarray((values // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image)
    return image
