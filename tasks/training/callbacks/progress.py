"""What a training reports while it runs: each epoch's metrics, its speed, and on standard error a bar and a table."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tasks.modeling import metrics
from tasks.system import clock
from tasks.training.position import Position

MetricSink = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its metrics."""
RATE = "learning rate"
WORD = 8


class SendMetrics(keras.callbacks.Callback):
    """Hands each epoch's metrics to whoever tracks the run."""

    def __init__(self, send: MetricSink, position: Position) -> None:
        super().__init__()
        self.send = send
        self.position = position

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.send(self.position.step + self.position.offset, metrics.by_split(logs or {}))


class Throughput(keras.callbacks.Callback):
    """Measures examples per second over all training steps after the first call, without validation, checkpoints and
    the profiler's own work; and the first call, which traces and compiles, by itself.

    Where TensorFlow has XLA compile each size of a batch for itself, the first call with an epoch's short last batch is
    left out, too: with it, an epoch of digits seemed a 23rd as fast (717 examples/s in place of 16,681).
    """

    def __init__(self, position: Position, began: float, compiles_each_size: bool = False) -> None:
        super().__init__()
        self.position = position
        self._compiles_each_size = compiles_each_size
        self._compiled: set[int] = set()
        self.began = began
        """When the stage began, by ``time.perf_counter``."""
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
        """None when there was no call but those that trace and compile."""
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
            clock.write("stages", "first step", time.monotonic() - self.first_call_seconds)
        elif not compiled:
            self.num_examples += sum(sizes)
            self.seconds += now - self._since
        self._since, self._step = now, step

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        begun_here = epoch > self.position.start.epoch or not self.position.start.step_in_epoch
        if begun_here and self.position.epoch > epoch:
            self.epoch_seconds.append(time.perf_counter() - self._epoch_began)


class ProgressBar(keras.callbacks.Callback):
    """Draws one bar an epoch on a terminal, and prints a table with one line an epoch everywhere; with two, the
    training's and the validation's, where one would be wider than the terminal."""

    def __init__(self, epochs: int, steps: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.steps = steps
        self.console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: Any = None
        self._lines: _Lines | None = None

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
        logs = logs or {}
        place, rate = f"{epoch + 1}/{self.epochs}", f"{logs['learning_rate']:.3g}"
        measured = [key for key in logs if key not in ("loss", "learning_rate") and not key.startswith("val_")]
        names = [name for name in ("loss", *measured) if name in logs]
        validated = [name for name in names if f"val_{name}" in logs]
        shown = {name: f"{logs[name]:.4f}" for name in names}
        val = {f"val {name}": f"{logs[f'val_{name}']:.4f}" for name in validated}
        if self._lines is None:
            whole = {"epoch": len(f"{self.epochs}/{self.epochs}")}
            self._lines = _columns_within(whole, names, validated, self.console.width)
            self._heading(self._lines)
        if self._lines.is_one:
            self._print(self._lines.columns, {"epoch": place, **shown, **val, "learning rate": rate})
            return
        self._print(self._lines.columns, {"epoch": place, "": "train", **shown, "learning rate": rate})
        if validated:
            self._print(self._lines.columns, {"": "val", **{name: val[f"val {name}"] for name in validated}})

    def close(self) -> None:
        """Take the bar away; an interrupted epoch does not end by itself."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _heading(self, lines: "_Lines") -> None:
        if lines.left_out:
            self.console.print(f"no room for {', '.join(lines.left_out)}: MLflow has them, and the report")
        words = {name: _words(name) if not lines.is_one else [name] for name in lines.columns}
        for line in range(height := max(map(len, words.values()))):
            # The last word of each name stands right above its numbers.
            above = {name: own[line - height] for name, own in words.items() if line >= height - len(own)}
            self._print(lines.columns, above)

    def _print(self, columns: Mapping[str, int], texts: Mapping[str, str]) -> None:
        line = "  ".join(f"{texts.get(name, ''):>{width}}" for name, width in columns.items())
        self.console.print(line.rstrip(), soft_wrap=True)


class _Lines(NamedTuple):
    """How an epoch is printed."""

    is_one: bool
    """In one line, or the training's and the validation's numbers below each other."""
    columns: dict[str, int]
    """The width of each column."""
    left_out: tuple[str, ...] = ()
    """Metrics that there is no room for."""


def _columns_within(epoch: dict[str, int], names: Sequence[str], validated: Sequence[str], width: int) -> _Lines:
    """Return columns that are not wider than a terminal.

    Args:
        epoch: the first column.
        names: of the loss and the metrics.
        validated: those that the validation has, too.
        width: of the terminal, in characters.
    """
    beside = (*names, *(f"val {name}" for name in validated), RATE)
    one = {name: max(7, len(name), epoch.get(name, 0)) for name in ("epoch", *beside)}
    if _width(one) <= width:
        return _Lines(True, one)
    two = {"epoch": max(7, epoch["epoch"]), "": 5}
    two |= {name: max(7, *map(len, _words(name))) for name in (*names, RATE)}
    left_out: list[str] = []
    for name in reversed(names[1:]):
        if _width(two) > width:
            del two[name]
            left_out.insert(0, name)
    return _Lines(False, two, tuple(left_out))


def _width(columns: Mapping[str, int]) -> int:
    return sum(columns.values()) + 2 * (len(columns) - 1)


def _words(name: str) -> list[str]:
    """Return the parts of a name that stand below each other, of 8 letters where that can be."""
    parts: list[str] = []
    for word in re.findall(r"[^ _:.]+[_:.]?", name):
        if parts and len(parts[-1] + word) <= WORD:
            parts[-1] += word
        else:
            parts.append(word)
    return parts or [name]
