"""What a person sees while a training runs: a bar for the epoch, a line for each finished one. On standard error."""

from collections.abc import Iterable
from typing import Any

import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar(keras.callbacks.Callback):
    """Draws one bar an epoch on a terminal, and prints a table with one line an epoch everywhere."""

    def __init__(self, epochs: int, steps: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.steps = steps
        self.console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: Any = None
        self._headed = False

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
        self.close()
        logs = logs or {}
        cells = {"epoch": f"{epoch + 1}/{self.epochs}"}
        measured = [key for key in logs if key not in ("loss", "learning_rate") and not key.startswith("val_")]
        for key in ("loss", *measured, "val_loss", *(f"val_{name}" for name in measured)):
            if key in logs:
                cells[key.replace("val_", "val ")] = f"{logs[key]:.4f}"
        cells["learning rate"] = f"{logs['learning_rate']:.3g}"
        if not self._headed:
            self._print(cells, cells)
            self._headed = True
        self._print(cells, cells.values())

    def close(self) -> None:
        """Take the bar away; an interrupted epoch does not end by itself."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, names: Iterable[str], texts: Iterable[str]) -> None:
        line = "  ".join(f"{text:>{max(7, len(name))}}" for name, text in zip(names, texts, strict=True))
        self.console.print(line, soft_wrap=True)
