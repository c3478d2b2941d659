"""What a person sees while a training runs: a bar for the epoch, a line for each finished one. On standard error."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


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

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
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


RATE = "learning rate"
WORD = 8


def _columns_within(epoch: dict[str, int], names: Sequence[str], validated: Sequence[str], width: int) -> _Lines:
    """Return columns that are no wider than a terminal.

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
