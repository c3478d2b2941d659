"""Augments and mixes training images and labels, with the random draws of their places in the pass."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tasks import config
from tasks.input import pixels
from tasks.input.draws import MIXED_COLUMNS, ONE
from tasks.modeling import own_code
from tasks.records import PreparedDataset
from tasks.system.errors import UserError, shown

OWN = "input.augmentation.custom"
OWN_NUMBERS = 8


def check_augmentation(section: config.Augmentation, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` if there are no images, if other features prevent mixing, or if the padding is so wide that a
    crop can miss all pixels."""
    images = [feature for feature in prepared.features.values() if feature.kind == "image"]
    for image in images:
        height, width, _ = image.shape
        if section.crop_padding >= min(height, width):
            raise UserError(
                f"input.augmentation.crop_padding = {section.crop_padding}: the images of {prepared.name} have "
                f"{height} x {width} pixels, so a crop could miss them completely. Use less than {min(height, width)}"
            )
        if section.custom is not None:
            _check_own(section, image.shape)
    if not images and section.changes:
        key = next(iter(section.changes))
        value = section.model_dump()[key]
        instead = "false" if value is True else "null" if key in ("rand_augment", "custom") else "0"
        raise UserError(
            f"input.augmentation.{key} = {shown(value)}: {prepared.name} has no images, but "
            f"{', '.join(prepared.features)}. Set input.augmentation.{key}={instead}"
        )
    if section.mixes and len(prepared.features) > 1:
        key = "mixup" if section.mixup else "cutmix"
        raise UserError(
            f"input.augmentation.{key} = {getattr(section, key)}: {prepared.name} has {', '.join(prepared.features)}, "
            f"and only examples that are one image can be mixed. Set input.augmentation.{key}=0"
        )


def is_images(array: Any) -> bool:
    """Return whether an array or a tensor holds images: no other feature has rows of three dimensions."""
    return len(array.shape) == 4


def augment_batch(
    batch: tuple[Any, ...], draws: Any, section: config.Augmentation, num_classes: int
) -> tuple[Any, ...]:
    """Return a batch with augmented images; with ``mixup`` or ``cutmix``, images, labels and weights are also mixed.

    Args:
        batch: features, one or by name, labels and optionally weights, of n rows. For mixing, these are pairs of rows,
            (n, 2, ...), as from ``with_partners``, and the returned labels are float32: (n, num_classes), the share of
            each class in the image, or (n, labels or numbers).
        draws: int32 (n, columns), or (n, 2, columns).
        num_classes: if labels are classes, else 0.
    """
    x, *others = batch
    if not section.mixes:
        return augment_images(x, draws, section), *others
    own, partner = (augment(x[:, i], draws[:, i], section) for i in (0, 1))
    images, kept = pixels.mix(own, partner, draws[:, 0, -MIXED_COLUMNS + 1 :])
    return images, *(_mix_labels(_one_hot(one, num_classes) if i == 0 else one, kept) for i, one in enumerate(others))


def _one_hot(labels: Any, num_classes: int) -> Any:
    if not num_classes:
        return labels
    lib = pixels.library(labels)
    if pixels.is_like_numpy(lib):
        return lib.eye(num_classes, dtype=np.float32)[labels]
    return lib.one_hot(labels, num_classes)


def _mix_labels(pairs: Any, kept: Any) -> Any:
    """Return pairs (n, 2, ...) mixed, ``kept`` / 256 of the first and the rest of the second: float32 (n, ...)."""
    pairs = pixels.cast(pairs, "float32")
    kept = pixels.library(pairs).reshape(pixels.cast(kept, "float32"), [-1] + [1] * (len(pairs.shape) - 2))
    return (pairs[:, 0] * kept + pairs[:, 1] * (256 - kept)) / 256


def augment_images(x: Any, draws: Any, section: config.Augmentation) -> Any:
    """Return features, one or by name, with their images augmented by ``augment``."""
    if isinstance(x, Mapping):
        return {name: augment_images(one, draws, section) for name, one in x.items()}
    return augment(x, draws, section) if is_images(x) else x


def augment(images: Any, draws: Any, section: config.Augmentation) -> Any:
    """Return augmented images, equal to the bit for a NumPy array, a TensorFlow tensor and a (traced) JAX array.

    Args:
        images: uint8 (n, height, width, channels).
        draws: int32 (n, columns), of ``pass_draws``.
    """
    height, width = images.shape[1:3]
    lib, padding, left = pixels.library(images), section.crop_padding, 3

    def take(count: int) -> Any:
        nonlocal left
        left += count
        return draws[:, left - count : left]

    if section.flip:
        images = lib.where(draws[:, 0, None, None, None] == 1, images[:, :, ::-1], images)
    if padding:
        padded = lib.pad(images, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
        images = pixels.crop(padded, draws[:, 1:3], height, width)
    if section.moves:
        images = pixels.move(images, take(6), section.fill_mode)
    if section.brightness:
        images = pixels.to_pixels(pixels.cast(images, "float32") + pixels.per_image(take(1)))
    if section.contrast:
        images = pixels.contrast(images, pixels.per_image(take(1)))
    for _ in range(section.rand_augment.num_layers if section.rand_augment else 0):
        images = pixels.move(images, take(6), section.fill_mode)
        images = pixels.contrast(images, pixels.per_image(take(1)))
        images = pixels.blend(images, 0, pixels.per_image(take(1)))
        images = pixels.blend(images, pixels.gray(images), pixels.per_image(take(1)))
        images = pixels.blend(images, pixels.smooth(images), pixels.per_image(take(1)))
        values = pixels.cast(images, "float32")
        values = lib.where(values >= pixels.per_image(take(1)), 255 - values, values)
        step = pixels.per_image(take(1))
        images = pixels.to_pixels(lib.floor(values / step) * step)
        images = pixels.choose(take(1), pixels.autocontrast(images), images)
        images = pixels.choose(take(1), pixels.equalize(images), images)
    images = pixels.erase(images, take(4)) if section.erasing else images
    return images if section.custom is None else _changed_by_own(images, take(OWN_NUMBERS), section)


def _changed_by_own(images: Any, columns: Any, section: config.Augmentation) -> Any:
    """Return images changed by the user's own function, which takes and returns tensors of the Keras backend."""
    import keras

    def change(images: Any, columns: Any) -> Any:
        with own_code.blamed(f"{OWN} = '{section.custom}': fails"):
            numbers = keras.ops.cast(columns, "float32") / ONE
            return function(keras.ops.convert_to_tensor(images), numbers, **section.options)

    function, lib = own_code.load(str(section.custom), OWN), pixels.library(images)
    if lib is np:
        return np.asarray(change(images, columns))
    if keras.backend.backend() == "jax" and not pixels.is_like_numpy(lib):  # TensorFlow reads a stream, also for JAX.
        changed = lib.numpy_function(lambda *arrays: np.asarray(change(*arrays)), [images, columns], lib.uint8)
        return lib.ensure_shape(changed, images.shape)
    return change(images, columns)


def _check_own(section: config.Augmentation, shape: tuple[int, ...]) -> None:
    """Raise ``UserError`` if the user's own function does not keep the dtype and shape of images."""
    images = np.zeros((2, *shape), np.uint8)
    made = _changed_by_own(images, np.zeros((2, OWN_NUMBERS), np.int32), section)
    if (made.shape, made.dtype) != (images.shape, images.dtype):
        raise UserError(
            f"{OWN} = '{section.custom}': returns {made.dtype} {made.shape} for images {images.dtype} {images.shape}, "
            "but must keep dtype and shape"
        )
