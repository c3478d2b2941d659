"""The batches of one split: how many, how large, in which order, and each worker's share. A source reads them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.input.draws import Draws, pass_draws, with_partners
from tasks.input.order import Rows, order

Batch: TypeAlias = tuple[Any, ...]
"""Features, labels and, where examples do not all count the same, weights float32 (n,): arrays of n rows. The features
are one array, or where there are several, arrays by name; labels are those of ``records.PreparedSplit``."""


class Source(Protocol):
    """Where the examples of a split lie, and how they are read."""

    reads_ahead: bool
    """Whether its dataset has batches ready ahead of who reads them."""

    def rows_at(self, places: Rows) -> Rows:
        """Return which rows of the split's arrays lie at these places of the unshuffled data."""

    def arrays(self, batches: "Batches") -> Iterator[Batch]:
        """Yield one batch a step in NumPy."""

    def dataset(self, batches: "Batches") -> Any:
        """Return the ``tf.data.Dataset`` of one batch a step."""

    def close(self) -> None:
        """Remove what was cached on the disk."""


@dataclass
class Batches:
    """The batches of one split, for three readers: ``dataset`` (TensorFlow), ``arrays`` (JAX), and ``rows`` and
    ``draws`` (who gathers elsewhere). The first two read from step ``start_step`` of epoch ``epoch`` to its end.

    A pass is once over the data, an epoch is ``steps_per_epoch`` steps or one pass, and a step is counted from the
    start of the run.
    """

    num_examples: int
    """Examples in the data, of all workers together."""
    global_batch_size: int
    drop_remainder: bool
    steps_per_epoch: int | None = None
    """The data go on where the epoch before left them. None is one pass."""
    epoch: int = 0
    start_step: int = 0
    source: Source | None = field(default=None, repr=False)
    """None can be counted, not read."""
    seed: int = 0
    shuffle: bool = False
    augmentation: config.Augmentation | None = None
    num_classes: int = 0
    """Of the labels, where they are classes; what mixes them asks."""
    prefetch: int | Literal["auto"] = 0
    num_replicas: int = 1
    """Of this worker."""
    worker: int = 0
    num_workers: int = 1
    divisor: int = 1
    """A batch that does not divide by it is every worker's whole."""

    @property
    def steps_in_pass(self) -> int:
        """Steps in one pass over the data."""
        whole, rest = divmod(self.num_examples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_remainder)

    @property
    def steps(self) -> int:
        """Steps in one epoch."""
        return self.steps_per_epoch or self.steps_in_pass

    @property
    def unread(self) -> range:
        """The steps of the rest of the epoch."""
        return range(self.epoch * self.steps + self.start_step, (self.epoch + 1) * self.steps)

    def size(self, step: int) -> int:
        """Return the examples of all workers together in a step: fewer in a short last batch of a pass."""
        before = step % self.steps_in_pass * self.global_batch_size
        return min(self.global_batch_size, self.num_examples - before)

    @cached_property
    def parts(self) -> npt.NDArray[np.int64]:
        """Where this worker's part of each batch of a pass begins and ends in the pass: int64 (steps_in_pass, 2)."""
        first = np.arange(self.steps_in_pass) * self.global_batch_size
        size = np.minimum(self.global_batch_size, self.num_examples - first)
        cut = size % self.divisor == 0
        worker, num_workers = np.where(cut, self.worker, 0), np.where(cut, self.num_workers, 1)
        return np.stack([first + size * (worker + i) // num_workers for i in (0, 1)], axis=1)

    def own_part(self, step: int) -> slice:
        """Return where this worker's examples of a step lie in its pass."""
        first, last = self.parts[step % self.steps_in_pass]
        return slice(first, last)

    def rows(self, step: int) -> Rows:
        """Return the rows of the split's arrays that this worker reads in a step: int64 (n,), or (n, 2) with those that
        are mixed in. Array source only."""
        return self._known_source.rows_at(self.pass_order(step // self.steps_in_pass)[self._places(step)])

    def draws(self, step: int) -> Draws | None:
        """Return what ``augment_batch`` takes for this worker's examples of a step; None when nothing is augmented."""
        if self.augmentation is None:
            return None
        return self.pass_draws(step // self.steps_in_pass, self.augmentation)[self._places(step)]

    def _places(self, step: int) -> slice | Rows:
        part, section = self.own_part(step), self.augmentation
        if section is None or not section.mixes:
            return part
        return with_partners(np.arange(part.start, part.stop), self.pass_draws(step // self.steps_in_pass, section))

    def pass_order(self, number: int) -> Rows:
        """Return the order of a pass, int64 (num_examples,)."""
        return _pass_order(self.num_examples, self.seed, self.shuffle, number)

    def pass_draws(self, number: int, section: config.Augmentation) -> Draws:
        """Return what is drawn for each place of a pass."""
        return pass_draws(self.num_examples, self.seed, number, section)

    def arrays(self) -> Iterator[Batch]:
        """Return this worker's batches in NumPy, one a step. The place is asked for with the first batch."""
        return self._known_source.arrays(self)

    @cached_property
    def dataset(self) -> Any:
        """``tf.data.Dataset`` of batches, one element a replica of this worker. The place is asked for when an
        iteration starts, so one dataset serves all epochs."""
        import tensorflow as tf

        # None of the functions in it needs AutoGraph, which took 0.5 s of a processor to rewrite those of augmented
        # arrays, and 0.6 s those of a stream.
        return tf.autograph.experimental.do_not_convert(self._make_dataset)()

    def _make_dataset(self) -> Any:
        import tensorflow as tf

        dataset = self._known_source.dataset(self)
        if self.num_replicas > 1:
            dataset = dataset.flat_map(lambda *batch: _pieces(batch, self.num_replicas))
        elif self._known_source.reads_ahead and self.augmentation is None:
            # With a thread that hands over each batch of 64, and tf.data's tuning, 0.6 million MNIST images a second
            # came instead of 1.4.
            options = tf.data.Options()
            options.autotune.enabled = False
            options.experimental_optimization.apply_default_optimizations = False
            options.experimental_optimization.inject_prefetch = False
            return dataset.with_options(options)
        return prefetched(dataset, self.prefetch, self.num_replicas)

    def close(self) -> None:
        """Remove what was cached in a file. TensorFlow keeps this object alive, so nothing else would."""
        if self.source is not None:
            self.source.close()

    @property
    def _known_source(self) -> Source:
        if self.source is None:
            raise ValueError("these batches have no source: they can be counted, not read")
        return self.source


@lru_cache(maxsize=4)  # A pass of the training, the one that is gathered ahead of it, and the validation's.
def _pass_order(num_examples: int, seed: int, shuffle: bool, number: int) -> Rows:
    return order(num_examples, seed, number) if shuffle else np.arange(num_examples)


def prefetched(dataset: Any, prefetch: int | Literal["auto"], num_elements: int) -> Any:
    """Return a dataset with so many batches of so many elements ready ahead."""
    if prefetch == "auto":
        return dataset.prefetch(-1)  # tf.data.AUTOTUNE
    return dataset.prefetch(prefetch * num_elements) if prefetch else dataset


def _pieces(batch: Batch, num_replicas: int) -> Any:
    """Cut one batch into as many parts as there are replicas, as even as can be, in order."""
    import tensorflow as tf

    size = tf.shape(batch[1], out_type=tf.int64)[0]
    bounds = size * tf.range(num_replicas + 1, dtype=tf.int64) // num_replicas
    cuts = tf.data.Dataset.from_tensor_slices((bounds[:-1], bounds[1:]))
    return cuts.map(lambda first, last: tf.nest.map_structure(lambda array: array[first:last], batch))
