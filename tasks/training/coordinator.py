"""Asynchronous training with parameter servers: this process decides which examples each step reads; the workers run
the steps as soon as they are free, on variables that the servers hold.

A worker memory-maps all arrays and receives the row numbers of a step, so an epoch reads every example once, whichever
worker runs a step. If a worker dies, another worker repeats its steps, although the first may already have changed
some variables: each step runs once if no worker dies, and otherwise at least once.
"""

import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks import config
from tasks.input.array import mapped_tensor
from tasks.input.augment import augment_batch
from tasks.input.batches import Batches
from tasks.records import as_input
from tasks.training import Training, loops, steps
from tasks.training.autotune import Calls

# Enough that no worker waits for this process, few enough that the position stays close to the workers.
GROUPS_PER_WORKER = 4

log = logging.getLogger(__name__)


def asynchronous(training: Training) -> None:
    """Train from the current position to the end of the phase. Workers receive ``steps_per_execution`` steps at a time;
    this process validates.

    Raises:
        tf.errors.OpError: a parameter server was lost, or a step failed.
    """
    calls = Calls(training)
    groups = _Groups(training, calls.many)
    measure = None
    if training.validation is not None:
        # The strategy's own `run` passes a step to workers.
        here = replace(training.strategy, run=lambda step, arguments: step(*arguments))
        test = steps.test_function(replace(training, strategy=here), training.validation, calls)
        nothing = itertools.repeat(None)  # It gathers its rows by itself.
        measure = loops.measuring(training.model, test, calls, training.validation, nothing)
    loops.drive(training, groups.train_epoch, measure)
    if groups.done_by:
        shares = ", ".join(f"{count:,}" for _, count in groups.done_by.most_common())
        log.info("workers   %d processes did %s steps", len(groups.done_by), shares)


class _Groups:
    """Schedules groups of steps on workers and collects their results in step order."""

    def __init__(self, training: Training, size: int) -> None:
        self.training = training
        self.size = size
        """Steps per group."""
        self.done_by: Counter[int] = Counter()
        """Finished steps by worker."""
        self._coordinator = training.strategy.coordinator
        self._function = worker_function(training)
        self._arrays = iter(self._coordinator.create_per_worker_dataset(resident(training.batches)))
        self._ahead = GROUPS_PER_WORKER * len(training.strategy.devices)
        self._every = training.settings.checkpoint.every_steps or training.batches.steps
        self._first = training.phase.first_epoch * training.batches.steps
        """The run's step at which the optimizer started counting."""
        self._waiting: deque[tuple[int, Any]] = deque()
        self._given = 0
        """All steps before this one are scheduled."""

    def train_epoch(self, epoch: int, listeners: Any) -> dict[str, float]:
        """Train the rest of an epoch, call the callbacks for each group, and return the metrics."""
        model, position = self.training.model, self.training.position
        # On a resume inside an epoch, they include the epoch's first part.
        sums = np.concatenate([variable.numpy().ravel() for variable in model.metrics_variables]).astype(np.float64)
        first, end = position.step, (epoch + 1) * self.training.batches.steps
        self._given, results = first, {}
        # As in ``Model.fit``, a training that is asked to stop finishes one call of the current epoch.
        while position.step < end and (self._waiting or position.step == first or not model.stop_training):
            self._hand_out(first, end)
            listeners.on_train_batch_begin(position.step - first)
            until, result = self._waiting.popleft()
            values = np.asarray(_fetch(self._coordinator, result))
            sums += values[:-1]
            self.done_by[int(values[-1])] += until - position.step
            if not self._waiting:
                # Nothing is running: the variables have the values of step `until`, but the counter has the value of
                # the worker that wrote last.
                model.optimizer.iterations.assign(until - self._first)
                for variable, value in _by_variable(model, sums):
                    variable.assign(value)
            results = _results(model, sums)
            position.all_applied = not self._waiting
            listeners.on_train_batch_end(until - first - 1, results)
        return results

    def _hand_out(self, first: int, end: int) -> None:
        """Schedule groups of an epoch's steps ``first`` to ``end - 1``, as many as may run at once."""
        model, position, batches = self.training.model, self.training.position, self.training.batches
        # A checkpoint holds the variables of one step, so no later step starts before it is written.
        due = min(end, (position.step // self._every + 1) * self._every)
        while (
            self._given < due
            and len(self._waiting) < self._ahead
            and not position.drain
            and (self._given == first or not model.stop_training)
        ):
            until = min(self._given + self.size, due)
            lines = examples(batches, self._given, until, self.size)
            lines[lines[:, 0] >= 0, 0] -= self._first
            arguments = self._arrays, tf.constant(lines)
            self._waiting.append((until, self._coordinator.schedule(self._function, args=arguments)))
            self._given = until


def examples(batches: Batches, first: int, end: int, size: int) -> npt.NDArray[np.int64]:
    """Return what a worker reads in steps ``first`` to ``end - 1``, one line per example: int64 (size * global batch
    size, 2 or more).

    The columns are the step, the row and, for augmented images, the columns of ``Batches.draws``. For mixed images the
    second row follows the first, then the draws of both. Lines of -1 pad the result to a full group of ``size`` steps,
    so that TensorFlow traces only one shape.
    """
    parts = []
    for step in range(first, end):
        rows = batches.rows(step)
        draws = () if (drawn := batches.draws(step)) is None else (drawn.reshape(len(rows), -1),)
        parts.append(np.column_stack([np.full(len(rows), step), rows, *draws]))
    lines = np.concatenate(parts)
    return np.pad(lines, ((0, size * batches.global_batch_size - len(lines)), (0, 0)), constant_values=-1)


def resident(batches: Batches) -> Callable[[], Any]:
    """Return a function that makes a worker's dataset, which repeats one element forever: (features, labels, weights
    if any, worker). The worker memory-maps the arrays from the same paths as this process; the number ``worker``
    identifies its process.

    Only TensorFlow operations run in another process: NumPy cannot read there, and an array in the graph would be sent.
    """
    source = batches.source
    split, root = source.split, config.project_root()
    paths = [root / path for path in (*split.features.values(), split.labels, split.weights) if path is not None]

    def read(_: Any) -> tuple[Any, ...]:
        arrays = [mapped_tensor(path) for path in paths]
        num_features = len(split.features)
        x = as_input(dict(zip(split.features, arrays[:num_features], strict=True)))
        labels, *weights = arrays[num_features:]
        if source.class_weights is not None:
            of_class = tf.gather(tf.constant(source.class_weights, tf.float32), labels)
            weights = [weights[0] * of_class if weights else of_class]
        # A seeded operation would give every worker the same number.
        return x, labels, *weights, tf.raw_ops.NonDeterministicInts(shape=[1], dtype=tf.int64)[0]

    return lambda: tf.data.Dataset.from_tensors(0).map(read).cache().repeat()


def worker_function(training: Training) -> Any:
    """Return the ``tf.function`` that a worker runs: (iterator of ``resident``, ``examples``) -> float (m + 1,): what
    the steps add to the m values of the metrics' variables, and the worker.

    Concurrent additions to shared metrics could get lost, just as those to the optimizer's step counter do.
    """
    model, loss = training.model, training.loss
    optimizer, metrics = model.optimizer, model.metrics_variables
    dtype = metrics[0].dtype

    def step(batch: Any, number: Any) -> Any:
        x, labels, weights = (*batch, None)[:3]
        count = tf.shape(labels)[0]
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            losses = steps.example_losses(loss, labels, outputs)
            total = steps.average_loss(losses, weights, count, model.losses, training.strategy.num_replicas)
        gradients = tape.gradient(total, model.trainable_variables)
        # The learning rate and Adam's bias correction depend on it, and concurrent increments would lose counts.
        optimizer.iterations.assign(number)
        # Workers do this concurrently; Keras' own Adam can diverge then (optimizers.FusedAdam).
        optimizer.apply(gradients, model.trainable_variables)
        with keras.StatelessScope((variable, tf.zeros(variable.shape, dtype)) for variable in metrics) as scope:
            model.metrics[0].update_state(total, sample_weight=count)
            model.compute_metrics(x, labels, outputs)
        return tf.concat([tf.reshape(scope.get_current_value(variable), [-1]) for variable in metrics], axis=0)

    @tf.function
    def many(arrays: Any, lines: Any) -> Any:
        *batch, worker = next(arrays)
        sums = tf.zeros([sum(math.prod(variable.shape) for variable in metrics)], dtype)
        for number in tf.range(lines[0, 0], tf.reduce_max(lines[:, 0]) + 1):
            mine = tf.boolean_mask(lines, lines[:, 0] == number)
            mixed = _examples_of(training, batch, mine)
            sums += training.strategy.run(step, (mixed, number))
        # Large enough that two processes rarely share a number, small enough for a float to represent exactly.
        return tf.concat([sums, [tf.cast(worker % 2**24, dtype)]], axis=0)

    return many


def _examples_of(training: Training, arrays: Any, lines: Any) -> tuple[Any, ...]:
    """Return the batch of one step, with images augmented; ``lines`` are the step's lines of ``examples``."""
    section = training.batches.augmentation
    mixes = section is not None and section.mixes
    rows = lines[:, 1:3] if mixes else lines[:, 1]
    batch = tf.nest.map_structure(lambda array: tf.gather(array, rows), arrays)
    if section is not None:
        draws = tf.cast(lines[:, 3 if mixes else 2 :], tf.int32)
        draws = tf.reshape(draws, [-1, 2, lines.shape[1] // 2 - 1]) if mixes else draws
        batch = augment_batch(tuple(batch), draws, section, training.batches.num_classes)
    return tuple(batch)


def _fetch(coordinator: Any, result: Any) -> Any:
    try:
        values = result.fetch()
    except tf.errors.OpError:
        # If a worker dies before its result arrives, another one repeats the group; other errors are raised here.
        coordinator.join()
        values = result.fetch()
    return values


def _results(model: Any, sums: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the metrics by name without reading from the parameter servers."""
    with keras.StatelessScope(_by_variable(model, sums)):
        return {name: float(value) for name, value in model.get_metrics_result().items()}


def _by_variable(model: Any, sums: npt.NDArray[np.float64]) -> list[tuple[Any, npt.NDArray[np.float64]]]:
    """Return each metric variable with its values, which are stored one after the other in ``sums``."""
    variables = model.metrics_variables
    ends = np.cumsum([math.prod(variable.shape) for variable in variables])
    parts = np.split(sums, ends[:-1])
    return [(variable, part.reshape(variable.shape)) for variable, part in zip(variables, parts, strict=True)]
