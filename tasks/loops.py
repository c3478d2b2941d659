"""The training loops. Each drives the same callbacks, so progress, tracking and checkpoints are the same everywhere."""

from collections.abc import Iterator
from typing import Any

import keras
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from tasks import config
from tasks.callbacks import Position
from tasks.input_pipeline import Batches
from tasks.profiler import marked
from tasks.strategies import Strategy


class Epochs(DataAdapter):
    """What ``Model.fit`` reads: batches iterated once an epoch, which say how many steps an epoch has.

    Keras would ask the dataset, and a distributed one counts a step once for each replica. It must not learn the
    length from the end of the data either: the step that finds no data has already advanced Dropout's seeds.
    """

    def __init__(self, batches: Batches, steps: int, dataset: Any = None) -> None:
        self._batches = batches
        self._steps = steps
        self._dataset = dataset

    def get_tf_dataset(self) -> Any:
        return self._batches.dataset if self._dataset is None else self._dataset

    def get_jax_iterator(self) -> Iterator[Any]:
        return marked(self._batches.arrays())

    @property
    def num_batches(self) -> int:
        return self._steps

    @property
    def batch_size(self) -> None:
        return None

    @property
    def has_partial_batch(self) -> None:
        return None

    @property
    def partial_batch_size(self) -> None:
        return None


def fit(
    model: Any,
    loss: Any,
    strategy: Strategy,
    training: Batches,
    validation: Batches | None,
    position: Position,
    section: config.Train,
    callbacks: list[Any],
) -> None:
    """Train with Keras' own ``Model.fit`` from ``position`` to the end of epoch ``section.epochs``.

    Keras' train function fails under tf.distribute with several steps a call, and with several workers altogether
    (keras#20585), so there ``Model.fit`` is given the one of the custom loop.

    The data have the steps of one epoch and are iterated once an epoch; ``Position`` says which. So
    steps_per_execution never runs over an epoch's end. An epoch that was left in its middle has fewer steps, and is a
    ``fit`` of its own.
    """
    data, measured = None, None
    if strategy.distributed:
        from tasks import steps

        data = _iterated(strategy, training)
        # Everything is built. Keras would average the first batch over all replicas to learn its shape, and fails.
        model._maybe_symbolic_build = lambda **_: None
        model.train_function = steps.train_function(model, loss, strategy, training, position, section)
        if validation is not None:
            measured = _iterated(strategy, validation)
            model.test_function = steps.test_function(model, loss, strategy, validation, section)
    held_out = Epochs(validation, validation.steps, measured) if validation is not None else None

    def fit_epochs(first: int, end: int, steps: int) -> None:
        model.fit(
            Epochs(training, steps, data),
            epochs=end,
            initial_epoch=first,
            validation_data=held_out,
            callbacks=callbacks,
            shuffle=False,
            verbose=0,
        )

    start = position.start
    first, rest = start.epoch, training.steps - start.step_in_epoch
    if first < section.epochs and rest < training.steps:
        fit_epochs(first, first + 1, rest)
        if model.stop_training:
            return
        first += 1
    if first < section.epochs:
        fit_epochs(first, section.epochs, training.steps)


def custom(
    model: Any,
    loss: Any,
    strategy: Strategy,
    training: Batches,
    validation: Batches | None,
    position: Position,
    section: config.Train,
    callbacks: list[Any],
) -> None:
    """Train with our own loop from ``position`` to the end of epoch ``section.epochs``; it tells the callbacks what
    ``Model.fit`` tells them, in the same order."""
    from tasks import steps

    train = steps.train_function(model, loss, strategy, training, position, section)
    data = _iterated(strategy, training)
    if validation is not None:
        test = steps.test_function(model, loss, strategy, validation, section)
        held_out = _iterated(strategy, validation)

    listeners = keras.callbacks.CallbackList(
        callbacks, add_history=True, model=model, epochs=section.epochs, steps=training.steps, verbose=0
    )
    model.stop_training = False
    results: dict[str, float] = {}
    listeners.on_train_begin()
    for epoch in range(position.start.epoch, section.epochs):
        model.reset_metrics()
        listeners.on_epoch_begin(epoch)
        iterator, left = iter(data), training.steps - position.step_in_epoch
        for done in range(0, left, section.steps_per_execution):
            listeners.on_train_batch_begin(done)
            logs = train(iterator)
            listeners.on_train_batch_end(min(done + section.steps_per_execution, left) - 1, logs)
            if model.stop_training:
                break
        results = _numbers(logs)
        if validation is not None:
            listeners.on_test_begin()
            model.reset_metrics()
            iterator = iter(held_out)
            for done in range(0, validation.steps, section.steps_per_execution):
                listeners.on_test_batch_begin(done)
                logs = test(iterator)
                listeners.on_test_batch_end(min(done + section.steps_per_execution, validation.steps) - 1, logs)
            measured = _numbers(logs)
            listeners.on_test_end(measured)
            results |= {f"val_{name}": value for name, value in measured.items()}
        listeners.on_epoch_end(epoch, results)
        if model.stop_training:
            break
    model.optimizer.finalize_variable_values(model.trainable_variables)
    listeners.on_train_end(results)


def _iterated(strategy: Strategy, batches: Batches) -> Any:
    """Return what a loop iterates once an epoch: zeros, where the step gathers its batch itself."""
    import tensorflow as tf

    from tasks import steps

    zeros = tf.data.Dataset.from_tensors(0).repeat()
    return strategy.distribute(batches.dataset if steps.reads_iterator(batches) else zeros)


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items()}
