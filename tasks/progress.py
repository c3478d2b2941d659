"""What a person sees while a training runs: a bar for the epoch, a line for each finished one. On standard error."""

from typing import Any

import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar(keras.callbacks.Callback):
    """Draws one bar an epoch on a terminal, and prints one line an epoch everywhere."""

    def __init__(self, epochs: int, steps: int, console: Console | None = None) -> None:
        super().__init__()
        self.epochs = epochs
        self.steps = steps
        self.console = console or Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: Any = None

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

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=min(batch + 1, self.steps))

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._stop()
        logs = logs or {}
        parts = [f"epoch {epoch + 1:>{len(str(self.epochs))}}/{self.epochs}"]
        parts += [f"loss {logs['loss']:.4f}", f"accuracy {logs['accuracy']:.4f}"]
        if "val_loss" in logs:
            parts += [f"val_loss {logs['val_loss']:.4f}", f"val_accuracy {logs['val_accuracy']:.4f}"]
        parts.append(f"lr {logs['learning_rate']:.3g}")
        self.console.print("  ".join(parts), soft_wrap=True)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
