"""Asynchronous training with parameter servers: this process decides which examples each step reads, and the workers do
the steps, each as soon as it is free, on variables that the servers hold.

A worker has the whole arrays in memory and is told the rows, so an epoch reads every example once, whoever does a step.
The steps of a worker that died are done by another one. It can have changed some variables before: each step is done
once if no worker dies, and at least once otherwise.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks import config
from tasks.input.array import ArraySource
from tasks.input.augment import augment
from tasks.input.batches import Batches
from tasks.strategies import Strategy
from tasks.training import steps
from tasks.training.autotune import Calls
from tasks.training.callbacks import Position, SaveCheckpoints

# Enough that no worker waits for this process, and few enough that the position is not far behind the workers.
GROUPS_PER_WORKER = 4

log = logging.getLogger(__name__)


def train(
    model: Any,
    loss: Any,
    strategy: Strategy,
    training: Batches,
    validation: Batches | None,
    position: Position,
    section: config.Train,
    callbacks: list[Any],
) -> None:
    """Train from ``position`` to the end of epoch ``section.epochs``; tell the callbacks what ``loops.custom`` tells
    them, in the same order. Workers are given ``steps_per_execution`` steps at a time; this process validates.

    Raises:
        tf.errors.OpError: a parameter server was lost, or a step failed.
    """
    calls = Calls(section, position, strategy)
    coordinator, size = strategy.coordinator, calls.many
    function = worker_function(model, loss, strategy, training)
    arrays = iter(coordinator.create_per_worker_dataset(resident(training)))
    ahead = GROUPS_PER_WORKER * len(strategy.devices)
    saving = next((one for one in callbacks if isinstance(one, SaveCheckpoints)), None)
    every = (saving and saving.section.every_steps) or training.steps
    if validation is not None:
        test = _test_function(model, loss, strategy, validation, section, calls)

    listeners = keras.callbacks.CallbackList(
        callbacks, add_history=True, model=model, epochs=section.epochs, steps=training.steps, verbose=0
    )
    model.stop_training = False
    results: dict[str, float] = {}
    done_by: Counter[int] = Counter()
    listeners.on_train_begin()
    for epoch in range(position.start.epoch, section.epochs):
        model.reset_metrics()
        listeners.on_epoch_begin(epoch)
        # The first part of an epoch that was left in its middle is in them.
        sums = np.array([variable.numpy() for variable in model.metrics_variables], np.float64)
        first, end = position.step, (epoch + 1) * training.steps
        given, groups = first, deque[tuple[int, Any]]()
        # As in ``Model.fit``, a training that is to stop does one call of the epoch that it has begun.
        while position.step < end and (groups or position.step == first or not model.stop_training):
            # A checkpoint holds the variables of one step, so nothing past it begins before it is written.
            due = min(end, (position.step // every + 1) * every)
            while (
                given < due
                and len(groups) < ahead
                and not position.drain
                and (given == first or not model.stop_training)
            ):
                until = min(given + size, due)
                lines = tf.constant(examples(training, given, until, size))
                groups.append((until, coordinator.schedule(function, args=(arrays, lines))))
                given = until
            listeners.on_train_batch_begin(position.step - first)
            until, result = groups.popleft()
            *parts, worker = _fetch(coordinator, result)
            sums += parts
            done_by[int(worker)] += until - position.step
            if not groups:
                # Nothing is under way: the variables are those of step `until`, and the count is whoever's came last.
                model.optimizer.iterations.assign(until)
                for variable, value in zip(model.metrics_variables, sums, strict=True):
                    variable.assign(value)
            results = _results(model, sums)
            position.settled = not groups
            listeners.on_train_batch_end(until - first - 1, results)
        if validation is not None:
            results |= {f"val_{name}": value for name, value in test(listeners).items()}
        listeners.on_epoch_end(epoch, results)
        if model.stop_training:
            break
    model.optimizer.finalize_variable_values(model.trainable_variables)
    listeners.on_train_end(results)
    if done_by:
        shares = ", ".join(f"{count:,}" for _, count in done_by.most_common())
        log.info("workers   %d processes did %s steps", len(done_by), shares)


def outputs(
    strategy: Strategy, test: Batches, call: Callable[[Any], tuple[Any, Any]]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], float, str]]:
    """Yield the labels of each batch, its logits, the model's own loss, and which worker's process computed it.

    The workers take the batches as they are free; one that was lost has its batch done by another.

    Args:
        strategy: of the chief.
        test: in order; an array source.
        call: images -> logits (n, classes) and a scalar, on variables that the servers hold.
    """
    coordinator = strategy.coordinator
    arrays = iter(coordinator.create_per_worker_dataset(resident(test)))

    @tf.function(reduce_retracing=True)
    def compute(arrays: Any, rows: Any) -> Any:
        images, labels, worker = next(arrays)
        logits, own_loss = strategy.run(call, (tf.gather(images, rows),))
        return tf.gather(labels, rows), tf.cast(logits, tf.float64), own_loss, worker

    names: dict[int, str] = {}
    ahead = GROUPS_PER_WORKER * len(strategy.devices)
    results: deque[Any] = deque()
    for step in range(test.steps + ahead):
        if step < test.steps:
            results.append(coordinator.schedule(compute, args=(arrays, tf.constant(test.rows(step)))))
        if step >= ahead and results:
            labels, logits, own_loss, worker = _fetch(coordinator, results.popleft())
            name = names.setdefault(int(worker), f"worker process {len(names) + 1}")
            yield labels, logits, float(own_loss), name


def examples(training: Batches, first: int, end: int, size: int) -> npt.NDArray[np.int64]:
    """Return what a worker reads in the steps from ``first`` to before ``end``: a line for each example.

    Columns are the step and the row, and where images are augmented, 1 for a mirrored one, top and left of its crop:
    int64 (size * global batch size, 2 or 5). Lines of -1 fill up what a group of ``size`` steps would have more, so
    that TensorFlow traces one shape.
    """
    parts = []
    for step in range(first, end):
        rows = training.rows(step)
        parts.append(np.column_stack([np.full(len(rows), step), rows, *(training.draws(step) or ())]))
    lines = np.concatenate(parts)
    return np.pad(lines, ((0, size * training.global_batch_size - len(lines)), (0, 0)), constant_values=-1)


def resident(training: Batches) -> Callable[[], Any]:
    """Return what makes a worker's dataset: for ever the same element (images, labels, worker), read once by the worker
    itself, from the same paths as here. ``worker`` is a number that tells its process from others.

    Only TensorFlow's operations run on another process: no NumPy reads there, and an array in the graph would be sent.

    Raises:
        ValueError: the source is a stream; ``train.check`` refuses it before.
    """
    if not isinstance(training.source, ArraySource):
        raise ValueError("a stream has no rows that a worker could be told")
    paths = [str(config.project_root() / path) for path in (training.source.split.images, training.source.split.labels)]
    headers = [np.load(path, mmap_mode="r") for path in paths]

    def read(_: Any) -> tuple[Any, ...]:
        arrays = []
        for path, header in zip(paths, headers, strict=True):
            values = tf.io.decode_raw(tf.io.read_file(path), header.dtype)[header.offset // header.itemsize :]
            arrays.append(tf.reshape(values, header.shape))
        # The seeds of this process would give every worker the same number.
        return *arrays, tf.raw_ops.NonDeterministicInts(shape=[1], dtype=tf.int64)[0]

    return lambda: tf.data.Dataset.from_tensors(0).map(read).cache().repeat()


def worker_function(model: Any, loss: Any, strategy: Strategy, training: Batches) -> Any:
    """Return the ``tf.function`` that a worker runs: (iterator of ``resident``, ``examples``) -> float (m + 1,), what
    the steps add to the metrics' m variables, and the worker.

    The workers' additions to shared metrics would be lost as their counts of steps are.
    """
    optimizer, metrics = model.optimizer, model.metrics_variables
    dtype, section = metrics[0].dtype, training.augmentation

    def step(images: Any, labels: Any, number: Any) -> Any:
        count = tf.shape(labels)[0]
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            total = steps.average_loss(steps.example_losses(loss, labels, outputs), None, count, model.losses)
        gradients = tape.gradient(total, model.trainable_variables)
        # The learning rate and Adam's correction depend on it, and workers that add 1 at the same time lose counts.
        optimizer.iterations.assign(number)
        # Workers do this at the same time; Keras' own Adam would be thrown out (schedules.adam_at_once).
        optimizer.apply(gradients, model.trainable_variables)
        with keras.StatelessScope((variable, tf.zeros(variable.shape, dtype)) for variable in metrics) as scope:
            model.metrics[0].update_state(total, sample_weight=count)
            model.compute_metrics(images, labels, outputs)
        return tf.stack([scope.get_current_value(variable) for variable in metrics])

    @tf.function
    def many(arrays: Any, lines: Any) -> Any:
        images, labels, worker = next(arrays)
        sums = tf.zeros([len(metrics)], dtype)
        for number in tf.range(lines[0, 0], tf.reduce_max(lines[:, 0]) + 1):
            mine = tf.boolean_mask(lines, lines[:, 0] == number)
            batch = tf.gather(images, mine[:, 1])
            if section is not None:
                batch = augment(batch, mine[:, 2] == 1, tf.cast(mine[:, 3:], tf.int32), section)
            sums += strategy.run(step, (batch, tf.gather(labels, mine[:, 1]), number))
        # So many that two processes hardly share one, and few enough for a float to tell apart.
        return tf.concat([sums, [tf.cast(worker % 2**24, dtype)]], axis=0)

    return many


def _fetch(coordinator: Any, result: Any) -> Any:
    try:
        values = result.fetch()
    except tf.errors.OpError:
        # A worker that died before its result was here has the group done again; any other error is raised now.
        coordinator.join()
        values = result.fetch()
    return values


def _results(model: Any, sums: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the metrics by name, without asking the parameter servers."""
    with keras.StatelessScope(zip(model.metrics_variables, sums, strict=True)):
        return {name: float(value) for name, value in model.get_metrics_result().items()}


def _test_function(
    model: Any, loss: Any, strategy: Strategy, validation: Batches, section: config.Train, calls: Calls
) -> Callable[[Any], dict[str, float]]:
    """Return what measures the validation split in this process and tells the callbacks it is given."""
    # The strategy's own `run` hands a step to workers.
    here = replace(strategy, run=lambda step, arguments: step(*arguments))
    function = steps.test_function(model, loss, here, validation, section, calls)
    total, size = validation.steps, calls.many

    def test(listeners: Any) -> dict[str, float]:
        listeners.on_test_begin()
        model.reset_metrics()
        for done in range(0, total, size):
            listeners.on_test_batch_begin(done)
            logs = function(None)  # It gathers its rows by itself.
            listeners.on_test_batch_end(min(done + size, total) - 1, logs)
        results = {name: float(value) for name, value in logs.items()}
        listeners.on_test_end(results)
        return results

    return test
