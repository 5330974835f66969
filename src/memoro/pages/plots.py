"""Plots that several packages draw. matplotlib is an optional dependency, loaded when something is drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from torch import Tensor

from memoro.files import write_whole

MAX_CONFUSION = 60
"""Classes up to which a confusion matrix has room for their names; files record none of more."""


def draw_confusion(path: Path, title: str, matrix: Tensor, labels: list[str]) -> Path:
    """True by predicted classes: the fraction of each row, with counts where they can be read."""
    from matplotlib.figure import Figure

    count = len(labels)
    fractions = (matrix / matrix.sum(dim=1, keepdim=True).clamp(min=1)).numpy()
    side = min(14.0, max(4.5, 0.45 * count + 2.5))
    figure = Figure(figsize=(side, side * 0.9), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    if count <= MAX_CONFUSION:
        size = 9 if count <= 25 else 6
        names = [drawable(label, most=18) for label in labels]
        axes.set_xticks(range(count), names, fontsize=size, parse_math=False)
        axes.set_yticks(range(count), names, fontsize=size, parse_math=False)
        for name in axes.get_xticklabels():
            name.set(rotation=60, ha="right", rotation_mode="anchor")
    if count <= 25:
        for row, column in matrix.nonzero().tolist():
            shade = "white" if fractions[row, column] > 0.5 else "black"
            value = str(int(matrix[row, column]))
            axes.text(column, row, value, ha="center", va="center", fontsize=8, color=shade)
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_title(drawable(title), parse_math=False)
    figure.colorbar(image, ax=axes, shrink=0.8, label="fraction of the true class")
    return save_figure(figure, path)


def save_figure(figure: Any, path: Path, dpi: int = 120) -> Path:
    """Writes the figure in the format of the path's suffix; returns the path."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi, format=path.suffix[1:] or "png")
    write_whole(path, buffer.getvalue())
    return path


def drawable(text: str, most: int = 200) -> str:
    """The text with boxes for characters that the font lacks: matplotlib would warn of each."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    shown = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(character if font.get_char_index(ord(character)) else "□" for character in shown)
