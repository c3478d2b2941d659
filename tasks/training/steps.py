"""One training step and one test step on TensorFlow, and the compiled functions that run many of them in one call.

Losses follow https://www.tensorflow.org/tutorials/distribute/custom_training: the sum of the losses of the examples,
divided by the *global* batch size, so that the replicas' gradients add up to those of one device with all examples.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tasks.input.array import ArraySource, read_at_random
from tasks.input.augment import augment_batch
from tasks.input.batches import Batches
from tasks.strategies import Strategy
from tasks.training import Training
from tasks.training.autotune import Calls, Steps

# Runs the steps of a call, and returns the metrics so far by name.
StepsFunction = Callable[[Steps], dict[str, Any]]
# Takes the values of ``Steps``; returns after how many of the steps the loss was still finite, and the metrics by name.
ManySteps = Callable[[Any, int, int], tuple[Any, dict[str, Any]]]


def example_losses(loss: Any, labels: Any, outputs: Any) -> Any:
    """Return the loss of each example and of each of its positions, in the dtype of the loss, as Keras computes it:
    outputs in half precision have too few digits for an average.

    Args:
        loss: a ``keras.losses.Loss``.
        labels: int (n,) or (n, d1, ...).
        outputs: float of any precision, (n, classes) or (n, d1, ..., classes).
    """
    return loss.call(labels, tf.cast(outputs, loss.dtype))


def average_loss(
    values: Any, sample_weight: Any, global_size: Any, regularization: list[Any], num_replicas: int
) -> Any:
    """Return this replica's part of the loss of a global batch; the parts of all replicas add up to it.

    Args:
        values: the loss of each example, float (n,); or (n, d1, ...) for labels with more than one dimension, averaged
            over all dimensions but the first.
        sample_weight: float (n,), or None.
        global_size: int scalar, the number of examples in this step over all replicas.
        regularization: the model's own losses, float scalars; every replica has all of them.
        num_replicas: the number of replicas of all workers.
    """
    values = tf.reduce_mean(values, axis=list(range(1, len(values.shape))))
    if sample_weight is not None:
        values *= tf.cast(sample_weight, values.dtype)  # compute_average_loss would multiply in float32.
    loss = tf.nn.compute_average_loss(values, global_batch_size=global_size)
    if regularization:
        # Not tf.nn.scale_regularization_loss: it fails on the chief of parameter servers, which validates itself.
        loss += tf.cast(tf.add_n(regularization) / num_replicas, loss.dtype)
    return loss


def train_step(model: Any, loss: Any, strategy: Strategy) -> Callable[..., None]:
    """Return the step of one replica, ``step(batch, global_size)``, which updates the model, its optimizer and metrics.

    ``batch`` is this replica's part of the global batch, which may be empty: (features, labels) or (features, labels,
    sample weights), with features (n, ...), a single array or by name, labels (n, ...), sample weights float (n,).
    ``global_size`` is an int64 scalar, the number of examples in this step over all replicas.
    """
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # Under mixed_float16.
    # Keras clips and checks for non-finite values before it sums over replicas, so replicas would decide differently.
    sum_first = strategy.num_replicas > 1 and (inner is not optimizer or inner.global_clipnorm)

    def step(batch: Any, global_size: Any) -> None:
        x, y, sample_weight = (*batch, None)[:3]
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            total = average_loss(
                example_losses(loss, y, outputs), sample_weight, global_size, model.losses, strategy.num_replicas
            )
            scaled = optimizer.scale_loss(total)
        variables = model.trainable_variables
        found = zip(tape.gradient(scaled, variables), variables, strict=True)
        pairs = [(gradient, variable) for gradient, variable in found if gradient is not None]
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if sum_first:
            gradients = strategy.all_reduce(gradients)
            if inner.global_clipnorm:
                limit = optimizer.scale_loss(tf.constant(inner.global_clipnorm, gradients[0].dtype))
                gradients, _ = tf.clip_by_global_norm(gradients, limit)
            # Keras sums the gradients again, which are now the same on each replica.
            gradients = [gradient / strategy.num_replicas for gradient in gradients]
        optimizer.apply(gradients, variables)
        _update_metrics(model, strategy, batch, outputs, total, global_size)

    return step


def test_step(model: Any, loss: Any, strategy: Strategy) -> Callable[..., None]:
    """Return the step that updates only the metrics: ``step(batch, global_size)``, as in ``train_step``."""

    def step(batch: Any, global_size: Any) -> None:
        x, y, sample_weight = (*batch, None)[:3]
        outputs = model(x, training=False)
        total = average_loss(
            example_losses(loss, y, outputs), sample_weight, global_size, model.losses, strategy.num_replicas
        )
        _update_metrics(model, strategy, batch, outputs, total, global_size)

    return step


def _update_metrics(model: Any, strategy: Strategy, batch: Any, outputs: Any, total: Any, global_size: Any) -> None:
    x, y, sample_weight = (*batch, None)[:3]
    # Weighted so that the replicas' parts add up to the mean over all examples, even if a replica has none.
    share = tf.cast(global_size, total.dtype) / strategy.num_replicas
    model.metrics[0].update_state(total * strategy.num_replicas, sample_weight=share)
    model.compute_metrics(x, y, outputs, sample_weight)


def train_function(training: Training, calls: Calls) -> StepsFunction:
    """Return the train function of the loops.

    ``fit`` on one device runs Keras' own step, all other cases run ``train_step``. ``train.loop`` and
    ``train.jit_compile`` are read. With an ``ArraySource`` the step gathers its batch and ignores the iterator.
    """
    model, strategy, batches = training.model, training.strategy, training.batches
    step = _on_batch(model.train_step) if _keras_steps(training) else train_step(model, training.loss, strategy)
    jit_compile = training.settings.train.jit_compile is True
    source = batches.source
    if jit_compile and not strategy.distributed and isinstance(source, ArraySource) and source.fits_accelerator:
        many = compiled_steps(model, strategy, step, source, batches, calls.most)
    else:
        many = many_steps(model, strategy, tf.function(step, jit_compile=True) if jit_compile else step, batches)
    return calls.function(many, trains=True)


def test_function(training: Training, batches: Batches, calls: Calls) -> StepsFunction:
    """Return the test function for the split of ``batches``. As in ``train_function``, the step gathers the batches of
    an ``ArraySource``."""
    model, strategy = training.model, training.strategy
    step = _on_batch(model.test_step) if _keras_steps(training) else test_step(model, training.loss, strategy)
    return calls.function(many_steps(model, strategy, step, batches), trains=False)


def _keras_steps(training: Training) -> bool:
    return training.settings.train.loop == "fit" and not training.strategy.distributed


def _on_batch(step: Callable[[Any], Any]) -> Callable[..., None]:
    """Wrap a Keras step so that it also takes the global batch size, and ignores it."""

    def on_batch(batch: Any, global_size: Any) -> None:
        step(batch)

    return on_batch


def iterated(strategy: Strategy, batches: Batches) -> Any:
    """Return what a loop iterates once per epoch: batches, or zeros if a step gathers from resident arrays."""
    zeros = tf.data.Dataset.from_tensors(0).repeat()
    return strategy.distribute(zeros if isinstance(batches.source, ArraySource) else batches.dataset)


def many_steps(model: Any, strategy: Strategy, step: Callable[..., None], batches: Batches) -> ManySteps:
    """Return a function that runs steps ``first`` to ``first + count - 1`` in one call."""
    total, size, in_pass = batches.num_examples, batches.global_batch_size, batches.steps_in_pass

    def examples(number: Any) -> Any:
        # A pass over the data can end in a short batch.
        return tf.minimum(tf.constant(size, tf.int64), total - number % in_pass * size)

    if not isinstance(batches.source, ArraySource):

        @tf.function(reduce_retracing=True, autograph=False)
        def iterate(iterator: Any, first: Any, count: Any) -> Any:
            return _repeat(model, strategy, count, lambda i: strategy.run(step, (next(iterator), examples(first + i))))

        def many(iterator: Any, first: int, count: int) -> tuple[Any, dict[str, Any]]:
            done: tuple[Any, dict[str, Any]] = iterate(
                iterator, tf.constant(first, tf.int64), tf.constant(count, tf.int64)
            )
            return done

        return many

    on_rows = _step_on_rows(step, strategy, batches.source, batches)
    pair = _pair(batches)

    # Calls of other lengths must not retrace.
    number = tf.TensorSpec([], tf.int64)
    drawn_specs = [tf.TensorSpec([None, *pair, None], tf.int32)] if batches.augmentation else []
    rows_spec, ends_spec = tf.TensorSpec([None, *pair], tf.int64), tf.TensorSpec([None], tf.int64)

    @tf.function(input_signature=[rows_spec, drawn_specs, ends_spec, number, number], autograph=False)
    def gather(rows: Any, draws: Any, ends: Any, first: Any, count: Any) -> Any:
        def one(i: Any) -> None:
            begin, end = ends[i], ends[i + 1]
            drawn = [draw[begin:end] for draw in draws]
            strategy.run(on_rows, (rows[begin:end], drawn, examples(first + i)))

        return _repeat(model, strategy, count, one)

    def many_on_rows(iterator: Any, first: int, count: int) -> tuple[Any, dict[str, Any]]:
        parts = _rows_and_draws(batches, range(first, first + count))
        rows, *draws = [tf.constant(np.concatenate(arrays)) for arrays in parts]
        ends = tf.constant(np.cumsum([0, *map(len, parts[0])]))
        numbers = tf.constant(first, tf.int64), tf.constant(count, tf.int64)
        done: tuple[Any, dict[str, Any]] = gather(rows, draws, ends, *numbers)
        return done

    return many_on_rows


def _repeat(model: Any, strategy: Strategy, count: Any, one: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    """Inside a ``tf.function``: call ``one(i)`` for i = 0 to count - 1; return after how many steps the loss was still
    finite (``count`` for several workers, which would have to communicate), and the metrics by name.

    It does not need autograph, which leaves a source file in the temporary folder for each function.
    """
    total = model.metrics[0].total if strategy.num_workers == 1 else None  # Its mean is the loss so far.

    def body(i: Any, finite: Any) -> tuple[Any, Any]:
        one(i)
        good = True if total is None else tf.math.is_finite(tf.convert_to_tensor(total))
        return i + 1, finite + tf.cast(good, tf.int64)

    zero = tf.constant(0, tf.int64)
    _, finite = tf.while_loop(lambda i, finite: i < count, body, [zero, zero])
    return finite, model.get_metrics_result()


def compiled_steps(
    model: Any, strategy: Strategy, step: Callable[..., None], source: ArraySource, batches: Batches, most: int
) -> ManySteps:
    """Return a function like that of ``many_steps``, for at most ``most`` steps per call on one device: XLA compiles
    the loop with its steps. A perceptron trains 1.5 times as fast as with compiled single steps, which pass all
    variables each. A short batch at the end of a pass is not compiled: XLA takes 0.45 s for each shape.
    """
    on_rows = _step_on_rows(step, strategy, source, batches)
    short = many_steps(model, strategy, step, batches)
    pair = _pair(batches)
    draws_specs = [tf.TensorSpec([most, None, *pair, None], tf.int32)] if batches.augmentation else []
    rows_spec, count_spec = tf.TensorSpec([most, None, *pair], tf.int64), tf.TensorSpec([], tf.int64)

    @tf.function(jit_compile=True, input_signature=[rows_spec, draws_specs, count_spec], autograph=False)
    def compiled(rows: Any, draws: Any, count: Any) -> Any:
        def one(i: Any) -> None:
            on_rows(rows[i], [draw[i] for draw in draws], tf.shape(rows, tf.int64)[1])

        return _repeat(model, strategy, count, one)

    def many(iterator: Any, first: int, count: int) -> tuple[Any, dict[str, Any]]:
        logs: dict[str, Any] = {}
        good: Any = 0
        for size, run in itertools.groupby(range(first, first + count), batches.size):
            steps = list(run)
            if size < batches.global_batch_size:
                finite, logs = short(iterator, steps[0], len(steps))
            else:
                # Fewer steps are padded: XLA would compile another shape.
                filled = [
                    np.resize(np.stack(arrays), (most, *arrays[0].shape)) for arrays in _rows_and_draws(batches, steps)
                ]
                rows, *draws = map(tf.constant, filled)
                finite, logs = compiled(rows, draws, tf.constant(len(steps), tf.int64))
            good += finite  # To read it here would wait for an accelerator.
        return good, logs

    return many


def _rows_and_draws(batches: Batches, numbers: Iterable[int]) -> list[list[Any]]:
    """Return the rows that this worker reads, one int64 array (n,) per step, and, for augmented images, the draws for
    ``augment_batch``, int32 (n, columns); for mixed images both have two per example, (n, 2, ...)."""
    steps = [(batches.rows(number), batches.draws(number)) for number in numbers]
    return [list(arrays) for arrays in zip(*steps, strict=True) if arrays[0] is not None]


def _pair(batches: Batches) -> list[int]:
    """Return the extra dimension of rows and draws: [2] if images are mixed, else []."""
    return [2] if batches.augmentation is not None and batches.augmentation.mixes else []


def _step_on_rows(
    step: Callable[..., None], strategy: Strategy, source: ArraySource, batches: Batches
) -> Callable[..., None]:
    """Return the step that gathers its own batch: ``step(rows, draws, global_size)``, with the rows of this worker.

    The arrays are in device memory if there is a single replica and they fit, else memory-mapped on the host.
    """
    num_replicas = strategy.num_local_replicas
    place = None if num_replicas == 1 and source.fits_accelerator else "/device:CPU:0"
    with tf.device(place):
        arrays = source.resident()
        read_at_random(arrays)

    def on_rows(rows: Any, draws: Any, global_size: Any) -> None:
        with tf.device(place):
            if num_replicas > 1:
                size, replica = tf.shape(rows)[0], strategy.local_replica()
                first, last = size * replica // num_replicas, size * (replica + 1) // num_replicas
                rows, draws = rows[first:last], [draw[first:last] for draw in draws]
            batch = tf.nest.map_structure(lambda array: tf.gather(array, rows), arrays)
            if batches.augmentation is not None:
                batch = augment_batch(batch, draws[0], batches.augmentation, batches.num_classes)
        step(batch, global_size)

    return on_rows
