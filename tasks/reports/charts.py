"""Every figure of this project. Each is built once with Matplotlib and saved as an SVG for a page, whose colours follow
the reader's light or dark mode, and as a PNG for MLflow and Prefect.

Matplotlib is imported when a figure is built, because commands that print tables answer in half a second.
"""

import contextlib
import io
import itertools
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
from tasks.system.errors import cut

COLOURS = ("#0068b5", "#c8500a", "#00815d", "#a8478a")
"""Blue, orange, green and purple of Okabe and Ito (2008), darker: readers with any colour vision tell them apart."""
MARKERS, LINES = ("o", "s", "^", "D"), ("-", "--", "-.", ":")
"""Of each colour, for readers who see none."""
INK, SOFT, RULE, PAGE = "#1b1f24", "#5b6470", "#d9dee4", "#ffffff"
PAGE_COLOURS = {INK: "var(--ink)", SOFT: "var(--soft)", RULE: "var(--rule)", PAGE: "var(--page)"} | {
    colour: f"var(--c{place})" for place, colour in enumerate(COLOURS)
}
"""The page's style has two values for each of these: light and dark."""
STYLE = {
    "axes.axisbelow": True, "axes.edgecolor": RULE, "axes.facecolor": "none", "axes.labelcolor": INK,
    "axes.spines.right": False, "axes.spines.top": False, "figure.facecolor": "none", "font.size": 11,
    "grid.color": RULE, "legend.frameon": False, "legend.fontsize": 10.5, "svg.fonttype": "none", "text.color": INK,
    "text.parse_math": False, "xtick.color": RULE, "xtick.labelcolor": INK, "ytick.color": RULE,
    "ytick.labelcolor": INK,
}  # fmt: skip
INCH = 72
"""Pixels of a page."""
WIDTH, HEIGHT = 365, 250
"""Pixels of most figures: a telephone has room for one, and a page of 1,200 pixels for three beside each other."""
LETTER = 6.6
"""Pixels of a letter, on average."""
MAX_NAME = 26
"""Letters of a name beside a figure; a longer one is drawn without its middle."""
MAX_LABELS = 60
MAX_MARKERS = 300
"""More dots are one path, which takes a tenth of the place."""
WITH_COUNTS = 30
"""The most classes for which a square of the confusion matrix has room for a number."""
SHADES = 10

Numbers: TypeAlias = Any
"""A sequence or an array of numbers."""
Range: TypeAlias = tuple[str, float, float, float]
"""A name, the low end, the value, the high end."""


@dataclass(frozen=True)
class Series:
    """Points of one kind in a plot."""

    x: Numbers
    y: Numbers
    label: str = ""
    colour: int = 0
    kind: Literal["line", "dots", "both"] = "both"


@dataclass(frozen=True)
class Chart:
    """A figure, and what it shows in words."""

    figure: Any
    alt: str

    def save(self, path: Path, title: str = "") -> Path:
        """Save it under a title on white ground; return where to."""
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
        # What belongs to a file of its own.
        drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<clipPath.*?</clipPath>|<!--.*?-->", "", drawn,
                       flags=re.S)  # fmt: skip
        drawn = re.sub(r"<[^>]+>", lambda tag: _of_page(tag[0]), drawn)
        width, height = (round(side * INCH) for side in self.figure.get_size_inches())
        return Markup('<svg viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img" aria-label="{2}">{3}').format(
            width, height, self.alt, Markup(drawn)
        )

    def _write(self, target: Any, **options: Any) -> None:
        from matplotlib.text import Text

        with _style({"svg.hashsalt": self.alt}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # No font of this machine has it.
            if isinstance(target, Path):
                texts = self.figure.findobj(Text)
                fonts = _fonts("".join(text.get_text() for text in texts))
                for text in texts:
                    text.set_family(fonts)
            self.figure.savefig(target, **options)


def _style(more: Mapping[str, Any] | None = None) -> contextlib.AbstractContextManager[None]:
    import matplotlib

    styled: contextlib.AbstractContextManager[None] = matplotlib.rc_context({**STYLE, **(more or {})})
    return styled


def _of_page(tag: str) -> str:
    """Return a tag of an SVG file with the colours and the font of the page, and without references that it has not."""
    tag = re.sub(r' clip-path="[^"]*"|(?<=<g) id="[^"]*"', "", tag).replace("xlink:href", "href")
    tag = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", tag)
    return re.sub("#[0-9a-f]{6}", lambda found: PAGE_COLOURS.get(found[0], found[0]), tag)


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


@contextlib.contextmanager
def _axes(
    width: float, height: float, left: float, *, top: float = 34, right: float = 14, bottom: float = 42
) -> Iterator[Any]:
    """Give axes in a figure of so many pixels with these margins; within the block the style is ours."""
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width / INCH, height / INCH))
        inner = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
        yield figure.add_axes(inner)


def number(value: float) -> str:
    """Return a number as short as an axis has room for."""
    return f"{value:.0e}" if value and not 1e-3 <= abs(value) < 1e6 else f"{float(f'{value:.6g}'):,.6g}"


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
        y_label: that of the y axis.
        series: what is not a number interrupts a line.
        alt: what it shows, in words.
        whole: the x axis has whole numbers only.
        names: what is written there in place of 0, 1, 2 and so on.
        log: the x axis is logarithmic.
        reference: a dashed line through these points.
        marks: a dashed upright line at each of these places, by name.
    """
    with _axes(WIDTH, HEIGHT, left=58) as axes:
        _draw_series(axes, series)
        if reference:
            axes.plot(*zip(*reference, strict=True), color=INK, linewidth=1, linestyle="--")
        for name, place in (marks or {}).items():
            axes.axvline(place, color=INK, linewidth=1, linestyle="--")
            axes.annotate(
                cut(name, MAX_NAME), (place, 0.98), (-3, 0), axes.get_xaxis_transform(), textcoords="offset points",
                rotation=90, ha="right", va="top", fontsize=10, color=SOFT,
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
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    named: set[str] = set()
    for one in series:
        colour, label = COLOURS[one.colour], one.label if one.label not in named else None
        x, y = ([v if abs(v) < 1e300 else math.nan for v in values] for values in (one.x, one.y))
        if not x:
            continue
        known = [point for point in zip(x, y, strict=True) if not math.isnan(sum(point))]
        if one.kind == "dots" and len(known) > MAX_MARKERS:
            outline = Outline(np.repeat(known, 2, axis=0), [Outline.MOVETO, Outline.LINETO] * len(known))
            dots = PathPatch(outline, color=colour, fill=False, linewidth=3.5, alpha=0.6, capstyle="round", label=label)
            axes.add_patch(dots)
            axes.autoscale_view()
        else:
            axes.plot(
                x, y, color=colour, linestyle="none" if one.kind == "dots" else LINES[one.colour], linewidth=1.6,
                marker="" if one.kind == "line" and len(x) > 1 else MARKERS[one.colour], markersize=4.5,
                markeredgewidth=0, markevery=1 if one.kind == "dots" else math.ceil(len(x) / 12), label=label,
            )  # fmt: skip
        named.add(one.label)
    if named - {""}:
        axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.98), ncols=4, columnspacing=1, handlelength=1.8)


def _label_axes(axes: Any, x_label: str, y_label: str, whole: bool = False, log: bool = False) -> None:
    """Name the axes, the y axis above it, because names are long and telephones narrow."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    axes.set_xlabel(cut(x_label, 48))
    _write_above(axes, y_label)
    axes.grid(linewidth=0.8)
    if log:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), ScalarFormatter):
            axis.set_major_locator(MaxNLocator(nbins=6, integer=whole and axis is axes.xaxis))
            axis.set_major_formatter(lambda value, _: number(value))


def _write_above(axes: Any, text: str) -> None:
    """Write a line at the top of a figure."""
    width, height = axes.figure.get_size_inches() * INCH
    axes.figure.text(4 / width, 1 - 5 / height, cut(text, int(width / LETTER)), va="top")


def curves(metric: str, splits: Mapping[str, Sequence[float]], marks: Mapping[str, float] | None = None) -> Chart:
    """Draw what a training measured after each epoch: a line per split."""
    name = metric.replace("_", " ")
    return plot("epoch", name, _by_epoch(splits), f"{name} by epoch: {', '.join(splits)}", whole=True, marks=marks)


def _by_epoch(splits: Mapping[str, Sequence[float]]) -> list[Series]:
    return [
        Series(range(1, len(values) + 1), values, split, place % len(COLOURS))
        for place, (split, values) in enumerate(splits.items())
    ]


def learning_curve(training: TrainingResult) -> Chart:
    """Draw the learning curves side by side: a panel per metric, a line per split."""
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


def histogram(heights: Numbers, edges: Numbers, x_label: str, y_label: str, alt: str, share: bool = False) -> Chart:
    """Draw a bar between each two edges; shares of 0 to 1 beside the dashed line where both axes are equal."""
    with _axes(WIDTH, HEIGHT, left=58) as axes:
        widths = [0.94 * (right - left) for left, right in itertools.pairwise(edges)]
        axes.bar(edges[:-1], heights, widths, align="edge", color=COLOURS[0])
        if share:
            axes.plot((0, 1), (0, 1), color=INK, linewidth=1, linestyle="--")
            axes.set(xlim=(0, 1), ylim=(0, 1))
        _label_axes(axes, x_label, y_label)
    return Chart(axes.figure, alt)


@contextlib.contextmanager
def _rows(title: str, names: Sequence[str], left: float, right: float, height: float, bottom: float) -> Iterator[Any]:
    """Give axes with a row of so many pixels for each name, from the top."""
    with _axes(WIDTH, 34 + height * len(names) + bottom, left, top=30, right=right, bottom=bottom + 4) as axes:
        _write_above(axes, title)
        axes.set_yticks(range(len(names)), [cut(name, int(left / LETTER)) for name in names], fontsize=10.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["bottom"].set_visible(False)
        axes.locator_params(axis="x", nbins=4)
        yield axes
        axes.xaxis.set_major_formatter(lambda value, _: number(value))


def bars(title: str, shown: Mapping[str, float], form: str = ",.6g") -> Chart:
    """Draw a lying bar per name, with its number."""
    with _rows(title, list(shown), left=130, right=70, height=20, bottom=0) as axes:
        drawn = axes.barh(range(len(shown)), list(shown.values()), height=0.72, color=COLOURS[0])
        axes.bar_label(drawn, [format(value, form) for value in shown.values()], padding=4, fontsize=10.5)
        axes.set_xlim(0, max([*shown.values(), 0]) or 1)
        axes.set_xticks([])
    return Chart(axes.figure, title)


def ranges(title: str, lines: Sequence[Range], from_zero: bool = True, shown: Callable[[float], str] = number) -> Chart:
    """Draw a line per name from its lowest to its highest value, with a dot at the value itself."""
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


def stacked(title: str, rows: Mapping[str, Mapping[str, float]]) -> Chart:
    """Draw a lying bar per row, divided into parts that have the same names in each row."""
    with _rows(title, list(rows), left=182, right=48, height=26, bottom=22) as axes:
        ends = [0.0] * len(rows)
        for place, part in enumerate(next(iter(rows.values()))):
            lengths = [parts[part] for parts in rows.values()]
            axes.barh(range(len(rows)), lengths, 0.65, ends, color=COLOURS[place], edgecolor=PAGE, label=part)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
        for place, end in enumerate(ends):
            axes.annotate(f"{end:.3g}", (end, place), (5, 0), textcoords="offset points", va="center", fontsize=10.5)
        axes.set_xlim(0, max(ends) or 1)
        axes.figure.legend(loc="upper right", ncols=4, columnspacing=0.9, handlelength=0.9, handletextpad=0.4)
    told = "; ".join(
        f"{row}: {', '.join(f'{part} {value:.3g}' for part, value in parts.items())}" for row, parts in rows.items()
    )
    return Chart(axes.figure, f"{title}: {told}")


def confusion_matrix(evaluation: EvaluationResult) -> Chart:
    """Draw the confusion matrix: rows are true classes, shades are shares of a row, numbers are counts."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    counts = np.array(evaluation.confusion_matrix)
    num = len(counts)
    readable = num <= WITH_COUNTS
    side = 34 if readable else 10 if num <= 100 else 1000 / num
    size = 10.5 if readable else 8.5
    names = [cut(entry.name, 40 if num <= 20 else 20) for entry in evaluation.classes]
    named = range(0, num, math.ceil(9.5 / side))
    room = max(map(len, names)) * 0.62 * size
    upright = room > side
    drawn = max(num * side, 200)  # Two classes are a small square, and what is beside it needs room.
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
        _write_above(axes, "true (the darker, the larger the share of its row)")
    right, every = int(np.trace(counts)), int(counts.sum())
    return Chart(
        axes.figure, f"confusion matrix of {num} classes, {right:,} of {every:,} examples on its diagonal"
    )  # fmt: skip


def scores_by_label(evaluation: EvaluationResult) -> Chart:
    """Draw precision and recall of each label."""
    shown = evaluation.classes[:MAX_LABELS]
    with _rows("", [f"{cut(one.name, 20)} ({one.support:,})" for one in shown], 190, 14, 26, bottom=40) as axes:
        for offset, name, colour in ((-0.2, "precision", 0), (0.2, "recall", 1)):
            places = [place + offset for place in range(len(shown))]
            axes.barh(places, [getattr(entry, name) for entry in shown], 0.38, label=name, color=COLOURS[colour])
        axes.set(xlim=(0, 1), xlabel="share")
        axes.figure.legend(loc="upper right", ncols=2)
    return Chart(axes.figure, "precision and recall of each label")


def parity(true: Numbers, predicted: Numbers, name: str = "target") -> Chart:
    """Draw predicted against true numbers."""
    ends = [value for value in (*true, *predicted) if math.isfinite(value)] or [0.0, 1.0]
    reference = [(min(ends), min(ends)), (max(ends), max(ends))]
    alt = f"predicted against true {name}, {len(true)} points"
    return plot(f"true {name}", f"predicted {name}", [Series(true, predicted, kind="dots")], alt, reference=reference)


def predictions(evaluation: EvaluationResult) -> Chart:
    """Draw predictions against the truth: a confusion matrix of classes, precision and recall of labels, or the numbers
    of a regression."""
    if evaluation.confusion_matrix:
        return confusion_matrix(evaluation)
    if evaluation.classes:
        return scores_by_label(evaluation)
    true, predicted = zip(*evaluation.predictions, strict=True)
    return parity(true, predicted)


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
    return f"{key.replace('_', ' ')}{'' if value is True else f' {value:g}'}"


def span(low: float, value: float, high: float, reference: float, ends: tuple[float, float]) -> Markup:
    """Return where an interval lies beside a reference, for a table's cell: HTML, as a table may have a hundred."""
    start, end = ends
    places = [(min(max(one, start), end) - start) / ((end - start) or 1) * 100 for one in (low, high, value, reference)]
    return Markup(
        '<span class="span" role="img" aria-label="{} to {}"><i style="left:{:.1f}%;right:{:.1f}%"></i>'
        '<em style="left:{:.1f}%"></em><u style="left:{:.1f}%"></u></span>'
    ).format(number(round(low, 4)), number(round(high, 4)), places[0], 100 - places[1], *places[2:])
