"""Drawings as SVG, written by hand: a figure of matplotlib takes 0.1 s, and knows no dark page. Colours are those of
the page's classes."""

import math
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

WIDTH, HEIGHT = 400, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 36, 44
NUM_COLOURS = 4
LETTER_WIDTH = 7
MAX_NAME = 18
"""Letters of a name beside a drawing."""

Point = tuple[float, float]


def ticks(low: float, high: float, most: int = 6, whole: bool = False) -> list[float]:
    """Return round numbers from ``low`` to ``high``: 1, 2 or 5 times a power of ten apart, at most ``most``."""
    span = high - low
    # Nearer together, float64 has no round numbers between them.
    if not 1e-9 * max(abs(low), abs(high)) < span < math.inf:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next(times for times in (1, 2, 5, 10, 20) if span / (step * times) <= most - 1)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [float(f"{(first + i) * step:.12g}") for i in range(math.floor(high / step + 1e-9) - first + 1)]


def number(value: float) -> str:
    """Return a number as short as an axis has room for."""
    return f"{value:.0e}" if value and not 1e-3 <= abs(value) < 1e6 else f"{value:,.6g}"


def short(name: str, most: int = MAX_NAME) -> str:
    """Return a name, cut where it is long."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def along_axis(names: Sequence[str]) -> list[str]:
    """Return names, each cut to the room that it has along the lying axis."""
    room = (WIDTH - LEFT - RIGHT) // (LETTER_WIDTH * max(len(names), 1))
    return [short(name, room) for name in names]


class Frame:
    """Two axes, and what is drawn between them."""

    def __init__(
        self, x: Point, y: Point, x_label: str, y_label: str, whole: bool = False, names: Sequence[str] = ()
    ) -> None:
        """
        Args:
            x: the ends of the lying axis.
            y: those of the upright one.
            x_label: what the lying one is.
            y_label: what the upright one is.
            whole: only whole numbers are written along the lying axis.
            names: what is written there in place of 0, 1, 2 and so on.
        """
        self._x, self._y = _widened(x), _widened(y)
        self._parts: list[Markup] = []
        along: dict[float, str] = dict(enumerate(along_axis(names)))
        for value, text in (along or {value: number(value) for value in ticks(*self._x, whole=whole)}).items():
            place = self.x(value)
            self._parts.append(
                Markup('<path class="grid" d="M{:.1f} {}V{}"/><text x="{:.1f}" y="{}" class="mid">{}</text>').format(
                    place, TOP, HEIGHT - BOTTOM, place, HEIGHT - BOTTOM + 16, text
                )
            )
        for value in ticks(*self._y):
            place = self.y(value)
            self._parts.append(
                Markup('<path class="grid" d="M{} {:.1f}H{}"/><text x="{}" y="{:.1f}" class="end">{}</text>').format(
                    LEFT, place, WIDTH - RIGHT, LEFT - 6, place + 4, number(value)
                )
            )
        middle = (LEFT + WIDTH - RIGHT) / 2
        self.text(middle, HEIGHT - 8, x_label, "mid")
        self.text(4, 14, y_label, "")

    def x(self, value: float) -> float:
        low, high = self._x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def text(self, x: float, y: float, text: str, kind: str) -> None:
        self._parts.append(Markup('<text x="{:.1f}" y="{:.1f}" class="{}">{}</text>').format(x, y, kind, text))

    def line(self, points: Sequence[Point], kind: str, dots: bool = False) -> None:
        """Draw a line through points; one that is no number interrupts it."""
        d, pen = [], "M"
        for x, y in points:
            if not (math.isfinite(x) and math.isfinite(y)):
                pen = "M"
                continue
            d.append(f"{pen}{self.x(x):.1f} {self.y(y):.1f}")
            pen = "L"
        self._parts.append(Markup('<path class="line {}" d="{}"/>').format(kind, "".join(d)))
        if dots:
            self.dots(points, kind)

    def dots(self, points: Iterable[Point], kind: str) -> None:
        drawn = "".join(f"M{self.x(x):.1f} {self.y(y):.1f}h0" for x, y in points if math.isfinite(x + y))
        self._parts.append(Markup('<path class="dots {}" d="{}"/>').format(kind, drawn))

    def upright(self, x: float) -> None:
        """Draw an upright line at a place."""
        self.line([(x, self._y[0]), (x, self._y[1])], "mark")

    def box(self, left: float, right: float, height: float, kind: str) -> None:
        """Draw a bar that stands on 0."""
        a, b, top, foot = self.x(left), self.x(right), self.y(height), self.y(0)
        self._parts.append(
            Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
                kind, a + 0.5, top, max(b - a - 1, 0.5), max(foot - top, 0)
            )
        )

    def legend(self, names: Sequence[str]) -> None:
        """Name the colours in their order."""
        right = float(WIDTH - RIGHT)
        for place, name in reversed(list(enumerate(names))):
            self.text(right, 14, name, f"end c{place % NUM_COLOURS} named")
            right -= 7.2 * len(name) + 14

    def drawing(self, alt: str) -> Markup:
        """Return the whole as SVG."""
        return svg(WIDTH, HEIGHT, alt, self._parts)


def svg(width: float, height: float, alt: str, parts: Iterable[Markup]) -> Markup:
    """Return a drawing of parts, with what it shows in words."""
    return Markup(
        '<svg viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" height="{1:.0f}" role="img" aria-label="{2}">{3}</svg>'
    ).format(width, height, alt, Markup("").join(parts))


def _widened(ends: Point) -> Point:
    low, high = ends
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def limits(values: Iterable[float]) -> Point:
    """Return the smallest and the largest of what is a number, 0 and 1 where nothing is."""
    finite = [float(value) for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 1.0)


def lines(
    title: str, x_label: str, drawn: Mapping[str, Sequence[float]], marks: Mapping[str, float] | None = None
) -> Markup:
    """Draw what was measured after 1, 2, ... epochs, a line a name, with upright lines where something was."""
    most = max(map(len, drawn.values()))
    frame = Frame((1, max(most, 2)), limits(value for line in drawn.values() for value in line), x_label, title, True)
    places = {name: min(epoch, max(most, 2)) for name, epoch in (marks or {}).items()}
    for epoch in places.values():
        frame.upright(epoch)
    for place, values in enumerate(drawn.values()):
        frame.line(list(enumerate(values, start=1)), f"c{place % NUM_COLOURS}", dots=True)
    named: list[tuple[int, Point]] = []  # The row of each name above the lines, and from where to where it reaches.
    for name, epoch in places.items():
        x = frame.x(epoch)
        right = x > WIDTH / 2
        ends = (x - 4 - LETTER_WIDTH * len(name), x) if right else (x, x + 4 + LETTER_WIDTH * len(name))
        taken = {row for row, other in named if ends[0] < other[1] and other[0] < ends[1]}
        row = min(set(range(len(taken) + 1)) - taken)
        named.append((row, ends))
        frame.text(x + (-4 if right else 4), TOP - 5 + 15 * row, name, "end mark-name" if right else "mark-name")
    frame.legend(list(drawn))
    return frame.drawing(f"{title} by {x_label}: {', '.join(drawn)}")


def bars(title: str, shown: Mapping[str, float], form: str = ",.6g") -> Markup:
    """Draw a lying bar a name, the numbers beside them."""
    most = max((value for value in shown.values()), default=0) or 1
    left, step = 130, 20
    parts = [Markup('<text x="4" y="14">{}</text>').format(title)]
    for place, (name, value) in enumerate(shown.items()):
        y, width = 24 + place * step, max(value, 0) / most * (WIDTH - left - 70)
        parts.append(
            Markup(
                '<text x="{}" y="{}" class="end">{}</text><rect class="f0" x="{}" y="{}" width="{:.1f}" height="{}"/>'
                '<text x="{:.1f}" y="{}">{}</text>'
            ).format(
                left - 6, y + 12, short(name), left, y, width, step - 5, left + width + 5, y + 12, format(value, form)
            )
        )
    return svg(WIDTH, 30 + step * len(shown), title, parts)


def interval(low: float, value: float, high: float, reference: float, ends: Point) -> Markup:
    """Draw where a number lies, beside a reference, as a small picture for a table's cell."""
    width, height = 130, 16
    start, end = _widened(ends)

    def x(one: float) -> float:
        return 4 + (min(max(one, start), end) - start) / (end - start) * (width - 8)

    parts = [
        Markup('<path class="line mark" d="M{0:.1f} 0V{1}"/>').format(x(reference), height),
        Markup('<path class="line c1" d="M{:.1f} 8H{:.1f}"/><path class="dots c1" d="M{:.1f} 8h0"/>').format(
            x(low), x(high), x(value)
        ),
    ]
    return svg(width, height, f"{number(round(low, 4))} to {number(round(high, 4))}", parts)
