"""The epochs of the loops of our own, which tell the callbacks what ``Model.fit`` tells them, in the same order."""

from collections.abc import Callable, Iterable
from typing import Any

import keras

from tasks.training import Training
from tasks.training.autotune import Calls

Measure = Callable[[Any], dict[str, float]]


def drive(training: Training, train_epoch: Callable[[int, Any], dict[str, float]], measure: Measure | None) -> None:
    """Train from the training's position to the end of its phase, or until a callback stops it.

    Args:
        training: its callbacks are told.
        train_epoch: takes an epoch's number and the callbacks, trains the rest of the epoch, tells them of each
            call, returns the metrics.
        measure: takes the callbacks, measures the validation split and tells them; returns the metrics.
    """
    model, last = training.model, training.phase.end_epoch
    listeners = keras.callbacks.CallbackList(
        list(training.callbacks), add_history=True, model=model, epochs=last, steps=training.batches.steps, verbose=0
    )
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
        results = numbers(logs)
        listeners.on_test_end(results)
        return results

    return measure


def numbers(logs: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a call as numbers, which waits for the call."""
    return {name: float(value) for name, value in logs.items()}
