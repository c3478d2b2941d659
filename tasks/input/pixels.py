"""Operations on the pixels of a batch of images, equal to the bit in NumPy, TensorFlow and JAX.

All computation uses integers: positions are int64, and pixels float32 with integer values below 2**24. Nothing is
rounded implicitly, so all frameworks, compilers and devices give the same bits. Without float64, JAX replaces int64 by
int32, which is enough for images of up to 2,000 pixels per side.

Images are uint8 (n, height, width, channels).
"""

import sys
from typing import Any

import numpy as np

from tasks.input.draws import ONE


def library(array: Any) -> Any:
    """Return NumPy, TensorFlow, or JAX' NumPy. Functions with the same name do the same in all of them."""
    if isinstance(array, np.ndarray):
        return np
    if "jax" in sys.modules and isinstance(array, sys.modules["jax"].Array):
        return sys.modules["jax"].numpy
    import tensorflow as tf

    return tf


def is_like_numpy(lib: Any) -> bool:
    """Return whether a library has NumPy's functions."""
    return hasattr(lib, "ndarray")


def cast(array: Any, dtype: str) -> Any:
    """Return an array or a tensor in another dtype."""
    lib = library(array)
    if not is_like_numpy(lib):
        return lib.cast(array, dtype)
    return array.astype(dtype if lib is np else sys.modules["jax"].dtypes.canonicalize_dtype(dtype))


def per_image(column: Any) -> Any:
    """Return a draw (n, 1) in a shape that broadcasts to pixels: float32 (n, 1, 1, 1)."""
    return cast(column, "float32")[:, :, None, None]


def to_pixels(values: Any) -> Any:
    """Return integers as uint8, clipped to 0 to 255."""
    lib = library(values)
    return cast(lib.minimum(lib.maximum(values, 0), 255), "uint8")


def shift_right(array: Any, bits: int) -> Any:
    """Return integers divided by 2**bits, rounded down."""
    lib = library(array)
    return array >> bits if is_like_numpy(lib) else lib.bitwise.right_shift(array, bits)


def crop(padded: Any, corners: Any, height: int, width: int) -> Any:
    """Return a part of each image with the given top and left corners: int32 (n, 2)."""
    lib = library(padded)
    if lib is np:
        crops = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
        return np.moveaxis(crops, 3, -1)[np.arange(len(padded)), corners[:, 0], corners[:, 1]]
    if is_like_numpy(lib):
        jax, size = sys.modules["jax"], (height, width, padded.shape[-1])
        return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (at[0], at[1], 0), size))(padded, corners)
    rows = lib.gather(padded, corners[:, :1] + lib.range(height), axis=1, batch_dims=1)
    return lib.gather(rows, corners[:, 1:] + lib.range(width), axis=2, batch_dims=1)


def move(images: Any, columns: Any, fill_mode: str) -> Any:
    """Return images transformed by matrix and shift, with bilinear interpolation at 1/256 of a pixel."""
    lib, (height, width, channels) = library(images), images.shape[1:]
    # Twice the distance from the centre, an integer even if the centre lies between two pixels.
    y, x = 2 * np.arange(height)[:, None] - (height - 1), 2 * np.arange(width) - (width - 1)
    yy, yx, xy, xx, down, right = (cast(columns, "int64")[:, i, None, None] for i in range(6))
    rows = shift_right(yy * y + yx * x + 2 * height * down + ((height - 1) * ONE + 256), 9)
    lines = shift_right(xy * y + xx * x + 2 * width * right + ((width - 1) * ONE + 256), 9)
    row, line = shift_right(rows, 8), shift_right(lines, 8)
    below, beside = (cast(place & 255, "float32")[..., None] for place in (rows, lines))
    if fill_mode == "constant":  # Whatever lies outside is the edge of zeros.
        images, row, line = lib.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]]), row + 1, line + 1
        height, width = height + 2, width + 2
    flat = lib.reshape(images, (-1, height * width, channels))

    def inside(places: Any, size: int) -> Any:
        if fill_mode == "reflect":
            places = places % (2 * size)
            return lib.minimum(places, 2 * size - 1 - places)
        return lib.minimum(lib.maximum(places, 0), size - 1)

    def at(places: Any) -> Any:
        if lib is np:
            places = places + np.arange(len(flat))[:, None, None] * (height * width)
            return cast(flat.reshape(-1, channels).take(places, axis=0), "float32")
        if is_like_numpy(lib):
            return cast(sys.modules["jax"].vmap(lambda image, own: image[own])(flat, places), "float32")
        return cast(lib.gather(flat, places, axis=1, batch_dims=1), "float32")

    upper, lower = (inside(row + i, height) * width for i in (0, 1))
    first, second = (inside(line + i, width) for i in (0, 1))
    above, under = (at(start + first) * (256 - beside) + at(start + second) * beside for start in (upper, lower))
    return cast(lib.floor((above * (256 - below) + under * below + ONE // 2) / ONE), "uint8")


def contrast(images: Any, factor: Any) -> Any:
    """Return images whose distances from the channel's mean, rounded to an integer, are scaled by the factor."""
    lib, (height, width) = library(images), images.shape[1:3]
    total = (lib.sum if is_like_numpy(lib) else lib.reduce_sum)(cast(images, "int64"), axis=(1, 2), keepdims=True)
    mean = (total + height * width // 2) // (height * width)
    return blend(images, mean, factor)


def blend(images: Any, others: Any, factor: Any) -> Any:
    """Return images whose distances from the integer pixels of others are scaled by a factor in units of 1/256."""
    others = others if isinstance(others, int) else cast(others, "float32")
    return to_pixels(library(images).floor((cast(images, "float32") * factor + others * (256 - factor) + 128) / 256))


def choose(column: Any, changed: Any, images: Any) -> Any:
    """Return the changed image if a draw (n, 1) is 1, else the original image."""
    return library(images).where(column[:, :, None, None] == 1, changed, images)


def gray(images: Any) -> Any:
    """Return the luma of colors (ITU-R 601-2), as Pillow computes it; grey images are unchanged."""
    if images.shape[-1] != 3:
        return images
    values = cast(images, "int32")
    luma = values[..., :1] * 19595 + values[..., 1:2] * 38470 + values[..., 2:] * 7471
    return shift_right(luma + (1 << 15), 16)


def smooth(images: Any) -> Any:
    """Return images smoothed with weights of 5/13 for a pixel and 1/13 for its eight neighbors; edges are unchanged."""
    lib, (height, width) = library(images), images.shape[1:3]
    values = cast(images, "int32")
    if min(height, width) < 3:
        return values
    total = 4 * values[:, 1:-1, 1:-1]
    for down in range(3):
        for right in range(3):
            total = total + values[:, down : height - 2 + down, right : width - 2 + right]
    inner = lib.pad((2 * total + 13) // 26, [[0, 0], [1, 1], [1, 1], [0, 0]])
    y, x = np.arange(height)[:, None, None], np.arange(width)[:, None]
    return lib.where((y > 0) & (y < height - 1) & (x > 0) & (x < width - 1), inner, values)


def autocontrast(images: Any) -> Any:
    """Return images with each channel stretched to 0 to 255."""
    lib, values = library(images), cast(images, "int32")
    lowest, highest = (lib.min, lib.max) if is_like_numpy(lib) else (lib.reduce_min, lib.reduce_max)
    low, high = (edge(values, axis=(1, 2), keepdims=True) for edge in (lowest, highest))
    return cast(lib.where(high > low, (values - low) * 255 // lib.maximum(high - low, 1), values), "uint8")


def equalize(images: Any) -> Any:
    """Return images with the histogram of each channel equalized."""
    lib, (height, width, channels) = library(images), images.shape[1:]
    pixels = height * width
    values = cast(lib.reshape(lib.transpose(images, (0, 3, 1, 2)), (-1, pixels)), "int64")  # A row for each channel.
    if is_like_numpy(lib):
        of_row, num_counts = lib.arange(len(values))[:, None] * 256 + values, len(values) * 256
        sized = {"minlength": num_counts} if lib is np else {"length": num_counts}
        counts = lib.bincount(of_row.ravel(), **sized).reshape(-1, 256)
        last = lib.take_along_axis(counts, values.max(axis=1, keepdims=True), axis=1)
        before = lib.cumsum(counts, axis=1) - counts
    else:
        num_rows = lib.shape(values, lib.int64)[0]
        of_row = lib.reshape(lib.range(num_rows)[:, None] * 256 + values, [-1])
        counts = lib.math.unsorted_segment_sum(lib.ones_like(of_row), of_row, num_rows * 256)
        counts = lib.reshape(counts, [-1, 256])
        last = lib.gather(counts, lib.reduce_max(values, axis=1, keepdims=True), axis=1, batch_dims=1)
        before = lib.cumsum(counts, axis=1, exclusive=True)
    step = (pixels - last) // 255
    table = lib.minimum((step // 2 + before) // lib.maximum(step, 1), 255)
    if is_like_numpy(lib):
        found = lib.take_along_axis(table, values, axis=1)
    else:
        found = lib.gather(table, values, axis=1, batch_dims=1)
    found = lib.reshape(lib.where(step > 0, found, values), (-1, channels, height, width))
    return cast(lib.transpose(found, (0, 2, 3, 1)), "uint8")


def erase(images: Any, columns: Any) -> Any:
    """Return images with a rectangle of zeros."""
    lib = library(images)

    def within(start: Any, share: Any, size: int) -> Any:
        length = shift_right(share * size + ONE // 2, 16)
        start = shift_right(start * (size - length + 1), 16)
        return (start <= np.arange(size)) & (start + length > np.arange(size))

    top, start, tall, wide = (cast(columns, "int64")[:, i, None] for i in range(4))
    rows, lines = within(top, tall, images.shape[1]), within(start, wide, images.shape[2])
    return lib.where(rows[:, :, None, None] & lines[:, None, :, None], lib.zeros_like(images), images)


def mix(own: Any, partner: Any, columns: Any) -> tuple[Any, Any]:
    """Return images mixed with others, and the share of the original image in units of 1/256: int64 (n,).

    Mixup follows Zhang et al., 2018, and cutmix Yun et al., 2019, whose rectangle may extend beyond the edge.
    """
    lib, (height, width) = library(own), own.shape[1:3]
    kept, y, x, side = (cast(columns, "int64")[:, i, None] for i in range(4))
    images = blend(own, partner, per_image(kept))

    def within(middle: Any, size: int) -> Any:
        middle, half = shift_right(middle * size, 16), shift_right(side * size, 17)
        return (middle - half <= np.arange(size)) & (middle + half > np.arange(size))

    rows, lines = within(y, height), within(x, width)
    images = lib.where(rows[:, :, None, None] & lines[:, None, :, None], partner, images)
    total = lib.sum if is_like_numpy(lib) else lib.reduce_sum
    left = height * width - total(cast(rows, "int64"), axis=1) * total(cast(lines, "int64"), axis=1)
    return images, (2 * kept[:, 0] * left + height * width) // (2 * height * width)
