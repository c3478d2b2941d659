"""The training loops. Each drives the same callbacks, so progress, tracking and checkpoints are the same everywhere."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from tasks.strategies import Strategy
from tasks.system import upstream
from tasks.training import Training
from tasks.training.autotune import Calls
from tasks.training.callbacks.stopping import ResumableEarlyStopping, StopBelowLimits

Measure = Callable[[Any], dict[str, float]]


def run(training: Training) -> None:
    """Train to the end of a phase, with the loop of the settings, unless the training had stopped early before it was
    resumed."""
    if stopped_early(training):
        return
    loop = {"fit": fit, "custom": custom}[training.settings.train.loop]
    if training.strategy.coordinator is not None:
        from tasks.training import coordinator

        loop = coordinator.asynchronous
    with training.strategy.scope():  # On JAX it is read for each batch and layer.
        loop(training)


def stopped_early(training: Training) -> bool:
    """Return whether early stopping, or a sweep's limits, have ended a training, also before it was resumed."""
    stopping = (ResumableEarlyStopping, StopBelowLimits)
    return any(isinstance(callback, stopping) and callback.over for callback in training.callbacks)


def thaws(training: Training) -> bool:
    """Return whether a training has done one phase, and another one follows."""
    ended = training.position.epoch == training.phase.end_epoch < training.settings.train.epochs
    return ended and not stopped_early(training)


def fit(training: Training) -> None:
    """Train with Keras' own ``Model.fit`` from the training's position to the end of its phase.

    ``Model.fit`` is given functions of ours, which gather batches from resident arrays and do many steps: on one device
    and on JAX Keras' own steps, under tf.distribute those of the custom loop, because there Keras' train function fails
    with several steps a call, and with several workers altogether (keras#20585).

    The data have the steps of one epoch and are iterated once an epoch; ``Position`` says which. So a call never runs
    over an epoch's end. An epoch that was left in its middle has fewer steps, and is a ``fit`` of its own.
    """
    model, strategy, batches, validation = training.model, training.strategy, training.batches, training.validation
    functions, calls, held_out = steps_of(strategy), Calls(training), None
    upstream.iterate_in_calls(model, lambda iterator: iterator.data_adapter.iterate_in_calls(iterator))
    model.train_function = functions.train_function(training, calls)
    data = functions.iterated(strategy, batches)
    if validation is not None:
        model.test_function = functions.test_function(training, validation, calls)
        held_out = Epochs(validation.steps, functions.iterated(strategy, validation), calls.within)

    def fit_epochs(first: int, end: int, steps: int) -> None:
        model.fit(
            Epochs(steps, data, calls.next),
            epochs=end,
            initial_epoch=first,
            validation_data=held_out,
            callbacks=Listeners(training),
            shuffle=False,
        )

    start, end = training.position.start, training.phase.end_epoch
    first, rest = start.epoch, batches.steps - start.step_in_epoch
    if first < end and rest < batches.steps:
        fit_epochs(first, first + 1, rest)
        if model.stop_training:
            return
        first += 1
    if first < end:
        fit_epochs(first, end, batches.steps)


class Listeners(keras.callbacks.CallbackList):
    """The callbacks of a training. Keras' own list reads all numbers of each call for them, which waits for the call;
    of these callbacks ``Position`` alone asks for one number, when the next call has begun."""

    def __init__(self, training: Training) -> None:
        super().__init__(
            list(training.callbacks),
            add_history=True,
            model=training.model,
            epochs=training.phase.end_epoch,
            steps=training.batches.steps,
            verbose=0,
        )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self.callbacks:
            callback.on_train_batch_end(batch, logs)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self.callbacks:
            callback.on_test_batch_end(batch, logs)


class Epochs(upstream.data_adapter()):  # type: ignore[misc]
    """What ``Model.fit`` reads: iterated once an epoch, with the number of an epoch's steps.

    Keras would ask the dataset, and a distributed one counts a step once for each replica. It must not learn the
    length from the end of the data either: the step that finds no data has already advanced Dropout's seeds.
    """

    def __init__(self, steps: int, dataset: Any, count: Callable[[int], int]) -> None:
        """
        Args:
            steps: of an epoch.
            dataset: what is iterated.
            count: takes the steps that are left, returns those of the next call.
        """
        self._steps = steps
        self._dataset = dataset
        self._count = count

    def iterate_in_calls(self, iterator: Any) -> None:
        """Let an iterator of Keras' go through an epoch in calls of as many steps as ``count`` says: its own ones do
        the same number each time."""

        def calls() -> Iterator[tuple[int, int, Any]]:
            source, done = iter(self._dataset), 0
            while done < self._steps:
                count = self._count(self._steps - done)
                yield done, done + count - 1, source
                done += count

        upstream.set_calls(iterator, calls)

    def get_tf_dataset(self) -> Any:
        return self._dataset

    @property
    def num_batches(self) -> int:
        return self._steps

    batch_size = has_partial_batch = partial_batch_size = None


def custom(training: Training) -> None:
    """Train with our own loop from the training's position to the end of its phase."""
    steps, calls = steps_of(training.strategy), Calls(training)
    train = steps.train_function(training, calls)
    if training.strategy.backend == "jax":
        train = upstream.keeping_state(training.model, train, trains=True)
    data = steps.iterated(training.strategy, training.batches)

    def train_epoch(epoch: int, listeners: Any) -> dict[str, float]:
        iterator, left, done = iter(data), training.batches.steps - training.position.step_in_epoch, 0
        while done < left:
            count = calls.next(left - done)
            listeners.on_train_batch_begin(done)
            logs = train(iterator)
            done += count
            listeners.on_train_batch_end(done - 1, logs)
            if training.model.stop_training:
                break
        return numbers(training.model, logs)

    measure = None
    if training.validation is not None:
        test = steps.test_function(training, training.validation, calls)
        if training.strategy.backend == "jax":
            test = upstream.keeping_state(training.model, test, trains=False)
        measure = measuring(training, test, calls, steps.iterated(training.strategy, training.validation))
    drive(training, train_epoch, measure)


def drive(training: Training, train_epoch: Callable[[int, Any], dict[str, float]], measure: Measure | None) -> None:
    """Train from the training's position to the end of its phase, or until a callback stops it.

    Args:
        training: its callbacks are called.
        train_epoch: takes an epoch's number and the callbacks, trains the rest of the epoch, calls them for
            each call of the step function, returns the metrics.
        measure: takes the callbacks, measures the validation split and calls them; returns the metrics.
    """
    model, last = training.model, training.phase.end_epoch
    listeners = Listeners(training)
    model.stop_training = False
    results: dict[str, float] = {}
    listeners.on_train_begin()
    for epoch in range(training.position.start.epoch, last):
        model.reset_metrics()
        listeners.on_epoch_begin(epoch)
        results = train_epoch(epoch, listeners)
        if measure is not None:
            results |= {f"val_{name}": value for name, value in measure(listeners).items()}
        listeners.on_epoch_end(epoch, results)
        if model.stop_training:
            break
    model.optimizer.finalize_variable_values(model.trainable_variables)
    listeners.on_train_end(results)


def measuring(
    training: Training, function: Callable[[Any], dict[str, Any]], calls: Calls, data: Iterable[Any]
) -> Measure:
    """Return what measures the validation split by ``steps.test_function``.

    Args:
        training: its model is measured.
        function: does the steps of a call.
        calls: says how many those are.
        data: what ``function`` reads, iterated once for each epoch.
    """
    total = training.validation.steps if training.validation is not None else 0

    def measure(listeners: Any) -> dict[str, float]:
        listeners.on_test_begin()
        training.model.reset_metrics()
        iterator, done = iter(data), 0
        while done < total:
            count = calls.within(total - done)
            listeners.on_test_batch_begin(done)
            logs = function(iterator)
            done += count
            listeners.on_test_batch_end(done - 1, logs)
        results = numbers(training.model, logs)
        listeners.on_test_end(results)
        return results

    return measure


def steps_of(strategy: Strategy) -> Any:
    """Return the module of the steps on a strategy's backend."""
    return importlib.import_module(f"tasks.training.steps{'_on_jax' * (strategy.backend == 'jax')}")


def numbers(model: Any, logs: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a call as numbers, which waits for the call. On JAX the model's variables then have the
    values after it."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    return {name: float(value) for name, value in logs.items()}
