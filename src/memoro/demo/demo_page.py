"""The demo's page: one HTML file with its images inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from memoro.console import format_bytes, printable
from memoro.data import Splits
from memoro.engine.composition import Composition
from memoro.files import write_whole
from memoro.pages.charts import Points, bar_chart, line_chart, meter
from memoro.pages.elements import Html, picture, render_page, table, tag
from memoro.pages.plots import save_figure
from memoro.training import TrainResult

COLORS = {"good": "#176b2c", "bad": "#b3261e", "other": "#9a9a9a"}

SAME_IMAGES = (("letter", "style", "case"), ("digit", "parity"))
"""Tasks that label the same images."""
SAMPLES = 8
"""Images shown of each set."""

RESULT_COLUMNS = ("task", "classes", "alone", "composed", "head", "unfamiliar", "layer", "file")
"""Short, so that the table fits into 80 columns. `unfamiliar`: see `DemoResult.noticed`; `layer`: that of the fork."""


@dataclass(frozen=True)
class DemoResult:
    """One task of the demo and its accuracy."""

    file: Path
    splits: Splits
    result: TrainResult
    composed: float
    head: float
    """The accuracy of a linear head on the frozen backbone."""
    noticed: float | None = None
    """The share of the other set's images that the task calls unfamiliar."""


@dataclass(frozen=True)
class Cost:
    """In plain base passes."""

    composed: float
    separate: float
    """One pass per task, as separate models would need."""


class Line(NamedTuple):
    """A task's answer to an image."""

    status: str
    """`good`, `bad` or `other`: not trained on such images."""
    text: str
    probability: float


Answered = Sequence[tuple[Image.Image, list[Line]]]
"""Images with every task's answer."""


def result_rows(results: dict[str, DemoResult]) -> list[list[str]]:
    """A row for each task, under `RESULT_COLUMNS`."""
    rows = []
    for name, found in results.items():
        task = found.result.task
        accuracies = (found.result.metrics["accuracy"], found.composed, found.head)
        rows.append([
            name,
            str(len(task.labels)),
            *(f"{accuracy:.3f}" for accuracy in accuracies),
            "-" if found.noticed is None else f"{found.noticed:.0%}",
            str(task.from_layer),
            format_bytes(found.file.stat().st_size),
        ])  # fmt: skip
    return rows


def write_page(path: Path, model: Composition, results: dict[str, DemoResult], cost: Cost, same: str) -> Path:
    """Writes the page, and an overview as a PNG beside it; returns the page's path.

    `same` says whether the backbone's own output is unchanged.
    """
    answered = predict_samples(model, results)
    draw_overview(path.with_name("overview.png"), answered, cost, len(results))
    curves = [
        tag("figure", tag("figcaption", name), line_chart(_curves(found), "epoch", "validation accuracy"))
        for name, found in results.items()
    ]
    parts = [
        tag("h1", f"{len(results)} tasks on one frozen backbone"),
        tag("p", f"{model.backbone}. With all tasks attached, its own output is ", tag("b", same),
            f". One pass for all tasks costs {cost.composed:.2f} plain passes; one pass per task costs "
            f"{cost.separate:.2f}."),
        table(RESULT_COLUMNS, result_rows(results)),
        tag("h2", "Answers of all tasks to some test images, from one pass"),
        tag("p", "Green: correct. Red: wrong. Grey: the task was not trained on this kind of image; “unfamiliar” means "
            "that it detected this."),
        tag("div", *(_card(image, answers) for image, answers in answered), class_="cards"),
        tag("h2", "Cost, in plain passes of the backbone"),
        bar_chart(_costs(cost, len(results)), ""),
        tag("h2", "Training"),
        tag("p", "Validation accuracy of every run over its epochs; the selected run is drawn thick. All runs of a "
            "chart shared each base pass."),
        tag("div", *curves, class_="charts"),
    ]  # fmt: skip
    write_whole(path, render_page("memoro demo", *parts).encode())
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
            status, text = "other", printable(f"{name}: {answer['label']} {answer['probability']:.0%}")
            if answer.get("unfamiliar"):
                text = printable(f"{name}: unfamiliar ({answer['label']}?)")
            elif name in target and target[name] != answer["label"]:
                status, text = "bad", f"{text} (is {printable(target[name])})"
            elif name in target:
                status = "good"
            lines.append(Line(status, text, answer["probability"]))
        answered.append((image, lines))
    return answered


def _labels(splits: Splits) -> dict[str, str]:
    """The label of each test image, by the hash of its content."""
    test = splits.test
    assert test is not None
    return {test.key(at): test.labels[int(test.targets[at])] for at in range(len(test))}


def _card(image: Image.Image, answers: Sequence[Line]) -> Html:
    looks = {"good": "right", "bad": "wrong", "other": "other"}
    lines = (
        tag("li", tag("span", one.text, class_=one.status), meter(one.probability, looks[one.status]))
        for one in answers
    )
    bars = tag("ul", *lines, class_="bars")
    return tag("div", picture(image, "test image", form="PNG", class_="pixels"), bars, class_="card")


def _costs(cost: Cost, tasks: int) -> dict[str, float]:
    return {
        "the backbone alone": 1.0,
        f"all {tasks} tasks in one pass": cost.composed,
        "one pass per task": cost.separate,
    }


def _curves(found: DemoResult) -> list[tuple[str, Points]]:
    """Validation accuracy of the best run."""
    return [("", [(entry["epoch"], entry["val_accuracy"]) for entry in found.result.history])]


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
        for line, (status, text, _) in enumerate(answers):
            how = {"fontsize": 8, "va": "top", "color": COLORS[status], "in_layout": False}
            below.text(0.02, 1.0 - 0.21 * line, text, **how)
    for one in axes.flat:
        one.axis("off")
    _draw_cost(halves[1].subplots(), cost, tasks)
    save_figure(figure, path, dpi=100)


def _draw_cost(axes: Any, cost: Cost, tasks: int) -> None:
    names, values = zip(*_costs(cost, tasks).items(), strict=True)
    bars = axes.barh(names, values, color=["#9aa0a6", "#1a73e8", "#d93025"])
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="plain passes of the backbone", xlim=(0, max(values) * 1.12))
    axes.spines[["top", "right"]].set_visible(False)
