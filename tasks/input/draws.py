"""Random draws for the images of a pass: one row of integers per place in the pass.

Keras layers (``RandomFlip`` to ``RandAugment``) draw from a generator with a state, so an image's draw depends on the
number of earlier draws, and differs between backends and numbers of workers. In this module, a draw depends only on
the place in the pass. Factors have the same meaning as in Keras.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config

Draws = npt.NDArray[np.int32]
"""A row for each image: 1 to flip it, top and left of its crop in the padded image, and for each active augmentation:

- moves, six columns: the matrix, row by row, from a pixel's place to its place in the original image, both (y, x) from
  the centre, in units of 1 / ONE; and a shift, y and x, as shares of height and width in the same units;
- brightness, one: the number added to each pixel;
- contrast, one: the factor of the distance to the mean, in units of 1/256;
- RandAugment, fourteen for each layer: as for moves; contrast, brightness, color and sharpness, in units of 1/256; the
  threshold of solarize, the step of posterize, and 1 for autocontrast and for equalize;
- erasing, four: top and left as shares of the free space, height and width as shares of the image, in units of 1 / ONE;
- custom, eight: numbers in units of 1 / ONE;
- mixing, five: the place in the pass of the image to mix in, the kept share of each pixel in units of 1/256, and the
  rectangle to copy from the other image: its center, y and x, and its sides, as shares in units of 1 / ONE.
"""
MIXED_COLUMNS = 5
ONE = 1 << 16
ERASED_AREA = 0.02, 0.33
"""Height and width are, independently, the square root of a share between these, as in Keras."""
RAND_AUGMENT = (
    "identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize", "contrast", "brightness",
    "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip
"""The operations of the paper, in its order."""


def with_partners(places: npt.NDArray[np.int64], draws: Draws) -> npt.NDArray[np.int64]:
    """Return places of a pass, int64 (...,), each with the place of the image to mix in: int64 (..., 2)."""
    return np.stack([places, draws[places, -MIXED_COLUMNS]], axis=-1)


@lru_cache(maxsize=2)
def pass_draws(num_examples: int, seed: int, number: int, section: config.Augmentation) -> Draws:
    """Return the draws of a pass, int32 (num_examples, columns), from Philox words of each place, the same for all
    workers. The draws of one setting do not depend on other settings.

    The last word of the counter is 1 to 6: ``order`` uses 0 with the same key, and no two may share words.
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
        if section.custom is not None:
            columns += list(_numbers(drawn(6, 2)))
        if section.mixes:
            words = drawn(5, 2)
            columns += [words[:, 0] % num_examples, *_mixed_columns(_numbers(words[:, 1:]), section)]
    return np.stack(columns, axis=1).astype(np.int32)


def _numbers(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return four numbers from 0 to ONE - 1 from each word, int64 (4 * words, n), from words (n, words)."""
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
    """Return the columns of a RandAugment layer, which applies one of its operations to each image, from numbers int64
    (4, n); ``level`` is the strength as a share of each operation's maximum."""
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
    """Return top, left, height and width of the erased rectangle; sides are 0 where nothing is erased."""
    least, most = ERASED_AREA
    sides = np.sqrt(least + (most - least) * drawn[:2] / ONE) * (drawn[4] < probability * ONE)
    return [*drawn[2:4], *np.rint(ONE * sides)]


def _mixed_columns(drawn: npt.NDArray[np.int64], section: config.Augmentation) -> list[Any]:
    """Return the kept share of each pixel, and middle and sides of the rectangle, from numbers int64 (4, n).

    With both mixup and cutmix on, each image gets one of them, with equal probability.
    """
    from scipy.special import betaincinv

    share_of_cuts = bool(section.cutmix) / (bool(section.mixup) + bool(section.cutmix))
    cuts = drawn[1] < share_of_cuts * ONE
    alpha = np.where(cuts, section.cutmix, section.mixup)
    kept = betaincinv(alpha, alpha, (drawn[0] + 0.5) / ONE)  # Its distribution is Beta(alpha, alpha).
    sides = np.where(cuts, np.sqrt(1 - kept), 0)
    return [np.where(cuts, 256, np.rint(256 * kept)), *drawn[2:4], np.rint(ONE * sides)]
