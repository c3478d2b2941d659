"""Images changed at random: what is drawn for each place of a pass, and the doing, alike in NumPy and TensorFlow.

Keras' layers (``RandomFlip`` to ``RandAugment``) draw from a generator's state, so an image's draw depends on how many
were drawn before it: with another backend or number of workers it is another one. Here a draw belongs to a place of the
pass. Factors mean what they mean there.

The host draws whole numbers, and whole numbers is all that is done with them: positions are int64, and pixels float32
that hold integers below 2**24. Nothing is lost to rounding, so no framework, compiler or device gives other bits.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.errors import UserError, shown
from tasks.records import PreparedDataset

Draws = npt.NDArray[np.int32]
"""A row for each image: 1 for a mirrored one, top and left of its crop in the padded image, and then, of what is on:

- moved, six columns: the matrix, row by row, that takes a pixel's place to that in the old image, both (y, x) from the
  centre, in units of 1 / ONE; and a shift, y and x, as shares of height and width in the same units;
- brightness, one: what is added to each pixel;
- contrast, one: what the distance to the mean is multiplied with, in units of 1/256;
- RandAugment, fourteen for each layer: as for moved; contrast, a factor of each pixel, color and sharpness, in units of
  1/256; the pixel from which on it is inverted, the step to which it is rounded down, and 1 for autocontrast and for
  equalize;
- erased, four: top and left as shares of what is free, height and width as shares of the image, in units of 1 / ONE;
- mixed, five: the place of the pass whose image is mixed in, what is kept of each pixel in units of 1/256, and the
  rectangle that is taken of the other image whole: the middle, y and x, and its sides, as shares in units of 1 / ONE.
"""
MIXED_COLUMNS = 5
ONE = 1 << 16
ERASED_AREA = 0.02, 0.33
"""Height and width are, each by itself, the root of a share between these, as in Keras."""
RAND_AUGMENT = (
    "identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize", "contrast", "brightness",
    "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip
"""The paper's, in its order."""


def check_augmentation(section: config.Augmentation, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` when there are no images, or something beside them that cannot be mixed, or when a crop can
    miss all pixels, so far are they padded."""
    images = [feature for feature in prepared.features.values() if feature.kind == "image"]
    for image in images:
        height, width, _ = image.shape
        if section.crop_padding >= min(height, width):
            raise UserError(
                f"input.augmentation.crop_padding = {section.crop_padding}: the images of {prepared.name} have "
                f"{height} x {width} pixels, and a crop would hold nothing of them. Give less than {min(height, width)}"
            )
    if not images and section.changes:
        key = next(iter(section.changes))
        value = section.model_dump()[key]
        instead = "false" if value is True else "null" if key == "rand_augment" else "0"
        raise UserError(
            f"input.augmentation.{key} = {shown(value)}: {prepared.name} has no images, but "
            f"{', '.join(prepared.features)}. Give input.augmentation.{key}={instead}"
        )
    if section.mixes and len(prepared.features) > 1:
        key = "mixup" if section.mixup else "cutmix"
        raise UserError(
            f"input.augmentation.{key} = {getattr(section, key)}: {prepared.name} has {', '.join(prepared.features)}, "
            f"and only examples that are one image can be mixed. Give input.augmentation.{key}=0"
        )


def is_images(array: Any) -> bool:
    """Return whether an array or a tensor is one of images: no other feature has rows of three dimensions."""
    return len(array.shape) == 4


def with_partners(places: npt.NDArray[np.int64], draws: Draws) -> npt.NDArray[np.int64]:
    """Return these places of a pass, int64 (...,), each with that of the image that is mixed in: int64 (..., 2)."""
    return np.stack([places, draws[places, -MIXED_COLUMNS]], axis=-1)


def augment_batch(
    batch: tuple[Any, ...], draws: Any, section: config.Augmentation, num_classes: int
) -> tuple[Any, ...]:
    """Return a batch whose images are changed and, with ``mixup`` or ``cutmix``, mixed, as are labels and weights.

    Args:
        batch: features, one or by name, labels and maybe weights, of n rows. Where images are mixed, they are pairs of
            rows, (n, 2, ...), as of ``with_partners``, and the labels that come back are float32: (n, num_classes),
            what of the image is of each class, or (n, labels or numbers).
        draws: int32 (n, columns), or (n, 2, columns).
        section: what is on, and how much.
        num_classes: if labels are classes, else 0.
    """
    x, *others = batch
    if not section.mixes:
        return augment_images(x, draws, section), *others
    own, partner = (augment(x[:, i], draws[:, i], section) for i in (0, 1))
    images, kept = _mixed(own, partner, draws[:, 0, -MIXED_COLUMNS + 1 :])
    return images, *(_shared(_one_hot(one, num_classes) if i == 0 else one, kept) for i, one in enumerate(others))


def _one_hot(labels: Any, num_classes: int) -> Any:
    if not num_classes:
        return labels
    lib = _library(labels)
    return np.eye(num_classes, dtype=np.float32)[labels] if lib is np else lib.one_hot(labels, num_classes)


def _shared(pairs: Any, kept: Any) -> Any:
    """Return of pairs (n, 2, ...) what is kept of the first one, in units of 1/256, and the rest of the second one:
    float32 (n, ...)."""
    pairs = _cast(pairs, "float32")
    kept = _library(pairs).reshape(_cast(kept, "float32"), [-1] + [1] * (len(pairs.shape) - 2))
    return (pairs[:, 0] * kept + pairs[:, 1] * (256 - kept)) / 256


def augment_images(x: Any, draws: Any, section: config.Augmentation) -> Any:
    """Return features, one or by name, of which the images are changed as ``augment`` does."""
    if isinstance(x, Mapping):
        return {name: augment_images(one, draws, section) for name, one in x.items()}
    return augment(x, draws, section) if is_images(x) else x


@lru_cache(maxsize=2)
def pass_draws(num_examples: int, seed: int, number: int, section: config.Augmentation) -> Draws:
    """Return the draws of a pass, int32 (num_examples, columns), from some Philox words for each place in it, whoever
    reads that place. What one key draws does not depend on which others are on.

    The counter's last word is 1 to 5: ``order`` has 0 under the same key, and no two may share words.
    """

    def drawn(stream: int, words_each: int) -> npt.NDArray[np.uint64]:
        bits = np.random.Philox(key=[seed, number + 1], counter=[0, 0, 0, stream])
        return bits.random_raw(num_examples * words_each).reshape(num_examples, words_each)

    words = drawn(1, 1)[:, 0]
    flips, words = words % 2 == 1, words // 2
    span = 2 * section.crop_padding + 1
    columns = [flips & section.flip, words % span, words // span % span]
    if section.changes.keys() - {"flip", "crop_padding"}:
        columns += _factor_columns(_numbers(drawn(2, 2)), section)
        if section.rand_augment is not None:
            num_layers = section.rand_augment.num_layers
            for layer in np.split(_numbers(drawn(3, num_layers)), num_layers):
                columns += _layer_columns(layer, section.rand_augment.magnitude / 10)
        if section.erasing:
            columns += _hole_columns(_numbers(drawn(4, 2)), section.erasing)
        if section.mixes:
            words = drawn(5, 2)
            columns += [words[:, 0] % num_examples, *_mixed_columns(_numbers(words[:, 1:]), section)]
    return np.stack(columns, axis=1).astype(np.int32)


def _numbers(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return four numbers from 0 to ONE - 1 of each word, int64 (4 * words, n), of words (n, words)."""
    numbers = words[:, :, None] >> np.arange(0, 64, 16).astype(np.uint64) & np.uint64(ONE - 1)
    return numbers.astype(np.int64).reshape(len(words), 4 * words.shape[1]).T


def _factor_columns(drawn: npt.NDArray[np.int64], section: config.Augmentation) -> list[Any]:
    """Return the columns of the factors that are on, of numbers int64 (8, n)."""
    around = (2 * drawn + 1 - ONE) / ONE  # Between -1 and 1, and never nearer to one than to the other.
    columns: list[Any] = []
    if section.moves:
        angle, scale = around[0] * section.rotation * 2 * math.pi, 1 + around[1] * section.zoom
        along, across, (down, right) = scale * np.cos(angle), scale * np.sin(angle), around[2:4] * section.translation
        columns += [np.rint(ONE * column) for column in (along, across, -across, along, down, right)]
    if section.brightness:
        columns.append(np.rint(255 * section.brightness * around[4]))
    if section.contrast:
        columns.append(np.rint(256 * (1 + section.contrast * around[5])))
    return columns


def _layer_columns(drawn: npt.NDArray[np.int64], level: float) -> list[Any]:
    """Return the columns of a layer of RandAugment: of its operations one changes something for each image.

    Args:
        drawn: which operation, and which direction, int64 (4, n).
        level: of the largest that each operation can do.
    """
    chosen = drawn[0] * len(RAND_AUGMENT) // ONE
    sign = np.where(drawn[1] < ONE // 2, -1, 1)

    def of(name: str, most: float) -> npt.NDArray[np.float64]:
        return np.where(chosen == RAND_AUGMENT.index(name), sign * level * most, 0.0)

    angle = of("rotate", math.pi / 6)
    along, across = np.cos(angle), np.sin(angle)
    matrix = along, across + of("shear_y", 0.3), of("shear_x", 0.3) - across, along
    shift = of("translate_y", 0.45), of("translate_x", 0.45)
    return [
        *(np.rint(ONE * column) for column in (*matrix, *shift)),
        *(np.rint(256 * (1 + of(name, 0.9))) for name in ("contrast", "brightness", "color", "sharpness")),
        256 - np.abs(np.rint(of("solarize", 256))),
        2 ** np.abs(np.rint(of("posterize", 4))),
        *((chosen == RAND_AUGMENT.index(name)) & (level > 0) for name in ("autocontrast", "equalize")),
    ]


def _hole_columns(drawn: npt.NDArray[np.int64], probability: float) -> list[Any]:
    """Return top, left, height and width of what is erased; the sides are 0 where nothing is."""
    least, most = ERASED_AREA
    sides = np.sqrt(least + (most - least) * drawn[:2] / ONE) * (drawn[4] < probability * ONE)
    return [*drawn[2:4], *np.rint(ONE * sides)]


def _mixed_columns(drawn: npt.NDArray[np.int64], section: config.Augmentation) -> list[Any]:
    """Return what is kept of each pixel, and the middle and the sides of the rectangle, of numbers int64 (4, n).

    Of both mixup and cutmix each image has one, as likely as the other.
    """
    from scipy.special import betaincinv

    share_of_cuts = bool(section.cutmix) / (bool(section.mixup) + bool(section.cutmix))
    cuts = drawn[1] < share_of_cuts * ONE
    alpha = np.where(cuts, section.cutmix, section.mixup)
    kept = betaincinv(alpha, alpha, (drawn[0] + 0.5) / ONE)  # Its distribution is Beta(alpha, alpha).
    sides = np.where(cuts, np.sqrt(1 - kept), 0)
    return [np.where(cuts, 256, np.rint(256 * kept)), *drawn[2:4], np.rint(ONE * sides)]


def augment(images: Any, draws: Any, section: config.Augmentation) -> Any:
    """Return images changed as drawn: of NumPy's an array, without TensorFlow, and of a tensor a tensor, alike to the
    bit.

    Args:
        images: uint8 (n, height, width, channels).
        draws: int32 (n, columns), of ``pass_draws``.
        section: what is on, and how much.
    """
    height, width = images.shape[1:3]
    lib, padding, left = _library(images), section.crop_padding, 3

    def take(count: int) -> Any:
        nonlocal left
        left += count
        return draws[:, left - count : left]

    if section.flip:
        images = lib.where(draws[:, 0, None, None, None] == 1, images[:, :, ::-1], images)
    if padding:
        padded = lib.pad(images, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
        images = _cropped(padded, draws[:, 1:3], height, width)
    if section.moves:
        images = _moved(images, take(6), section.fill_mode)
    if section.brightness:
        images = _pixels(_cast(images, "float32") + _each(take(1)))
    if section.contrast:
        images = _contrasted(images, _each(take(1)))
    for _ in range(section.rand_augment.num_layers if section.rand_augment else 0):
        images = _moved(images, take(6), section.fill_mode)
        images = _contrasted(images, _each(take(1)))
        images = _blended(images, 0, _each(take(1)))
        images = _blended(images, _gray(images), _each(take(1)))
        images = _blended(images, _smooth(images), _each(take(1)))
        values = _cast(images, "float32")
        values = lib.where(values >= _each(take(1)), 255 - values, values)
        step = _each(take(1))
        images = _pixels(lib.floor(values / step) * step)
        images = _chosen(take(1), _autocontrasted(images), images)
        images = _chosen(take(1), _equalized(images), images)
    return _erased(images, take(4)) if section.erasing else images


def _library(array: Any) -> Any:
    """Return NumPy or TensorFlow. Where both have a function of a name, it does the same."""
    if isinstance(array, np.ndarray):
        return np
    import tensorflow as tf

    return tf


def _cast(array: Any, dtype: str) -> Any:
    return array.astype(dtype) if isinstance(array, np.ndarray) else _library(array).cast(array, dtype)


def _each(column: Any) -> Any:
    """Return a draw (n, 1) as what stands beside pixels: float32 (n, 1, 1, 1)."""
    return _cast(column, "float32")[:, :, None, None]


def _pixels(values: Any) -> Any:
    """Return whole numbers as uint8, cut to 0 to 255."""
    lib = _library(values)
    return _cast(lib.minimum(lib.maximum(values, 0), 255), "uint8")


def _shifted_right(array: Any, bits: int) -> Any:
    return array >> bits if isinstance(array, np.ndarray) else _library(array).bitwise.right_shift(array, bits)


def _cropped(padded: Any, corners: Any, height: int, width: int) -> Any:
    if isinstance(padded, np.ndarray):
        crops = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
        return np.moveaxis(crops, 3, -1)[np.arange(len(padded)), corners[:, 0], corners[:, 1]]
    tf = _library(padded)
    rows = tf.gather(padded, corners[:, :1] + tf.range(height), axis=1, batch_dims=1)
    return tf.gather(rows, corners[:, 1:] + tf.range(width), axis=2, batch_dims=1)


def _moved(images: Any, columns: Any, fill_mode: str) -> Any:
    """Return images whose pixels come from where matrix and shift say, to 1/256 of a pixel, between the four there."""
    lib, (height, width, channels) = _library(images), images.shape[1:]
    # Twice the distance from the centre, a whole number also where the centre lies between two pixels.
    y, x = 2 * np.arange(height)[:, None] - (height - 1), 2 * np.arange(width) - (width - 1)
    yy, yx, xy, xx, down, right = (_cast(columns, "int64")[:, i, None, None] for i in range(6))
    rows = _shifted_right(yy * y + yx * x + 2 * height * down + ((height - 1) * ONE + 256), 9)
    lines = _shifted_right(xy * y + xx * x + 2 * width * right + ((width - 1) * ONE + 256), 9)
    row, line = _shifted_right(rows, 8), _shifted_right(lines, 8)
    below, beside = (_cast(place & 255, "float32")[..., None] for place in (rows, lines))
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
            return _cast(flat.reshape(-1, channels).take(places, axis=0), "float32")
        return _cast(lib.gather(flat, places, axis=1, batch_dims=1), "float32")

    upper, lower = (inside(row + i, height) * width for i in (0, 1))
    first, second = (inside(line + i, width) for i in (0, 1))
    above, under = (at(start + first) * (256 - beside) + at(start + second) * beside for start in (upper, lower))
    return _cast(lib.floor((above * (256 - below) + under * below + ONE // 2) / ONE), "uint8")


def _contrasted(images: Any, factor: Any) -> Any:
    """Return images whose pixels have another distance from the mean of their channel, which is a whole number."""
    lib, (height, width) = _library(images), images.shape[1:3]
    total = (np.sum if lib is np else lib.reduce_sum)(_cast(images, "int64"), axis=(1, 2), keepdims=True)
    mean = (total + height * width // 2) // (height * width)
    return _blended(images, mean, factor)


def _blended(images: Any, others: Any, factor: Any) -> Any:
    """Return images whose pixels have another distance from those of others, which are whole numbers; the factor is in
    units of 1/256."""
    others = others if isinstance(others, int) else _cast(others, "float32")
    return _pixels(_library(images).floor((_cast(images, "float32") * factor + others * (256 - factor) + 128) / 256))


def _chosen(column: Any, changed: Any, images: Any) -> Any:
    return _library(images).where(column[:, :, None, None] == 1, changed, images)


def _gray(images: Any) -> Any:
    """Return the luma of colors (ITU-R 601-2), as Pillow computes it; an image that has none is as it is."""
    if images.shape[-1] != 3:
        return images
    values = _cast(images, "int32")
    luma = values[..., :1] * 19595 + values[..., 1:2] * 38470 + values[..., 2:] * 7471
    return _shifted_right(luma + (1 << 15), 16)


def _smooth(images: Any) -> Any:
    """Return images of which each pixel counts 5 of 13, and its eight neighbors one each; the edge is as it was."""
    lib, (height, width) = _library(images), images.shape[1:3]
    values = _cast(images, "int32")
    if min(height, width) < 3:
        return values
    total = 4 * values[:, 1:-1, 1:-1]
    for down in range(3):
        for right in range(3):
            total = total + values[:, down : height - 2 + down, right : width - 2 + right]
    inner = lib.pad((2 * total + 13) // 26, [[0, 0], [1, 1], [1, 1], [0, 0]])
    y, x = np.arange(height)[:, None, None], np.arange(width)[:, None]
    return lib.where((y > 0) & (y < height - 1) & (x > 0) & (x < width - 1), inner, values)


def _autocontrasted(images: Any) -> Any:
    """Return images of which each channel reaches from 0 to 255."""
    lib, values = _library(images), _cast(images, "int32")
    lowest, highest = (np.min, np.max) if lib is np else (lib.reduce_min, lib.reduce_max)
    low, high = (edge(values, axis=(1, 2), keepdims=True) for edge in (lowest, highest))
    return _cast(lib.where(high > low, (values - low) * 255 // lib.maximum(high - low, 1), values), "uint8")


def _equalized(images: Any) -> Any:
    """Return images of which each channel has, as near as can be, as many pixels of one value as of any other."""
    lib, (height, width, channels) = _library(images), images.shape[1:]
    pixels = height * width
    values = _cast(lib.reshape(lib.transpose(images, (0, 3, 1, 2)), (-1, pixels)), "int64")  # A row for each channel.
    if lib is np:
        of_row = np.arange(len(values))[:, None] * 256 + values
        counts = np.bincount(of_row.ravel(), minlength=len(values) * 256).reshape(-1, 256)
        last = np.take_along_axis(counts, values.max(axis=1, keepdims=True), axis=1)
        before = np.cumsum(counts, axis=1) - counts
    else:
        num_rows = lib.shape(values, lib.int64)[0]
        of_row = lib.reshape(lib.range(num_rows)[:, None] * 256 + values, [-1])
        counts = lib.math.unsorted_segment_sum(lib.ones_like(of_row), of_row, num_rows * 256)
        counts = lib.reshape(counts, [-1, 256])
        last = lib.gather(counts, lib.reduce_max(values, axis=1, keepdims=True), axis=1, batch_dims=1)
        before = lib.cumsum(counts, axis=1, exclusive=True)
    step = (pixels - last) // 255
    table = lib.minimum((step // 2 + before) // lib.maximum(step, 1), 255)
    found = np.take_along_axis(table, values, axis=1) if lib is np else lib.gather(table, values, axis=1, batch_dims=1)
    found = lib.reshape(lib.where(step > 0, found, values), (-1, channels, height, width))
    return _cast(lib.transpose(found, (0, 2, 3, 1)), "uint8")


def _mixed(own: Any, partner: Any, columns: Any) -> tuple[Any, Any]:
    """Return images mixed with others, and how much of each is its own, in units of 1/256: int64 (n,).

    Mixup is that of Zhang et al., 2018, and cutmix that of Yun et al., 2019, whose rectangle may reach over the edge.
    """
    lib, (height, width) = _library(own), own.shape[1:3]
    kept, y, x, side = (_cast(columns, "int64")[:, i, None] for i in range(4))
    images = _blended(own, partner, _each(kept))

    def within(middle: Any, size: int) -> Any:
        middle, half = _shifted_right(middle * size, 16), _shifted_right(side * size, 17)
        return (middle - half <= np.arange(size)) & (middle + half > np.arange(size))

    rows, lines = within(y, height), within(x, width)
    images = lib.where(rows[:, :, None, None] & lines[:, None, :, None], partner, images)
    total = np.sum if lib is np else lib.reduce_sum
    left = height * width - total(_cast(rows, "int64"), axis=1) * total(_cast(lines, "int64"), axis=1)
    return images, (2 * kept[:, 0] * left + height * width) // (2 * height * width)


def _erased(images: Any, columns: Any) -> Any:
    """Return images with a rectangle of zeros."""
    lib = _library(images)

    def within(start: Any, share: Any, size: int) -> Any:
        length = _shifted_right(share * size + ONE // 2, 16)
        start = _shifted_right(start * (size - length + 1), 16)
        return (start <= np.arange(size)) & (start + length > np.arange(size))

    top, start, tall, wide = (_cast(columns, "int64")[:, i, None] for i in range(4))
    rows, lines = within(top, tall, images.shape[1]), within(start, wide, images.shape[2])
    return lib.where(rows[:, :, None, None] & lines[:, None, :, None], lib.zeros_like(images), images)
