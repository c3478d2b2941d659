"""The training loops. Each drives the same callbacks, so progress, tracking and checkpoints are the same everywhere."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from tasks import config
from tasks.input.batches import Batches
from tasks.strategies import Strategy
from tasks.training.autotune import Calls
from tasks.training.callbacks import Position, SaveCheckpoints
from tasks.training.profiler import marked


class Epochs(DataAdapter):
    """What ``Model.fit`` reads: batches iterated once an epoch, which say how many steps an epoch has.

    Keras would ask the dataset, and a distributed one counts a step once for each replica. It must not learn the
    length from the end of the data either: the step that finds no data has already advanced Dropout's seeds.
    """

    def __init__(
        self, batches: Batches, steps: int, dataset: Any = None, count: Callable[[int], int] | None = None
    ) -> None:
        """
        Args:
            batches: what is read.
            steps: of an epoch.
            dataset: what TensorFlow iterates instead of that of ``batches``.
            count: takes the steps that are left, returns those of the next call; without it Keras counts.
        """
        self._batches = batches
        self._steps = steps
        self._dataset = dataset
        self._count = count

    def lead(self, iterator: Any) -> None:
        """Let an iterator of Keras' go through an epoch in calls of as many steps as ``count`` says: its own ones do
        the same number each time."""

        def calls() -> Iterator[tuple[int, int, Any]]:
            source, done = iter(iterator._get_iterator()), 0
            while done < self._steps:
                count = self._count(self._steps - done) if self._count else self._steps
                yield done, done + count - 1, source
                done += count

        iterator._enumerate_iterator = calls

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

    On TensorFlow ``Model.fit`` is given functions of ours, which gather batches from resident arrays and do many steps:
    on one device Keras' own steps, under tf.distribute those of the custom loop, because there Keras' train function
    fails with several steps a call, and with several workers altogether (keras#20585). A model on one device with a
    step of its own is left to Keras.

    The data have the steps of one epoch and are iterated once an epoch; ``Position`` says which. So a call never runs
    over an epoch's end. An epoch that was left in its middle has fewer steps, and is a ``fit`` of its own.
    """
    data, measured = None, None
    count, count_test = None, None
    if strategy.backend == "tensorflow" and (strategy.distributed or not _steps_itself(model)):
        from tasks.training import steps

        calls = _calls(section, position, strategy, callbacks)
        data = _iterated(strategy, training)
        # Everything is built. Keras would average the first batch over all replicas to learn its shape, and fails.
        model._maybe_symbolic_build = lambda iterator, **_: iterator.data_adapter.lead(iterator)
        model.train_function = steps.train_function(model, loss, strategy, training, position, section, calls)
        count = calls.next
        if validation is not None:
            measured = _iterated(strategy, validation)
            model.test_function = steps.test_function(model, loss, strategy, validation, section, calls)
            count_test = calls.within
    held_out = Epochs(validation, validation.steps, measured, count_test) if validation is not None else None

    def fit_epochs(first: int, end: int, steps: int) -> None:
        model.fit(
            Epochs(training, steps, data, count),
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
    from tasks.training import steps

    calls = _calls(section, position, strategy, callbacks)
    train = steps.train_function(model, loss, strategy, training, position, section, calls)
    data = _iterated(strategy, training)
    if validation is not None:
        test = steps.test_function(model, loss, strategy, validation, section, calls)
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
        iterator, left, done = iter(data), training.steps - position.step_in_epoch, 0
        while done < left:
            count = calls.next(left - done)
            listeners.on_train_batch_begin(done)
            logs = train(iterator)
            done += count
            listeners.on_train_batch_end(done - 1, logs)
            if model.stop_training:
                break
        results = _numbers(logs)
        if validation is not None:
            listeners.on_test_begin()
            model.reset_metrics()
            iterator, done = iter(held_out), 0
            while done < validation.steps:
                count = calls.within(validation.steps - done)
                listeners.on_test_batch_begin(done)
                logs = test(iterator)
                done += count
                listeners.on_test_batch_end(done - 1, logs)
            measured = _numbers(logs)
            listeners.on_test_end(measured)
            results |= {f"val_{name}": value for name, value in measured.items()}
        listeners.on_epoch_end(epoch, results)
        if model.stop_training:
            break
    model.optimizer.finalize_variable_values(model.trainable_variables)
    listeners.on_train_end(results)


def _calls(section: config.Train, position: Position, strategy: Strategy, callbacks: list[Any]) -> Calls:
    saving = next((one for one in callbacks if isinstance(one, SaveCheckpoints)), None)
    return Calls(section, position, strategy, saving.section.every_steps if saving else None)


def _steps_itself(model: Any) -> bool:
    """Return whether a model's class has a step of its own, whose logs ``Model.fit`` passes on."""
    names = ("train_step", "test_step", "make_train_function", "make_test_function")
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in names)


def _iterated(strategy: Strategy, batches: Batches) -> Any:
    """Return what a loop iterates once an epoch: zeros, where the step gathers its batch itself."""
    import tensorflow as tf

    from tasks.training import steps

    zeros = tf.data.Dataset.from_tensors(0).repeat()
    return strategy.distribute(batches.dataset if steps.reads_iterator(batches) else zeros)


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items()}
