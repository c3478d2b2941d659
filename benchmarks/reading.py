"""One reading of the training data, by one way: examples/s of each pass, and the memory that the data take.

`python -m benchmarks.reading WAY DATASET BATCH_SIZE PASSES`, in the environment of a stage process; the dataset must be
prepared. Prints one JSON line. Every way gives shuffled batches of images and labels to a compiled loop that takes each
batch and asks for its size; `numpy` and `ours, NumPy` give them to Python, and `ours, in the step` to a step.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import psutil

from tasks import config, strategies
from tasks.input import sources
from tasks.input.batches import Batches
from tasks.operations import dvc_data

STEPS_PER_EXECUTION = 50
"""About what `auto` comes to for a convnet of MNIST."""
SHUFFLED = {
    "input.validation": None,
    "checkpoint.monitor": "train/loss",
    "input.augmentation.crop_padding": 0,
    "input.augmentation.flip": False,  # The default of photographs.
}


def batches_of(dataset: str, batch_size: int, source: str) -> Batches:
    """Return the project's training batches."""
    values = {**SHUFFLED, "dataset.name": dataset, "train.per_replica_batch_size": batch_size, "input.source": source}
    settings = config.load(overrides=values)
    return sources.training_batches(settings, dvc_data.load_prepared(dataset), batch_size)


def ours(dataset: str, batch_size: int, source: str) -> Callable[[int], int]:
    """Return what reads a pass of the project's pipeline with TensorFlow, as `fit` does there."""
    batches = batches_of(dataset, batch_size, source)
    data = batches.dataset
    consume = counter()

    def read(number: int) -> int:
        batches.epoch = number
        return int(consume(data))

    return read


def our_arrays(dataset: str, batch_size: int) -> Callable[[int], int]:
    """Return what reads a pass of the project's pipeline with NumPy, as `fit` does on JAX, and every evaluation."""
    batches = batches_of(dataset, batch_size, "array")

    def read(number: int) -> int:
        batches.epoch = number
        seen = 0
        for images, labels in batches.arrays():
            batch = images.astype(np.float32), labels  # As the peer does; in a training the model's first layer casts.
            seen += len(batch[1])
        return seen

    return read


def our_steps(dataset: str, batch_size: int) -> Callable[[int], int]:
    """Return what reads a pass as the custom loop does: steps that gather their own batches, and only count them."""
    import tensorflow as tf

    from tasks.training import steps

    batches, seen = batches_of(dataset, batch_size, "array"), tf.Variable(0, dtype=tf.int64)

    class Counter:
        """In the model's place, whose metrics a call returns; the first is the loss so far."""

        metrics = (SimpleNamespace(total=tf.constant(0.0)),)

        def get_metrics_result(self):
            return {"seen": seen.read_value()}

    def step(batch, global_size):
        images, labels = batch  # TensorFlow would not gather what nobody reads.
        seen.assign_add(tf.minimum(tf.shape(images, tf.int64)[0], tf.shape(labels, tf.int64)[0]))

    strategy = strategies.build(config.load().strategy)
    many = steps.many_steps(Counter(), strategy, step, batches)

    def read(number: int) -> int:
        seen.assign(0)
        first, end = number * batches.steps, (number + 1) * batches.steps
        for done in range(first, end, STEPS_PER_EXECUTION):
            _, logs = many(None, done, min(STEPS_PER_EXECUTION, end - done))
        return int(logs["seen"])

    return read


def tutorial(dataset: str, batch_size: int, prefetch: bool) -> Callable[[int], int]:
    """Return what reads a pass of the tutorial's pipeline; or of that with the prefetch which it leaves out."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    data = tfds.load(dataset, split="train", as_supervised=True, data_dir=f"data/{dataset}/raw", download=False)
    data = data.map(lambda image, label: (tf.cast(image, tf.float32) / 255, label)).cache().shuffle(10000)
    data = data.batch(batch_size)
    if prefetch:
        data = data.prefetch(tf.data.AUTOTUNE)
    consume = counter()
    return lambda number: int(consume(data))


def records(dataset: str, batch_size: int) -> Callable[[int], int]:
    """Return what reads a pass of TFDS' own records: load, map, batch."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    data = tfds.load(dataset, split="train", as_supervised=True, data_dir=f"data/{dataset}/raw", download=False)
    data = data.map(lambda image, label: (tf.cast(image, tf.float32) / 255, label)).batch(batch_size)
    consume = counter()
    return lambda number: int(consume(data))


def numpy(dataset: str, batch_size: int) -> Callable[[int], int]:
    """Return what reads a pass with NumPy alone: permutation, gather, cast."""
    images = np.load(f"data/{dataset}/prepared/train_images.npy")
    labels = np.load(f"data/{dataset}/prepared/train_labels.npy")

    def read(number: int) -> int:
        order, seen = np.random.default_rng(number).permutation(len(labels)), 0
        for first in range(0, len(labels), batch_size):
            rows = order[first : first + batch_size]
            batch = images[rows].astype(np.float32), labels[rows]
            seen += len(batch[1])
        return seen

    return read


def nothing(dataset: str, batch_size: int) -> Callable[[int], int]:
    """Return what takes as many elements from tf.data as a pass has batches, with no data in them: the loop alone."""
    import tensorflow as tf

    num_examples = dvc_data.load_prepared(dataset).splits["train"].num_examples
    options = tf.data.Options()  # As ours sets them, because it is faster.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    data = tf.data.Dataset.range(-(-num_examples // batch_size)).with_options(options)

    @tf.function
    def consume(data):
        seen = tf.constant(0, tf.int64)
        for _ in data:
            seen += batch_size
        return seen

    return lambda number: int(consume(data))


def counter() -> Callable[[object], object]:
    """Return a compiled loop that takes every batch of a dataset and counts its examples."""
    import tensorflow as tf

    @tf.function
    def consume(data):
        seen = tf.constant(0, tf.int64)
        for images, _ in data:
            seen += tf.shape(images, out_type=tf.int64)[0]
        return seen

    return consume


WAYS = {
    "ours, tf.data": lambda dataset, size: ours(dataset, size, "array"),
    "ours, NumPy": our_arrays,
    "ours, in the step": our_steps,
    "ours, from records": lambda dataset, size: ours(dataset, size, "stream"),
    "tutorial": lambda dataset, size: tutorial(dataset, size, prefetch=False),
    "tutorial with prefetch": lambda dataset, size: tutorial(dataset, size, prefetch=True),
    "TFDS records": records,
    "tf.data without data": nothing,
    "numpy": numpy,
}


def main(way: str, dataset: str, batch_size: int, passes: int) -> None:
    """Read, and print."""
    import tensorflow as tf

    if dataset == "digits":
        importlib.import_module("tasks.data.builders.digits")

    int(counter()(tf.data.Dataset.range(4).map(lambda number: (tf.zeros([1]), number))))  # What every process needs.
    before = psutil.Process().memory_info().rss
    read = WAYS[way](dataset, batch_size)
    speeds = []
    for number in range(passes):
        began = time.perf_counter()
        seen = read(number)
        speeds.append(seen / (time.perf_counter() - began))
    memory = psutil.Process().memory_info().rss - before
    print(json.dumps({"examples_per_second": speeds, "memory_bytes": memory}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
