"""The demo's page: one HTML file with its images inside."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from memoro.console import format_bytes, printable
from memoro.data import Splits
from memoro.engine.composition import Composition
from memoro.training.sweep import SweepResult

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
COLORS = {"right": "#176b2c", "wrong": "#b3261e", "other": "#9a9a9a"}

SAME_IMAGES = (("letter", "style", "case"), ("digit", "parity"))
"""Tasks that label the same images."""
SAMPLES = 8
"""Images shown of each set."""

RESULT_COLUMNS = ("task", "classes", "alone", "composed", "head only", "strangers noticed", "from layer", "lr", "file")


@dataclass(frozen=True)
class DemoResult:
    """One task of the demo and its accuracy."""

    file: Path
    splits: Splits
    sweep: SweepResult
    composed: float
    head: float
    """Of a linear head on the frozen backbone."""
    noticed: float | None = None
    """The share of the other set's images that the task calls unfamiliar."""


@dataclass(frozen=True)
class Cost:
    """In plain base passes."""

    composed: float
    separate: float
    """One pass per task, as separate models would need."""


Answered = Sequence[tuple[Image.Image, list[tuple[str, str]]]]
"""Images with every task's answer: `right`, `wrong` or `other` (not trained on such images), and the text."""


def result_rows(results: dict[str, DemoResult]) -> list[list[str]]:
    """A row for each task, under `RESULT_COLUMNS`."""
    rows = []
    for name, found in results.items():
        task = found.sweep.task
        parents = ", ".join(parent.name for parent in task.extends)
        accuracies = (found.sweep.best.metrics["accuracy"], found.composed, found.head)
        rows.append([
            f"{name}, extends {parents}" if parents else name,
            str(len(task.labels)),
            *(f"{accuracy:.3f}" for accuracy in accuracies),
            "-" if found.noticed is None else f"{found.noticed:.0%}",
            str(task.from_layer),
            f"{task.spec.training['lr']:g}",
            format_bytes(found.file.stat().st_size),
        ])  # fmt: skip
    return rows


def write_page(path: Path, model: Composition, results: dict[str, DemoResult], cost: Cost, same: str) -> Path:
    """Writes the page, and an overview as a PNG beside it; returns the page's path.

    `same` says whether the backbone's own output is unchanged.
    """
    answered = predict_samples(model, results)
    draw_overview(path.with_name("overview.png"), answered, cost, len(results))
    head = "".join(f"<th>{name}</th>" for name in RESULT_COLUMNS)
    rows = ("".join(f"<td>{escape(printable(cell))}</td>" for cell in row) for row in result_rows(results))
    parts = [
        f"<h1>{len(results)} tasks on one frozen backbone</h1>",
        f"<p>{escape(printable(str(model.backbone)))}. With all tasks attached, its own output is <b>{same}</b>. One "
        f"pass for all tasks costs {cost.composed:.2f} plain passes; one pass per task costs {cost.separate:.2f}.</p>",
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>",
        "<h2>Answers of all tasks to some test images, from one pass</h2>",
        "<p>Green is right, red is wrong, grey is a task that was not trained on such images: unfamiliar, "
        "where it notices that.</p>",
        f'<div class="cards">{"".join(_card(image, answers) for image, answers in answered)}</div>',
        "<h2>Cost</h2>",
        _plot(_cost_figure(cost, len(results)), "bars: one base pass, all tasks in one pass, one pass per task"),
        "<h2>Training</h2>",
        "<p>Validation accuracy of every run over its epochs; the selected run is drawn thick. All runs of a panel "
        "shared each base pass.</p>",
        _plot(_curves_figure(results), "validation accuracy of every run"),
    ]
    body = "\n".join(parts)
    path.write_text(
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>memoro demo</title><style>{STYLE}</style>'
        f"<body>{body}</body></html>\n",
        encoding="utf-8",
    )
    return path


def predict_samples(model: Composition, results: dict[str, DemoResult]) -> Answered:
    """Some test images of both sets with every task's answer, all from one pass."""
    labels = {name: _labels(found.splits) for name, found in results.items()}
    images, targets = [], []
    for names in SAME_IMAGES:
        test = results[names[0]].splits.test
        assert test is not None
        for at in (number * len(test) // SAMPLES for number in range(SAMPLES)):
            images.append(test.open(at))
            targets.append({name: labels[name][test.key(at)] for name in names})
    answered = []
    for image, answers, target in zip(images, model.predict(images), targets, strict=True):
        lines = []
        for name, answer in answers.items():
            text = printable(f"{name}: {answer['label']} {answer['probability']:.0%}")
            if answer.get("unfamiliar"):
                lines.append(("other", printable(f"{name}: unfamiliar ({answer['label']}?)")))
            elif name not in target or target[name] == answer["label"]:
                lines.append(("right" if name in target else "other", text))
            else:
                lines.append(("wrong", f"{text} (is {printable(target[name])})"))
        answered.append((image, lines))
    return answered


def _labels(splits: Splits) -> dict[str, str]:
    """The label of each test image, by the hash of its content."""
    test = splits.test
    assert test is not None
    return {test.key(at): test.labels[int(test.targets[at])] for at in range(len(test))}


def _card(image: Image.Image, answers: list[tuple[str, str]]) -> str:
    lines = "".join(f'<div class="{status}">{escape(text)}</div>' for status, text in answers)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f'<div class="card"><img src="{_data_url(buffer)}" alt="">{lines}</div>'


def draw_overview(path: Path, answered: Answered, cost: Cost, tasks: int) -> None:
    """The page in one plot: images with answers above, the cost below."""
    from matplotlib.figure import Figure

    columns = SAMPLES
    figure = Figure(figsize=(1.75 * columns, 8.4), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(6.6, 1.5))
    axes = halves[0].subplots(4, columns, height_ratios=(3, 2.1, 3, 2.1))
    for number, (image, answers) in enumerate(answered):
        above, below = (axes[number // columns * 2 + part, number % columns] for part in (0, 1))
        above.imshow(image)
        for line, (status, text) in enumerate(answers):
            how = {"fontsize": 8, "va": "top", "color": COLORS[status], "in_layout": False}
            below.text(0.02, 1.0 - 0.21 * line, text, **how)
    for one in axes.flat:
        one.axis("off")
    _draw_cost(halves[1].subplots(), cost, tasks)
    figure.savefig(path, dpi=100)


def _cost_figure(cost: Cost, tasks: int) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.2), layout="constrained")
    _draw_cost(figure.add_subplot(), cost, tasks)
    return figure


def _draw_cost(axes: Any, cost: Cost, tasks: int) -> None:
    names = ("the backbone alone", f"all {tasks} tasks in one pass", "one pass per task")
    values = [1.0, cost.composed, cost.separate]
    bars = axes.barh(names, values, color=["#9aa0a6", "#1a73e8", "#d93025"])
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="plain passes of the backbone", xlim=(0, max(values) * 1.12))
    axes.spines[["top", "right"]].set_visible(False)


def _curves_figure(results: dict[str, DemoResult]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(3.1 * len(results), 3.0), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (name, found) in zip(panels, results.items(), strict=True):
        for result in found.sweep.results:
            points = [(entry["epoch"], entry["val_accuracy"]) for entry in result.history]
            best = result is found.sweep.best
            axes.plot(*zip(*points, strict=True), color="#1a73e8" if best else "#bbb", linewidth=2.5 if best else 1)
        axes.set(title=name, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation accuracy")
    return figure


def _plot(figure: Any, alt: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return f'<img class="plot" alt="{alt}" src="{_data_url(buffer)}">'


def _data_url(png: io.BytesIO) -> str:
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
