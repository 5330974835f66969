"""Plots of the paper's tables: lines with error bars, and differences with their intervals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from memoro.pages.plots import drawable, save_figure

MAX_TICKS = 8
"""Whole numbers on an x axis up to which each has a tick of its own."""
Point = tuple[float, float, float]
"""(x, y, half the height of an error bar)"""
INTERVAL_COLORS = {"above zero": "C0", "includes zero": "0.55", "below zero": "C3"}


def draw_panels(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[Point]]],
    xlabel: str,
    ylabel: str,
    *,
    log: bool = False,
    level: Collection[str] = (),
    ticks: Sequence[str] = (),
) -> Path:
    """Panels side by side, each with lines of points and error bars; one legend for all. Lines of `level`, which do not
    depend on x, are dashed and have no points. `ticks` are names for x = 0, 1, …"""
    from matplotlib.ticker import MaxNLocator
    from matplotlib.transforms import offset_copy

    figure, grid = _make_grid(panels, height=2.9)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    drawn: dict[str, Any] = {}
    for axes, lines in zip(grid, panels.values(), strict=True):
        places = {point[0] for points in lines.values() for point in points}
        for number, (name, points) in enumerate(lines.items()):
            x, y, error = zip(*sorted(points), strict=True)
            # Moved a little to the side, so that no error bar hides another.
            aside = offset_copy(axes.transData, figure, x=2 * (number - (len(lines) - 1) / 2), units="points")
            look: dict[str, Any] = {"color": f"C{names.index(name) % 10}", "linewidth": 1.3}
            if name in level:
                [drawn[name]] = axes.plot(x, y, linestyle="--", **look)
            else:
                drawn[name] = axes.errorbar(x, y, error, marker="o", markersize=4, capsize=2, transform=aside, **look)
            axes.update_datalim([(at, value + side * bar) for at, value, bar in points for side in (-1, 1)])
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if log:
            axes.set_xscale("log")
        if ticks:
            axes.set_xticks(range(len(ticks)), map(drawable, ticks), parse_math=False)
        elif all(float(place).is_integer() for place in places):
            at = sorted(places)
            if len(at) <= MAX_TICKS and not (log and any(two < 2 * one for one, two in pairwise(at))):
                axes.set_xticks(at, [f"{place:,.0f}" for place in at])
                axes.set_xticks([], minor=True)
            elif not log:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.autoscale_view()
    labels = [drawable(name) for name in drawn]
    entry = 0.7 + 0.08 * max(map(len, labels), default=0)  # inches: a line, the gaps around it, and characters
    fitting = max(1, min(4, int(figure.get_figwidth() / entry)))
    figure.legend(list(drawn.values()), labels, loc="outside lower center", ncols=fitting)
    return save_figure(figure, path)


def draw_differences(path: Path, panels: Mapping[str, Mapping[str, tuple[float, float]]], xlabel: str) -> Path:
    """Panels side by side, each with a row for every name: a difference, and half of its interval. Colours show whether
    the interval includes zero. Rows of a mean are drawn larger."""
    from matplotlib.ticker import MaxNLocator

    most = max(map(len, panels.values()))
    figure, grid = _make_grid(panels, height=1.0 + 0.24 * most)
    drawn: dict[str, Any] = {}
    for axes, rows in zip(grid, panels.values(), strict=True):
        axes.axvline(0, color="0.3", linewidth=0.8)
        for at, (name, (difference, margin)) in enumerate(rows.items()):
            sign = "above zero" if difference > margin else "below zero" if difference < -margin else "includes zero"
            look = {"marker": "D", "linewidth": 2.2} if name.startswith("mean") else {"marker": "o", "linewidth": 1.3}
            color = INTERVAL_COLORS[sign]
            bar = axes.errorbar(difference, at, xerr=margin, color=color, markersize=4, capsize=2, **look)
            drawn.setdefault(sign, bar)
        axes.set_yticks(range(len(rows)), map(drawable, rows), fontsize=8, parse_math=False)
        axes.set_ylim(most - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel(xlabel)
    known = [sign for sign in INTERVAL_COLORS if sign in drawn]
    figure.legend(
        [drawn[sign] for sign in known], known, title="interval", loc="outside lower center", ncols=len(known)
    )
    return save_figure(figure, path)


def _make_grid(panels: Mapping[str, Any], height: float) -> tuple[Any, list[Any]]:
    """A figure, and axes with a title for each panel, at most four in a row; `height` of a row in inches."""
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns + 1, height * rows + 0.8), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, title in zip(grid.flat, panels, strict=False):
        shown = [drawable(line) for part in title.split("\n") for line in wrap(part, 42)]
        axes.set_title("\n".join(shown), parse_math=False, fontsize=9)
        axes.grid(alpha=0.25)
    return figure, list(grid.flat[: len(panels)])
