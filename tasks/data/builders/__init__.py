"""Datasets by name: a file of this folder, else a stock TFDS builder; and the checks of what lies on the disk."""

import importlib
import math
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
from tasks.modeling import own_code
from tasks.records import HeldOut
from tasks.system.errors import UserError, cut, one_of

# TensorFlow and TFDS are imported where they are needed: on JAX, training needs neither.

DECODED = 8
TEST_SHARE = 0.2
"""Of the training examples, where a dataset has no test split."""


def find_builder(folder_name: str, own: str | None = None) -> tuple[Any, str | None]:
    """Return the ``tfds.core.DatasetBuilder`` class that a name stands for, and the configuration in it, or None.

    The user's own builder comes first, then a file of this folder. ``cmaterdb.bangla`` is the configuration ``bangla``
    of ``cmaterdb``.

    Args:
        folder_name: of the dataset's folder in data/.
        own: the user's ``module:Class``; without it what data/<name>/params.yaml says.

    Raises:
        UserError: neither the user nor this folder nor TFDS has it, or it has no such configuration.
    """
    import tensorflow_datasets as tfds

    name, configuration = config.split_folder_name(folder_name)
    if own := own or _own_builder(folder_name):
        kind = own_code.load(own, "dataset.name")
        if not (isinstance(kind, type) and issubclass(kind, tfds.core.DatasetBuilder)):
            raise UserError(
                f"dataset.name = '{own}' is not a tfds.core.GeneratorBasedBuilder: name a class that is one"
            )
        return _configured(kind, name, configuration)
    embedded = config.names_of("data/builders")
    if name in embedded:
        importlib.import_module(f"tasks.data.builders.{name}")  # Its class registers itself with TFDS.
    elif name not in (stock := tfds.list_builders(with_community_datasets=False)):
        see = (
            "Allowed: a dataset of images, texts or numbers of https://www.tensorflow.org/datasets/catalog/overview, "
            f"or one of tasks/data/builders/ ({', '.join(embedded)})"
        )
        raise UserError(one_of("dataset", name, {*embedded, *stock}, see))
    return _configured(tfds.builder_cls(name), name, configuration)


def _own_builder(folder_name: str) -> str | None:
    folder = config.project_root() / "data" / folder_name
    described = config.read_description(folder) if (folder / "params.yaml").is_file() else None
    return described.builder if isinstance(described, config.Tfds) else None


def _configured(kind: Any, name: str, configuration: str) -> tuple[Any, str | None]:
    if not configuration:
        return kind, None
    if not kind.builder_configs:
        raise UserError(
            f"dataset.name = '{name}/{configuration}': {name} has no configurations: give dataset.name={name}"
        )
    if configuration not in kind.builder_configs:
        raise UserError(one_of(f"configuration of {name}", configuration, kind.builder_configs))
    return kind, configuration


def build(name: str, version: str | None, data_dir: Path, own: str | None = None) -> Any:
    """Return a ``tfds.core.DatasetBuilder`` whose supervised keys a model can learn, see ``LEARNABLE``.

    Args:
        name: of the dataset's folder, see ``find_builder``.
        version: a version that the builder can make; None is the newest.
        data_dir: TFDS' folder; the builder's ``info`` describes what it already holds.
        own: see ``find_builder``.

    Raises:
        UserError: no such dataset or version, or it holds nothing that is learnt here.
    """
    import tensorflow_datasets as tfds

    kind, configuration = find_builder(name, own)
    try:
        builder = kind(data_dir=data_dir, config=configuration)
        makeable = {str(builder.version), str(max(builder.versions))}
        if version not in {None, *makeable}:
            raise UserError(one_of(f"dataset.version of {name}", version, makeable))
        if version not in {None, str(builder.version)}:
            builder = kind(data_dir=data_dir, config=configuration, version=version)
        features, keys = builder.info.features, builder.info.supervised_keys
    except UserError:
        raise
    except Exception as error:  # TFDS' robotics datasets ask the network for their description, others want arguments.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"dataset.name = '{name}': TFDS cannot describe this dataset here ({reason})") from None
    if not keys:
        raise UserError(
            f"dataset.name = '{name}' cannot be trained on: TFDS names no supervised keys for it, which say what is "
            "given and what is to be learnt. Write a builder of your own that has them (docs/data.md)"
        )
    if _supervised(builder) is None:
        found = [[type(one).__name__ for one in _leaves(features, part).values()] for part in keys]
        raise UserError(
            f"dataset.name = '{name}' cannot be trained on: its supervised keys must be an image (uint8, known number "
            "of channels), a text, numbers of a known shape or a dictionary of such columns, and a class label, "
            "several of them (Sequence(ClassLabel)), numbers or, not of texts alone, a text; got "
            + cut(str(found), 120)
        )
    return builder


LEARNABLE = {(given, wanted) for given in ("image", "text", "numbers") for wanted in ("class", "labels", "numbers")}
"""Pairs of input and target for which the input is one feature, named after its kind; all others have columns."""
Place: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Supervised:
    """What a builder's examples are, and what is learnt of them: TFDS' features by their place in an example."""

    kinds: tuple[str, str]
    """One of ``LEARNABLE``; or `columns`, and `class`, `labels`, `numbers` or `text` (a class that is named)."""
    given: dict[Place, Any]
    wanted: dict[Place, Any]

    @property
    def names(self) -> dict[str, Place]:
        """The places of what is given by the names of the columns: the last part, or all of it where that is of two."""
        last = Counter(place[-1] for place in (*self.given, *self.wanted))
        return {place[-1] if last[place[-1]] == 1 else "/".join(place): place for place in self.given}

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes or labels; none where numbers are learnt, or classes that the data alone know."""
        (one, *others), learnt = self.wanted.values(), self.kinds[1]
        if learnt not in ("class", "labels"):
            return ()
        if others:
            return tuple(place[-1] for place in self.wanted)
        label = one.feature if kind_of(one) == "labels" else one
        return ("False", "True") if kind_of(one) == "bool" else tuple(label.names)


def supervised(builder: Any) -> Supervised:
    """Return what is given and what is learnt of a dataset that ``build`` returned."""
    if (found := _supervised(builder)) is None:
        raise ValueError(f"{builder.name} holds nothing that is learnt here, which build refuses")
    return found


def _supervised(builder: Any) -> Supervised | None:
    """Return inputs and targets, swapped where only that can be learnt (forest_fires, lfw); None where nothing can."""
    features, keys = builder.info.features, builder.info.supervised_keys
    if len(keys) > 2 and {kind_of(one) for one in _leaves(features, keys[2]).values()} != {"text"}:
        return None  # A weight; places365_small has the name of a file there.
    first, second = (_leaves(features, part) for part in keys[:2])
    return _learnable(first, second, keys[0]) or _learnable(second, first, keys[1])


def _learnable(given: dict[Place, Any], wanted: dict[Place, Any], key: Any) -> Supervised | None:
    learnt, kinds = _learnt(wanted), [kind_of(one) for one in given.values()]
    is_alone = isinstance(key, str) and list(given) == [(key,)]
    is_truth = "bool" in map(kind_of, wanted.values())
    if is_alone and len(wanted) == 1 and (kinds[0], learnt) in LEARNABLE and not is_truth:
        return Supervised((str(kinds[0]), str(learnt)), given, wanted)
    rest = {place: one for place, one in given.items() if place not in wanted}  # penguins/simple gives its target, too.
    usable = {kind_of(one) for one in rest.values() if is_column(one)}
    # To answer a text with a text is to write one, as in translation.
    if learnt is None or not usable or (usable == {"text"} and learnt == "text"):
        return None
    return Supervised(("columns", learnt), rest, wanted)


def _learnt(wanted: dict[Place, Any]) -> str | None:
    """Return what kind of target some features are: one feature by its kind, several alike as numbers or labels."""
    kinds = {kind_of(one) for one in wanted.values()}
    if len(kinds) != 1:
        return None
    of_several = {"numbers": "numbers", "bool": "labels"}
    of_one = {"class": "class", "labels": "labels", "numbers": "numbers", "bool": "class", "text": "text"}
    return (of_one if len(wanted) == 1 else of_several).get(str(kinds.pop()))


def _leaves(features: Any, keys: Any) -> dict[Place, Any]:
    """Return the features that a supervised key stands for, by place: a name, or names in tuples or dictionaries."""
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
    """Return what a feature of TFDS is: image, text, numbers, class, labels or bool; None for all else."""
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


def rows(builder: Any, split: str) -> Iterator[tuple[Any, Any]]:
    """Yield the two supervised values of each example as NumPy's, in the order of the shards."""
    import tensorflow_datasets as tfds

    one_after_another = tfds.ReadConfig(interleave_cycle_length=1)
    read = builder.as_dataset(split=split, shuffle_files=False, as_supervised=True, read_config=one_after_another)
    found = supervised(builder)
    is_turned = next(iter(found.given))[0] != builder.info.supervised_keys[0]
    for first, second, *_ in tfds.as_numpy(read):
        yield (second, first) if is_turned else (first, second)


def columns(builder: Any, split: str, places: Collection[Place], size: int) -> Iterator[dict[Place, Any]]:
    """Yield features of the next examples by place, in the order of the shards: an array (n, ...), files of images
    undecoded, or a list for labels.

    Args:
        builder: a dataset on disk.
        split: its name.
        places: of the features; nothing else is parsed.
        size: how many examples to yield at once; the last ones may be fewer.
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
    """Takes serialized records, string (batch,), in TensorFlow's graph or out of it; returns images uint8
    (batch, height, width, channels) and labels as ``records.PreparedSplit`` has them."""


def shards(builder: Any, split: str, image_shape: tuple[int, ...]) -> Shards:
    """Return the files of a split and how to decode them to one shape (bilinear, antialiased, if theirs is another).

    A batch is parsed at once: TFDS' own reader parses one example after the other and takes three times as long.
    Images are decoded DECODED at a time: one per turn of TensorFlow's loop takes 1.5 times as long.
    """
    import tensorflow as tf

    found = supervised(builder)
    (((image_key,), feature),), (((label_key,), label),) = found.given.items(), found.wanted.items()
    learnt = found.kinds[1]
    if learnt == "labels":
        label_spec: Any = tf.io.RaggedFeature(tf.int64)
    elif learnt == "numbers":  # TFDS writes each of them as one of these two.
        is_fraction = np.dtype(label.np_dtype).kind == "f"
        label_spec = tf.io.FixedLenFeature(label.shape, tf.float32 if is_fraction else tf.int64)
    else:
        label_spec = tf.io.FixedLenFeature((), tf.int64)
    spec = {image_key: tf.io.FixedLenFeature((), tf.string), label_key: label_spec}

    def as_labels(found: Any) -> Any:
        if learnt == "labels":
            places = found.to_tensor(-1)  # Which is not a label.
            return tf.reduce_max(tf.one_hot(places, label.feature.num_classes, dtype=tf.uint8), axis=1)
        if learnt == "numbers":
            return tf.cast(tf.reshape(found, (tf.shape(found)[0], math.prod(label.shape))), tf.float32)
        return found

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
        return tf.concat([tf.reshape(images, (-1, *image_shape)), rest], 0), as_labels(examples[label_key])

    info = builder.info.splits[split]
    return Shards([str(path) for path in info.filepaths], [int(length) for length in info.shard_lengths], decode)


def hold_out(num_examples: int) -> HeldOut | None:
    """Return the test split that a dataset without one gets; None where there is nothing to divide."""
    count = max(1, round(num_examples * TEST_SHARE))
    return HeldOut(num_examples=count, seed=0) if num_examples > 1 else None


def is_held_out(total: int, held: HeldOut) -> npt.NDArray[np.bool_]:
    """Return which of so many training examples are test examples, bool (total,): the same ones for ever."""
    # Raw words, because NumPy keeps those of a bit generator the same, and promises nothing for its permutations.
    words = np.random.Philox(key=[held.seed, 0], counter=[0, 0, 0, 2]).random_raw(total)
    chosen = np.zeros(total, bool)
    chosen[np.argsort(words, kind="stable")[: held.num_examples]] = True
    return chosen


def damaged_shard(builder: Any) -> Path | None:
    """Return the first file of a dataset on disk that cannot be read to its last record; None when all can."""
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
