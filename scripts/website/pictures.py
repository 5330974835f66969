"""The drawings of docs/how.md: `PYTHONPATH=scripts python -m website.pictures` writes them to docs/pictures.

They are narrow, so that their text can be read on a phone, and take their colours from the page.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
STYLE = """<style>
  svg { --ink: #22272e; --base: #1f5fa8; --task: #b3400c; --other: #2e7d32; --faint: #d5dbe3; }
  text { fill: var(--ink); font-family: system-ui, sans-serif; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e3e8ef; --base: #7db4f5; --task: #ffa06b; --other: #8fd694; --faint: #3a4350; }
  }
</style>"""
"""Only for the file alone: on the site, the style sheet of the page has these."""


class Drawing:
    """Shapes in a box of the given size; colours are the names of variables."""

    def __init__(self, width: int, height: int, about: str) -> None:
        self.head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        self.parts = [f"<title>{escape(about)}</title>"]

    def box(self, x: float, y: float, width: float, height: float, color: str, *, filled: bool = False) -> None:
        fill, opacity = (f"var(--{color})", "") if filled else ("none", "")
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'style="fill:{fill};stroke:var(--{color});stroke-width:1.5{opacity}"/>'
        )

    def line(
        self, x: float, y: float, to_x: float, to_y: float, color: str, *, arrow: bool = True, thin: bool = False
    ) -> None:
        dash = ";stroke-dasharray:4 3" if thin else ""
        self.parts.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" style="fill:none;stroke:var(--{color});stroke-width:1.5{dash}"/>'
        )
        if arrow:
            length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
            along, across = ((to_x - x) / length, (to_y - y) / length)
            left = (to_x - 7 * along + 4 * across, to_y - 7 * across - 4 * along)
            right = (to_x - 7 * along - 4 * across, to_y - 7 * across + 4 * along)
            self.parts.append(
                f'<path d="M{to_x:g} {to_y:g}L{left[0]:.1f} {left[1]:.1f}L{right[0]:.1f} {right[1]:.1f}Z" '
                f'style="fill:var(--{color})"/>'
            )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        size: int = 13,
        bold: bool = False,
        color: str = "ink",
    ) -> None:
        weight = ";font-weight:600" if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" style="font-size:{size}px;fill:var(--{color}){weight}">'
            f"{escape(words)}</text>"
        )

    def svg(self) -> str:
        return "\n".join([self.head, STYLE, *self.parts, "</svg>"]) + "\n"


def two_streams() -> Drawing:
    drawing = Drawing(
        400, 372,
        "The backbone's tokens pass through its layers as they always do. Beside them, one token for each task reads "
        "the keys and values of every layer, and ends in the task's own answer.",
    )  # fmt: skip
    drawing.text(85, 16, "the backbone's tokens", anchor="middle", bold=True, color="base")
    drawing.text(278, 16, "a token for each task", anchor="middle", bold=True, color="task")
    columns = ((235, "task", "pets", 12), (320, "other", "rooms", 30))
    for at, color in enumerate(["base"] * 6):
        drawing.box(22 + at * 22, 28, 16, 16, color, filled=at == 0)
    for x, color, *_ in columns:
        drawing.box(x - 8, 28, 16, 16, color, filled=True)
    for number, name in enumerate(("layer 0", "layer 1", "…", "layer 11")):
        top = 66 + number * 60
        drawing.line(85, top - 20, 85, top - 2, "base")
        if name == "…":
            drawing.text(85, top + 20, name, anchor="middle")
            for x, color, *_, down in columns:
                drawing.line(x, top - 52 + down, x, top + 50 + down, color)
            continue
        for x, color, *_, down in columns:
            if number != 3:
                drawing.line(x, top - 20 if number == 0 else top - 52 + down, x, top - 10 + down, color)
        drawing.box(16, top, 138, 38, "base")
        drawing.text(85, top + 24, name, anchor="middle")
        for x, color, *_, down in columns:
            drawing.box(x - 8, top - 8 + down, 16, 16, color, filled=True)
            drawing.line(156, top + down, x - 10, top + down, "base", thin=True)
        if number == 0:
            drawing.text(190, top + 7, "K, V", anchor="middle", size=12)
            drawing.text(272, top + 25, "K, V", anchor="middle", size=12)
    drawing.line(85, 286, 85, 312, "base")
    drawing.text(85, 330, "base", anchor="middle", bold=True, color="base")
    drawing.text(85, 348, "the original output,", anchor="middle", size=12)
    drawing.text(85, 363, "equal to the bit", anchor="middle", size=12)
    for x, color, name, down in columns:
        drawing.line(x, 254 + down, x, 312, color)
        drawing.text(x, 330, name, anchor="middle", bold=True, color=color)
    drawing.text(235, 348, "cat 0.97", anchor="middle", size=12)
    drawing.text(320, 348, "kitchen 0.88", anchor="middle", size=12)
    return drawing


def mask() -> Drawing:
    drawing = Drawing(
        400, 262,
        "Who attends to whom. Patches and the backbone's class token attend to each other only. The token of pets also "
        "attends to itself and its memory; that of breeds, which extends pets, to those of pets as well.",
    )  # fmt: skip
    columns = (
        ("patches", "base"),
        ("class", "base"),
        ("pets", "task"),
        ("breeds", "other"),
        ("pets", "task"),
        ("breeds", "other"),
    )
    rows = (
        ("patches", "base", "110000"),
        ("class", "base", "110000"),
        ("pets", "task", "111010"),
        ("breeds", "other", "111111"),
    )
    left, step = 84, 51
    drawing.text(left + step, 14, "backbone", anchor="middle", bold=True, size=12, color="base")
    drawing.text(left + 3 * step, 14, "tokens", anchor="middle", bold=True, size=12)
    drawing.text(left + 5 * step, 14, "memory cells", anchor="middle", bold=True, size=12)
    for at, (name, color) in enumerate(columns):
        drawing.text(left + step * (at + 0.5), 34, name, anchor="middle", size=12, color=color)
    for number, (name, color, seen) in enumerate(rows):
        top = 44 + number * 42
        drawing.text(left - 8, top + 24, name, anchor="end", color=color, bold=True)
        for at, mark in enumerate(seen):
            drawing.box(left + at * step + 3, top, step - 6, 36, color if mark == "1" else "faint", filled=mark == "1")
    drawing.text(left, 230, "filled: the row's token attends to the column", size=12)
    drawing.text(left, 248, "breeds extends pets; nothing else sees a task", size=12)
    return drawing


def fork() -> Drawing:
    drawing = Drawing(
        400, 236,
        "Where a task's token leaves the backbone's class token: at layer 0 it runs beside all twelve layers, at layer "
        "8 beside the last four, at layer 12 it is a linear head and costs nothing.",
    )  # fmt: skip
    left, step = 12, 29
    drawing.text(left, 16, "the backbone's 12 layers", bold=True, color="base")
    for layer in range(12):
        drawing.box(left + layer * step, 28, step - 6, 26, "base")
        drawing.text(left + layer * step + (step - 6) / 2, 46, str(layer), anchor="middle", size=12)
    rows = (
        (0, "from_layer=0: the paper", "task"),
        (8, "from_layer=8: a third of the cost", "task"),
        (12, "from_layer=12: a linear head", "task"),
    )
    for number, (start, name, color) in enumerate(rows):
        y = 92 + number * 56
        x, end = left + start * step, left + 12 * step
        drawing.line(x - 3 if start else x + 2, 58, x - 3 if start else x + 2, y, "faint", arrow=False, thin=True)
        drawing.text(left + 8, y + 20, name)
        if start < 12:
            drawing.line(x + 2, y, end + 10, y, color)
            for layer in range(start, 12):
                drawing.box(left + layer * step + 8, y - 4, 8, 8, color, filled=True)
        drawing.box(end + 12, y - 8, 16, 16, color, filled=True)
    drawing.text(388, 58, "head", anchor="end", size=12, color="task")
    return drawing


def readout() -> Drawing:
    drawing = Drawing(
        400, 268,
        "After each of the upper layers, three vectors are kept: the class token, the mean of the patch tokens and "
        "their standard deviation. All of them together enter one linear layer, solved in closed form.",
    )  # fmt: skip
    drawing.text(12, 16, "layers", bold=True, color="base")
    drawing.text(190, 16, "class · mean · deviation", anchor="middle", bold=True, size=12)
    names = ("layer 0", "…", "layer 4", "layer 5", "…", "layer 11")
    for number, name in enumerate(names):
        y = 28 + number * 36
        if name == "…":
            drawing.text(54, y + 18, "…", anchor="middle")
            continue
        drawing.box(12, y, 84, 26, "base")
        drawing.text(54, y + 18, name, anchor="middle")
        if number < 2:
            drawing.text(190, y + 18, "not read", anchor="middle", size=12)
            continue
        drawing.line(98, y + 13, 128, y + 13, "base")
        for at, part in enumerate(("c", "μ", "σ")):
            drawing.box(132 + at * 40, y, 34, 26, "task")
            drawing.text(149 + at * 40, y + 18, part, anchor="middle")
        drawing.line(252, y + 13, 296, 152, "task", thin=True)
    drawing.text(190, 28 + 4 * 36 + 18, "…", anchor="middle")
    drawing.box(300, 118, 88, 68, "task")
    drawing.text(344, 142, "one linear", anchor="middle")
    drawing.text(344, 159, "layer: ridge", anchor="middle")
    drawing.text(344, 176, "regression", anchor="middle")
    drawing.line(344, 188, 344, 218, "task")
    drawing.text(344, 236, "logits", anchor="middle", bold=True, color="task")
    drawing.text(12, 262, "c: class token, μ: mean, σ: standard deviation", size=12)
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "two-streams": two_streams,
    "mask": mask,
    "fork": fork,
    "read-out": readout,
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
