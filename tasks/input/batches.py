"""The batches of one split: their number, size and order, and each worker's share. A source reads them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.input.draws import Draws, pass_draws, with_partners
from tasks.input.order import Rows, order

Batch: TypeAlias = tuple[Any, ...]
"""Features, labels and, if examples are weighted, weights float32 (n,): arrays of n rows. Features are one array, or
several by name; labels are those of ``records.PreparedSplit``."""


class InputShare(NamedTuple):
    """The part of each batch that a worker reads; by default all of it, for one replica."""

    num_replicas: int = 1
    """The replicas of this worker; the dataset has one element per replica."""
    worker: int = 0
    """The index of this worker, from 0."""
    num_workers: int = 1
    divisor: int = 1
    """Each worker gets the whole batch if its size is not a multiple of this."""


WHOLE = InputShare()


@dataclass
class Batches:
    """The batches of one split: ``rows`` and ``draws`` for steps that gather rows on the device, ``arrays`` in NumPy,
    and ``dataset`` of a stream for TensorFlow. The last two read epoch ``epoch`` from step ``start_step`` on.

    A pass reads the data once, an epoch is ``steps_per_epoch`` steps or one pass, and steps are counted from the start
    of the run.
    """

    num_examples: int
    """Examples in the data, of all workers together."""
    global_batch_size: int
    drop_remainder: bool
    steps_per_epoch: int | None = None
    """An epoch continues where the previous one ended. None is one pass."""
    epoch: int = 0
    start_step: int = 0
    source: Any = field(default=None, repr=False)
    """An ``ArraySource`` or a ``StreamSource``; without one, batches can be counted but not read."""
    seed: int = 0
    shuffle: bool = False
    augmentation: config.Augmentation | None = None
    num_classes: int = 0
    """Of labels that are classes, for mixup and cutmix; else 0."""
    prefetch: int | Literal["auto"] = 0
    share: InputShare = WHOLE
    """Of this worker."""

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

    def alike(self, steps: range, most: int) -> Iterator[range]:
        """Yield these steps in parts of at most ``most``, each with a single pass and batch size."""
        first = steps.start
        while first < steps.stop:
            last = first + 1
            while last - first < most and last < steps.stop and last % self.steps_in_pass:
                if self.size(last) != self.size(first):
                    break
                last += 1
            yield range(first, last)
            first = last

    @cached_property
    def parts(self) -> npt.NDArray[np.int64]:
        """Begin and end, in the pass, of this worker's part of each batch: int64 (steps_in_pass, 2)."""
        first = np.arange(self.steps_in_pass) * self.global_batch_size
        size = np.minimum(self.global_batch_size, self.num_examples - first)
        cut = size % self.share.divisor == 0
        worker, num_workers = np.where(cut, self.share.worker, 0), np.where(cut, self.share.num_workers, 1)
        return np.stack([first + size * (worker + i) // num_workers for i in (0, 1)], axis=1)

    def own_part(self, step: int) -> slice:
        """Return the places in the pass of this worker's examples of a step."""
        first, last = self.parts[step % self.steps_in_pass]
        return slice(first, last)

    def rows(self, step: int) -> Rows:
        """Return the rows of the split's arrays that this worker reads in a step: int64 (n,), or (n, 2) with the rows
        to mix in. Array source only."""
        return self.pass_rows(step // self.steps_in_pass)[0][self.own_part(step)]

    def draws(self, step: int) -> Draws | None:
        """Return the draws of ``augment_batch`` for this worker's examples of a step; None without augmentation."""
        _, draws = self.pass_rows(step // self.steps_in_pass)
        return None if draws is None else draws[self.own_part(step)]

    @cached_property
    def pass_rows(self) -> Callable[[int], tuple[Rows, Draws | None]]:
        """Takes the number of a pass; returns its ``rows`` and ``draws`` for all workers."""

        @lru_cache(maxsize=2)  # A pass, and the one that is gathered ahead of it.
        def of_pass(number: int) -> tuple[Rows, Draws | None]:
            rows, section = self.source.rows, self.augmentation
            if self.shuffle:
                rows = rows[order(self.num_examples, self.seed, number)]
            if section is None:
                return rows, None
            draws = pass_draws(self.num_examples, self.seed, number, section)
            if section.mixes:
                pairs = with_partners(np.arange(self.num_examples), draws)
                return rows[pairs], draws[pairs]
            return rows, draws

        return of_pass

    def arrays(self) -> Iterator[Batch]:
        """Return this worker's batches in NumPy, one per step. The position is read with the first batch."""
        arrays: Iterator[Batch] = self.source.arrays(self)
        return arrays

    @cached_property
    def dataset(self) -> Any:
        """Of a stream: the ``tf.data.Dataset`` of batches, one element per replica of this worker. The position is
        read when an iteration starts, so one dataset serves all epochs."""
        import tensorflow as tf

        # The functions do not need AutoGraph, whose conversion took 0.6 s of CPU time.
        return tf.autograph.experimental.do_not_convert(self.source.dataset)(self)

    def close(self) -> None:
        """Remove cached files. TensorFlow keeps this object alive, so nothing else would."""
        self.source.close()
