"""Asynchronous training with parameter servers: this process decides which examples each step reads, and the workers do
the steps, each as soon as it is free, on variables that the servers hold.

A worker has the whole arrays in memory and receives the rows of a step, so an epoch reads every example once, whoever
does a step.
The steps of a worker that died are done by another one. It can have changed some variables before: each step is done
once if no worker dies, and at least once otherwise.
"""

import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks import config
from tasks.input.array import ArraySource, mapped_tensor
from tasks.input.augment import augment_batch
from tasks.input.batches import Batches
from tasks.records import StepTime, as_input
from tasks.strategies import Strategy
from tasks.training import Training, loops, steps
from tasks.training.autotune import Calls

# Enough that no worker waits for this process, and few enough that the position is not far behind the workers.
GROUPS_PER_WORKER = 4

log = logging.getLogger(__name__)


def asynchronous(training: Training) -> None:
    """Train from the training's position to the end of its phase. Workers are given ``steps_per_execution`` steps
    at a time; this process validates.

    Raises:
        tf.errors.OpError: a parameter server was lost, or a step failed.
    """
    calls = Calls(training)
    groups = _Groups(training, calls.many)
    measure = None
    if training.validation is not None:
        # The strategy's own `run` hands a step to workers.
        here = replace(training.strategy, run=lambda step, arguments: step(*arguments))
        test = steps.test_function(replace(training, strategy=here), training.validation, calls)
        measure = loops.measuring(training, test, calls, itertools.repeat(None))  # It gathers its rows by itself.
    loops.drive(training, groups.train_epoch, measure)
    if groups.done_by:
        shares = ", ".join(f"{count:,}" for _, count in groups.done_by.most_common())
        log.info("workers   %d processes did %s steps", len(groups.done_by), shares)


class _Groups:
    """Hands groups of steps to workers, and counts what they have done in the order of the steps."""

    def __init__(self, training: Training, size: int) -> None:
        self.training = training
        self.size = size
        """Steps of a group."""
        self.done_by: Counter[int] = Counter()
        """How many steps each worker has done."""
        self._coordinator = training.strategy.coordinator
        self._function = worker_function(training)
        self._arrays = iter(self._coordinator.create_per_worker_dataset(resident(training.batches)))
        self._ahead = GROUPS_PER_WORKER * len(training.strategy.devices)
        self._every = training.settings.checkpoint.every_steps or training.batches.steps
        self._first = training.phase.first_epoch * training.batches.steps
        """The step of the run at which the optimizer began to count."""
        self._waiting: deque[tuple[int, Any]] = deque()
        self._given = 0
        """The step before which all are handed out."""

    def train_epoch(self, epoch: int, listeners: Any) -> dict[str, float]:
        """Train the rest of an epoch, tell the callbacks of each group, and return the metrics."""
        model, position = self.training.model, self.training.position
        # The first part of an epoch that was left in its middle is in them.
        sums = np.concatenate([variable.numpy().ravel() for variable in model.metrics_variables]).astype(np.float64)
        first, end = position.step, (epoch + 1) * self.training.batches.steps
        self._given, results = first, {}
        # As in ``Model.fit``, a training that is to stop does one call of the epoch that it has begun.
        while position.step < end and (self._waiting or position.step == first or not model.stop_training):
            self._hand_out(first, end)
            listeners.on_train_batch_begin(position.step - first)
            until, result = self._waiting.popleft()
            values = np.asarray(_fetch(self._coordinator, result))
            sums += values[:-1]
            self.done_by[int(values[-1])] += until - position.step
            if not self._waiting:
                # Nothing is under way: the variables are those of step `until`, and the count is whoever's came last.
                model.optimizer.iterations.assign(until - self._first)
                for variable, value in _by_variable(model, sums):
                    variable.assign(value)
            results = _results(model, sums)
            position.all_applied = not self._waiting
            listeners.on_train_batch_end(until - first - 1, results)
        return results

    def _hand_out(self, first: int, end: int) -> None:
        """Hand out groups of an epoch's steps ``first`` to before ``end``, as many as may be under way."""
        model, position, batches = self.training.model, self.training.position, self.training.batches
        # A checkpoint holds the variables of one step, so nothing past it begins before it is written.
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


def outputs(
    strategy: Strategy, test: Batches, call: Callable[[Any], tuple[Any, Any]]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], float, str]]:
    """Yield the labels of each batch, its outputs, the model's own loss, and which worker's process computed it.

    The workers take the batches as they are free; one that was lost has its batch done by another.

    Args:
        strategy: of the chief.
        test: in order; an array source.
        call: features -> outputs (n, outputs) and a scalar, on variables that the servers hold.
    """
    coordinator = strategy.coordinator
    arrays = iter(coordinator.create_per_worker_dataset(resident(test)))

    @tf.function(reduce_retracing=True)
    def compute(arrays: Any, rows: Any) -> Any:
        x, labels, *_, worker = next(arrays)
        logits, own_loss = strategy.run(call, (_gather(x, rows),))
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


def examples(batches: Batches, first: int, end: int, size: int) -> npt.NDArray[np.int64]:
    """Return what a worker reads in the steps from ``first`` to before ``end``: a line for each example.

    Columns are the step and the row, and where images are augmented, those of ``Batches.draws``; where images are
    mixed, there are the second row after the first, and then the draws of both: int64 (size * global batch size, 2 or
    more). Lines of -1 fill up what a group of ``size`` steps would have more, so that TensorFlow traces one shape.
    """
    parts = []
    for step in range(first, end):
        rows = batches.rows(step)
        draws = () if (drawn := batches.draws(step)) is None else (drawn.reshape(len(rows), -1),)
        parts.append(np.column_stack([np.full(len(rows), step), rows, *draws]))
    lines = np.concatenate(parts)
    return np.pad(lines, ((0, size * batches.global_batch_size - len(lines)), (0, 0)), constant_values=-1)


def resident(batches: Batches) -> Callable[[], Any]:
    """Return what makes a worker's dataset: for ever the same element (features, labels, weights if there are some,
    worker), memory-mapped by the worker itself, from the same paths as here. ``worker`` is a number that tells its
    process from others.

    Only TensorFlow's operations run on another process: no NumPy reads there, and an array in the graph would be sent.

    Raises:
        ValueError: the source is a stream; ``check`` of the stage refuses it before.
    """
    source = batches.source
    if not isinstance(source, ArraySource):
        raise ValueError("a stream has no rows that a worker could be given")
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
        # The seeds of this process would give every worker the same number.
        return x, labels, *weights, tf.raw_ops.NonDeterministicInts(shape=[1], dtype=tf.int64)[0]

    return lambda: tf.data.Dataset.from_tensors(0).map(read).cache().repeat()


def worker_function(training: Training) -> Any:
    """Return the ``tf.function`` that a worker runs: (iterator of ``resident``, ``examples``) -> float (m + 1,), what
    the steps add to the m numbers of the metrics' variables, and the worker.

    The workers' additions to shared metrics would be lost as their counts of steps are.
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
        # The learning rate and Adam's correction depend on it, and workers that add 1 at the same time lose counts.
        optimizer.iterations.assign(number)
        # Workers do this at the same time; Keras' own Adam would be thrown out (optimizers.FusedAdam).
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
        # So many that two processes hardly share one, and few enough for a float to tell apart.
        return tf.concat([sums, [tf.cast(worker % 2**24, dtype)]], axis=0)

    return many


def time_steps(training: Training, num_steps: int) -> StepTime | None:
    """Do steps as a training does, and return what their time went into by the clocks of the workers that did them;
    None where no worker did two one after another.

    Of a worker's steps, `collectives` is fetching all variables from the servers, before, and changing them there,
    after; `compute` is between; `host` is from the end of a step to the beginning of the worker's next one. In a
    training a layer computes while the next one's variables are still on their way.
    """
    strategy, batches, first = training.strategy, training.batches, training.position.step
    arrays = iter(strategy.coordinator.create_per_worker_dataset(resident(batches)))
    function, workers = _clocked_function(training), len(strategy.devices)
    waiting: deque[Any] = deque()
    rows: dict[int, list[npt.NDArray[np.float64]]] = {}
    total = num_steps + 2 * workers  # What each worker does first, it makes ready.
    for number in range(total + GROUPS_PER_WORKER * workers):
        if number < total:
            lines = examples(batches, first + number, first + number + 1, 1)
            lines[:, 0] -= training.phase.first_epoch * batches.steps  # Where the optimizer began to count.
            waiting.append(strategy.coordinator.schedule(function, args=(arrays, tf.constant(lines))))
        if number >= GROUPS_PER_WORKER * workers:
            *times, worker = _fetch(strategy.coordinator, waiting.popleft())
            rows.setdefault(int(worker), []).append(np.array(times))
    steps: list[npt.NDArray[np.float64]] = []
    for done in rows.values():
        clocks = np.array(sorted(done[1:], key=lambda times: float(times[0])))
        if len(clocks) > 1:
            gaps = clocks[1:, 0] - clocks[:-1, 3]
            steps += [np.array([*np.diff(times), gap]) for times, gap in zip(clocks[1:], gaps, strict=True)]
    if not steps:
        return None
    fetch, compute, change, gap = 1e3 * np.mean(steps, axis=0)
    host = max(0.0, gap) / training.position.longest_call  # Of a group of so many steps there is one.
    return StepTime(
        num_steps=len(steps), compute_ms=compute, collectives_ms=fetch + change, input_wait_ms=0.0, host_ms=host
    )


def _clocked_function(training: Training) -> Any:
    """Return the ``tf.function`` of one step that looks at the worker's clock: (iterator of ``resident``, ``examples``)
    -> float64 (5,): when it began, had the variables, had the gradients, and had changed the variables, and the worker.
    """
    model, loss = training.model, training.loss
    variables = model.trainable_variables

    def step(batch: Any, lines: Any) -> Any:
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            local = [tf.identity(variable.value) for variable in variables]
        with tf.control_dependencies(local):
            fetched = tf.timestamp()
        with tf.control_dependencies([fetched]):
            local = [tf.identity(value) for value in local]
            x, labels, weights = (*_examples_of(training, batch, tf.identity(lines)), None)[:3]
        with tf.GradientTape() as tape, keras.StatelessScope(zip(variables, local, strict=True)):
            tape.watch(local)
            outputs = model(x, training=True)
            losses = steps.example_losses(loss, labels, outputs)
            total = steps.average_loss(losses, weights, tf.shape(labels)[0], model.losses, 1)
        found = zip(tape.gradient(total, local), variables, strict=True)
        pairs = [(gradient, variable) for gradient, variable in found if gradient is not None]
        gradients = [gradient for gradient, _ in pairs]
        with tf.control_dependencies(gradients):
            computed = tf.timestamp()
        before = set(tf.compat.v1.get_default_graph().get_operations())
        with tf.control_dependencies([computed]):
            model.optimizer.iterations.assign(lines[0, 0])
            model.optimizer.apply(gradients, [variable for _, variable in pairs])
        made = [one for one in tf.compat.v1.get_default_graph().get_operations() if one not in before]
        with tf.control_dependencies(made):
            changed = tf.timestamp()
        return tf.stack([began, fetched, computed, changed])

    @tf.function
    def one(arrays: Any, lines: Any) -> Any:
        *batch, worker = next(arrays)
        times = training.strategy.run(step, (batch, lines))
        return tf.concat([times, tf.cast(worker % 2**24, tf.float64)[None]], axis=0)

    return one


def _examples_of(training: Training, arrays: Any, lines: Any) -> tuple[Any, ...]:
    """Return the batch of one step, augmented where images are: ``lines`` are its own of ``examples``."""
    section = training.batches.augmentation
    mixes = section is not None and section.mixes
    batch = _gather(arrays, lines[:, 1:3] if mixes else lines[:, 1])
    if section is not None:
        draws = tf.cast(lines[:, 3 if mixes else 2 :], tf.int32)
        draws = tf.reshape(draws, [-1, 2, lines.shape[1] // 2 - 1]) if mixes else draws
        batch = augment_batch(tuple(batch), draws, section, training.batches.num_classes)
    return tuple(batch)


def _gather(arrays: Any, rows: Any) -> Any:
    """Return these rows of each array."""
    return tf.nest.map_structure(lambda array: tf.gather(array, rows), arrays)


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
    with keras.StatelessScope(_by_variable(model, sums)):
        return {name: float(value) for name, value in model.get_metrics_result().items()}


def _by_variable(model: Any, sums: npt.NDArray[np.float64]) -> list[tuple[Any, npt.NDArray[np.float64]]]:
    """Return each variable of the metrics with its numbers, which lie one after the other in ``sums``."""
    variables = model.metrics_variables
    ends = np.cumsum([math.prod(variable.shape) for variable in variables])
    parts = np.split(sums, ends[:-1])
    return [(variable, part.reshape(variable.shape)) for variable, part in zip(variables, parts, strict=True)]
