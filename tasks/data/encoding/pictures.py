"""Files of images as the pixels that are seen. Pillow is imported where one is opened."""

import contextlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
MORE_FORMATS = ("TIFF", "JPEG2000", "AVIF", "PPM", "ICO")
"""Formats of images that are read beside those of data and requests where a person names the files, as Pillow calls
them. Pillow decodes each by itself, without another program, and knows it by its first bytes."""
HEIF = "HEIF"
"""What Pillow calls HEIC once pi-heif is there, which decodes it."""
HEIC = re.compile(rb".{4}ftyp(?:hei[cfmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)
"""How a photograph of a telephone begins that Pillow does not read by itself."""
SIXTEEN_BITS = 2**16 - 1
ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held; from 5 on, height and width change places."""


def register_heif() -> tuple[str, ...]:
    """Return what Pillow calls the format of photographs of telephones, where there is the package that decodes it."""
    try:
        from pi_heif import register_heif_opener
    except ImportError:
        return ()
    register_heif_opener()
    return (HEIF,)


def inside(folder: Path, path: str) -> Path:
    """Return a path in a folder.

    Raises:
        ValueError: it leads out of it, or is not one from there on.
    """
    place = folder / path
    try:
        leads_out = Path(path).is_absolute() or not place.resolve().is_relative_to(folder.resolve())
    except RuntimeError:  # Before Python 3.13.
        raise ValueError("it is a link round in a circle") from None
    if leads_out:
        raise ValueError("it leads out of the folder of the table")
    return place


def open_picture(source: Any, formats: tuple[str, ...] = FORMATS) -> Any:
    """Return what Pillow opens, with its header read; arguments and errors are those of ``decode_picture``."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(source, formats=formats)
    except UnidentifiedImageError:
        with open(source, "rb") if isinstance(source, str | Path) else contextlib.nullcontext(source) as file:
            file.seek(0)
            if HEIC.match(file.read(12)):
                if HEIF in formats:
                    raise ValueError("HEIC that is damaged, or of a kind that pi-heif does not read") from None
                # Where a person names the files, pi-heif is all that it takes.
                install = "install pi-heif (the extra 'heic'), or " if set(MORE_FORMATS) <= set(formats) else ""
                raise ValueError(
                    f"HEIC, which is not decoded here: {install}convert it to JPEG or PNG (heif-convert; sips on macOS)"
                ) from None
        raise
    # Pillow only warns of it up to twice as many, and a program of the user's may not have made that an error.
    if (pixels := image.width * image.height) > (most := Image.MAX_IMAGE_PIXELS or math.inf):
        image.close()
        raise ValueError(f"Image size ({pixels} pixels) exceeds limit of {most} pixels, it may be a decompression bomb")
    return image


def decode_picture(source: Any, shape: Sequence[int], formats: tuple[str, ...] = FORMATS) -> npt.NDArray[np.uint8]:
    """Return an image of any kind and size as the pixels that are seen, uint8 (height, width, channels).

    It is turned as its EXIF says, laid on white where it is transparent, brought to 8 bits, and resized (bilinear,
    antialiased, without keeping the aspect ratio).

    Args:
        source: a path, a file, or an array uint8 (height, width), or (height, width, channels).
        shape: of the result; channels are 1 or 3.
        formats: those that a file may have, as Pillow calls them.

    Raises:
        Exception: whatever Pillow's readers raise on a broken file.
    """
    from PIL import Image, ImageOps

    height, width, channels = shape
    mode = "L" if channels == 1 else "RGB"
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8:
            raise ValueError(f"an array of {source.dtype}, where uint8 is wanted")
        opened: Any = Image.fromarray(source[..., 0] if source.ndim == 3 and source.shape[2] == 1 else source)
    else:
        opened = open_picture(source, formats)
    with opened:
        is_turned = opened.getexif().get(ORIENTATION, 1) >= 5
        # JPEG's own decoder leaves out what a smaller image does not show: photographs of 500 x 375 and 375 x 500 took
        # 1.6 ms in place of 2.1 to become 224 x 168.
        opened.draft(mode, (height, width) if is_turned else (width, height))
        ImageOps.exif_transpose(opened, in_place=True)
        image = _eight_bits(opened)
        if image.mode != mode:
            image = image.convert(mode)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image, np.uint8).reshape(height, width, channels)


def _eight_bits(image: Any) -> Any:
    """Return an image of 8 bits a channel without transparency."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are fractions: save it with 8 or 16 bits a channel")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > SIXTEEN_BITS:
            raise ValueError("its pixels are numbers of 32 bits: save it with 8 or 16 bits a channel")
        return Image.fromarray((values // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image)
    return image
