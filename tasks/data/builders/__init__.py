"""Finds dataset builders by name: a file of this folder, else a stock TFDS builder; and reads their files on disk."""

import importlib
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data import splits
from tasks.modeling import own_code
from tasks.records import HeldOut
from tasks.system import files
from tasks.system.errors import UserError, cut, one_of

# Functions import TensorFlow and TFDS, because training on JAX needs neither.

DECODED = 8


def find_builder(folder_name: str, own: str | None) -> tuple[Any, str | None]:
    """Return the ``tfds.core.DatasetBuilder`` class of a name, and the configuration in the name, or None.

    The user's own builder comes first, then a file of this folder. ``cmaterdb.bangla`` is the configuration ``bangla``
    of ``cmaterdb``. ``own`` is the user's ``module:Class``, by default the one in data/<name>/params.yaml.

    Raises:
        UserError: neither the user nor this folder nor TFDS has such a builder.
    """
    import tensorflow_datasets as tfds

    name, configuration = config.split_folder_name(folder_name)
    folder = config.project_root() / "data" / folder_name
    if own is None and (folder / "params.yaml").is_file():
        own = getattr(config.read_description(folder), "builder", None)
    if own:
        kind = own_code.load(own, "dataset.name")
        if not (isinstance(kind, type) and issubclass(kind, tfds.core.DatasetBuilder)):
            raise UserError(
                f"dataset.name = '{own}' is not a tfds.core.GeneratorBasedBuilder: name a class that is one"
            )
        return kind, configuration or None
    embedded = config.names_of("data/builders")
    if name in embedded:
        importlib.import_module(f"tasks.data.builders.{name}")  # Its class registers itself with TFDS.
    elif name not in (stock := tfds.list_builders(with_community_datasets=False)):
        see = (
            "Allowed: a dataset of images, texts or numbers of https://www.tensorflow.org/datasets/catalog/overview, "
            f"or one of tasks/data/builders/ ({', '.join(embedded)})"
        )
        raise UserError(one_of("dataset", name, {*embedded, *stock}, see))
    return tfds.builder_cls(name), configuration or None


def build(name: str, version: str | None, data_dir: Path, own: str | None = None) -> Any:
    """Return a ``tfds.core.DatasetBuilder`` with usable supervised keys, see ``supervised``.

    Args:
        version: a version that the builder supports; None is the newest.
        data_dir: TFDS' folder; the builder's ``info`` describes what it already holds.
        own: see ``find_builder``.

    Raises:
        UserError: no such dataset or version, or its supervised keys are not supported.
    """
    import tensorflow_datasets as tfds

    kind, configuration = find_builder(name, own)
    if configuration and configuration not in kind.builder_configs:
        see = None if kind.builder_configs else "it has none, so leave it out"
        raise UserError(one_of(f"configuration of {kind.name}", configuration, kind.builder_configs, see))
    try:
        builder = kind(data_dir=data_dir, config=configuration, version=version)
        features, keys = builder.info.features, builder.info.supervised_keys
    except Exception as error:  # No such version, or the description needs the network.
        if (damaged := files.damaged_json((data_dir / kind.name).rglob("*.json"))) is not None:
            raise UserError(
                f"{damaged} is damaged. Remove it, and TFDS makes it again: rm {shlex.quote(str(damaged))}"
            ) from None
        reason = cut(str(error)) or type(error).__name__
        raise UserError(f"dataset.name = '{name}': TFDS cannot describe this dataset here ({reason})") from None
    if not keys:
        raise UserError(
            f"dataset.name = '{name}' cannot be trained on: TFDS defines no supervised keys (input and target) "
            "for it. Write your own builder that does (docs/data.md)"
        )
    try:
        supervised(builder)
    except KeyError as error:
        raise UserError(
            f"dataset.name = '{name}' cannot be trained on: its supervised keys {keys} name {error}, but its features "
            f"are {', '.join(features)}"
        ) from None
    except ValueError:
        found = [[type(one).__name__ for one in _leaves(features, part).values()] for part in keys]
        raise UserError(
            f"dataset.name = '{name}' cannot be trained on. Of its supervised keys, the input must be an image (uint8, "
            "known number of channels), a text, numbers of a known shape or a dictionary of such columns; the target "
            "a class label, several of them (Sequence(ClassLabel)), numbers or, unless the input is only a text, a "
            f"text; got {cut(str(found), 120)}"
        ) from None
    return builder


Place: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Supervised:
    """The inputs and targets of a builder's examples: TFDS features by their place in an example."""

    target_kind: str
    """The target: `class`, `labels`, `numbers` or `text` (the name of a class)."""
    given: dict[Place, Any]
    wanted: dict[Place, Any]

    @property
    def is_of_images(self) -> bool:
        """Whether an example is only an image and its class, without columns."""
        kinds = [kind_of(one) for one in (*self.given.values(), *self.wanted.values())]
        return kinds == ["image", "class"] and all(len(place) == 1 for place in (*self.given, *self.wanted))

    @property
    def names(self) -> dict[str, Place]:
        """The places of the inputs by column name: its last part, or the whole place if that is ambiguous."""
        last = Counter(place[-1] for place in (*self.given, *self.wanted))
        return {place[-1] if last[place[-1]] == 1 else "/".join(place): place for place in self.given}

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes or labels; none for numbers, or if only the data define the classes."""
        one, *others = self.wanted.values()
        if self.target_kind not in ("class", "labels"):
            return ()
        if others:
            return tuple(place[-1] for place in self.wanted)
        label = one.feature if kind_of(one) == "labels" else one
        return ("False", "True") if kind_of(one) == "bool" else tuple(label.names)


def supervised(builder: Any) -> Supervised:
    """Return inputs and targets of a dataset, swapped if only that can be learned (forest_fires, lfw).

    Raises:
        ValueError: the supervised keys are not supported; ``build`` refuses such a dataset.
    """
    features, keys = builder.info.features, builder.info.supervised_keys
    # A third key is a weight, except in places365_small, where it is a file name.
    if not (len(keys) > 2 and {kind_of(one) for one in _leaves(features, keys[2]).values()} != {"text"}):
        first, second = (_leaves(features, part) for part in keys[:2])
        if found := _learnable(first, second) or _learnable(second, first):
            return found
    raise ValueError(f"{builder.name} has no supported supervised keys")


def _learnable(given: dict[Place, Any], wanted: dict[Place, Any]) -> Supervised | None:
    kind = _target_kind(wanted)
    rest = {place: one for place, one in given.items() if place not in wanted}  # penguins/simple gives its target, too.
    usable = {kind_of(one) for one in rest.values() if is_column(one)}
    found = Supervised(kind or "", rest, wanted)
    # A text that is learned from a text is generated, as in a translation.
    if kind is None or not (usable or found.is_of_images) or (usable == {"text"} and kind == "text"):
        return None
    return found


def _target_kind(wanted: dict[Place, Any]) -> str | None:
    """Return the kind of target: for one feature its kind, for several of one kind numbers or labels."""
    kinds = {kind_of(one) for one in wanted.values()}
    if len(kinds) != 1:
        return None
    of_several = {"numbers": "numbers", "bool": "labels"}
    of_one = {"class": "class", "labels": "labels", "numbers": "numbers", "bool": "class", "text": "text"}
    return (of_one if len(wanted) == 1 else of_several).get(str(kinds.pop()))


def _leaves(features: Any, keys: Any) -> dict[Place, Any]:
    """Return the features of a supervised key by place; a key is a name, or names in tuples or dictionaries."""
    if not isinstance(keys, str):
        parts = keys.values() if isinstance(keys, dict) else keys
        return {place: one for part in parts for place, one in _leaves(features, part).items()}
    if keys in features:
        return _below((keys,), features[keys])
    place = tuple(keys.split("/"))  # duke_ultrasound writes das/dB.
    return _below(place, reduce(getitem, place, features))


def _below(place: Place, feature: Any) -> dict[Place, Any]:
    import tensorflow_datasets as tfds

    if type(feature) is not tfds.features.FeaturesDict:
        return {place: feature}
    return {below: one for key, inner in feature.items() for below, one in _below((*place, key), inner).items()}


def is_column(feature: Any) -> bool:
    """Return whether a feature can be one or more columns: a label, a bool, a text, numbers, or a decoded image."""
    kind = kind_of(feature)
    return kind in ("class", "bool", "text", "numbers") or (kind == "image" and feature.shape[-1] in (1, 3))


def kind_of(feature: Any) -> str | None:
    """Return the kind of a TFDS feature: image, text, numbers, class, labels or bool; None for all others."""
    import tensorflow_datasets as tfds

    known: dict[Any, str] = {tfds.features.ClassLabel: "class", tfds.features.Text: "text"}
    if isinstance(feature, tfds.features.Image):
        return "image" if feature.np_dtype == np.uint8 and feature.shape[-1] is not None else None
    if isinstance(feature, tfds.features.Sequence):
        return "labels" if type(feature.feature) is tfds.features.ClassLabel else None
    if type(feature) in (tfds.features.Tensor, tfds.features.Scalar):  # Not its subclasses, such as an audio.
        kind = np.dtype(feature.np_dtype).kind
        if feature.shape == () and kind in "bO":
            return "bool" if kind == "b" else "text"
        return "numbers" if kind in "iuf" and None not in feature.shape else None
    return known.get(type(feature))


def columns(builder: Any, split: str, places: Collection[Place], size: int) -> Iterator[dict[Place, Any]]:
    """Yield features of the next examples by place, in the order of the shards: an array (n, ...), encoded image
    files, or a list for labels.

    Args:
        places: of the features; only these are parsed.
        size: how many examples to yield at once; the last part may have fewer.
    """
    import tensorflow_datasets as tfds

    every = {**supervised(builder).given, **supervised(builder).wanted}
    wanted: dict[str, Any] = {}
    undecoded: dict[str, Any] = {}
    for place in places:
        _put(wanted, place, True)
        if kind_of(every[place]) == "image":
            _put(undecoded, place, tfds.decode.SkipDecoding())
    read = builder.as_dataset(
        split=split,
        shuffle_files=False,
        decoders=tfds.decode.PartialDecoding(wanted, decoders=undecoded or None),
        read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
    )
    for found in read.ragged_batch(size):
        values = {place: reduce(getitem, place, found) for place in places}
        yield {place: one.to_list() if hasattr(one, "to_list") else one.numpy() for place, one in values.items()}


def _put(tree: dict[str, Any], place: Place, value: Any) -> None:
    for part in place[:-1]:
        tree = tree.setdefault(part, {})
    tree[place[-1]] = value


@dataclass(frozen=True)
class Shards:
    """One split of a dataset on disk, as TFRecord files."""

    paths: list[str]
    lengths: list[int]
    """Records in each file."""
    decode: Callable[[Any], tuple[Any, Any]]
    """Takes serialized records, string (batch,), eagerly or in a graph; returns images uint8
    (batch, height, width, channels) and labels int64 (batch,)."""


def shards(builder: Any, split: str, image_shape: tuple[int, ...]) -> Shards:
    """Return the files of a split and a function that decodes images to one shape (resized bilinearly, antialiased).

    It parses a whole batch at once: TFDS' own reader parses one example after the other and takes three times as long.
    It decodes DECODED images at a time: one per iteration of TensorFlow's loop takes 1.5 times as long.
    """
    import tensorflow as tf

    found = supervised(builder)
    (((image_key,), feature),), ((label_key,),) = found.given.items(), found.wanted
    spec = {image_key: tf.io.FixedLenFeature((), tf.string), label_key: tf.io.FixedLenFeature((), tf.int64)}

    def decode_image(encoded: Any) -> Any:
        image = feature.decode_example(encoded)
        if feature.shape != image_shape:
            image = tf.round(tf.image.resize(image, image_shape[:2], antialias=True))
            image = tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8)
        return image

    def decode_some(encoded: Any) -> Any:
        return tf.stack([decode_image(one) for one in tf.unstack(encoded, DECODED)])

    def decode(serialized: Any) -> tuple[Any, Any]:
        examples = tf.io.parse_example(serialized, spec)
        encoded = examples[image_key]
        whole = tf.size(encoded) // DECODED * DECODED
        some, one = (tf.TensorSpec(shape, tf.uint8) for shape in ((DECODED, *image_shape), image_shape))
        images = tf.map_fn(decode_some, tf.reshape(encoded[:whole], (-1, DECODED)), fn_output_signature=some)
        rest = tf.map_fn(decode_image, encoded[whole:], fn_output_signature=one)
        return tf.concat([tf.reshape(images, (-1, *image_shape)), rest], 0), examples[label_key]

    info = builder.info.splits[split]
    return Shards([str(path) for path in info.filepaths], [int(length) for length in info.shard_lengths], decode)


def is_held_out(total: int, held: HeldOut) -> npt.NDArray[np.bool_]:
    """Return which of ``total`` training examples are test examples, bool (total,): always the same ones."""
    one_class, words = np.zeros(total, np.int64), splits.random_words(total, held.seed)
    return splits.smallest_of_each(one_class, words, np.array([held.num_examples]))


def damaged_shard(builder: Any) -> Path | None:
    """Return the first file of a dataset on disk that cannot be read completely; None if all can."""
    import tensorflow as tf

    for split in builder.info.splits.values():
        for path, expected in zip(split.filepaths, split.shard_lengths, strict=True):
            try:
                # TFRecord has a checksum for each record, and TensorFlow compares it.
                batches = tf.data.TFRecordDataset(str(path), buffer_size=2**20).batch(1024)
                num_records = sum(int(tf.size(batch)) for batch in batches)
            except tf.errors.OpError:
                return Path(path)
            if num_records != expected:
                return Path(path)
    return None
