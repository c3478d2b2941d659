"""Datasets by name: a file of this folder, else a stock TFDS builder; and the checks of what lies on the disk."""

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config, own_code, upstream
from tasks.errors import UserError, one_of
from tasks.records import HeldOut

# TensorFlow and TFDS are imported where they are needed: on JAX, training needs neither.

DECODED = 8
TEST_SHARE = 0.2
"""Of the training examples, where a dataset has no test split."""


def find(folder_name: str, own: str | None = None) -> tuple[Any, str | None]:
    """Return the ``tfds.core.DatasetBuilder`` class that a name stands for, and the configuration in it, or None.

    A builder of the user's own comes first, then a file of this folder. ``cmaterdb-bangla`` is the configuration
    ``bangla`` of ``cmaterdb``.

    Args:
        folder_name: of the dataset's folder in data/.
        own: the user's ``module:Class``; without it what data/<name>/params.yaml says.

    Raises:
        UserError: neither the user nor this folder nor TFDS has it, or it has no such configuration.
    """
    import tensorflow_datasets as tfds

    name, _, configuration = folder_name.partition("-")
    if own := own or _own_builder(folder_name):
        kind = own_code.load(own, "dataset.name")
        if not (isinstance(kind, type) and issubclass(kind, tfds.core.DatasetBuilder)):
            raise UserError(f"dataset.name = '{own}' is no tfds.core.GeneratorBasedBuilder: name a class that is one")
        return _configured(kind, name, configuration)
    embedded = config.names_of("datasets")
    if name in embedded:
        importlib.import_module(f"tasks.datasets.{name}")  # Its class registers itself with TFDS.
    elif name not in (stock := tfds.list_builders(with_community_datasets=False)):
        see = (
            "Allowed: a dataset of images, texts or numbers of https://www.tensorflow.org/datasets/catalog/overview, "
            f"or one of tasks/datasets/ ({', '.join(embedded)})"
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
    """Return a ``tfds.core.DatasetBuilder`` whose supervised keys can be learnt, see ``LEARNABLE``.

    Args:
        name: of the dataset's folder, see ``find``.
        version: one that the builder can make; None is its newest.
        data_dir: TFDS' folder; what it already holds is described by the builder's ``info``.
        own: see ``find``.

    Raises:
        UserError: no such dataset or version, or it holds nothing that is learnt here.
    """
    import tensorflow_datasets as tfds

    kind, configuration = find(name, own)
    upstream.leave_bucket_alone()
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
    found = [features[key] for key in keys] if all(isinstance(key, str) for key in keys) else []
    kinds = tuple(_kind(feature) for feature in found)
    if kinds not in LEARNABLE:
        raise UserError(
            f"dataset.name = '{name}' cannot be trained on: its supervised keys must be an image (uint8, known number "
            "of channels), a text or numbers of a known shape, and a class label, several of them "
            f"(Sequence(ClassLabel)) or numbers; got {[type(feature).__name__ for feature in found] or keys}"
        )
    return builder


LEARNABLE = {(given, wanted) for given in ("image", "text", "numbers") for wanted in ("class", "labels", "numbers")}


def kinds_of(builder: Any) -> tuple[str | None, str | None]:
    """Return what a builder's examples are, and what is learnt of them: one of ``LEARNABLE``."""
    given, wanted = (_kind(builder.info.features[key]) for key in builder.info.supervised_keys)
    return given, wanted


def _kind(feature: Any) -> str | None:
    import tensorflow_datasets as tfds

    known: dict[Any, str] = {tfds.features.ClassLabel: "class", tfds.features.Text: "text"}
    if isinstance(feature, tfds.features.Image):
        return "image" if feature.np_dtype == np.uint8 and feature.shape[-1] is not None else None
    if isinstance(feature, tfds.features.Sequence):
        return "labels" if type(feature.feature) is tfds.features.ClassLabel else None
    if type(feature) in (tfds.features.Tensor, tfds.features.Scalar):  # Not its subclasses, such as an audio.
        return "numbers" if np.dtype(feature.np_dtype).kind in "iuf" and None not in feature.shape else None
    return known.get(type(feature))


def rows(builder: Any, split: str) -> Iterator[tuple[Any, Any]]:
    """Yield the two supervised values of each example as NumPy's, in the order of the shards."""
    import tensorflow_datasets as tfds

    one_after_another = tfds.ReadConfig(interleave_cycle_length=1)
    read = builder.as_dataset(split=split, shuffle_files=False, as_supervised=True, read_config=one_after_another)
    yield from tfds.as_numpy(read)


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

    A batch is parsed whole: TFDS' own reader parses one example after the other and takes three times as long. Its
    images are decoded DECODED at a time: one a turn of TensorFlow's loop takes 1.5 times as long.
    """
    import tensorflow as tf

    image_key, label_key = builder.info.supervised_keys
    feature, label = builder.info.features[image_key], builder.info.features[label_key]
    _, learnt = kinds_of(builder)
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
            places = found.to_tensor(-1)  # Which is no label.
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
