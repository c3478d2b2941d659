"""From prepared data to batches: which examples, in which order, cut into which pieces.

The order of a pass over the data is a function of (seed, pass) alone, and the place in it is one integer, the step. So
a resumed run reads what the killed one would have read, and worker i of n computes its part without talking to the
others. Rows and augmentation are drawn in NumPy, for every backend alike; only what reads with TensorFlow imports it.
"""

import itertools
import logging
import math
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tasks import config, datasets, prepared_data, raw_data
from tasks.errors import UserError
from tasks.records import PreparedDataset, PreparedSplit

Rows = npt.NDArray[np.int64]
Draws = tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]
"""Which images are mirrored, bool (n,), and the top left corner of each crop in its padded image, int32 (n, 2)."""
Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

GATHERED_BYTES = 4_000_000
"""How much the array source gathers at once, or one batch where that is more: NumPy read MNIST 1.4 times as fast in
blocks of 3 to 6 MB as in those of 1.6 or of 8 MB, whatever the batch."""
PLANNED_STEPS = 100_000
"""Steps of whole passes that are planned at once, whatever train.steps_per_epoch is: 2147483648 took 13 GB."""
AHEAD = 2
"""How many of those are gathered ahead for NumPy: with one, each waits for the thread to wake up."""
RECORDS_AT_ONCE = 32
"""How many records of a shard follow each other before those of the next: a small shuffle buffer still mixes shards."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArraySource:
    """Rows of prepared arrays."""

    split: PreparedSplit
    rows: Rows

    def mapped(self) -> Batch:
        """Return all images and labels as memory-mapped arrays."""
        return _mapped(*self._files())

    def tensors(self) -> tuple[Any, Any]:
        """Return all images and labels as tensors, which lie in memory once however many batches read them."""
        return _resident(*self._files())

    def _files(self) -> tuple[Path, Path, tuple[str, ...]]:
        root = config.project_root()
        return root / self.split.images, root / self.split.labels, tuple(self.split.sha256.values())


@dataclass(frozen=True)
class StreamSource:
    """Rows of TFRecord shards, which need not fit in memory."""

    prepared: PreparedDataset
    split: str
    rows: Rows
    cache: Literal["memory", "file", "none"]
    shuffle_buffer: int


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
    source: ArraySource | StreamSource | None = field(default=None, repr=False)
    """None can be counted, not read."""
    seed: int = 0
    shuffle: bool = False
    augmentation: config.Augmentation | None = None
    prefetch: int | Literal["auto"] = 0
    num_replicas: int = 1
    """Of this worker."""
    worker: int = 0
    num_workers: int = 1
    cache_folder: Any = field(default=None, repr=False)
    """What the ``stream`` source caches in, with ``input.cache=file``; ``close`` removes it."""

    @property
    def steps_in_pass(self) -> int:
        """Steps in one pass over the data."""
        whole, rest = divmod(self.num_examples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_remainder)

    @property
    def steps(self) -> int:
        """Steps in one epoch."""
        return self.steps_per_epoch or self.steps_in_pass

    def size(self, step: int) -> int:
        """Return the examples of all workers together in a step: fewer in a short last batch of a pass."""
        before = step % self.steps_in_pass * self.global_batch_size
        return min(self.global_batch_size, self.num_examples - before)

    def place(self, step: int) -> slice:
        """Return where this worker's examples of a step lie in its pass."""
        return self._part(step)[1]

    def rows(self, step: int) -> Rows:
        """Return the rows of the split's arrays that this worker reads in a step, int64 (n,). Array source only."""
        if not isinstance(self.source, ArraySource):
            raise ValueError("a stream is shuffled in a buffer: which rows a step reads is not known beforehand")
        number, part = self._part(step)
        return self.source.rows[_pass_order(self.num_examples, self.seed, self.shuffle, number)[part]]

    def draws(self, step: int) -> Draws | None:
        """Return what ``augment`` takes for this worker's examples of a step; None when nothing is augmented."""
        if self.augmentation is None:
            return None
        number, part = self._part(step)
        flips, corners = _pass_draws(self.num_examples, self.seed, number, self.augmentation)
        return flips[part], corners[part]

    def arrays(self) -> Iterator[Batch]:
        """Yield images uint8 (n, height, width, channels) and labels int64 (n,) of this worker, one batch a step.

        The place is asked for with the first batch. With ``prefetch``, many batches are gathered at once, in a thread,
        while those before are read; it ends with the iterator. With the ``stream`` source they come from
        TensorFlow, which then leaves the GPUs alone.
        """
        if not isinstance(self.source, ArraySource):
            import tensorflow as tf

            tf.config.set_visible_devices([], "GPU")  # It would take all memory of a GPU that JAX trains on.
            yield from self._prefetched(self._whole, 1).as_numpy_iterator()
            return
        source, (images, labels) = self.source, self.source.mapped()

        def gather(number: int, first: int, last: int) -> Iterator[Batch]:
            rows, draws = self._read(source, number, first, last)
            block, its_labels = images.take(rows, axis=0), labels.take(rows)
            if draws is not None and self.augmentation is not None:
                block = augment_arrays(block, *draws, self.augmentation)
            ends = itertools.accumulate((end - start for start, end in self._parts[first:last].tolist()), initial=0)
            return ((block[start:end], its_labels[start:end]) for start, end in itertools.pairwise(ends))

        many = _at_once(-(-self.global_batch_size // self.num_workers), images.shape) if self.prefetch else 1
        blocks = (block for chunk in range(self._chunks) for block in self._blocks(many, chunk).tolist())
        for block in _ahead(gather, blocks) if self.prefetch else itertools.starmap(gather, blocks):
            yield from block

    @cached_property
    def dataset(self) -> Any:
        """``tf.data.Dataset`` of (images uint8 (n, height, width, channels), labels int64 (n,)), one element a replica
        of this worker. The place is asked for when an iteration starts, so one dataset serves all epochs."""
        dataset = self._whole
        if self.num_replicas > 1:
            dataset = dataset.flat_map(lambda images, labels: _pieces(images, labels, self.num_replicas))
        return self._prefetched(dataset, self.num_replicas)

    def close(self) -> None:
        """Remove what was cached in a file. TensorFlow keeps this object alive, so nothing else would."""
        if self.cache_folder is not None:
            self.cache_folder.cleanup()

    @cached_property
    def _parts(self) -> npt.NDArray[np.int64]:
        """Where this worker's part of each batch of a pass begins and ends in the pass: int64 (steps_in_pass, 2)."""
        first = np.arange(self.steps_in_pass) * self.global_batch_size
        size = np.minimum(self.global_batch_size, self.num_examples - first)
        return np.stack([first + size * (self.worker + i) // self.num_workers for i in (0, 1)], axis=1)

    def _part(self, step: int) -> tuple[int, slice]:
        """Return the pass that a step lies in, and where this worker's part of it lies there."""
        number, place = divmod(step, self.steps_in_pass)
        first, last = self._parts[place]
        return number, slice(first, last)

    @property
    def _chunks(self) -> int:
        """What the rest of an epoch is asked for in, so that no list grows with ``train.steps_per_epoch``."""
        return -(-(self.steps // self.steps_in_pass + 2) // self._passes_at_once)

    @property
    def _passes_at_once(self) -> int:
        return max(1, PLANNED_STEPS // self.steps_in_pass)

    def _unread(self, chunk: int) -> npt.NDArray[np.int64]:
        """Return a chunk of the rest of the epoch, cut where a pass ends: int64 (n, 3), a pass and the steps of it to
        begin with and to end before."""
        steps = range(self.epoch * self.steps + self.start_step, (self.epoch + 1) * self.steps)
        in_pass = self.steps_in_pass
        first = steps.start // in_pass + chunk * self._passes_at_once
        passes = np.arange(first, min(first + self._passes_at_once, -(-steps.stop // in_pass)))
        starts = np.maximum(steps.start - passes * in_pass, 0)
        ends = np.minimum(steps.stop - passes * in_pass, in_pass)
        return np.stack([passes, starts, ends], axis=1)

    def _blocks(self, many: int, chunk: int) -> npt.NDArray[np.int64]:
        """Return what ``_unread`` returns, cut into blocks of so many steps or fewer; a short batch is one alone."""
        whole = self.num_examples // self.global_batch_size
        blocks = [
            (number, first, min(first + many, last))
            for number, start, end in self._unread(chunk).tolist()
            for begin, last in ((start, min(end, whole)), (max(start, whole), end))
            for first in range(begin, last, many)
        ]
        return np.array(blocks, np.int64).reshape(-1, 3)

    def _read(self, source: ArraySource, number: int, start: int, end: int) -> tuple[Rows, Draws | None]:
        """Return which rows this worker reads in steps ``start`` to ``end`` - 1 of a pass, and what ``augment`` takes
        for them; None when nothing is augmented."""
        parts = self._parts[start:end].tolist()

        def places(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([values[first:last] for first, last in parts])

        rows = source.rows[places(_pass_order(self.num_examples, self.seed, self.shuffle, number))]
        if self.augmentation is None:
            return rows, None
        flips, corners = _pass_draws(self.num_examples, self.seed, number, self.augmentation)
        return rows, (places(flips), places(corners))

    def _prefetched(self, dataset: Any, num_elements: int) -> Any:
        """Make batches of so many elements ready ahead."""
        if isinstance(self.source, ArraySource) and self.num_replicas == 1 and self.augmentation is None:
            import tensorflow as tf

            # The blocks are ready ahead already. With a thread that hands over each batch of 64, and tf.data's tuning,
            # 0.6 million MNIST images a second came instead of 1.4.
            options = tf.data.Options()
            options.autotune.enabled = False
            options.experimental_optimization.apply_default_optimizations = False
            options.experimental_optimization.inject_prefetch = False
            return dataset.with_options(options)
        if self.prefetch == "auto":
            return dataset.prefetch(-1)  # tf.data.AUTOTUNE
        return dataset.prefetch(self.prefetch * num_elements) if self.prefetch else dataset

    @cached_property
    def _whole(self) -> Any:
        """The dataset with one element a step: source -> batch -> augmentation."""
        if isinstance(self.source, ArraySource):
            return _gathered(self, self.source)
        if isinstance(self.source, StreamSource):
            return _streamed(self, self.source)
        raise ValueError("these batches have no source: they can be counted, not read")


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
        again = f"Prepare it again, which makes one: stratagem prepare --set dataset.name={prepared.name} --force"
        remedy = "Give input.validation=0.1" if validation in splits else again
        raise UserError(
            f"dataset {prepared.name} has the splits {', '.join(splits)} and input.validation = {validation!r}: "
            f"nothing is left to test on. {remedy}"
        )
    use["test"] = (test, everything[test])
    return use


def order(num_examples: int, seed: int, epoch: int | None) -> Rows:
    """Return a permutation of ``range(num_examples)``, int64 (num_examples,), that depends on (seed, epoch) alone.

    ``epoch`` None is the draw of the validation examples. Raw Philox words are sorted, because NumPy keeps a bit
    generator's words the same for ever, and promises nothing of the kind for ``Generator.permutation``. Each word has
    its place in its lowest bits, so no two are equal, and the values themselves are sorted: 0.7 ms for 60,000, where a
    stable argsort takes 5.2 ms, a third of the time in which NumPy reads MNIST.
    """
    words = np.random.Philox(key=[seed, 0 if epoch is None else epoch + 1]).random_raw(num_examples)
    places = np.uint64((1 << num_examples.bit_length()) - 1)
    words = words & ~places | np.arange(num_examples, dtype=np.uint64)
    words.sort()
    return (words & places).astype(np.int64)


@lru_cache(maxsize=4)  # A pass of the training, the one that is gathered ahead of it, and the validation's.
def _pass_order(num_examples: int, seed: int, shuffle: bool, number: int) -> Rows:
    return order(num_examples, seed, number) if shuffle else np.arange(num_examples)


@lru_cache(maxsize=2)
def _pass_draws(num_examples: int, seed: int, number: int, section: config.Augmentation) -> Draws:
    """Return the draws of a pass: one Philox word for each place in it, whoever reads that place.

    The counter's last word is 1: ``order`` starts at 0 under the same key, and the two must not share words.
    """
    words = np.random.Philox(key=[seed, number + 1], counter=[0, 0, 0, 1]).random_raw(num_examples)
    flips, words = words % 2 == 1, words // 2
    span = 2 * section.crop_padding + 1
    corners = np.stack([words % span, words // span % span], axis=1).astype(np.int32)
    return flips & section.flip, corners


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


def check_augmentation(section: config.Augmentation, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` when images are padded so far that a crop can miss them altogether."""
    height, width, _ = prepared.image_shape
    if section.crop_padding >= min(height, width):
        raise UserError(
            f"input.augmentation.crop_padding = {section.crop_padding}: the images of {prepared.name} have {height} x "
            f"{width} pixels, and a crop would hold nothing of them. Give less than {min(height, width)}"
        )


def training(
    settings: config.Settings,
    prepared: PreparedDataset,
    global_batch_size: int,
    num_replicas: int = 1,
    worker: int = 0,
    num_workers: int = 1,
) -> Batches:
    """Return the training batches: shuffled anew each pass, augmented if asked, this worker's part of each global
    batch.

    Args:
        settings: ``input``, ``train.seed`` and ``train.steps_per_epoch`` are read.
        prepared: the data.
        global_batch_size: examples in one step of all workers together.
        num_replicas: replicas of this worker; the dataset has one element for each.
        worker: number of this worker, from 0.
        num_workers: number of workers.

    Raises:
        UserError: the batch is larger than the split, or there is no such split.
    """
    section = settings.input
    split, rows = carve(prepared, section.validation, settings.train.seed)["train"]
    check_batch(global_batch_size, len(rows), prepared)
    megabytes = f"{_train_bytes(prepared) / 1e6:,.1f} of {section.memory_budget_bytes / 1e6:,.0f} MB"
    chosen = choose_source(section, prepared)
    log.info(
        "input     %s source (%s), %s of %s examples a step", chosen, megabytes, global_batch_size, f"{len(rows):,}"
    )
    return Batches(
        len(rows),
        global_batch_size,
        section.drop_remainder,
        settings.train.steps_per_epoch,
        source=_source(section, prepared, split, rows),
        seed=settings.train.seed,
        shuffle=section.shuffle,
        augmentation=section.augmentation if section.augmentation.flip or section.augmentation.crop_padding else None,
        prefetch=section.prefetch,
        num_replicas=num_replicas,
        worker=worker,
        num_workers=num_workers,
    )


def verify(section: config.Input, prepared: PreparedDataset) -> None:
    """Compare what these settings read with what the data version says.

    Raises:
        UserError: names the file that is missing, damaged or changed, and what makes it again.
    """
    prepared_data.verify(prepared)
    if choose_source(section, prepared) == "stream":
        raw_data.verify(prepared)


def ordered(
    settings: config.Settings,
    prepared: PreparedDataset,
    use: str,
    global_batch_size: int,
    num_replicas: int = 1,
    worker: int = 0,
    num_workers: int = 1,
) -> Batches:
    """Return the batches of ``validation`` or ``test``: every example once, always in the same order, never
    augmented; this worker's part of each."""
    section = settings.input
    split, rows = carve(prepared, section.validation, settings.train.seed)[use]
    return Batches(
        len(rows),
        min(global_batch_size, len(rows)),
        drop_remainder=False,
        source=_source(section, prepared, split, rows),
        prefetch=section.prefetch,
        num_replicas=num_replicas,
        worker=worker,
        num_workers=num_workers,
    )


def augment(images: Any, flips: Any, corners: Any, section: config.Augmentation) -> Any:
    """Return images uint8 (n, height, width, channels), mirrored and cropped as drawn, as a tensor of that shape.

    Args:
        images: a tensor.
        flips: which are mirrored left to right, bool (n,).
        corners: top and left of each crop in the padded image, int32 (n, 2).
        section: what is done at all, and the padding.
    """
    import tensorflow as tf

    height, width, padding = images.shape[1], images.shape[2], section.crop_padding
    if section.flip:
        images = tf.where(flips[:, None, None, None], tf.reverse(images, [2]), images)
    if padding:
        padded = tf.pad(images, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
        images = tf.gather(padded, corners[:, :1] + tf.range(height), axis=1, batch_dims=1)
        images = tf.gather(images, corners[:, 1:] + tf.range(width), axis=2, batch_dims=1)
    return images


def augment_arrays(
    images: npt.NDArray[np.uint8],
    flips: npt.NDArray[np.bool_],
    corners: npt.NDArray[np.int32],
    section: config.Augmentation,
) -> npt.NDArray[np.uint8]:
    """Return what ``augment`` returns, to the bit, without TensorFlow."""
    size, padding = images.shape[1:3], section.crop_padding
    if section.flip:
        images = np.where(flips[:, None, None, None], images[:, :, ::-1], images)
    if padding:
        padded = np.pad(images, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
        crops = np.lib.stride_tricks.sliding_window_view(padded, size, axis=(1, 2))
        images = np.moveaxis(crops, 3, -1)[np.arange(len(images)), corners[:, 0], corners[:, 1]]
    return images


def _source(section: config.Input, prepared: PreparedDataset, split: str, rows: Rows) -> ArraySource | StreamSource:
    if choose_source(section, prepared) == "array":
        return ArraySource(prepared.splits[split], rows)
    return StreamSource(prepared, split, rows, section.cache, section.shuffle_buffer)


def _ahead(
    gather: Callable[[int, int, int], Iterator[Batch]], blocks: Iterable[tuple[int, int, int]]
) -> Iterator[Iterator[Batch]]:
    """Yield the batches of each block, while a thread gathers the next AHEAD."""
    pool, gathered = ThreadPoolExecutor(1, "input"), deque[Future[Iterator[Batch]]]()
    try:
        for block in blocks:
            gathered.append(pool.submit(gather, *block))
            if len(gathered) > AHEAD:
                yield gathered.popleft().result()
        while gathered:
            yield gathered.popleft().result()
    finally:  # Also when nobody wants the rest.
        pool.shutdown(cancel_futures=True)


def _pieces(images: Any, labels: Any, num_replicas: int) -> Any:
    """Cut one batch into as many parts as there are replicas, as even as can be, in order."""
    import tensorflow as tf

    size = tf.shape(labels, out_type=tf.int64)[0]
    bounds = size * tf.range(num_replicas + 1, dtype=tf.int64) // num_replicas
    cuts = tf.data.Dataset.from_tensor_slices((bounds[:-1], bounds[1:]))
    return cuts.map(lambda first, last: (images[first:last], labels[first:last]))


def _at_once(batch_size: int, shape: tuple[int, ...]) -> int:
    """Return how many batches of an array of uint8 are gathered at once."""
    return max(1, GATHERED_BYTES // (batch_size * math.prod(shape[1:])))


@lru_cache(maxsize=4)  # The training and the validation split are often rows of the same array.
def _mapped(images: Path, labels: Path, sha256: tuple[str, ...]) -> Batch:
    """Return both arrays, memory-mapped; the hashes are there to tell a rebuilt array from the one before."""
    return np.asarray(np.load(images, mmap_mode="r")), np.asarray(np.load(labels, mmap_mode="r"))


@lru_cache(maxsize=4)
def _resident(images: Path, labels: Path, sha256: tuple[str, ...]) -> tuple[Any, Any]:
    """Return both arrays as tensors."""
    import tensorflow as tf

    return tuple(tf.convert_to_tensor(np.load(path, mmap_mode="r")) for path in (images, labels))


def _gathered(batches: Batches, source: ArraySource) -> Any:
    """Return the dataset of batches that are rows of arrays that lie in memory."""
    import tensorflow as tf

    with tf.device("CPU:0"):  # Where tf.data gathers, whatever the strategy trains on.
        images, labels = source.tensors()
    section = batches.augmentation
    many = _at_once(-(-batches.global_batch_size // batches.num_workers), images.shape)

    def read(block: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], ...]:
        rows, draws = batches._read(source, *block.tolist())
        return rows, *(draws or ())

    def gather(block: Any) -> tuple[Any, ...]:
        # Once a block: asking Python for the rows of each batch takes three times as long.
        rows, *draws = tf.numpy_function(read, [block], [tf.int64, *([tf.bool, tf.int32] if section else [])])
        for tensor, shape in zip((rows, *draws), ([None], [None], [None, 2]), strict=False):
            tensor.set_shape(shape)
        arrays = tf.gather(images, rows), tf.gather(labels, rows), *draws
        # The batches of a block have one size.
        return tuple(tf.reshape(array, [block[2] - block[1], -1, *array.shape[1:]]) for array in arrays)

    dataset = _at_start(lambda chunk: batches._blocks(many, int(chunk)), batches._chunks).map(gather)
    dataset = dataset.prefetch(2) if batches.prefetch else dataset
    dataset = dataset.flat_map(lambda *arrays: tf.data.Dataset.from_tensor_slices(arrays))
    if section is None:
        return dataset

    def augmented(images: Any, labels: Any, flips: Any, corners: Any) -> tuple[Any, Any]:
        return augment(images, flips, corners, section), labels

    return dataset.map(augmented, num_parallel_calls=tf.data.AUTOTUNE)


def _streamed(batches: Batches, source: StreamSource) -> Any:
    """Return the dataset of batches that are read from TFRecord shards."""
    import tensorflow as tf

    prepared = source.prepared
    builder = datasets.build(prepared.name, prepared.version, config.project_root() / prepared.raw_folder)
    held_out, split = prepared.held_out, source.split
    if held_out is not None and split == "test":
        split = "train"
    shards = datasets.shards(builder, split, prepared.image_shape)
    places = np.arange(sum(shards.lengths))
    if held_out is not None and split == "train":
        held = datasets.is_held_out(len(places), held_out)
        places = places[held if source.split == "test" else ~held]
    chosen = np.zeros(sum(shards.lengths), bool)
    chosen[places[source.rows]] = True
    chosen = tf.constant(chosen)
    starts = np.cumsum([0, *shards.lengths[:-1]])

    def wanted(block: Any, start: Any, serialized: Any) -> Any:
        rows = start + block * RECORDS_AT_ONCE + tf.range(tf.size(serialized, tf.int64), dtype=tf.int64)
        return tf.boolean_mask(serialized, tf.gather(chosen, rows))

    def blocks(path: Any, start: Any) -> Any:
        read = tf.data.TFRecordDataset(path).batch(RECORDS_AT_ONCE).enumerate()
        return read.map(lambda block, serialized: wanted(block, start, serialized))

    # Many records at once: the threads of the interleave handed over 60,000 single ones in 1.6 s, and these in 0.2 s.
    many = tf.data.Dataset.from_tensor_slices((shards.paths, starts)).interleave(
        blocks,
        cycle_length=min(4, len(shards.paths)) if batches.shuffle else 1,  # One shard after the other is their order.
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    records = many.unbatch()
    if source.cache == "memory":
        records = records.cache()
    elif source.cache == "file":
        # A folder of its own: TensorFlow would take an old file for these records, and trip over a killed run's lock.
        batches.cache_folder = tempfile.TemporaryDirectory(prefix=".cache.", dir=config.project_root() / "mlruns")
        records = records.cache(f"{batches.cache_folder.name}/records")

    if source.cache != "none" and batches.steps < batches.steps_in_pass:
        # TensorFlow throws a part of a cache away, and each epoch of the first pass would read its beginning again.
        num_records = records.reduce(np.int64(0), lambda count, record: count + 1)
        log.info("input     %s records read into the cache", f"{int(num_records):,}")

    def decode_part(serialized: Any) -> Any:
        # Every worker reads all records and decodes its own: shares of the shards would not fill the same steps.
        size = tf.shape(serialized, out_type=tf.int64)[0]
        worker, num_workers = batches.worker, batches.num_workers
        return shards.decode(serialized[size * worker // num_workers : size * (worker + 1) // num_workers])

    def one_pass(number: Any, start: Any, end: Any) -> Any:
        shuffled = records
        if batches.shuffle:
            # The seed of this function's graph alone: with a graph seed of 0, which train.seed=0 would hand down,
            # TensorFlow compares the tensor below with 0 in Python, and fails.
            tf.random.set_seed(1)
            # TensorFlow makes room for the whole buffer, also where there are fewer records.
            shuffled = records.shuffle(
                min(source.shuffle_buffer, batches.num_examples),
                seed=batches.seed * 1_000_003 + number,
                reshuffle_each_iteration=False,
            )
        batched = shuffled.batch(batches.global_batch_size, drop_remainder=batches.drop_remainder).skip(start)
        # Not to count up to the end of the data: the cache is whole when it was read.
        batched = batched.take(tf.where(end < batches.steps_in_pass, end - start, -1))
        decoded = batched.map(decode_part, num_parallel_calls=tf.data.AUTOTUNE)
        section = batches.augmentation
        if section is None:
            return decoded
        flips, corners = tf.numpy_function(
            lambda number: _pass_draws(batches.num_examples, batches.seed, int(number), section),
            [number],
            [tf.bool, tf.int32],
        )
        flips = tf.ensure_shape(flips, (batches.num_examples,))
        corners = tf.ensure_shape(corners, (batches.num_examples, 2))

        def augmented(place: Any, batch: tuple[Any, Any]) -> tuple[Any, Any]:
            first, last = tf.unstack(tf.gather(batches._parts, place))
            return augment(batch[0], flips[first:last], corners[first:last], section), batch[1]

        return decoded.enumerate(start).map(augmented, num_parallel_calls=tf.data.AUTOTUNE)

    # Not one inside the other, which would cost 8 ms more at the start of each iteration.
    return _at_start(lambda chunk: batches._unread(int(chunk)), batches._chunks).flat_map(
        lambda part: one_pass(part[0], part[1], part[2])
    )


def _at_start(parts: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]], num_chunks: int) -> Any:
    """Return the dataset of what a function returns for each chunk, int64 (n, 3), when an iteration comes to it: so one
    dataset serves all epochs, and a resume starts inside one."""
    import tensorflow as tf

    def asked(chunk: Any) -> Any:
        part = tf.numpy_function(parts, [chunk], tf.int64)
        return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(part, (None, 3)))

    return tf.data.Dataset.range(num_chunks).flat_map(asked)
