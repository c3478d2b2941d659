"""The section ``input``: which examples a training reads, in which order, and what is done to them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tasks.config.section import MAX_PIXELS, Count, Result, Section, Speed, Text

Fraction = Annotated[float, Field(ge=0, le=1)]
Alpha = Annotated[float, Field(ge=0, le=100)]


class RandAugment(Section):
    num_layers: Result[Annotated[int, Field(ge=1, le=10)]] = 2
    """Operations that each image goes through, one after the other, each drawn of fourteen."""
    magnitude: Result[Annotated[float, Field(ge=0, le=10)]] = 9
    """Of each operation: at 10 it turns by 30 degrees, shears by 0.3, shifts by 45% of the image, multiplies with 0.1
    or 1.9, inverts all pixels, or keeps 4 bits of 8."""


class Augmentation(Section):
    """Of the training images. A factor is that of Keras' layer (RandomTranslation, ...): each image draws a value up to
    it, in both directions; 0 is off."""

    flip: Result[bool]
    """Mirror half of the training images left to right."""
    crop_padding: Result[Annotated[int, Field(ge=0, le=MAX_PIXELS)]]
    """Pad training images by this many pixels on each side, then crop at random; 0 is off."""
    translation: Result[Fraction]
    """Shift training images up and down, and sideways, by up to this share of height and width; 0 is off."""
    rotation: Result[Fraction]
    """Rotate training images by up to this share of a full turn, either way; 0 is off."""
    zoom: Result[Fraction]
    """Shrink or enlarge training images: 0.2 shows 80% to 120% of height and width; 0 is off."""
    fill_mode: Result[Literal["constant", "nearest", "reflect"]]
    """What lies beyond an image that is shifted, rotated or zoomed: black, its edge, or its mirror image."""
    brightness: Result[Fraction]
    """Add up to this share of 255 to training images, or take it away; 0 is off."""
    contrast: Result[Fraction]
    """Multiply the distance of pixels to the mean of their image with 1 minus to 1 plus this; 0 is off."""
    rand_augment: Result[RandAugment | None]
    """RandAugment (Cubuk et al., 2020): {num_layers: 2, magnitude: 9}; null is off."""
    erasing: Result[Fraction]
    """The probability that a training image has a rectangle, of 2% to 33% of it, made black; 0 is off."""
    mixup: Result[Alpha]
    """Mix each training image, and its label, with another one. The share is drawn of Beta(alpha, alpha), of which this
    is alpha: 0.2 often keeps nearly all of one; 0 is off."""
    cutmix: Result[Alpha]
    """Put a rectangle of another image into each training image; the labels are mixed as the areas are, drawn of
    Beta(alpha, alpha). With mixup, too, each image has one of the two; 0 is off."""

    @property
    def changes(self) -> dict[str, Any]:
        """What is on, by key."""
        return {name: value for name, value in self if value and name != "fill_mode"}

    @property
    def moves(self) -> bool:
        """Whether pixels go to other places than whole ones."""
        return bool(self.translation or self.rotation or self.zoom)

    @property
    def mixes(self) -> bool:
        """Whether an example is made of two."""
        return bool(self.mixup or self.cutmix)


class Input(Section):
    source: Result[Literal["auto", "array", "stream"]]
    """`array`, which `auto` takes: the prepared arrays, memory-mapped, also where they are larger than the memory.
    `stream`: TFDS' shards of images, decoded anew in each run and shuffled in a buffer."""
    memory_budget_bytes: Speed[Annotated[int, Field(gt=0, le=10**18)]]
    """The largest split that one GPU, or on JAX each, copies into its own memory; the processor gathers larger ones."""
    validation: Result[Text | Annotated[float, Field(gt=0, lt=1)] | Count | None]
    """The name of a split, a fraction of the training examples, an exact number of them, or null for none. Of a
    user's own data each class gives the same share of those that are drawn; of TFDS' they are drawn without regard to
    classes."""
    normalization: Result[Literal["scale", "standardize", "none"]]
    """`scale`: to 0..1. `standardize`: by the training split's mean and deviation of each channel. `none`: 0..255."""
    shuffle: Result[bool]
    """A new order every pass over the data, drawn from train.seed and the pass's number."""
    drop_remainder: Result[bool]
    """Leave out a short last batch of each pass."""
    prefetch: Speed[Annotated[int, Field(ge=0, le=1000)] | Literal["auto"]]
    """Batches made ready ahead: 0 for none; `auto` lets tf.data tune it. Of an array many are gathered at once."""
    cache: Speed[Literal["memory", "file", "none"]]
    """Where the `stream` source keeps records after the first epoch."""
    shuffle_buffer: Result[Count]
    """Records that the `stream` source shuffles among."""
    augmentation: Augmentation
