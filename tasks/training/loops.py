"""The training loops. All call the same callbacks, so progress, tracking and checkpoints work alike."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from tasks.input.batches import Batches
from tasks.strategies import Strategy
from tasks.system import upstream
from tasks.training import Training
from tasks.training.autotune import Calls

Measure = Callable[[Any], dict[str, float]]


def run(training: Training) -> None:
    """Train to the end of the phase with the configured loop, unless the training stopped early before a resume."""
    if stopped_early(training):
        return
    loop = {"fit": fit, "custom": custom}[training.settings.train.loop]
    if training.strategy.coordinator is not None:
        from tasks.training import coordinator

        loop = coordinator.asynchronous
    with training.strategy.scope():  # On JAX it is read for each batch and layer.
        loop(training)


def stopped_early(training: Training) -> bool:
    """Return whether a callback has ended the training, also before a resume: early stopping, a sweep's limits, or a
    user's callback."""
    return any(getattr(callback, "over", False) for callback in training.callbacks)


def thaws(training: Training) -> bool:
    """Return whether a training has finished one phase and another follows."""
    ended = training.position.epoch == training.phase.end_epoch < training.settings.train.epochs
    return ended and not stopped_early(training)


def fit(training: Training) -> None:
    """Train with Keras' own ``Model.fit`` from the current position to the end of the phase.

    ``Model.fit`` receives this project's train and test functions, which gather batches from resident arrays and run
    many steps per call: Keras' own steps on one device and on JAX, the custom loop's steps under tf.distribute, where
    Keras' train function fails with several steps per call and always with several workers (keras#20585).

    The data have the steps of one epoch, which ``Position`` selects, and are iterated once per epoch. So a call never
    crosses the end of an epoch, and a resumed epoch has only its remaining steps.
    """
    model, strategy, batches, validation = training.model, training.strategy, training.batches, training.validation
    functions, calls, held_out = steps_of(strategy), Calls(training), None
    upstream.iterate_in_calls(model, lambda iterator: iterator.data_adapter.iterate_in_calls(iterator))
    model.train_function = functions.train_function(training, calls)
    data = functions.iterated(strategy, batches)
    if validation is not None:
        model.test_function = functions.test_function(training, validation, calls)
        held_out = Epochs(validation, functions.iterated(strategy, validation), calls)
    model.fit(
        Epochs(batches, data, calls),
        epochs=training.phase.end_epoch,
        initial_epoch=training.position.start.epoch,
        validation_data=held_out,
        callbacks=Listeners(training),
        shuffle=False,
    )


class Listeners(keras.callbacks.CallbackList):
    """The callbacks of a training. Keras' own list reads all metrics after each call, which waits for the call. Here
    only ``Position`` reads a value, the loss, and only after the next call has started."""

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
    """The data adapter that ``Model.fit`` reads: iterated once per epoch, with the number of the epoch's steps.

    Keras would ask the dataset for its length, but a distributed dataset counts a step once per replica. Keras must not
    detect the end of the data either: a step that finds no data has already advanced Dropout's seeds.
    """

    def __init__(self, batches: Batches, dataset: Any, calls: Calls) -> None:
        self._batches = batches
        self._dataset = dataset
        self._calls = calls

    def iterate_in_calls(self, iterator: Any) -> None:
        """Let Keras' epoch iterator make our calls; its own calls all have the same number of steps."""

        def calls() -> Iterator[tuple[int, int, Any]]:
            begin = self._batches.unread.start
            for steps in self._calls.over(self._batches, self._dataset):
                done = steps.first - begin
                yield done, done + steps.num_steps - 1, steps

        upstream.set_calls(iterator, calls)

    def get_tf_dataset(self) -> Any:
        return self._dataset

    @property
    def num_batches(self) -> int:
        return len(self._batches.unread)

    batch_size = has_partial_batch = partial_batch_size = None


def custom(training: Training) -> None:
    """Train with this project's own loop from the current position to the end of the phase."""
    steps, calls = steps_of(training.strategy), Calls(training)
    train = steps.train_function(training, calls)
    if training.strategy.backend == "jax":
        train = upstream.keeping_state(training.model, train, trains=True)
    data = steps.iterated(training.strategy, training.batches)

    def train_epoch(epoch: int, listeners: Any) -> dict[str, float]:
        begin = training.position.step
        for one in calls.over(training.batches, data):
            done = one.first - begin
            listeners.on_train_batch_begin(done)
            logs = train(one)
            listeners.on_train_batch_end(done + one.num_steps - 1, logs)
            if training.model.stop_training:
                break
        return numbers(training.model, logs)

    measure = None
    if training.validation is not None:
        test = steps.test_function(training, training.validation, calls)
        if training.strategy.backend == "jax":
            test = upstream.keeping_state(training.model, test, trains=False)
        data_held_out = steps.iterated(training.strategy, training.validation)
        measure = measuring(training.model, test, calls, training.validation, data_held_out)
    drive(training, train_epoch, measure)


def drive(training: Training, train_epoch: Callable[[int, Any], dict[str, float]], measure: Measure | None) -> None:
    """Train from the current position to the end of the phase, or until a callback stops the training.

    Args:
        train_epoch: takes an epoch's number and the callbacks, trains the rest of the epoch, calls the callbacks for
            each call of the step function, and returns the metrics.
        measure: takes the callbacks, measures the validation split, calls the callbacks, and returns the metrics.
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
    model: Any, function: Callable[[Any], dict[str, Any]], calls: Calls, validation: Batches, data: Iterable[Any]
) -> Measure:
    """Return a function that measures the validation split with ``function``, a ``steps.test_function``, whose calls
    read iterations over ``data``."""

    def measure(listeners: Any) -> dict[str, float]:
        listeners.on_test_begin()
        model.reset_metrics()
        for one in calls.over(validation, data):
            listeners.on_test_batch_begin(one.first)
            logs = function(one)
            listeners.on_test_batch_end(one.first + one.num_steps - 1, logs)
        results = numbers(model, logs)
        listeners.on_test_end(results)
        return results

    return measure


def steps_of(strategy: Strategy) -> Any:
    """Return the module with the steps for a strategy's backend."""
    return importlib.import_module(f"tasks.training.steps{'_on_jax' * (strategy.backend == 'jax')}")


def numbers(model: Any, logs: dict[str, Any]) -> dict[str, float]:
    """Wait for a call and return its metrics as floats. On JAX this also updates the model's variables."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    return {name: float(value) for name, value in logs.items()}
