"""The array source: rows of prepared arrays, gathered many batches at once."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.input.augment import augment, augment_arrays
from tasks.input.batches import Batch, Batches
from tasks.input.order import Rows
from tasks.records import PreparedSplit

BLOCK_BYTES = 4_000_000
"""How much is gathered at once, or one batch where that is more: NumPy read MNIST 1.4 times as fast in blocks of 3 to
6 MB as in those of 1.6 or of 8 MB, whatever the batch."""
AHEAD = 2
"""How many blocks are gathered ahead for NumPy: with one, each waits for the thread to wake up."""


@dataclass(frozen=True)
class ArraySource:
    """Rows of prepared arrays."""

    split: PreparedSplit
    rows: Rows
    reads_ahead = True

    def rows_at(self, places: Rows) -> Rows:
        """Return which rows of the split's arrays lie at these places of the unshuffled data."""
        return self.rows[places]

    def mapped(self) -> Batch:
        """Return all images and labels as memory-mapped arrays."""
        return _mapped(*self._files())

    def tensors(self) -> tuple[Any, Any]:
        """Return all images and labels as tensors, which lie in memory once however many batches read them."""
        return _resident(*self._files())

    def arrays(self, batches: Batches) -> Iterator[Batch]:
        """Yield images uint8 (n, height, width, channels) and labels int64 (n,), one batch a step.

        With ``prefetch``, blocks are gathered in a thread while those before are read; it ends with the iterator.
        """
        images, labels = self.mapped()

        def gather(block: range) -> Iterator[Batch]:
            rows, *draws = self._read(batches, block)
            read, shape = images.take(rows.ravel(), axis=0), (*rows.shape, *images.shape[1:])
            if batches.augmentation is not None:
                flips, corners = draws
                read = augment_arrays(read, flips.ravel(), corners.reshape(-1, 2), batches.augmentation)
            return zip(read.reshape(shape), labels.take(rows), strict=True)

        cut = Blocks(batches, _block_steps(batches, images.shape) if batches.prefetch else 1)
        unread = batches.unread
        blocks = (cut.steps(number, unread) for number in cut.of(unread))
        for block in _ahead(gather, blocks) if batches.prefetch else map(gather, blocks):
            yield from block

    def dataset(self, batches: Batches) -> Any:
        """Return the ``tf.data.Dataset`` of one batch a step."""
        import tensorflow as tf

        with tf.device("CPU:0"):  # Where tf.data gathers, whatever the strategy trains on.
            images, labels = self.tensors()
        section = batches.augmentation
        cut = Blocks(batches, _block_steps(batches, images.shape))

        def places() -> npt.NDArray[np.int64]:
            unread = batches.unread
            numbers = cut.of(unread)
            return np.array([numbers.start, numbers.stop, unread.start, unread.stop])

        def begin(_: Any) -> Any:
            first, last, start, stop = tf.unstack(tf.ensure_shape(tf.numpy_function(places, [], tf.int64), [4]))
            return tf.data.Dataset.range(first, last).map(lambda number: (number, start, stop))

        def gather(*block: Any) -> tuple[Any, ...]:
            # Once a block: asking Python for the rows of each batch takes three times as long.
            rows, *draws = tf.numpy_function(
                lambda number, *steps: self._read(batches, cut.steps(int(number), range(*map(int, steps)))),
                block,
                [tf.int64, *([tf.bool, tf.int32] if section else [])],
            )
            for tensor, shape in zip((rows, *draws), ([None] * 2, [None] * 2, [None, None, 2]), strict=False):
                tensor.set_shape(shape)
            return tf.gather(images, rows), tf.gather(labels, rows), *draws

        dataset = tf.data.Dataset.from_tensors(0).flat_map(begin).map(gather)
        dataset = dataset.prefetch(2) if batches.prefetch else dataset
        dataset = dataset.flat_map(lambda *arrays: tf.data.Dataset.from_tensor_slices(arrays))
        if section is None:
            return dataset

        def augmented(images: Any, labels: Any, flips: Any, corners: Any) -> tuple[Any, Any]:
            return augment(images, flips, corners, section), labels

        return dataset.map(augmented, num_parallel_calls=tf.data.AUTOTUNE)

    def close(self) -> None:
        """Nothing is cached on the disk."""

    def _files(self) -> tuple[Path, Path, tuple[str, ...]]:
        root = config.project_root()
        return root / self.split.features["image"], root / self.split.labels, tuple(self.split.sha256.values())

    def _read(self, batches: Batches, block: range) -> tuple[npt.NDArray[Any], ...]:
        """Return which rows a worker reads in the steps of a block, int64 (steps, n), and what ``augment`` takes for
        them: bool (steps, n) and int32 (steps, n, 2), or nothing."""
        number, first = divmod(block.start, batches.steps_in_pass)
        parts = batches.parts[first : first + len(block)]
        places = parts[:, :1] + np.arange(parts[0, 1] - parts[0, 0])  # The batches of a block have one size.
        rows = self.rows_at(batches.pass_order(number)[places])
        if batches.augmentation is None:
            return (rows,)
        return rows, *(drawn[places] for drawn in batches.pass_draws(number, batches.augmentation))


class Blocks:
    """The passes cut into blocks of so many steps or fewer; a short last batch is a block alone."""

    def __init__(self, batches: Batches, most: int) -> None:
        self._in_pass, self._most = batches.steps_in_pass, most
        self._whole = min(batches.num_examples // batches.global_batch_size, self._in_pass)
        self._blocks_in_pass = -(-self._whole // most) + (self._in_pass > self._whole)

    def of(self, steps: range) -> range:
        """Return the numbers of the blocks that these steps lie in."""
        return range(self._number(steps.start), self._number(steps.stop - 1) + 1) if steps else range(0)

    def steps(self, number: int, within: range) -> range:
        """Return which of these steps lie in a block."""
        before, block = divmod(number, self._blocks_in_pass)
        first = min(block * self._most, self._whole)
        last = min(first + self._most, self._whole) if first < self._whole else self._in_pass
        first, last = (before * self._in_pass + step for step in (first, last))
        return range(max(first, within.start), min(last, within.stop))

    def _number(self, step: int) -> int:
        before, place = divmod(step, self._in_pass)
        return before * self._blocks_in_pass + (
            place // self._most if place < self._whole else self._blocks_in_pass - 1
        )


def _block_steps(batches: Batches, shape: tuple[int, ...]) -> int:
    """Return how many batches of an array of uint8 are gathered at once."""
    batch_size = -(-batches.global_batch_size // batches.num_workers)
    return max(1, BLOCK_BYTES // (batch_size * math.prod(shape[1:])))


def _ahead(gather: Callable[[range], Iterator[Batch]], blocks: Iterable[range]) -> Iterator[Iterator[Batch]]:
    """Yield the batches of each block, while a thread gathers the next AHEAD."""
    pool, gathered = ThreadPoolExecutor(1, "input"), deque[Future[Iterator[Batch]]]()
    try:
        for block in blocks:
            gathered.append(pool.submit(gather, block))
            if len(gathered) > AHEAD:
                yield gathered.popleft().result()
        while gathered:
            yield gathered.popleft().result()
    finally:  # Also when nobody wants the rest.
        pool.shutdown(cancel_futures=True)


@lru_cache(maxsize=4)  # The training and the validation split are often rows of the same array.
def _mapped(images: Path, labels: Path, sha256: tuple[str, ...]) -> Batch:
    """Return both arrays, memory-mapped; the hashes are there to tell a rebuilt array from the one before."""
    return np.asarray(np.load(images, mmap_mode="r")), np.asarray(np.load(labels, mmap_mode="r"))


@lru_cache(maxsize=4)
def _resident(images: Path, labels: Path, sha256: tuple[str, ...]) -> tuple[Any, Any]:
    """Return both arrays as tensors."""
    import tensorflow as tf

    return tuple(tf.convert_to_tensor(np.load(path, mmap_mode="r")) for path in (images, labels))
