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

from tasks import config
from tasks.input.augment import augment_batch
from tasks.input.batches import Batch, Batches
from tasks.input.order import Rows
from tasks.records import PreparedSplit, as_input
from tasks.system import background, upstream

BLOCK_BYTES = 4_000_000
"""The size of a block, which is gathered at once, or one batch if that is larger: NumPy read MNIST 1.4 times as fast in
blocks of 3 to 6 MB as in blocks of 1.6 or 8 MB, for any batch size."""
AHEAD = 2
"""How many blocks are gathered ahead for NumPy: with one, each waits for the thread to wake up."""


@dataclass(frozen=True)
class ArraySource:
    """Rows of prepared arrays."""

    split: PreparedSplit
    rows: Rows
    class_weights: tuple[float, ...] | None = None
    """The weight of an example of each class; None without weights."""
    fits_accelerator: bool = True
    """Whether the whole split may be kept in the memory of one accelerator."""

    def mapped(self) -> Batch:
        """Return all features and labels, and weights if there are any, as memory-mapped arrays."""
        return self._complete(*_mapped(*self.files()))

    def resident(self, put: Callable[[Any], Any] | None = None) -> tuple[Any, ...]:
        """Return the same arrays on devices, placed by ``put`` once for all batches; without it, as tensors on the
        current device, which copies nothing on the CPU."""
        return self._complete(*_resident(*self.files(), put))

    def arrays(self, batches: Batches) -> Iterator[Batch]:
        """Yield features (n, ...) and labels (n, ...), and weights (n,) if there are any, one batch per step.

        With ``prefetch``, a thread gathers blocks in advance; it ends with the iterator.
        """
        arrays = self.mapped()
        if batches.shuffle:
            read_at_random(arrays)

        blocks = batches.alike(batches.unread, _block_steps(batches, arrays[0]) if batches.prefetch else 1)

        def gather(block: range) -> list[Batch]:
            return self.gather(batches, arrays, block)

        made = background.in_order(gather, blocks, 1, AHEAD, "input") if batches.prefetch else map(gather, blocks)
        for block in made:
            yield from block

    def gather(self, batches: Batches, arrays: Batch, block: range) -> list[Batch]:
        """Return the batches of steps with the same pass and size, gathered at once from ``mapped()``."""
        rows = np.concatenate([batches.rows(step) for step in block])
        batch: Batch = tuple(_each(lambda array: array.take(rows, axis=0), one) for one in arrays)
        if batches.augmentation is not None:
            draws = np.concatenate([batches.draws(step) for step in block])
            batch = augment_batch(batch, draws, batches.augmentation, batches.num_classes)
        size = len(rows) // len(block)

        def part(place: int) -> Batch:
            own = slice(place * size, (place + 1) * size)
            return tuple(_each(lambda array: array[own], one) for one in batch)

        return list(map(part, range(len(block))))

    def close(self) -> None:
        """Do nothing, because nothing is cached on disk."""

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


def _each(function: Callable[[Any], Any], one: Any) -> Any:
    """Apply a function to an array, or to each array of features by name."""
    return {name: function(array) for name, array in one.items()} if isinstance(one, Mapping) else function(one)


def _block_steps(batches: Batches, x: Any) -> int:
    """Return the number of batches of these features to gather at once."""
    batch_size = -(-batches.global_batch_size // batches.share.num_workers)
    arrays = x.values() if isinstance(x, Mapping) else [x]
    row_bytes: int = sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in arrays)
    return max(1, BLOCK_BYTES // (batch_size * row_bytes))


@lru_cache(maxsize=4)  # The training and the validation split are often rows of the same array.
def _mapped(
    features: tuple[tuple[str, Path], ...], labels: Path, weights: Path | None, sha256: tuple[str, ...]
) -> tuple[Any, ...]:
    """Return all arrays, memory-mapped; the hashes distinguish a rebuilt array from the previous one."""
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
    """Return all arrays as placed by ``put``, or as tensors on the current device; for the hashes see ``_mapped``."""
    if put is not None:
        import jax

        found: tuple[Any, ...] = jax.tree.map(put, _mapped(features, labels, weights, sha256))
        return found
    import tensorflow as tf

    x = as_input({name: tf.identity(mapped_tensor(path)) for name, path in features})
    return x, *(None if path is None else tf.identity(mapped_tensor(path)) for path in (labels, weights))


def read_at_random(arrays: tuple[Any, ...]) -> None:
    """Advise the kernel that these memory-mapped arrays or tensors are read at random.

    By default, it reads 128 kB around each row: from a file larger than memory, 46 rows of 12 kB per second, not 600.
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

    Only pages of rows that are read are loaded, and the kernel can evict them, as with NumPy's ``mmap_mode``, whose
    arrays TensorFlow would copy as a whole. Nothing is copied, not even in a graph or another process.
    """
    import tensorflow as tf

    # In a function, because the operation alone always returns the file of its first call.
    @tf.function(autograph=False)
    def mapped() -> Any:
        header = np.load(path, mmap_mode="r")
        content = upstream.bytes_of_file(str(path), path.stat().st_size)
        content = content[header.offset :]  # The header is padded, so the rest is aligned as TensorFlow needs.
        if header.dtype != np.uint8:
            content = tf.bitcast(tf.reshape(content, [-1, header.itemsize]), header.dtype)
        return tf.reshape(content, header.shape)

    with tf.device("CPU:0"):
        return mapped()
