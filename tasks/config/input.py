"""The section ``input``: which examples a training reads, in which order, and how it changes them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tasks.config.section import MAX_PIXELS, Count, Options, OwnCode, Result, Section, Speed, Text

Fraction = Annotated[float, Field(ge=0, le=1)]
Alpha = Annotated[float, Field(ge=0, le=100)]


class RandAugment(Section):
    num_layers: Result[Annotated[int, Field(ge=1, le=10)]] = 2
    """Number of operations applied to each image, one after another, each drawn at random from fourteen."""
    magnitude: Result[Annotated[float, Field(ge=0, le=10)]] = 9
    """Strength of each operation: 10 rotates by 30 degrees, shears by 0.3, shifts by 45% of the image, multiplies by
    0.1 or 1.9, inverts all pixels, or keeps 4 of 8 bits."""


class Augmentation(Section):
    """Augmentation of the training images. A factor means the same as in Keras' layers (RandomTranslation, ...): each
    image draws a value up to it, in both directions; 0 is off."""

    flip: Result[bool]
    """Flip half of the training images horizontally."""
    crop_padding: Result[Annotated[int, Field(ge=0, le=MAX_PIXELS)]]
    """Pad training images by this many pixels on each side, then crop at random; 0 is off."""
    translation: Result[Fraction]
    """Shift training images vertically and horizontally by up to this fraction of height and width; 0 is off."""
    rotation: Result[Fraction]
    """Rotate training images by up to this fraction of a full turn, in either direction; 0 is off."""
    zoom: Result[Fraction]
    """Shrink or enlarge training images: 0.2 shows 80% to 120% of height and width; 0 is off."""
    fill_mode: Result[Literal["constant", "nearest", "reflect"]]
    """How to fill the area outside a shifted, rotated or zoomed image: black, its edge pixels, or its reflection."""
    brightness: Result[Fraction]
    """Add or subtract up to this fraction of 255; 0 is off."""
    contrast: Result[Fraction]
    """Multiply the difference between each pixel and the image's mean by a factor between 1 - this and 1 + this; 0 is
    off."""
    rand_augment: Result[RandAugment | None]
    """RandAugment (Cubuk et al., 2020): {num_layers: 2, magnitude: 9}; null is off."""
    erasing: Result[Fraction]
    """Probability of blackening a rectangle of 2% to 33% of a training image; 0 is off."""
    mixup: Result[Alpha]
    """Mix each training image and its label with another one. This is the alpha of Beta(alpha, alpha), from which the
    share of each is drawn: 0.2 often keeps nearly all of one image; 0 is off."""
    cutmix: Result[Alpha]
    """Paste a rectangle of another image into each training image, and mix the labels by area, which is drawn from
    Beta(alpha, alpha). If mixup is on too, each image gets one of the two; 0 is off."""
    custom: Result[OwnCode | None] = None
    """Your own `module:function` of (images, numbers), tensors of Keras' backend: images uint8 (n, height, width,
    channels), and for each image eight random numbers between 0 and 1, which depend on its position in the pass. It
    returns the changed images, before mixup and cutmix. Null is off."""
    options: Result[Options] = {}
    """Keyword arguments of that function."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # Because ``options`` is not hashable.

    @property
    def changes(self) -> dict[str, Any]:
        """The changes that are on, by key."""
        return {name: value for name, value in self if value and name not in ("fill_mode", "options")}

    @property
    def moves(self) -> bool:
        """Whether pixels move by fractions of a pixel."""
        return bool(self.translation or self.rotation or self.zoom)

    @property
    def mixes(self) -> bool:
        """Whether it combines two examples into one."""
        return bool(self.mixup or self.cutmix)


class Input(Section):
    source: Result[Literal["auto", "array", "stream"]]
    """`array`, the choice of `auto`: the prepared arrays, memory-mapped, so they may be larger than memory. `stream`:
    TFDS' shards of images, which each run decodes again and shuffles in a buffer."""
    memory_budget_bytes: Speed[Annotated[int, Field(gt=0, le=10**18)]]
    """The largest split that a single GPU, or each device on JAX, copies into its memory; the host gathers the batches
    of larger splits."""
    validation: Result[Text | Annotated[float, Field(gt=0, lt=1)] | Count | None]
    """The name of a split, a fraction or a number of the training examples, or null for none. From your own data,
    examples are drawn stratified by class; from TFDS, without regard to classes."""
    normalization: Result[Literal["scale", "standardize", "none"]]
    """`scale`: to 0..1. `standardize`: by each channel's mean and standard deviation in the training split. `none`:
    0..255."""
    shuffle: Result[bool]
    """Shuffle the data in every pass, with an order drawn from train.seed and the number of the pass."""
    drop_remainder: Result[bool]
    """Drop a short last batch of each pass."""
    prefetch: Speed[Annotated[int, Field(ge=0, le=1000)] | Literal["auto"]]
    """Number of batches to prepare in advance; 0 is off, and `auto` lets tf.data choose. The array source gathers
    several batches at once."""
    cache: Speed[Literal["memory", "file", "none"]]
    """Where the `stream` source keeps records after the first epoch."""
    shuffle_buffer: Result[Count]
    """Size of the `stream` source's shuffle buffer, in records."""
    augmentation: Augmentation
