"""The batches of one split: their number, size and order, and each worker's share. A source reads them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.input.draws import Draws, pass_draws, with_partners
from tasks.input.order import Rows, order

Batch: TypeAlias = tuple[Any, ...]
"""Features, labels and, if examples are weighted, weights float32 (n,): arrays of n rows. Features are one array, or
several by name; labels are those of ``records.PreparedSplit``."""


class Source(Protocol):
    """Reads the examples of a split."""

    reads_ahead: bool
    """Whether its dataset prefetches batches by itself."""

    def rows_at(self, places: Rows) -> Rows:
        """Return which rows of the split's arrays lie at these places of the unshuffled data."""

    def arrays(self, batches: "Batches") -> Iterator[Batch]:
        """Yield one batch a step in NumPy."""

    def dataset(self, batches: "Batches") -> Any:
        """Return the ``tf.data.Dataset`` of one batch a step."""

    def close(self) -> None:
        """Remove cached files."""


@dataclass
class Batches:
    """The batches of one split: ``dataset`` for TensorFlow, ``arrays`` for JAX, and ``rows`` and ``draws`` for code
    that gathers by itself. The first two read from step ``start_step`` of epoch ``epoch`` to its end.

    A pass goes once over the data, an epoch is ``steps_per_epoch`` steps or one pass, and steps are counted from the
    start of the run.
    """

    num_examples: int
    """Examples in the data, of all workers together."""
    global_batch_size: int
    drop_remainder: bool
    steps_per_epoch: int | None = None
    """An epoch continues where the previous one ended. None is one pass."""
    epoch: int = 0
    start_step: int = 0
    source: Source | None = field(default=None, repr=False)
    """Without a source, batches can be counted but not read."""
    seed: int = 0
    shuffle: bool = False
    augmentation: config.Augmentation | None = None
    num_classes: int = 0
    """Of labels that are classes, for mixup and cutmix; else 0."""
    prefetch: int | Literal["auto"] = 0
    num_replicas: int = 1
    """Of this worker."""
    worker: int = 0
    num_workers: int = 1
    divisor: int = 1
    """Each worker gets the whole of a batch whose size is not a multiple of it."""

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
        """Return the number of examples of all workers in a step: fewer in a short last batch of a pass."""
        before = step % self.steps_in_pass * self.global_batch_size
        return min(self.global_batch_size, self.num_examples - before)

    @cached_property
    def parts(self) -> npt.NDArray[np.int64]:
        """Begin and end, in the pass, of this worker's part of each batch: int64 (steps_in_pass, 2)."""
        first = np.arange(self.steps_in_pass) * self.global_batch_size
        size = np.minimum(self.global_batch_size, self.num_examples - first)
        cut = size % self.divisor == 0
        worker, num_workers = np.where(cut, self.worker, 0), np.where(cut, self.num_workers, 1)
        return np.stack([first + size * (worker + i) // num_workers for i in (0, 1)], axis=1)

    def own_part(self, step: int) -> slice:
        """Return the places of this worker's examples of a step in its pass."""
        first, last = self.parts[step % self.steps_in_pass]
        return slice(first, last)

    def rows(self, step: int) -> Rows:
        """Return the rows of the split's arrays that this worker reads in a step: int64 (n,), or (n, 2) with the rows
        to mix in. Array source only."""
        return self._known_source.rows_at(self._places(step // self.steps_in_pass)[0][self.own_part(step)])

    def draws(self, step: int) -> Draws | None:
        """Return the draws of ``augment_batch`` for this worker's examples of a step; None without augmentation."""
        _, draws = self._places(step // self.steps_in_pass)
        return None if draws is None else draws[self.own_part(step)]

    def pass_rows(self, number: int) -> tuple[Rows, Draws | None]:
        """Return ``rows`` and ``draws`` of a whole pass, of all workers."""
        places, draws = self._places(number)
        return self._known_source.rows_at(places), draws

    @cached_property
    def _places(self) -> Callable[[int], tuple[Rows, Draws | None]]:
        """Takes a pass; returns the places of the unshuffled data in its order, and the draws for them."""

        @lru_cache(maxsize=2)  # A pass, and the one that is gathered ahead of it.
        def places_of(number: int) -> tuple[Rows, Draws | None]:
            places, section = self.pass_order(number), self.augmentation
            if section is None:
                return places, None
            draws = self.pass_draws(number, section)
            if section.mixes:
                pairs = with_partners(np.arange(self.num_examples), draws)
                return places[pairs], draws[pairs]
            return places, draws

        return places_of

    def pass_order(self, number: int) -> Rows:
        """Return the order of a pass, int64 (num_examples,)."""
        return _pass_order(self.num_examples, self.seed, self.shuffle, number)

    def pass_draws(self, number: int, section: config.Augmentation) -> Draws:
        """Return the draws for each place of a pass."""
        return pass_draws(self.num_examples, self.seed, number, section)

    def arrays(self) -> Iterator[Batch]:
        """Return this worker's batches in NumPy, one per step. The position is read with the first batch."""
        return self._known_source.arrays(self)

    @cached_property
    def dataset(self) -> Any:
        """``tf.data.Dataset`` of batches, one element per replica of this worker. The position is read when an
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
        """Remove cached files. TensorFlow keeps this object alive, so nothing else would."""
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
    """Return a dataset that prefetches ``prefetch`` batches of ``num_elements`` elements."""
    if prefetch == "auto":
        return dataset.prefetch(-1)  # tf.data.AUTOTUNE
    return dataset.prefetch(prefetch * num_elements) if prefetch else dataset


def _pieces(batch: Batch, num_replicas: int) -> Any:
    """Cut one batch into one part per replica, as even as possible, in order."""
    import tensorflow as tf

    size = tf.shape(batch[1], out_type=tf.int64)[0]
    bounds = size * tf.range(num_replicas + 1, dtype=tf.int64) // num_replicas
    cuts = tf.data.Dataset.from_tensor_slices((bounds[:-1], bounds[1:]))
    return cuts.map(lambda first, last: tf.nest.map_structure(lambda array: array[first:last], batch))
