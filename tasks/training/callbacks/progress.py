"""Reports of a running training: metrics of each epoch, speed, and a progress bar and a table on standard error."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tasks.modeling import metrics
from tasks.system import units
from tasks.training.position import Position

MetricSink = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its metrics."""


class SendMetrics(keras.callbacks.Callback):
    """Sends each epoch's metrics to the tracking."""

    def __init__(self, send: MetricSink, position: Position) -> None:
        super().__init__()
        self.send = send
        self.position = position

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.send(self.position.step + self.position.offset, metrics.by_split(logs or {}))


class Throughput(keras.callbacks.Callback):
    """Measures examples per second over all training steps after the first call, without validation, checkpoints and
    the profiler's own work; the first call, which traces and compiles, is timed separately.

    If XLA compiles each batch size separately on TensorFlow, the first call with an epoch's short last batch is also
    left out: with it, an epoch of digits measured 717 examples/s instead of 16,681, a 23rd.
    """

    def __init__(self, position: Position, began: float, compiles_each_size: bool = False) -> None:
        super().__init__()
        self.position = position
        self._compiles_each_size = compiles_each_size
        self._compiled: set[int] = set()
        self.began = began
        """Start of the stage, by ``time.perf_counter``."""
        self.setup_seconds = 0.0
        self.first_call_seconds: float | None = None
        self.epoch_seconds: list[float] = []
        self.seconds = 0.0
        self.num_examples = 0
        self._epoch_began = 0.0
        self._since = 0.0
        self._step = 0

    @property
    def examples_per_second(self) -> float | None:
        """Examples per second; None if every call traced and compiled."""
        return self.num_examples / self.seconds if self.num_examples else None

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._epoch_began, self._since = time.perf_counter(), self.position.now()
        self._step = self.position.step
        if self.first_call_seconds is None:
            self.setup_seconds = self._epoch_began - self.began

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.first_call_seconds is None:
            self.position.wait()  # An epoch's last call is done, too: ``Position`` has waited for it.
        now, step = self.position.now(), self.position.step
        sizes = [self.position.batches.size(done) for done in range(self._step, step)]
        compiled = self._compiles_each_size and not self._compiled.issuperset(sizes)
        self._compiled.update(sizes)
        if self.first_call_seconds is None:
            self.first_call_seconds = now - self._since
        elif not compiled:
            self.num_examples += sum(sizes)
            self.seconds += now - self._since
        self._since, self._step = now, step

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        begun_here = epoch > self.position.start.epoch or not self.position.start.step_in_epoch
        if begun_here and self.position.epoch > epoch:
            self.epoch_seconds.append(time.perf_counter() - self._epoch_began)


class ProgressBar(keras.callbacks.Callback):
    """Draws one bar per epoch on a terminal and prints the epoch's metrics as a table row, or as a list of names and
    values if the table is wider than the terminal."""

    def __init__(self, epochs: int, steps: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.steps = steps
        self.console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: Any = None
        self._widths: dict[str, int] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task(f"epoch {epoch + 1}/{self.epochs}", total=self.steps)
            self._bar.start()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=min(batch + 1, self.steps))

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.close()
        values = {name: value for name, value in (logs or {}).items() if name != "learning_rate"}
        ordered = sorted(values, key=lambda name: (name.startswith("val_"), name.removeprefix("val_") != "loss"))
        words = {"epoch": f"{epoch + 1}/{self.epochs}"}
        words |= {name.replace("val_", "val ", 1): units.metric(values[name]) for name in ordered}
        words["learning rate"] = f"{(logs or {})['learning_rate']:.3g}"
        if begins := not self._widths:
            self._widths = {name: max(7, len(name), len(word)) for name, word in words.items()}
            self._widths["epoch"] = max(7, len(f"{self.epochs}/{self.epochs}"))
        if sum(self._widths.values()) + 2 * (len(self._widths) - 1) > self.console.width:
            self.console.print(", ".join(f"{name} {word}" for name, word in words.items()))
            return
        for line in ({name: name for name in words}, words) if begins else (words,):
            cells = (
                f"{word:>{self._widths.get(name, 0)}}"
                for name, word in (dict.fromkeys(self._widths, "") | line).items()
            )
            self.console.print("  ".join(cells), soft_wrap=True)

    def close(self) -> None:
        """Remove the bar; Keras does not end an interrupted epoch."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
