"""Small charts as SVG: they follow the page's colours, light or dark, and their text keeps its size."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence

from memoro.pages.elements import Html, tag

WIDTH, HEIGHT = 310, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 10, 36
BINS = 24
"""The number of bars in a histogram."""
_CELL, _NAMES = 26, 104

Points = Sequence[tuple[float, float]]


def line_chart(lines: Sequence[tuple[str, Points]], x: str, y: str) -> Html:
    """Lines over whole numbers such as epochs. A class says how each is drawn: empty, `dashed` or `faint`."""
    xs, ys = ([point[axis] for _, points in lines for point in points] for axis in (0, 1))
    across, down = _Scale(xs, _LEFT, WIDTH - _RIGHT), _Scale(ys, HEIGHT - _BOTTOM, _TOP)
    drawn = []
    for look, points in lines:
        if len(points) == 1:
            drawn.append(
                tag("circle", cx=across(points[0][0]), cy=down(points[0][1]), r=3, class_=f"dot {look}".strip())
            )
        path = " ".join(f"{across(a)},{down(b)}" for a, b in points)
        drawn.append(tag("polyline", points=path, class_=f"line {look}".strip()))
    return _frame(across, down, x, y, drawn, whole=True)


def scatter_chart(points: Points, x: str, y: str) -> Html:
    """Dots, and the diagonal on which both numbers are equal."""
    values = [value for point in points for value in point]
    across, down = _Scale(values, _LEFT, WIDTH - _RIGHT), _Scale(values, HEIGHT - _BOTTOM, _TOP)
    low, high = across.low, across.high
    diagonal = tag("line", x1=across(low), y1=down(low), x2=across(high), y2=down(high), class_="line dashed")
    dots = [tag("circle", cx=across(a), cy=down(b), r=2.5, fill_opacity=0.55, class_="dot") for a, b in points]
    return _frame(across, down, x, y, [diagonal, *dots])


def histogram_chart(values: Sequence[float], limit: float, x: str) -> Html:
    """How many values lie where, and a dashed line at the limit."""
    across = _Scale([*values, limit], _LEFT, WIDTH - _RIGHT)
    width = (across.high - across.low) / BINS
    counts = [0] * BINS
    for value in values:
        counts[min(int((value - across.low) / width), BINS - 1)] += 1
    down = _Scale([0.0, *counts], HEIGHT - _BOTTOM, _TOP)
    size = {"width": round(across(across.low + width) - _LEFT - 1, 1), "class_": "bar"}
    bars = [
        tag("rect", x=across(across.low + at * width), y=down(count), height=round(down(0) - down(count), 1), **size)
        for at, count in enumerate(counts)
        if count
    ]
    line = tag("line", x1=across(limit), x2=across(limit), y1=_TOP, y2=HEIGHT - _BOTTOM, class_="line dashed")
    return _frame(across, down, x, "images", [*bars, line])


def bar_chart(values: Mapping[str, float], unit: str) -> Html:
    """A bar for each value, with its name above it."""
    top, row, width = max([*values.values(), 1e-12]), 36, WIDTH
    parts = []
    for at, (name, value) in enumerate(values.items()):
        size = round(max(1.0, (width - 70) * value / top), 1)
        parts += [
            tag("text", shorten(name, width), x=0, y=at * row + 12),
            tag("rect", x=0, y=at * row + 17, width=size, height=12, rx=2, class_="bar"),
            tag("text", f"{value:.3g}{unit}", x=size + 6, y=at * row + 27, class_="soft"),
        ]
    return _svg(
        width, row * len(values), parts, ", ".join(f"{name} {value:.3g}{unit}" for name, value in values.items())
    )


def meter(share: float, look: str = "bar") -> Html:
    """A share as a bar as wide as its place; the number stands beside it. The server's page has the same."""
    bars = (
        tag("rect", class_=name, width=f"{width:.1%}", height=8, rx=4)
        for name, width in (("track", 1.0), (look, share))
    )
    return tag("svg", *bars, class_="meter", width="100%", height=8, aria_hidden="true")


def matrix_chart(counts: Sequence[Sequence[int]], labels: Sequence[str]) -> Html:
    """True by predicted classes, with counts; the colour is the fraction of the true class."""
    count, names = len(labels), [shorten(label, _NAMES) for label in labels]
    room = 14 + max((text_width(name) for name in names), default=0)
    head, heading = room + 18, "predicted →"
    width = room + max(count * _CELL, text_width(heading)) + 2
    parts = [
        tag("text", heading, x=room, y=12, class_="soft"),
        tag("text", "true ↓", x=0, y=head - 6, class_="soft"),
    ]
    for at, (name, label) in enumerate(zip(names, labels, strict=True)):
        middle = at * _CELL + _CELL / 2 + 4
        tip = tag("title", label)
        parts.append(tag("text", name, tip, x=room - 8, y=head + middle, text_anchor="end"))
        parts.append(tag("text", name, tip, transform=f"translate({room + middle} {head - 6}) rotate(-90)"))
    for true, row in enumerate(counts):
        for predicted, number in enumerate(row):
            x, y = room + predicted * _CELL, head + true * _CELL
            parts.append(tag("rect", x=x, y=y, width=_CELL, height=_CELL, class_="axis"))
            if not number:
                continue
            shade = f"{0.12 + 0.5 * number / sum(row):.2f}"
            tip = tag("title", f"{labels[true]}, predicted {labels[predicted]}: {number} of {sum(row)}")
            look = "right" if true == predicted else "wrong"
            parts.append(tag("rect", tip, x=x, y=y, width=_CELL, height=_CELL, fill_opacity=shade, class_=look))
            parts.append(tag("text", _brief(number), x=x + _CELL / 2, y=y + _CELL / 2 + 4, text_anchor="middle"))
    return _svg(math.ceil(width), math.ceil(head + count * _CELL + 2), parts, "confusion matrix")


def shorten(text: str, width: float) -> str:
    """The text cut to about this many pixels."""
    if text_width(text) <= width:
        return text
    while text and text_width(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


def text_width(text: str) -> float:
    """At most, in pixels: as in DejaVu Sans and Verdana, the widest of the usual fonts. Less would cut a label."""
    return sum(map(_letter_width, text))


def _letter_width(char: str) -> float:
    if unicodedata.combining(char):
        return 0.0
    if unicodedata.east_asian_width(char) in "WF":
        return 14.0
    letter = unicodedata.normalize("NFD", char)[0]
    if letter in "mwMW@%" or not letter.isascii():
        return 11.0
    if letter in "ijlftrIJ.,:;'|! ()[]/\\-":
        return 4.6
    return 7.1 if letter.islower() or letter.isdigit() else 9.3


class _Scale:
    """From values to pixels, with a few round numbers to mark."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values, default=0.0), max(values, default=1.0)
        if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
            low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
        self.low, self.high, self._start, self._end = low, high, start, end

    def __call__(self, value: float) -> float:
        return round(self._start + (value - self.low) / (self.high - self.low) * (self._end - self._start), 1)

    def marks(self, whole: bool = False) -> list[float]:
        step = 10 ** math.floor(math.log10((self.high - self.low) / 3))
        step = next(step * factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= 5)
        step = max(1.0, step) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _frame(across: _Scale, down: _Scale, x: str, y: str, drawn: Sequence[Html], *, whole: bool = False) -> Html:
    left, bottom = _LEFT, HEIGHT - _BOTTOM
    parts = [tag("path", d=f"M{left},{_TOP} V{bottom} H{WIDTH - _RIGHT}", class_="axis")]
    for value in across.marks(whole):
        middle = {"text_anchor": "middle", "class_": "soft"}
        parts.append(tag("text", f"{value:.4g}", x=across(value), y=bottom + 14, **middle))
    for value in down.marks():
        parts.append(tag("line", x1=left, x2=WIDTH - _RIGHT, y1=down(value), y2=down(value), class_="axis"))
        parts.append(tag("text", f"{value:.4g}", x=left - 5, y=down(value) + 4, text_anchor="end", class_="soft"))
    parts.append(tag("text", x, x=(left + WIDTH) / 2, y=HEIGHT - 6, text_anchor="middle", class_="soft"))
    return _svg(WIDTH, HEIGHT, [*parts, *drawn], f"{y} over {x}")


def _svg(width: float, height: float, parts: Sequence[Html], label: str) -> Html:
    return tag("svg", *parts, width=width, height=height, viewBox=f"0 0 {width} {height}", role="img", aria_label=label)


def _brief(number: int) -> str:
    return str(number) if number < 1000 else f"{number / 1000:.0f}k"
