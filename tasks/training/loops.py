"""The training loops. Each drives the same callbacks, so progress, tracking and checkpoints are the same everywhere."""

from typing import Any

import keras

from tasks.system import upstream
from tasks.training import Training, epochs
from tasks.training.adapter import Epochs
from tasks.training.autotune import Calls
from tasks.training.callbacks.stopping import ResumableEarlyStopping, StopBelowLimits


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

    On TensorFlow ``Model.fit`` is given functions of ours, which gather batches from resident arrays and do many steps:
    on one device Keras' own steps, under tf.distribute those of the custom loop, because there Keras' train function
    fails with several steps a call, and with several workers altogether (keras#20585). A model on one device with a
    step of its own is left to Keras.

    The data have the steps of one epoch and are iterated once an epoch; ``Position`` says which. So a call never runs
    over an epoch's end. An epoch that was left in its middle has fewer steps, and is a ``fit`` of its own.
    """
    model, strategy, batches, validation = training.model, training.strategy, training.batches, training.validation
    data, measured = None, None
    count, count_test = None, None
    if strategy.backend == "tensorflow" and (strategy.distributed or not _steps_itself(model)):
        from tasks.training import steps

        calls = Calls(training)
        data = steps.iterated(strategy, batches)
        upstream.iterate_in_calls(model, lambda iterator: iterator.data_adapter.iterate_in_calls(iterator))
        model.train_function = steps.train_function(training, calls)
        count = calls.next
        if validation is not None:
            measured = steps.iterated(strategy, validation)
            model.test_function = steps.test_function(training, validation, calls)
            count_test = calls.within
    held_out = None
    if validation is not None:
        held_out = Epochs(validation, validation.steps, measured, count_test, strategy.place_batch)

    def fit_epochs(first: int, end: int, steps: int) -> None:
        model.fit(
            Epochs(batches, steps, data, count, strategy.place_batch),
            epochs=end,
            initial_epoch=first,
            validation_data=held_out,
            callbacks=list(training.callbacks),
            shuffle=False,
            verbose=0,
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


def custom(training: Training) -> None:
    """Train with our own loop from the training's position to the end of its phase."""
    from tasks.training import steps

    calls = Calls(training)
    train = steps.train_function(training, calls)
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
        return epochs.numbers(logs)

    measure = None
    if training.validation is not None:
        test = steps.test_function(training, training.validation, calls)
        measure = epochs.measuring(training, test, calls, steps.iterated(training.strategy, training.validation))
    epochs.drive(training, train_epoch, measure)


def _steps_itself(model: Any) -> bool:
    """Return whether a model's class has a step of its own, whose logs ``Model.fit`` passes on."""
    names = ("train_step", "test_step", "make_train_function", "make_test_function")
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in names)
