"""The array source: rows of prepared arrays, gathered many batches at once."""

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.input.augment import augment_batch
from tasks.input.batches import Batch, Batches
from tasks.input.order import Rows
from tasks.records import PreparedSplit, as_input
from tasks.system import background, upstream

BLOCK_BYTES = 4_000_000
"""So much is gathered at once, or one batch if that is larger: NumPy read MNIST 1.4 times as fast in blocks of 3 to
6 MB as in blocks of 1.6 or 8 MB, for any batch size."""
AHEAD = 2
"""Blocks that are gathered ahead for NumPy: with one, each waits for the thread to wake up."""


@dataclass(frozen=True)
class ArraySource:
    """Rows of prepared arrays."""

    split: PreparedSplit
    rows: Rows
    class_weights: tuple[float, ...] | None = None
    """The weight of an example of each class; None without weights."""
    fits_accelerator: bool = True
    """Whether the whole split may lie in the memory of one accelerator."""
    reads_ahead = True

    def rows_at(self, places: Rows) -> Rows:
        """Return which rows of the split's arrays lie at these places of the unshuffled data."""
        return self.rows[places]

    def mapped(self) -> Batch:
        """Return all features and labels, and weights if there are any, as memory-mapped arrays."""
        return self._complete(*_mapped(*self.files()))

    def tensors(self) -> tuple[Any, ...]:
        """Return the same as memory-mapped tensors on the CPU."""
        features, labels, weights, _ = self.files()
        x = as_input({name: mapped_tensor(path) for name, path in features})
        return self._complete(x, mapped_tensor(labels), None if weights is None else mapped_tensor(weights))

    def resident(self, put: Callable[[Any], Any] | None = None) -> tuple[Any, ...]:
        """Return the same as ``put`` keeps an array on devices, one copy for all batches; without it as tensors on the
        current device, which copies nothing on the CPU."""
        return self._complete(*_resident(*self.files(), put))

    def arrays(self, batches: Batches) -> Iterator[Batch]:
        """Yield features (n, ...) and labels (n, ...), and weights (n,) if there are any, one batch per step.

        With ``prefetch``, a thread gathers blocks while earlier ones are read; it ends with the iterator.
        """
        arrays = self.mapped()
        if batches.shuffle:
            read_at_random(arrays)

        cut = Blocks(batches, _block_steps(batches, arrays[0]) if batches.prefetch else 1)
        unread = batches.unread
        blocks = (cut.steps(number, unread) for number in cut.of(unread))

        def gather(block: range) -> Iterator[Batch]:
            return self.gather(batches, arrays, block)

        made = background.in_order(gather, blocks, 1, AHEAD, "input") if batches.prefetch else map(gather, blocks)
        for block in made:
            yield from block

    def gather(self, batches: Batches, arrays: Batch, block: range) -> Iterator[Batch]:
        """Return the batches of steps of one pass and one size, gathered at once from ``mapped()``."""
        rows, *draws = self.read(batches, block)
        num_steps, num_examples = rows.shape[:2]

        def take(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return array.take(np.concatenate(rows), axis=0)

        def by_step(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return array.reshape((num_steps, num_examples, *array.shape[1:]))

        x, *others = arrays
        taken = {name: take(array) for name, array in x.items()} if isinstance(x, Mapping) else take(x)
        batch: Batch = (taken, *map(take, others))
        if batches.augmentation is not None:
            batch = augment_batch(batch, np.concatenate(draws[0]), batches.augmentation, batches.num_classes)
        x, *others = batch
        if not isinstance(x, Mapping):
            return zip(by_step(x), *map(by_step, others), strict=True)
        named = {name: by_step(array) for name, array in x.items()}
        of_step = ({name: array[step] for name, array in named.items()} for step in range(num_steps))
        return zip(of_step, *map(by_step, others), strict=True)

    def dataset(self, batches: Batches) -> Any:
        """Return the ``tf.data.Dataset`` of one batch a step."""
        import tensorflow as tf

        arrays = self.tensors()
        if batches.shuffle:
            read_at_random(arrays)
        section = batches.augmentation
        cut = Blocks(batches, _block_steps(batches, self.mapped()[0]))

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
                lambda number, *steps: self.read(batches, cut.steps(int(number), range(*map(int, steps)))),
                block,
                [tf.int64, *([tf.int32] if section else [])],
            )
            pair = [2] if section is not None and section.mixes else []
            for tensor, columns in zip((rows, *draws), ([], [None]), strict=False):
                tensor.set_shape([None, None, *pair, *columns])
            return *tf.nest.map_structure(lambda array: tf.gather(array, rows), arrays), *draws

        dataset = tf.data.Dataset.from_tensors(0).flat_map(begin).map(gather)
        dataset = dataset.prefetch(2) if batches.prefetch else dataset
        dataset = dataset.flat_map(lambda *arrays: tf.data.Dataset.from_tensor_slices(arrays))
        if section is None:
            return dataset

        def augmented(*batch_and_draws: Any) -> tuple[Any, ...]:
            *batch, draws = batch_and_draws
            return augment_batch(tuple(batch), draws, section, batches.num_classes)

        return dataset.map(augmented, num_parallel_calls=tf.data.AUTOTUNE)

    def close(self) -> None:
        """Nothing is cached on the disk."""

    def files(self) -> tuple[tuple[tuple[str, Path], ...], Path, Path | None, tuple[str, ...]]:
        """Return the files of the features by name, of the labels and of the weights, and the sha256 of all."""
        root, split = config.project_root(), self.split
        features = tuple((name, root / path) for name, path in split.features.items())
        weights = None if split.weights is None else root / split.weights
        return features, root / split.labels, weights, tuple(split.sha256.values())

    def _complete(self, x: Any, labels: Any, weights: Any) -> tuple[Any, ...]:
        """Return features, labels and, if there are any, weights."""
        if self.class_weights is not None:
            of_class = np.array(self.class_weights, np.float32)[np.asarray(labels)]
            weights = of_class if weights is None else weights * of_class
        return (x, labels) if weights is None else (x, labels, weights)

    def read(self, batches: Batches, block: range) -> tuple[npt.NDArray[Any], ...]:
        """Return the rows that a worker reads in the steps of a block, int64 (steps, n), and with augmentation their
        draws, int32 (steps, n, columns). Where images are mixed, a dimension of two follows n.
        """
        number, first = divmod(block.start, batches.steps_in_pass)
        parts = batches.parts[first : first + len(block)]
        places = parts[:, :1] + np.arange(parts[0, 1] - parts[0, 0])  # The batches of a block have one size.
        return tuple(array[places] for array in batches.pass_rows(number) if array is not None)


class Blocks:
    """The passes, cut into blocks of at most ``most`` steps; a short last batch is a block of its own."""

    def __init__(self, batches: Batches, most: int) -> None:
        self._in_pass, self._max_steps = batches.steps_in_pass, most
        self._num_full = min(batches.num_examples // batches.global_batch_size, self._in_pass)
        self._blocks_in_pass = -(-self._num_full // most) + (self._in_pass > self._num_full)

    def of(self, steps: range) -> range:
        """Return the numbers of the blocks of these steps."""
        return range(self._number(steps.start), self._number(steps.stop - 1) + 1) if steps else range(0)

    def steps(self, number: int, within: range) -> range:
        """Return the steps of a block that are among these."""
        before, block = divmod(number, self._blocks_in_pass)
        first = min(block * self._max_steps, self._num_full)
        last = min(first + self._max_steps, self._num_full) if first < self._num_full else self._in_pass
        first, last = (before * self._in_pass + step for step in (first, last))
        return range(max(first, within.start), min(last, within.stop))

    def _number(self, step: int) -> int:
        before, place = divmod(step, self._in_pass)
        return before * self._blocks_in_pass + (
            place // self._max_steps if place < self._num_full else self._blocks_in_pass - 1
        )


def _block_steps(batches: Batches, x: Any) -> int:
    """Return how many batches of these features to gather at once."""
    batch_size = -(-batches.global_batch_size // batches.num_workers)
    arrays = x.values() if isinstance(x, Mapping) else [x]
    row_bytes: int = sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in arrays)
    return max(1, BLOCK_BYTES // (batch_size * row_bytes))


@lru_cache(maxsize=4)  # The training and the validation split are often rows of the same array.
def _mapped(
    features: tuple[tuple[str, Path], ...], labels: Path, weights: Path | None, sha256: tuple[str, ...]
) -> tuple[Any, ...]:
    """Return all arrays, memory-mapped; the hashes tell a rebuilt array from the previous one."""
    x = as_input({name: np.asarray(np.load(path, mmap_mode="r")) for name, path in features})
    others = (None if path is None else np.asarray(np.load(path, mmap_mode="r")) for path in (labels, weights))
    return x, *others


@lru_cache(maxsize=4)
def _resident(
    features: tuple[tuple[str, Path], ...],
    labels: Path,
    weights: Path | None,
    sha256: tuple[str, ...],
    put: Callable[[Any], Any] | None,
) -> tuple[Any, ...]:
    """Return all arrays where ``put`` keeps them, or as tensors on the current device; for the hashes see
    ``_mapped``."""

    if put is not None:
        import jax

        found: tuple[Any, ...] = jax.tree.map(put, _mapped(features, labels, weights, sha256))
        return found
    import tensorflow as tf

    x = as_input({name: tf.identity(mapped_tensor(path)) for name, path in features})
    return x, *(None if path is None else tf.identity(mapped_tensor(path)) for path in (labels, weights))


def read_at_random(arrays: tuple[Any, ...]) -> None:
    """Tell the system that these memory-mapped arrays or tensors are read at random.

    Otherwise it reads 128 kB around each row: of a file larger than memory 46 rows of 12 kB a second in place of 600.
    """
    madvise = ctypes.CDLL(None).madvise
    x, *others = arrays
    for array in (*(x.values() if isinstance(x, Mapping) else [x]), *others):
        if array is not None and "cpu" in array.device.lower():
            content = np.asarray(memoryview(array))
            first = content.ctypes.data - content.ctypes.data % mmap.PAGESIZE
            length = content.ctypes.data + content.nbytes - first
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_RANDOM)


def mapped_tensor(path: Path) -> Any:
    """Return the array of a .npy file as a tensor on the CPU whose memory is the file itself.

    Only pages of rows that are read come into memory, and the system can evict them: like NumPy's ``mmap_mode``, which
    TensorFlow would copy as a whole. Nothing is copied, in a graph and on another process, too.
    """
    import tensorflow as tf

    # A function of its own, because the operation alone returns the file of its first call forever.
    @tf.function(autograph=False)
    def mapped() -> Any:
        return in_graph(path)

    with tf.device("CPU:0"):
        return mapped()


def in_graph(path: Path) -> Any:
    """Return the same inside a graph, which names the file and can be sent to another process that has it."""
    import tensorflow as tf

    header = np.load(path, mmap_mode="r")
    content = upstream.bytes_of_file(str(path), path.stat().st_size)
    content = content[header.offset :]  # The header is padded, so the rest is aligned as TensorFlow needs.
    if header.dtype != np.uint8:
        content = tf.bitcast(tf.reshape(content, [-1, header.itemsize]), header.dtype)
    return tf.reshape(content, header.shape)
