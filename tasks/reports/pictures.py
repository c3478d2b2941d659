"""PNG pictures of a run: learning curve, predictions, reliability, and augmented images."""

import contextlib
import math
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks import config
from tasks.records import EvaluationResult, TrainingResult
from tasks.system.errors import cut

MAX_LABELS = 60
"""The most labels in a picture."""
MAX_NAME = 40
"""Letters of a class or a label in a picture; a longer name is drawn without its middle."""


def predictions(evaluation: EvaluationResult, title: str, folder: Path) -> Path:
    """Draw predictions against the truth: a confusion matrix of classes, precision and recall of labels, or the numbers
    of a regression. Return the picture's path."""
    if evaluation.confusion_matrix:
        return confusion_matrix(evaluation, title, folder / "confusion_matrix.png")
    draw = _draw_labels if evaluation.classes else _draw_numbers
    return draw(evaluation, title, folder / "predictions.png")


def _draw_numbers(evaluation: EvaluationResult, title: str, path: Path) -> Path:
    wanted, given = zip(*evaluation.predictions, strict=True)
    figure, axes = _titled((5.6, 5.2), title)
    ends = min(*wanted, *given), max(*wanted, *given)
    axes.plot(ends, ends, color="0.6", linewidth=1, label="as it is")
    axes.scatter(wanted, given, s=12, alpha=0.6, linewidths=0)
    axes.set(xlabel="true", ylabel="predicted")
    axes.grid(alpha=0.3)
    axes.legend()
    return _saved(figure, path)


def _draw_labels(evaluation: EvaluationResult, title: str, path: Path) -> Path:
    shown = evaluation.classes[:MAX_LABELS]
    names = [f"{cut(entry.name, MAX_NAME)} ({entry.support:,})" for entry in shown]
    figure, axes = _titled((6.4 + _room(names), 1.6 + 0.34 * len(shown)), title)
    for offset, name in ((-0.2, "precision"), (0.2, "recall")):
        places = [place + offset for place in range(len(shown))]
        axes.barh(places, [getattr(entry, name) for entry in shown], height=0.38, label=name)
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share")
    axes.legend()
    return _saved(figure, path)


def _room(names: Sequence[str]) -> float:
    """Return how many inches a figure is larger than usual, so that its longest name leaves room for what is drawn."""
    return 0.09 * max(max(map(len, names)) - 15, 0)


def _titled(size: tuple[float, float], title: str) -> tuple[Any, Any]:
    """Return a figure, and its axes under a title."""
    # Here and not above: the tables are also printed by commands that answer in half a second.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(_wrapped(title, size[0]))
    return figure, axes


def _wrapped(title: str, inches: float) -> str:
    """Return a title in lines that fit a figure's width. Matplotlib's own way takes dollars for a formula."""
    return textwrap.fill(title, int(9 * inches))


def _saved(figure: Any, path: Path) -> Path:
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    fonts = _fonts("".join(text.get_text() for text in texts))
    for text in texts:
        text.set(parse_math=False, family=fonts)  # `$5 to $10` is a name, and no formula.
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # No font of this machine has it.
        figure.savefig(path, dpi=120)
    return path


def _fonts(text: str) -> list[str]:
    """Return the usual font, and those of this machine that have what it lacks of a text, such as 漢字."""
    from matplotlib.font_manager import findfont, fontManager, get_font

    names = ["DejaVu Sans"]
    lacking = set(map(ord, text.replace("\n", ""))) - get_font(findfont(names[0])).get_charmap().keys()
    for font in fontManager.ttflist if lacking else ():
        with contextlib.suppress(OSError, RuntimeError):  # One that Matplotlib cannot read.
            found = lacking & get_font(font.fname).get_charmap().keys()
            if found and not font.name.startswith("Last Resort"):  # It has a box for each letter.
                names.append(font.name)
                lacking -= found
    return names


def confusion_matrix(evaluation: EvaluationResult, title: str, path: Path) -> Path:
    """Draw the confusion matrix as a PNG: rows are true classes, shades are shares of a row, numbers are counts."""
    import numpy as np

    counts = np.array(evaluation.confusion_matrix)
    names = [cut(entry.name, MAX_NAME) for entry in evaluation.classes]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    num_classes = len(names)
    readable = num_classes <= 30  # With more, squares are too small for numbers, and from 100 on not each has a name.
    side = max(5.0, 0.55 * num_classes + 2.0) if readable else min(0.14 * num_classes + 4.0, 20.0)
    side += _room(names)
    figure, axes = _titled((side + 1.2, side), title)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", fraction=0.046)
    named = range(0, num_classes, math.ceil(num_classes / 100))
    labels, size = [names[i] for i in named], 10 if readable else 7
    short = max(map(len, labels)) <= 2
    rotation = 0 if short and readable else 45 if readable else 90
    axes.set_xticks(named, labels, fontsize=size, rotation=rotation, ha="right" if rotation == 45 else "center")
    axes.set_yticks(named, labels, fontsize=size)
    axes.set(xlabel="predicted", ylabel="true")
    if readable:
        for row, column in np.argwhere(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=color, fontsize=8)
    return _saved(figure, path)


def reliability(accuracy: Sequence[float], means: str, title: str, path: Path) -> Path:
    """Draw a reliability diagram as a PNG: the confidence of predictions, and how often they are right.

    Args:
        accuracy: of each bin; the bins are equal parts of 0 to 1.
        means: the name of ``accuracy``.
        title: of the picture.
        path: of the picture.
    """
    figure, axes = _titled((5.6, 5.2), title)
    edges = [place / len(accuracy) for place in range(len(accuracy) + 1)]
    axes.stairs(accuracy, edges, fill=True, alpha=0.6, label="as measured")
    axes.plot((0, 1), (0, 1), color="0.4", linewidth=1, label="as it should be")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability", ylabel=means)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    return _saved(figure, path)


def learning_curve(training: TrainingResult, title: str, path: Path) -> Path:
    """Draw the learning curves as a PNG: one panel per metric, one line per split."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = training.curves
    # Margins by hand: a layout that measures the text takes twice as long to draw, at the end of every run.
    figure = Figure(figsize=(4.2 * len(panels), 3.6))
    figure.subplots_adjust(left=0.2 / len(panels), right=1 - 0.06 / len(panels), bottom=0.14, top=0.82, wspace=0.3)
    figure.suptitle(_wrapped(title, figure.get_figwidth()))
    for place, (metric, splits) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), place)
        for split, values in splits.items():
            epochs = range(1, len(values) + 1)
            axes.plot(epochs, values, label=split, marker=".")  # A line alone does not show a single epoch.
        axes.set(xlabel="epoch", title=metric.replace("_", " "))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    return _saved(figure, path)


def augmented_examples(images: Any, augmentation: config.Augmentation, title: str, path: Path) -> Path:
    """Draw training images as a PNG, one per row: the original, then augmented versions.

    Args:
        images: uint8 (images, 1 + versions, height, width, channels).
        augmentation: its changes are named above the images.
        title: of the picture.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    rows, columns, height, width, channels = images.shape
    shown = images[..., :3] if channels in (3, 4) else images[..., 0]
    tall, gap, top = height / width, 0.06, 0.85  # Beside a width of 1.
    right, bottom = columns + gap * columns + 0.25, rows * (tall + gap)
    figure = Figure(figsize=(1.1 * right, 1.1 * (bottom + top)), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    for row in range(rows):
        for column in range(columns):
            left, upper = gap + column * (1 + gap) + 0.15 * (column > 0), row * (tall + gap)
            extent = (left, left + 1, upper + tall, upper)
            axes.imshow(shown[row, column], cmap="gray", vmin=0, vmax=255, extent=extent)
    axes.set(xlim=(0, right), ylim=(bottom, -top))
    axes.set_axis_off()
    axes.text(right / 2, -0.58, title, ha="center", va="center", fontsize=12)
    axes.text(gap + 0.5, -0.18, "original", ha="center", va="center", fontsize=10)
    on = ", ".join(_augmentation(key, value) for key, value in augmentation.changes.items())
    axes.text((right + 1.2) / 2, -0.18, textwrap.fill(on, 100), ha="center", va="center", fontsize=10)
    return _saved(figure, path)


def _augmentation(key: str, value: Any) -> str:
    if isinstance(value, config.RandAugment):
        return f"RandAugment (N = {value.num_layers}, M = {value.magnitude:g})"
    return f"{key.replace('_', ' ')}{'' if value is True else f' {value:g}'}"
