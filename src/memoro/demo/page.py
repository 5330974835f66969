"""The demo's page: one HTML file with its pictures inside."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from memoro.backbones import Backbone
from memoro.engine.composition import Composition
from memoro.engine.verify import Verification

if TYPE_CHECKING:
    from memoro.demo.story import Answered, Cost

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
table { border-collapse: collapse } th, td { padding: .3rem .9rem .3rem 0; text-align: right }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 1px solid #999 }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 1rem }
.card { border: 1px solid #ddd; border-radius: 6px; padding: .7rem; font-size: .85rem }
.card img { width: 96px; height: 96px; image-rendering: pixelated; display: block; margin: 0 auto .5rem }
.right { color: #176b2c } .wrong { color: #b3261e } .other { color: #767676 }
img.plot { max-width: 100%; height: auto }
"""


def write_page(
    path: Path,
    backbone: Backbone,
    model: Composition,
    answered: dict[str, Answered],
    cost: Cost,
    receipt: Verification,
) -> Path:
    """Writes the page, and a picture of it beside; returns the page's path."""
    asked = ask(model, answered, 8)
    draw_overview(path.with_name("overview.png"), asked, cost, len(answered))
    same = "equal to the bit" if receipt.base_equal else f"different by {receipt.base_difference:.2g}"
    parts = [
        f"<h1>{len(answered)} tasks on one frozen backbone</h1>",
        f"<p>{escape(str(backbone))}. With all tasks attached, its own answer is <b>{same}</b>. One pass for all tasks "
        f"costs {cost.composed / cost.base:.2f} plain passes; a pass for each would cost "
        f"{cost.separate / cost.base:.2f}.</p>",
        _table(answered),
        "<h2>What all tasks say of some test images, in one pass</h2>",
        "<p>Green is right, red is wrong, grey was not asked of such images.</p>",
        _cards(asked),
        "<h2>What it costs</h2>",
        _picture(_cost_plot(cost, len(answered)), "bars: one base pass, all tasks in one pass, a pass for each"),
        "<h2>How it was learned</h2>",
        "<p>Validation accuracy of every run over its epochs; the chosen one is drawn thick. All of a panel's runs "
        "shared each base pass.</p>",
        _picture(_curves(answered), "validation accuracy of every run"),
    ]
    body = "\n".join(parts)
    path.write_text(
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>memoro demo</title><style>{STYLE}</style>'
        f"<body>{body}</body></html>\n",
        encoding="utf-8",
    )
    return path


def _table(answered: dict[str, Answered]) -> str:
    heads = ("task", "classes", "alone", "composed", "head only", "from layer", "file")
    rows = []
    for name, found in answered.items():
        parents = ", ".join(parent.name for parent in found.task.extends)
        cells = (
            escape(f"{name} (extends {parents})" if parents else name),
            str(len(found.task.labels)),
            f"{found.alone:.3f}",
            f"{found.composed:.3f}",
            f"{found.head:.3f}",
            str(found.task.from_layer),
            f"{found.file.stat().st_size / 1000:.0f} kB",
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


KINDS = (("letter", "style", "case"), ("digit", "parity"))
"""Tasks that are asked of the same images."""


@dataclass(frozen=True)
class Answer:
    """One task's answer to one image."""

    task: str
    label: str
    share: float
    truth: str | None
    """None where the task is not about such images."""

    @property
    def look(self) -> str:
        return "other" if self.truth is None else "right" if self.truth == self.label else "wrong"


def ask(model: Composition, answered: dict[str, Answered], each: int) -> list[tuple[Image.Image, list[Answer]]]:
    """Some test images of both kinds with every task's answer, all from one pass."""
    pictures, truths = [], []
    for names in KINDS:
        first = answered[names[0]].splits.test
        assert first is not None
        for number in range(each):
            at = number * len(first) // each
            pictures.append(first.open(at))
            truths.append({name: _truth(answered[name], first.key(at)) for name in names})
    found = []
    for picture, said, truth in zip(pictures, model.predict(pictures), truths, strict=True):
        answers = [
            Answer(name, answer["label"], answer["probabilities"][answer["label"]], truth.get(name))
            for name, answer in said.items()
        ]
        found.append((picture, answers))
    return found


def _cards(asked: list[tuple[Image.Image, list[Answer]]]) -> str:
    cards = []
    for picture, answers in asked:
        lines = []
        for said in answers:
            note = f" (is {escape(str(said.truth))})" if said.look == "wrong" else ""
            text = f"{escape(said.task)}: <b>{escape(said.label)}</b> {said.share:.0%}{note}"
            lines.append(f'<div class="{said.look}">{text}</div>')
        cards.append(f'<div class="card"><img src="{_inline(picture)}" alt="">{"".join(lines)}</div>')
    return f'<div class="cards">{"".join(cards)}</div>'


def draw_overview(path: Path, asked: list[tuple[Image.Image, list[Answer]]], cost: Cost, tasks: int) -> Path:
    """The page in one picture: images with answers above, the cost below."""
    from matplotlib.figure import Figure

    colours = {"right": "#176b2c", "wrong": "#b3261e", "other": "#9a9a9a"}
    columns = len(asked) // 2
    figure = Figure(figsize=(1.75 * columns, 8.4), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(6.6, 1.5))
    top, bottom = halves
    rows = top.subplots(4, columns, height_ratios=(3, 2.1, 3, 2.1))
    for number, (picture, answers) in enumerate(asked):
        above, below = (rows[number // columns * 2 + part, number % columns] for part in (0, 1))
        above.imshow(picture)
        above.axis("off")
        below.axis("off")
        for line, said in enumerate(answers):
            text = f"{said.task}: {said.label} {said.share:.0%}"
            below.text(0.02, 1.0 - 0.21 * line, text, fontsize=9, va="top", color=colours[said.look])
    _draw_cost(bottom.subplots(), cost, tasks)
    figure.savefig(path, dpi=100)
    return path


def _truth(found: Answered, key: str) -> str:
    """What a task's own set says of an image, found by its content."""
    test = found.splits.test
    assert test is not None
    at = next(at for at in range(len(test)) if test.key(at) == key)
    return test.labels[int(test.targets[at])]


def _cost_plot(cost: Cost, tasks: int) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.2), layout="constrained")
    _draw_cost(figure.add_subplot(), cost, tasks)
    return _png(figure)


def _draw_cost(axes: Any, cost: Cost, tasks: int) -> None:
    names = ("the backbone alone", f"all {tasks} tasks in one pass", "a pass for each task")
    values = [1.0, cost.composed / cost.base, cost.separate / cost.base]
    bars = axes.barh(names, values, color=["#9aa0a6", "#1a73e8", "#d93025"])
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="plain passes of the backbone", xlim=(0, max(values) * 1.12))
    axes.spines[["top", "right"]].set_visible(False)


def _curves(answered: dict[str, Answered]) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(3.1 * len(answered), 3.0), layout="constrained")
    panels = figure.subplots(1, len(answered), sharey=True, squeeze=False)[0]
    for axes, (name, found) in zip(panels, answered.items(), strict=True):
        for result in found.sweep.results:
            points = [(entry["epoch"], entry["val_accuracy"]) for entry in result.history]
            best = result is found.sweep.best
            axes.plot(*zip(*points, strict=True), color="#1a73e8" if best else "#bbb", linewidth=2.5 if best else 1)
        axes.set(title=name, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation accuracy")
    return _png(figure)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _picture(data: bytes, alt: str) -> str:
    return f'<img class="plot" alt="{alt}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def _inline(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
