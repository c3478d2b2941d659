"""Images mirrored and cropped at random: what is drawn for each place of a pass, and the doing, in both frameworks."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.errors import UserError
from tasks.records import PreparedDataset

Draws = tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]
"""Which images are mirrored, bool (n,), and the top left corner of each crop in its padded image, int32 (n, 2)."""


def check_augmentation(section: config.Augmentation, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` when there are no images, or a crop of them can miss all pixels, so far are they padded."""
    images = [feature for feature in prepared.features.values() if feature.kind == "image"]
    for image in images:
        height, width, _ = image.shape
        if section.crop_padding >= min(height, width):
            raise UserError(
                f"input.augmentation.crop_padding = {section.crop_padding}: the images of {prepared.name} have "
                f"{height} x {width} pixels, and a crop would hold nothing of them. Give less than {min(height, width)}"
            )
    if not images and (section.flip or section.crop_padding):
        key, instead = ("flip", "false") if section.flip else ("crop_padding", "0")
        raise UserError(
            f"input.augmentation.{key} = {getattr(section, key)}: {prepared.name} has no images, but "
            f"{', '.join(prepared.features)}. Give input.augmentation.{key}={instead}"
        )


def is_images(array: Any) -> bool:
    """Return whether an array or a tensor is one of images: no other feature has rows of three dimensions."""
    return len(array.shape) == 4


def augment_images(x: Any, flips: Any, corners: Any, section: config.Augmentation) -> Any:
    """Return features as tensors, one or by name, of which the images are mirrored and cropped as ``augment`` does."""
    if isinstance(x, Mapping):
        return {name: augment_images(one, flips, corners, section) for name, one in x.items()}
    return augment(x, flips, corners, section) if is_images(x) else x


@lru_cache(maxsize=2)
def pass_draws(num_examples: int, seed: int, number: int, section: config.Augmentation) -> Draws:
    """Return the draws of a pass: one Philox word for each place in it, whoever reads that place.

    The counter's last word is 1: ``order`` starts at 0 under the same key, and the two must not share words.
    """
    words = np.random.Philox(key=[seed, number + 1], counter=[0, 0, 0, 1]).random_raw(num_examples)
    flips, words = words % 2 == 1, words // 2
    span = 2 * section.crop_padding + 1
    corners = np.stack([words % span, words // span % span], axis=1).astype(np.int32)
    return flips & section.flip, corners


def augment(images: Any, flips: Any, corners: Any, section: config.Augmentation) -> Any:
    """Return images uint8 (n, height, width, channels), mirrored and cropped as drawn, as a tensor of that shape.

    Args:
        images: a tensor.
        flips: which are mirrored left to right, bool (n,).
        corners: top and left of each crop in the padded image, int32 (n, 2).
        section: what is done at all, and the padding.
    """
    import tensorflow as tf

    height, width, padding = images.shape[1], images.shape[2], section.crop_padding
    if section.flip:
        images = tf.where(flips[:, None, None, None], tf.reverse(images, [2]), images)
    if padding:
        padded = tf.pad(images, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
        images = tf.gather(padded, corners[:, :1] + tf.range(height), axis=1, batch_dims=1)
        images = tf.gather(images, corners[:, 1:] + tf.range(width), axis=2, batch_dims=1)
    return images


def augment_arrays(
    images: npt.NDArray[np.uint8],
    flips: npt.NDArray[np.bool_],
    corners: npt.NDArray[np.int32],
    section: config.Augmentation,
) -> npt.NDArray[np.uint8]:
    """Return what ``augment`` returns, to the bit, without TensorFlow."""
    size, padding = images.shape[1:3], section.crop_padding
    if section.flip:
        images = np.where(flips[:, None, None, None], images[:, :, ::-1], images)
    if padding:
        padded = np.pad(images, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
        crops = np.lib.stride_tricks.sliding_window_view(padded, size, axis=(1, 2))
        images = np.moveaxis(crops, 3, -1)[np.arange(len(images)), corners[:, 0], corners[:, 1]]
    return images
