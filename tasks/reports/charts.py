"""Draws charts with Matplotlib: as SVG for a page, with colours for light and dark mode, and as PNG for MLflow and
Prefect.

Only functions that draw import Matplotlib, because commands that print tables must answer in half a second.
"""

import contextlib
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from markupsafe import Markup

from tasks import config
from tasks.records import EvaluationResult, TrainingResult
from tasks.system import units
from tasks.system.errors import cut

COLOURS = ("#0068b5", "#c8500a", "#00815d", "#a8478a")
"""Darker versions of Okabe and Ito's (2008) blue, orange, green and purple, distinguishable with any colour vision."""
MARKERS, LINES = ("o", "s", "^", "D"), ("-", "--", "-.", ":")
"""The marker and the line style of each colour, for readers who cannot see colours."""
INK, SOFT, RULE, PAGE = "#1b1f24", "#5b6470", "#d9dee4", "#ffffff"
PAGE_COLOURS = {INK: "var(--ink)", SOFT: "var(--soft)", RULE: "var(--rule)", PAGE: "var(--page)"} | {
    colour: f"var(--c{place})" for place, colour in enumerate(COLOURS)
}
"""The page's style gives each of these a light and a dark value."""
STYLE = {
    "axes.axisbelow": True, "axes.edgecolor": RULE, "axes.facecolor": "none", "axes.labelcolor": INK,
    "axes.spines.right": False, "axes.spines.top": False, "figure.facecolor": "none", "font.size": 11,
    "grid.color": RULE, "legend.frameon": False, "legend.fontsize": 10.5, "svg.fonttype": "none", "text.color": INK,
    "text.parse_math": False, "xtick.color": RULE, "xtick.labelcolor": INK, "ytick.color": RULE,
    "ytick.labelcolor": INK,
}  # fmt: skip
FONTS = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Hiragino Sans", "Microsoft YaHei", "Arial Unicode MS",
    "STIXGeneral",
)  # fmt: skip
"""Each character is drawn in the first installed font that has it."""
INCH = 72
"""Pixels per inch."""
WIDTH, HEIGHT = 365, 250
"""The size of most charts in pixels: a phone has room for one, a page of 1,200 pixels for three side by side."""
LETTER = 6.6
"""The average width of a letter in pixels."""
MAX_NAME = 26
"""The maximum length of a name next to a chart; longer names lose their middle."""
MAX_MARKERS = 300
"""Above this number, dots are smaller and overlap visibly."""
WITH_COUNTS = 30
"""The maximum number of classes for which the cells of the confusion matrix show counts."""
SHADES = 10

Numbers: TypeAlias = Any
"""A sequence or an array of numbers."""


@dataclass(frozen=True)
class Series:
    """The points of one series in a chart."""

    x: Numbers
    y: Numbers
    label: str = ""
    colour: int = 0
    kind: Literal["line", "dots", "both"] = "both"


@dataclass(frozen=True)
class Chart:
    """A figure with its description."""

    figure: Any
    alt: str

    def save(self, path: Path, title: str = "") -> Path:
        """Save it with a title on a white background; return the path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        wrapped = textwrap.fill(cut(title), int(self.figure.get_figwidth() * INCH / LETTER))
        written = self.figure.text(
            0.01, 1 + 0.1 / self.figure.get_figheight(), wrapped, va="bottom", fontsize=12, parse_math=False
        )
        self._write(path, dpi=150, facecolor="white", bbox_inches="tight", pad_inches=0.15)
        written.remove()
        return path

    def svg(self) -> Markup:
        """Return it as a part of a page."""
        buffer = io.StringIO()
        self._write(buffer, format="svg", metadata={"Date": None})
        _, _, drawn = buffer.getvalue().partition("<svg")
        _, _, drawn = drawn.partition(">")
        # Remove parts that only a separate SVG file needs.
        drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<clipPath.*?</clipPath>|<!--.*?-->", "", drawn,
                       flags=re.S)  # fmt: skip
        drawn = re.sub(r"<[^>]+>", lambda tag: _of_page(tag[0]), drawn)
        width, height = (round(side * INCH) for side in self.figure.get_size_inches())
        return Markup('<svg viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img" aria-label="{2}">{3}').format(
            width, height, self.alt, Markup(drawn)
        )

    def _write(self, target: Any, **options: Any) -> None:
        with _style({"svg.hashsalt": self.alt}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # No installed font has it.
            self.figure.savefig(target, **options)


def _style(more: Mapping[str, Any] | None = None) -> contextlib.AbstractContextManager[None]:
    import matplotlib
    from matplotlib.font_manager import fontManager

    fonts = [name for name in fontManager.get_font_names() if name in FONTS]
    given = {**STYLE, "font.family": sorted(fonts, key=FONTS.index), **(more or {})}
    styled: contextlib.AbstractContextManager[None] = matplotlib.rc_context(given)
    return styled


def _of_page(tag: str) -> str:
    """Return an SVG tag with the page's colours and font, without references to removed parts."""
    tag = re.sub(r' clip-path="[^"]*"|(?<=<g) id="[^"]*"', "", tag).replace("xlink:href", "href")
    tag = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", tag)
    return re.sub("#[0-9a-f]{6}", lambda found: PAGE_COLOURS.get(found[0], found[0]), tag)


@contextlib.contextmanager
def _axes(
    width: float, height: float, left: float, *, top: float = 34, right: float = 14, bottom: float = 42
) -> Iterator[Any]:
    """Yield axes in a figure with this size and these margins in pixels, and apply the style within the block."""
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width / INCH, height / INCH))
        inner = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
        yield figure.add_axes(inner)


def plot(
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    alt: str,
    *,
    whole: bool = False,
    names: Sequence[str] = (),
    log: bool = False,
    reference: Sequence[tuple[float, float]] = (),
    marks: Mapping[str, float] | None = None,
) -> Chart:
    """Draw points and lines.

    Args:
        x_label: the name of the x axis.
        y_label: the name of the y axis.
        series: the series; NaN interrupts a line.
        alt: the description of the chart.
        whole: the x axis has only integers.
        names: the labels of the x axis instead of 0, 1, 2 and so on.
        log: the x axis is logarithmic.
        reference: a dashed line through these points.
        marks: a dashed upright line at each of these places, by name.
    """
    import numpy as np

    with _axes(WIDTH, HEIGHT, left=58) as axes:
        _draw_series(axes, series)
        lines, middle = [line.get_data() for line in axes.lines], sum(axes.get_ylim()) / 2
        if reference:
            axes.plot(*zip(*reference, strict=True), color=INK, linewidth=1, linestyle="--")
        for name, place in (marks or {}).items():
            axes.axvline(place, color=INK, linewidth=1, linestyle="--")
            below = any(np.interp(place, x, y) > middle for x, y in lines)  # Keep its name away from the lines.
            axes.annotate(
                cut(name, MAX_NAME), (place, 0.02 if below else 0.98), (-3, 0), axes.get_xaxis_transform(),
                textcoords="offset points", rotation=90, ha="right", va="bottom" if below else "top", fontsize=10,
                color=SOFT,
            )  # fmt: skip
        if names:
            room = int((WIDTH - 72) / LETTER / len(names))
            shown = [cut(name, room) if room > 3 else "" for name in names]
            if len(set(shown)) < len(names):  # No room for them.
                shown, x_label = list(map(str, range(len(names)))), f"{x_label}: {', '.join(names)}"
            axes.set_xticks(range(len(names)), shown)
            axes.set_xlim(-0.5, len(names) - 0.5)
        _label_axes(axes, x_label, y_label, whole, log)
    return Chart(axes.figure, alt)


def _draw_series(axes: Any, series: Iterable[Series]) -> None:
    named: set[str] = set()
    for one in series:
        colour, label = COLOURS[one.colour], one.label if one.label not in named else None
        x, y = ([v if abs(v) < 1e300 else math.nan for v in values] for values in (one.x, one.y))
        if not x:
            continue
        many = one.kind == "dots" and len(x) > MAX_MARKERS
        axes.plot(
            x, y, color=colour, linestyle="none" if one.kind == "dots" else LINES[one.colour], linewidth=1.6,
            marker="" if one.kind == "line" and len(x) > 1 else MARKERS[one.colour], markersize=3 if many else 4.5,
            markeredgewidth=0, markevery=1 if one.kind == "dots" else math.ceil(len(x) / 12), label=label,
            alpha=0.6 if many else 1,
        )  # fmt: skip
        named.add(one.label)
    if named - {""}:
        axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.98), ncols=4, columnspacing=1, handlelength=1.8)


def _label_axes(axes: Any, x_label: str, y_label: str, whole: bool = False, log: bool = False) -> None:
    """Label the axes, with the y label above its axis, because labels are long and phones narrow."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    axes.set_xlabel(cut(x_label, 48))
    _write_above(axes, y_label)
    axes.grid(linewidth=0.8)
    if log:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(_tick)
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), ScalarFormatter):
            axis.set_major_locator(MaxNLocator(nbins=6, integer=whole and axis is axes.xaxis))
            axis.set_major_formatter(_tick)


def _tick(value: float, _: object) -> str:
    """Return the number at a tick of an axis, short enough for the margin: −9500, 250k, 1.25M."""
    from matplotlib.ticker import EngFormatter, Formatter

    return Formatter.fix_minus(units.number(value)) if abs(value) < 10_000 else EngFormatter(sep="")(value)


def _write_above(axes: Any, text: str) -> None:
    """Write a line at the top of a figure."""
    width, height = axes.figure.get_size_inches() * INCH
    axes.figure.text(4 / width, 1 - 5 / height, cut(text, int(width / LETTER)), va="top")


def curves(metric: str, splits: Mapping[str, Sequence[float]], marks: Mapping[str, float] | None = None) -> Chart:
    """Draw a metric after each epoch, one line per split."""
    name = metric.replace("_", " ")
    return plot("epoch", name, _by_epoch(splits), f"{name} by epoch: {', '.join(splits)}", whole=True, marks=marks)


def _by_epoch(splits: Mapping[str, Sequence[float]]) -> list[Series]:
    return [
        Series(range(1, len(values) + 1), values, split, place % len(COLOURS))
        for place, (split, values) in enumerate(splits.items())
    ]


def learning_curve(training: TrainingResult) -> Chart:
    """Draw the learning curves side by side, one panel per metric and one line per split."""
    from matplotlib.figure import Figure

    panels = training.curves
    with _style():
        figure = Figure(figsize=(WIDTH * len(panels) / INCH, HEIGHT / INCH))
        for place, (metric, splits) in enumerate(panels.items()):
            left, wide = (place + 58 / WIDTH) / len(panels), (1 - 72 / WIDTH) / len(panels)
            axes = figure.add_axes((left, 42 / HEIGHT, wide, 1 - 82 / HEIGHT))
            _draw_series(axes, _by_epoch(splits))
            _label_axes(axes, "epoch", "", whole=True)
            axes.set_title(metric.replace("_", " "), loc="left", fontsize=11)
    return Chart(figure, f"learning curves: {', '.join(panels)}")


@contextlib.contextmanager
def _rows(title: str, names: Sequence[str], left: float, right: float, height: float, bottom: float) -> Iterator[Any]:
    """Yield axes with one row for each name, from the top, with a height in pixels."""
    with _axes(WIDTH, 34 + height * len(names) + bottom, left, top=30, right=right, bottom=bottom + 4) as axes:
        _write_above(axes, title)
        axes.set_yticks(range(len(names)), [cut(name, int(left / LETTER)) for name in names], fontsize=10.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["bottom"].set_visible(False)
        axes.locator_params(axis="x", nbins=3)
        yield axes
        axes.xaxis.set_major_formatter(_tick)


def bars(title: str, shown: Mapping[str, float], form: str = ",.6g") -> Chart:
    """Draw one horizontal bar per name, with its number."""
    with _rows(title, list(shown), left=130, right=70, height=20, bottom=0) as axes:
        drawn = axes.barh(range(len(shown)), list(shown.values()), height=0.72, color=COLOURS[0])
        axes.bar_label(drawn, [format(value, form) for value in shown.values()], padding=4, fontsize=10.5)
        axes.set_xlim(0, max([*shown.values(), 0]) or 1)
        axes.set_xticks([])
    return Chart(axes.figure, title)


def ranges(
    title: str,
    lines: Sequence[tuple[str, float, float, float]],
    shown: Callable[[float], str],
    from_zero: bool = True,
) -> Chart:
    """Draw one line per (name, lower end, value, upper end), with a dot at the value."""
    with _rows(title, [name for name, *_ in lines], left=182, right=66, height=26, bottom=22) as axes:
        axes.grid(linewidth=0.8)
        for place, (_, low, value, high) in enumerate(lines):
            axes.plot((low, high), (place, place), color=COLOURS[0], linewidth=2, solid_capstyle="butt")
            axes.plot(value, place, MARKERS[0], color=COLOURS[0], markersize=6, markeredgewidth=0)
            axes.annotate(shown(value), (1, place), (8, 0), axes.get_yaxis_transform(), textcoords="offset points",
                          va="center", fontsize=10.5)  # fmt: skip
        if from_zero:
            axes.set_xlim(left=0)
    told = "; ".join(f"{name} {shown(value)}" for name, _, value, _ in lines)
    return Chart(axes.figure, f"{title}: {told}")


def confusion_matrix(evaluation: EvaluationResult) -> Chart:
    """Draw the confusion matrix: rows are true classes, shades are shares of a row, numbers are counts."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    counts = np.array(evaluation.confusion_matrix)
    num = len(counts)
    readable = num <= WITH_COUNTS
    side = 30 if readable else 10 if num <= 100 else 1000 / num
    size = 10.5 if readable else 8.5
    names = [cut(entry.name, 40 if num <= 20 else 20) for entry in evaluation.classes]
    named = range(0, num, math.ceil(9.5 / side))
    room = max(map(len, names)) * 0.62 * size
    upright = room > side
    drawn = max(num * side, 200)  # The labels beside the small square of two classes need room.
    shades = np.ceil(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) * SHADES).astype(int)
    with _axes(
        drawn + room + 40, drawn + (room if upright else 16) + 60, left=room + 30, top=24, right=10,
        bottom=(room if upright else 16) + 36,
    ) as axes:  # fmt: skip
        corners = np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5], [-0.5, -0.5]])
        for shade in range(1, SHADES + 1):
            places = np.argwhere(shades == shade)[:, ::-1]
            outline = Outline(
                (places[:, None] + corners).reshape(-1, 2),
                [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(places),
            )
            if len(places):
                axes.add_patch(PathPatch(outline, color=COLOURS[0], alpha=shade / SHADES, linewidth=0))
        for row, column in np.argwhere(counts) if readable else ():
            colour = PAGE if shades[row, column] > SHADES // 2 else INK
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=colour, fontsize=10)
        axes.set_xticks(named, [names[i] for i in named], fontsize=size, rotation=90 if upright else 0)
        axes.set_yticks(named, [names[i] for i in named], fontsize=size)
        axes.set(xlim=(-0.5, num - 0.5), ylim=(num - 0.5, -0.5), xlabel="predicted")
        axes.spines[["top", "right"]].set_visible(True)
        _write_above(axes, "true (colour: share of the row)")
    right, every = int(np.trace(counts)), int(counts.sum())
    return Chart(
        axes.figure, f"confusion matrix of {num} classes, {right:,} of {every:,} examples on its diagonal"
    )  # fmt: skip


def parity(true: Numbers, predicted: Numbers, name: str = "target") -> Chart:
    """Draw predicted against true numbers."""
    ends = [value for value in (*true, *predicted) if math.isfinite(value)] or [0.0, 1.0]
    reference = [(min(ends), min(ends)), (max(ends), max(ends))]
    alt = f"predicted against true {name}, {len(true)} points"
    return plot(f"true {name}", f"predicted {name}", [Series(true, predicted, kind="dots")], alt, reference=reference)


def augmented_examples(images: Any, augmentation: config.Augmentation) -> Chart:
    """Draw training images, one per row: the original, then augmented versions.

    Args:
        images: uint8 (images, 1 + versions, height, width, channels).
        augmentation: its changes are named above the images.
    """
    import numpy as np

    rows, columns, height, width, channels = images.shape
    gap, side = math.ceil(max(height, width) / 16), 80 / width
    sheet = np.full((rows, columns, height + gap, width + gap, 3), 255, np.uint8)
    shown = images[..., :3] if channels >= 3 else images[..., :1]
    sheet[:, 1:, :height, gap:], sheet[:, 0, :height, :-gap] = shown[:, 1:], shown[:, 0]
    sheet = sheet.transpose(0, 2, 1, 3, 4).reshape(rows * (height + gap), columns * (width + gap), 3)
    on = ", ".join(_augmentation(key, value) for key, value in augmentation.changes.items())
    with _axes(side * sheet.shape[1], side * sheet.shape[0] + 40, 0, top=40, right=0, bottom=0) as axes:
        axes.imshow(sheet, aspect="auto", interpolation="nearest")
        axes.set_axis_off()
        axes.text(width / 2, -6 / side, "original", ha="center", fontsize=10)
        axes.text(sheet.shape[1] * (0.5 + 0.5 / columns), -6 / side, textwrap.fill(on, 90), ha="center", fontsize=10)
    return Chart(axes.figure, "augmented training images")


def _augmentation(key: str, value: Any) -> str:
    if isinstance(value, config.RandAugment):
        return f"RandAugment (N = {value.num_layers}, M = {value.magnitude:g})"
    shown = "" if value is True else f" {value}" if isinstance(value, str) else f" {value:g}"
    return f"{key.replace('_', ' ')}{shown}"
