"""The stream source: records from TFRecord shards, which need not fit into memory."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data import builders
from tasks.input.augment import augment
from tasks.input.batches import Batch, Batches
from tasks.input.draws import Draws, pass_draws
from tasks.input.order import Rows
from tasks.records import PreparedDataset
from tasks.system import files

RECORDS_AT_ONCE = 32
"""Consecutive records of one shard before those of the next: few enough for a small shuffle buffer to mix shards."""

log = logging.getLogger(__name__)


@dataclass
class StreamSource:
    """Rows of TFRecord shards."""

    prepared: PreparedDataset
    split: str
    rows: Rows
    cache: Literal["memory", "file", "none"]
    shuffle_buffer: int
    class_weights: tuple[float, ...] | None = None
    """As in ``ArraySource``."""
    _cached_until: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    """Holds the folder in which ``input.cache=file`` caches records; ``close`` removes it."""

    def arrays(self, batches: Batches) -> Iterator[Batch]:
        """Yield the batches in NumPy. On JAX, TensorFlow, which reads them, cannot use GPUs from then on."""
        import keras
        import tensorflow as tf

        if keras.backend.backend() == "jax":
            tf.config.set_visible_devices([], "GPU")  # It would take all memory of a GPU that JAX trains on.
        yield from batches.dataset.as_numpy_iterator()

    def dataset(self, batches: Batches) -> Any:
        """Return the ``tf.data.Dataset`` with one part of a batch for each replica of this worker, per step."""
        import tensorflow as tf

        shards, chosen = self._shards()
        records = self._cached(self._records(shards, chosen, batches.shuffle), batches)
        in_pass, section = batches.steps_in_pass, batches.augmentation

        def drawn(number: Any) -> Draws:
            return pass_draws(batches.num_examples, batches.seed, int(number), section)

        def one_pass(number: Any, first: Any, stop: Any) -> Any:
            start, end = tf.maximum(first - number * in_pass, 0), tf.minimum(stop - number * in_pass, in_pass)
            batched = self._shuffled(records, batches, number)
            batched = batched.batch(batches.global_batch_size, drop_remainder=batches.drop_remainder).skip(start)
            # -1 instead of a count at the end of the data, because only a fully read cache is complete.
            batched = batched.take(tf.where(end < in_pass, end - start, -1))
            if section is not None:
                draws = tf.ensure_shape(tf.numpy_function(drawn, [number], tf.int32), (batches.num_examples, None))

            def decode_part(step: Any, serialized: Any) -> Any:
                # Each worker reads all records and decodes its own: shares of the shards would not give equal steps.
                part, before = tf.gather(batches.parts, step), step * batches.global_batch_size
                images, labels = shards.decode(serialized[part[0] - before : part[1] - before])
                if section is not None:
                    images = augment(images, draws[part[0] : part[1]], section)
                if self.class_weights is None:
                    return images, labels
                return images, labels, tf.gather(tf.constant(self.class_weights, tf.float32), labels)

            return batched.enumerate(start).map(decode_part, num_parallel_calls=tf.data.AUTOTUNE)

        def unread() -> npt.NDArray[np.int64]:
            return np.array([batches.unread.start, batches.unread.stop])

        def begin(_: Any) -> Any:
            first, stop = tf.unstack(tf.ensure_shape(tf.numpy_function(unread, [], tf.int64), [2]))
            passes = tf.data.Dataset.range(first // in_pass, -(-stop // in_pass))
            return passes.map(lambda number: (number, first, stop))

        # Not nested, which would take 8 ms more at the start of each iteration.
        dataset = tf.data.Dataset.from_tensors(0).flat_map(begin).flat_map(one_pass)
        num_replicas = batches.share.num_replicas
        if num_replicas > 1:
            dataset = dataset.flat_map(lambda *batch: _pieces(batch, num_replicas))
        if batches.prefetch == "auto":
            return dataset.prefetch(tf.data.AUTOTUNE)
        return dataset.prefetch(batches.prefetch * num_replicas) if batches.prefetch else dataset

    def close(self) -> None:
        """Remove the cached records."""
        self._cached_until.close()

    def _shards(self) -> tuple[builders.Shards, npt.NDArray[np.bool_]]:
        """Return the files of the split, and whether each record is used."""
        prepared = self.prepared
        builder = builders.build(prepared.name, prepared.version, config.project_root() / str(prepared.raw_folder))
        held_out, split = prepared.held_out, self.split
        if held_out is not None and split == "test":
            split = "train"
        shards = builders.shards(builder, split, prepared.features["image"].shape)
        chosen = np.zeros(sum(shards.lengths), bool)
        places = np.arange(len(chosen))
        if held_out is not None and split == "train":
            held = builders.is_held_out(len(places), held_out)
            places = places[held if self.split == "test" else ~held]
        chosen[places[self.rows]] = True
        return shards, chosen

    def _records(self, shards: builders.Shards, chosen: npt.NDArray[np.bool_], shuffle: bool) -> Any:
        """Return the dataset of serialized records."""
        import tensorflow as tf

        wanted = tf.constant(chosen)
        starts = np.cumsum([0, *shards.lengths[:-1]])

        def blocks(path: Any, start: Any) -> Any:
            read = tf.data.TFRecordDataset(path).batch(RECORDS_AT_ONCE).enumerate()
            return read.map(lambda block, serialized: of_block(start + block * RECORDS_AT_ONCE, serialized))

        def of_block(first: Any, serialized: Any) -> Any:
            rows = first + tf.range(tf.size(serialized, tf.int64), dtype=tf.int64)
            return tf.boolean_mask(serialized, tf.gather(wanted, rows))

        # In blocks: the interleave took 1.6 s for 60,000 single records, and takes 0.2 s for blocks.
        many = tf.data.Dataset.from_tensor_slices((shards.paths, starts)).interleave(
            blocks,
            cycle_length=min(4, len(shards.paths)) if shuffle else 1,  # One shard after the other is their order.
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        return many.unbatch()

    def _cached(self, records: Any, batches: Batches) -> Any:
        if self.cache == "none":
            return records
        if self.cache == "memory":
            records = records.cache()
        else:
            # A new folder: TensorFlow would reuse an old file for these records, and fail on the lock of a killed run.
            self._cached_until = contextlib.ExitStack()
            folder = self._cached_until.enter_context(files.scratch(config.project_root() / "mlruns", ".cache."))
            records = records.cache(f"{folder}/records")
        if batches.steps < batches.steps_in_pass:
            # TensorFlow drops an incomplete cache, so each epoch of the first pass would read from the beginning.
            num_records = records.reduce(np.int64(0), lambda count, record: count + 1)
            log.info("input     %s records read into the cache", f"{int(num_records):,}")
        return records

    def _shuffled(self, records: Any, batches: Batches, number: Any) -> Any:
        """Return the records in the order of a pass."""
        import tensorflow as tf

        if not batches.shuffle:
            return records
        # Only the seed of this function's graph: with a graph seed of 0, from train.seed=0, TensorFlow would compare
        # the tensor below with 0 in Python, and fail.
        tf.random.set_seed(1)
        # TensorFlow allocates the whole buffer even for fewer records.
        return records.shuffle(
            min(self.shuffle_buffer, batches.num_examples),
            seed=batches.seed * 1_000_003 + number,
            reshuffle_each_iteration=False,
        )


def _pieces(batch: Batch, num_replicas: int) -> Any:
    """Cut one batch into one part per replica, as even as possible, in order."""
    import tensorflow as tf

    size = tf.shape(batch[1], out_type=tf.int64)[0]
    bounds = size * tf.range(num_replicas + 1, dtype=tf.int64) // num_replicas
    cuts = tf.data.Dataset.from_tensor_slices((bounds[:-1], bounds[1:]))
    return cuts.map(lambda first, last: tf.nest.map_structure(lambda array: array[first:last], batch))
