"""The training loops. Each drives the same callbacks, so progress, tracking and checkpoints are the same everywhere."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from tasks.checkpoints import Checkpoints, State
from tasks.input_pipeline import Batches
from tasks.strategies import Strategy

MetricSink = Callable[[int, Mapping[str, float]], None]


def metric_names(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return Keras' logs under our names: ``loss`` is ``train/loss``, ``val_loss`` is ``validation/loss``."""
    return {
        f"validation/{name.removeprefix('val_')}" if name.startswith("val_") else f"train/{name}": float(value)
        for name, value in logs.items()
    }


class Position(keras.callbacks.Callback):
    """Knows where the training is, and tells the input pipeline before it starts an epoch. First of all callbacks."""

    def __init__(self, batches: Batches, start: State) -> None:
        super().__init__()
        self.batches = batches
        self.start = start
        self.history: dict[str, list[float]] = {name: list(values) for name, values in start.history.items()}
        self.epoch = start.epoch
        self.step_in_epoch = start.step_in_epoch
        self._first_step = start.step_in_epoch

    @property
    def step(self) -> int:
        """Training steps done since the start of the run."""
        return self.epoch * self.batches.steps + self.step_in_epoch

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._first_step = self.start.step_in_epoch if epoch == self.start.epoch else 0
        self.epoch, self.step_in_epoch = epoch, self._first_step
        self.batches.epoch, self.batches.start_step = epoch, self._first_step

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        # With steps_per_execution the last call of an epoch reports steps that it did not do.
        self.step_in_epoch = min(self._first_step + batch + 1, self.batches.steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.epoch, self.step_in_epoch = epoch + 1, 0
        logs = logs if logs is not None else {}
        logs["learning_rate"] = self._learning_rate()
        for name, value in metric_names(logs).items():
            self.history.setdefault(name, []).append(value)

    def _learning_rate(self) -> float:
        """Return the rate of the step just done. The optimizer's own is the next step's, of another epoch by now."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)  # Under mixed_float16.
        rate = optimizer._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(optimizer.iterations - 1)
        return float(keras.ops.convert_to_numpy(rate))

    def state(self, stopping: "EarlyStopping | None") -> State:
        """Return what a checkpoint needs to carry on from here."""
        return self.start.model_copy(
            update={
                "step": self.step,
                "epoch": self.epoch,
                "step_in_epoch": self.step_in_epoch,
                "history": {name: tuple(values) for name, values in self.history.items()},
                "stopping": stopping.state() if stopping else {},
            }
        )


class Throughput(keras.callbacks.Callback):
    """Measures examples per second over all training steps after the first call, validation and checkpoints left
    out."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position
        self.seconds = 0.0
        self.num_examples = 0
        self._traced = False
        self._since = 0.0
        self._step = 0

    @property
    def examples_per_second(self) -> float | None:
        """None when there was only the first call, which traces."""
        return self.num_examples / self.seconds if self.num_examples else None

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._since, self._step = time.perf_counter(), self.position.step_in_epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        now, step, batches = time.perf_counter(), self.position.step_in_epoch, self.position.batches
        if self._traced:
            size = batches.global_batch_size
            self.num_examples += min(step * size, batches.num_examples) - self._step * size
            self.seconds += now - self._since
        self._traced, self._since, self._step = True, now, step


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras' own, whose memory goes into the checkpoint: a resumed run stops where the whole one would have."""

    _memory = ("wait", "best", "best_epoch", "stopped_epoch")

    def __init__(self, stopping: Any, saved: Mapping[str, Any]) -> None:
        monitor = stopping.monitor.replace("train/", "").replace("validation/", "val_")
        mode = "min" if monitor.endswith("loss") else "max"
        super().__init__(monitor, stopping.min_delta, stopping.patience_epochs, mode=mode)
        self._saved = saved

    @property
    def over(self) -> bool:
        """Whether the training had stopped before it was resumed."""
        return bool(self._saved.get("stopped_epoch", 0) > 0 and self._saved["wait"] >= self.patience)

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        super().on_train_begin(logs)
        for name, value in self._saved.items():
            setattr(self, name, value)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._saved = self.state()

    def state(self) -> dict[str, Any]:
        """Return what the next decision needs."""
        return {name: getattr(self, name) for name in self._memory}


class SaveCheckpoints(keras.callbacks.Callback):
    """Saves every so many steps and epochs, and always at the end. After EarlyStopping, whose memory it saves."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        position: Position,
        stopping: EarlyStopping | None,
        every_epochs: int | None,
        every_steps: int | None,
        metric_values: Callable[[], None],
    ) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.position = position
        self.stopping = stopping
        self.every_epochs = every_epochs
        self.every_steps = every_steps
        self.restore_metrics = metric_values
        self._metrics: dict[str, float] | None = None
        self._last_step = position.step

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        start = self.position.start
        if epoch == start.epoch and start.step_in_epoch:
            self.restore_metrics()  # Keras has just reset them, and this epoch's first part is in them.

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        done, every = self.position.step, self.every_steps
        due = every is not None and done // every > self._last_step // every
        if due and self.position.step_in_epoch < self.position.batches.steps:  # An epoch's end saves its metrics too.
            self._save(None)
        self._last_step = done

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._metrics = metric_names(logs or {})
        by_epoch = self.every_epochs and (epoch + 1) % self.every_epochs == 0
        by_step = self.every_steps and self.position.step % self.every_steps == 0
        if by_epoch or by_step:
            self._save(self._metrics)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._save(self._metrics)

    def _save(self, metrics: dict[str, float] | None) -> None:
        self.checkpoints.save(self.model, self.position.state(self.stopping), metrics)


class SendMetrics(keras.callbacks.Callback):
    """Hands each epoch's metrics to whoever tracks the run."""

    def __init__(self, send: MetricSink, position: Position) -> None:
        super().__init__()
        self.send = send
        self.position = position

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.send(self.position.step, metric_names(logs or {}))


class Epochs(DataAdapter):
    """What ``Model.fit`` reads: a dataset iterated once an epoch, which says how many steps an epoch has.

    Keras would ask the dataset, and a distributed one counts a step once for each replica. It must not learn the
    length from the end of the data either: the step that finds no data has already advanced Dropout's seeds.
    """

    def __init__(self, dataset: Any, steps: int) -> None:
        self._dataset = dataset
        self._steps = steps

    def get_tf_dataset(self) -> Any:
        return self._dataset

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
    strategy: Strategy,
    training: Batches,
    validation: Batches | None,
    epochs: int,
    start: State,
    callbacks: list[Any],
) -> None:
    """Train with Keras' own ``Model.fit`` from ``start`` to the end of epoch ``epochs``.

    The dataset has the steps of one epoch and is iterated once an epoch; ``Position`` says which. So
    steps_per_execution never runs over an epoch's end. An epoch that was left in its middle has fewer steps, and is a
    ``fit`` of its own.
    """
    data = strategy.distribute(training.dataset)
    held_out = Epochs(strategy.distribute(validation.dataset), validation.steps) if validation else None

    def fit_epochs(first: int, end: int, steps: int) -> None:
        model.fit(
            Epochs(data, steps),
            epochs=end,
            initial_epoch=first,
            validation_data=held_out,
            callbacks=callbacks,
            shuffle=False,
            verbose=0,
        )

    first, rest = start.epoch, training.steps - start.step_in_epoch
    if first < epochs and rest < training.steps:
        fit_epochs(first, first + 1, rest)
        if model.stop_training:
            return
        first += 1
    if first < epochs:
        fit_epochs(first, epochs, training.steps)
