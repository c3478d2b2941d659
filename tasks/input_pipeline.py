"""From prepared data to batches: which examples, in which order, cut into which pieces.

The order of an epoch is a function of (seed, epoch) alone, and the place in it is one integer, the step. So a resumed
run reads what the killed one would have read, and worker i of n computes its part without talking to the others.
"""

import logging
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks import config, datasets
from tasks.errors import UserError
from tasks.records import PreparedDataset

Rows = npt.NDArray[np.int64]

log = logging.getLogger(__name__)


@dataclass
class Batches:
    """The batches of one split. Iterating ``dataset`` reads epoch ``epoch`` from step ``start_step`` on."""

    num_examples: int
    """Examples in one epoch, of all workers together."""
    global_batch_size: int
    drop_remainder: bool
    epoch: int = 0
    start_step: int = 0
    dataset: Any = field(init=False, repr=False)
    """``tf.data.Dataset`` of (images uint8 (batch, height, width, channels), labels int64 (batch,)), one element a
    replica."""

    cache_folder: Any = field(default=None, repr=False)
    """What the ``stream`` source caches in, with ``input.cache=file``; ``close`` removes it."""

    @property
    def steps(self) -> int:
        """Steps in one epoch."""
        whole, rest = divmod(self.num_examples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_remainder)

    def close(self) -> None:
        """Remove what was cached in a file. TensorFlow keeps this object alive, so nothing else would."""
        if self.cache_folder is not None:
            self.cache_folder.cleanup()


def carve(prepared: PreparedDataset, validation: str | float | int | None, seed: int) -> dict[str, tuple[str, Rows]]:
    """Return which rows of which prepared split are used for what.

    Args:
        prepared: gives the splits and their sizes.
        validation: a split's name, a fraction of the training examples, an exact number of them, or None.
        seed: chooses the training examples that become validation examples.

    Returns:
        ``{"train" | "validation" | "test": (split, rows)}``; rows are int64 (n,), rising. Without a test split, a split
        named ``validation`` that is not used for validation takes its place.

    Raises:
        UserError: no such split, more validation examples than training examples, or no split to test on.
    """
    splits = prepared.splits
    if "train" not in splits:
        raise UserError(
            f"dataset {prepared.name} has no split 'train' (it has {', '.join(splits)}): choose another dataset"
        )
    everything = {name: np.arange(split.num_examples) for name, split in splits.items()}
    use = {"train": ("train", everything["train"])}
    if isinstance(validation, str):
        if validation not in splits or validation == "train":
            others = [name for name in splits if name != "train"]
            raise UserError(
                f"input.validation = '{validation}': dataset {prepared.name} has no such split to validate on. "
                f"Allowed: {', '.join(others)}, a fraction such as 0.1, or a number of training examples"
            )
        use["validation"] = (validation, everything[validation])
    elif validation is not None:
        total = splits["train"].num_examples
        count = validation if isinstance(validation, int) else round(total * validation)
        if not 0 < count < total:
            raise UserError(
                f"input.validation = {validation}: takes {count} of the {total} training examples of {prepared.name}, "
                f"and both parts need at least one. Give a number from 1 to {total - 1}, or a fraction"
            )
        shuffled = order(total, seed, epoch=None)
        use["validation"] = ("train", np.sort(shuffled[:count]))
        use["train"] = ("train", np.sort(shuffled[count:]))
    test = next((name for name in ("test", "validation") if name in splits and name != validation), None)
    if test is None:
        raise UserError(
            f"dataset {prepared.name} has the splits {', '.join(splits)} and input.validation = {validation!r}: "
            "nothing is left to test on. Give input.validation=0.1"
        )
    use["test"] = (test, everything[test])
    return use


def order(num_examples: int, seed: int, epoch: int | None) -> Rows:
    """Return a permutation of ``range(num_examples)``, int64 (num_examples,), that depends on (seed, epoch) alone.

    ``epoch`` None is the draw of the validation examples. Raw Philox words are sorted, because NumPy keeps a bit
    generator's words the same for ever, and promises nothing of the kind for ``Generator.permutation``.
    """
    words = np.random.Philox(key=[seed, 0 if epoch is None else epoch + 1]).random_raw(num_examples)
    return np.argsort(words, kind="stable")


def choose_source(section: config.Input, prepared: PreparedDataset) -> str:
    """Return ``array`` or ``stream``: what is asked for, else what the training split's size as uint8 allows."""
    if section.source != "auto":
        return section.source
    return "array" if _train_bytes(prepared) <= section.memory_budget_bytes else "stream"


def _train_bytes(prepared: PreparedDataset) -> int:
    return prepared.splits["train"].num_examples * math.prod(prepared.image_shape)


def check_batch(global_batch_size: int, num_examples: int, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` when a global batch is larger than the training split."""
    if global_batch_size > num_examples:
        raise UserError(
            f"the global batch of {global_batch_size} examples is larger than the training split of {prepared.name}, "
            f"which has {num_examples}: lower train.per_replica_batch_size or train.global_batch_size"
        )


def training(
    settings: config.Settings,
    prepared: PreparedDataset,
    global_batch_size: int,
    num_replicas: int = 1,
    worker: int = 0,
    num_workers: int = 1,
) -> Batches:
    """Return the training batches: shuffled anew each epoch, augmented if asked, this worker's part of each global
    batch.

    Args:
        settings: ``input`` and ``train.seed`` are read.
        prepared: the data.
        global_batch_size: examples in one step of all workers together.
        num_replicas: replicas of this worker; the dataset has one element for each.
        worker: number of this worker, from 0.
        num_workers: number of workers.

    Raises:
        UserError: the batch is larger than the split, or does not divide by the replicas.
    """
    split, rows = carve(prepared, settings.input.validation, settings.train.seed)["train"]
    check_batch(global_batch_size, len(rows), prepared)
    megabytes = f"{_train_bytes(prepared) / 1e6:,.1f} of {settings.input.memory_budget_bytes / 1e6:,.0f} MB"
    source = choose_source(settings.input, prepared)
    log.info(
        "input     %s source (%s), %s of %s examples a step", source, megabytes, global_batch_size, f"{len(rows):,}"
    )
    batches = Batches(len(rows), global_batch_size, settings.input.drop_remainder)
    augment = _augmentation(settings.input.augmentation, settings.train.seed)
    _fill(batches, settings, prepared, split, rows, num_replicas, worker, num_workers, settings.input.shuffle, augment)
    return batches


def ordered(
    settings: config.Settings, prepared: PreparedDataset, use: str, global_batch_size: int, num_replicas: int = 1
) -> Batches:
    """Return the batches of ``validation`` or ``test``: every example once, always in the same order, never
    augmented."""
    split, rows = carve(prepared, settings.input.validation, settings.train.seed)[use]
    batches = Batches(len(rows), min(global_batch_size, len(rows)), drop_remainder=False)
    _fill(batches, settings, prepared, split, rows, num_replicas, 0, 1, shuffle=False, augment=None)
    return batches


def _fill(
    batches: Batches,
    settings: config.Settings,
    prepared: PreparedDataset,
    split: str,
    rows: Rows,
    num_replicas: int,
    worker: int,
    num_workers: int,
    shuffle: bool,
    augment: Callable[[Any, Any, Any], Any] | None,
) -> None:
    """Give ``batches`` its dataset: source -> augmentation -> pieces for the replicas -> prefetch."""
    section, seed = settings.input, settings.train.seed
    if choose_source(section, prepared) == "array":
        epoch_batches = _array_source(batches, prepared, split, rows, seed if shuffle else None, worker, num_workers)
    else:
        epoch_batches = _stream_source(
            batches, section, prepared, split, rows, seed if shuffle else None, worker, num_workers
        )

    def one_epoch(_: Any) -> Any:
        # Asked when an iteration starts, so that one dataset serves all epochs and a resume starts inside one.
        epoch, start = tf.numpy_function(
            lambda: (np.int64(batches.epoch), np.int64(batches.start_step)), [], [tf.int64] * 2
        )
        dataset = epoch_batches(tf.ensure_shape(epoch, ()), tf.ensure_shape(start, ()))
        if augment is not None:
            dataset = dataset.enumerate(start).map(
                lambda step, batch: (augment(batch[0], epoch, step), batch[1]), num_parallel_calls=tf.data.AUTOTUNE
            )
        return dataset

    dataset = tf.data.Dataset.from_tensors(0).flat_map(one_epoch)
    if num_replicas > 1:
        dataset = dataset.flat_map(lambda images, labels: _pieces(images, labels, num_replicas))
    prefetch = tf.data.AUTOTUNE if section.prefetch == "auto" else section.prefetch * num_replicas
    batches.dataset = dataset.prefetch(prefetch) if prefetch else dataset


def _pieces(images: Any, labels: Any, num_replicas: int) -> Any:
    """Cut one batch into as many parts as there are replicas, as even as can be, in order."""
    size = tf.shape(labels, out_type=tf.int64)[0]
    bounds = size * tf.range(num_replicas + 1, dtype=tf.int64) // num_replicas
    cuts = tf.data.Dataset.from_tensor_slices((bounds[:-1], bounds[1:]))
    return cuts.map(lambda first, last: (images[first:last], labels[first:last]))


@lru_cache(maxsize=4)  # The training and the validation split are often rows of the same array.
def _resident(images: Path, labels: Path, sha256: tuple[str, ...]) -> tuple[Any, Any]:
    """Return both arrays as tensors; the hashes are there to tell a rebuilt array from the one before."""
    return tuple(tf.convert_to_tensor(np.load(path, mmap_mode="r")) for path in (images, labels))


def _array_source(
    batches: Batches, prepared: PreparedDataset, split: str, rows: Rows, seed: int | None, worker: int, num_workers: int
) -> Callable[[Any, Any], Any]:
    """Return (epoch, first step) -> dataset of batches, by gathering rows of arrays that lie in memory."""
    root, arrays = config.project_root(), prepared.splits[split]
    images, labels = _resident(root / arrays.images, root / arrays.labels, tuple(arrays.sha256.values()))
    total, size = len(rows), batches.global_batch_size
    even = total % size == 0 or batches.drop_remainder

    def epoch_order(epoch: npt.NDArray[np.int64]) -> Rows:
        return rows if seed is None else rows[order(total, seed, int(epoch))]

    def epoch_batches(epoch: Any, start: Any) -> Any:
        shuffled = tf.ensure_shape(tf.numpy_function(epoch_order, [epoch], tf.int64), (total,))

        def gather(step: Any) -> Any:
            first, last = step * size, tf.minimum((step + 1) * size, total)
            mine = shuffled[
                first + (last - first) * worker // num_workers : first + (last - first) * (worker + 1) // num_workers
            ]
            if even and size % num_workers == 0:
                mine = tf.ensure_shape(mine, (size // num_workers,))
            return tf.gather(images, mine), tf.gather(labels, mine)

        return tf.data.Dataset.range(start, batches.steps).map(gather, num_parallel_calls=tf.data.AUTOTUNE)

    return epoch_batches


def _stream_source(
    batches: Batches,
    section: config.Input,
    prepared: PreparedDataset,
    split: str,
    rows: Rows,
    seed: int | None,
    worker: int,
    num_workers: int,
) -> Callable[[Any, Any], Any]:
    """Return (epoch, first step) -> dataset of batches, read from TFRecord shards that need not fit in memory."""
    builder = datasets.build(prepared.name, prepared.version, config.project_root() / prepared.raw_folder)
    shards = datasets.shards(builder, split, prepared.image_shape)
    chosen = np.zeros(sum(shards.lengths), bool)
    chosen[rows] = True
    chosen = tf.constant(chosen)
    starts = np.cumsum([0, *shards.lengths[:-1]])
    records = tf.data.Dataset.from_tensor_slices((shards.paths, starts)).interleave(
        lambda path, start: tf.data.TFRecordDataset(path).enumerate(start),
        cycle_length=1 if seed is None else min(4, len(shards.paths)),  # One shard after the other is their order.
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    # A lambda a line: AutoGraph finds their source by line, and says so at length when there are two.
    records = records.filter(lambda row, record: chosen[row])
    records = records.map(lambda row, record: record)
    if section.cache == "memory":
        records = records.cache()
    elif section.cache == "file":
        # A folder of its own: TensorFlow would take an old file for these records, and trip over a killed run's lock.
        batches.cache_folder = tempfile.TemporaryDirectory(prefix=".cache.", dir=config.project_root() / "mlruns")
        records = records.cache(f"{batches.cache_folder.name}/records")

    def decode_part(serialized: Any) -> Any:
        # Every worker reads all records and decodes its own: shares of the shards would not fill the same steps.
        size = tf.shape(serialized, out_type=tf.int64)[0]
        return shards.decode(serialized[size * worker // num_workers : size * (worker + 1) // num_workers])

    def epoch_batches(epoch: Any, start: Any) -> Any:
        shuffled = records
        if seed is not None:
            # The seed of this function's graph alone: with a graph seed of 0, which train.seed=0 would hand down,
            # TensorFlow compares the tensor below with 0 in Python, and fails.
            tf.random.set_seed(1)
            shuffled = records.shuffle(
                section.shuffle_buffer, seed=seed * 1_000_003 + epoch, reshuffle_each_iteration=False
            )
        batched = shuffled.batch(batches.global_batch_size, drop_remainder=batches.drop_remainder).skip(start)
        return batched.map(decode_part, num_parallel_calls=tf.data.AUTOTUNE)

    return epoch_batches


def _augmentation(section: config.Augmentation, seed: int) -> Callable[[Any, Any, Any], Any] | None:
    """Return (images, epoch, step) -> images, or None; the draw depends on (seed, epoch, step) and the place in the
    batch."""
    if not section.flip and not section.crop_padding:
        return None
    padding = section.crop_padding

    def augment(images: Any, epoch: Any, step: Any) -> Any:
        key = tf.random.fold_in(tf.random.fold_in(tf.constant([seed, 0], tf.int64), epoch), step)
        count, height, width = tf.shape(images)[0], images.shape[1], images.shape[2]
        if section.flip:
            flipped = tf.random.stateless_uniform([count], tf.random.fold_in(key, 0)) < 0.5
            images = tf.where(flipped[:, None, None, None], tf.reverse(images, [2]), images)
        if padding:
            padded = tf.pad(images, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
            corner = tf.random.stateless_uniform([count, 2], tf.random.fold_in(key, 1), 0, 2 * padding + 1, tf.int32)
            images = tf.gather(padded, corner[:, :1] + tf.range(height), axis=1, batch_dims=1)
            images = tf.gather(images, corner[:, 1:] + tf.range(width), axis=2, batch_dims=1)
        return images

    return augment
