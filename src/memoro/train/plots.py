"""Pictures of a training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from memoro.train.sweep import SweepRow


def draw_curve(path: Path, title: str, history: list[dict[str, Any]]) -> Path:
    """Loss, and accuracy where there is one, over epochs; training and validation."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = [name for name in ("loss", "accuracy") if any(f"train_{name}" in entry for entry in history)]
    figure = Figure(figsize=(5.2 * len(panels), 3.6), layout="constrained")
    for place, name in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place)
        for split, style in (("train", "o--"), ("val", "o-")):
            points = [(e["epoch"], e[f"{split}_{name}"]) for e in history if f"{split}_{name}" in e]
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, markersize=3, label={"val": "validation"}.get(split, split)
                )
        axes.set(xlabel="epoch", ylabel=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title, parse_math=False)
    return _write(figure, path)


def draw_sweep(path: Path, title: str, rows: Sequence[SweepRow], figure_name: str) -> Path:
    """Validation score over learning rate: a line for each cell count and fork, its seeds as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[tuple[int, int], list[SweepRow]] = {}
    for row in rows:
        if row.val:
            lines.setdefault((row.cells, row.from_layer), []).append(row)
    for (cells, layer), some in lines.items():
        some = sorted(some, key=lambda row: row.lr)
        rates = [row.lr for row in some]
        (line,) = axes.plot(
            rates, [sum(row.val) / len(row.val) for row in some], "o-", label=f"{cells} cells, from layer {layer}"
        )
        axes.fill_between(
            rates, [min(row.val) for row in some], [max(row.val) for row in some], alpha=0.15, color=line.get_color()
        )
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"validation {figure_name.replace('_', ' ')}")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    return path


def draw_confusion(path: Path, title: str, matrix: Tensor, labels: list[str]) -> Path:
    """Which class was taken for which: each row's shares, with counts where they can be read."""
    from matplotlib.figure import Figure

    count = len(labels)
    shares = (matrix / matrix.sum(dim=1, keepdim=True).clamp(min=1)).numpy()
    side = min(14.0, max(4.5, 0.45 * count + 2.5))
    figure = Figure(figsize=(side, side * 0.9), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if count <= 60:
        size = 9 if count <= 25 else 6
        names = [label if len(label) <= 18 else f"{label[:17]}…" for label in labels]
        axes.set_xticks(range(count), names, fontsize=size, parse_math=False)
        axes.set_yticks(range(count), names, fontsize=size, parse_math=False)
        for name in axes.get_xticklabels():
            name.set(rotation=60, ha="right", rotation_mode="anchor")
    if count <= 25:
        for row in range(count):
            for column in range(count):
                if value := int(matrix[row, column]):
                    shade = "white" if shares[row, column] > 0.5 else "black"
                    axes.text(column, row, str(value), ha="center", va="center", fontsize=8, color=shade)
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_title(title, parse_math=False)
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the true class")
    return _write(figure, path)


def _write(figure: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a script that the font lacks: boxes, but a picture
        figure.savefig(path, dpi=120)
    return path
