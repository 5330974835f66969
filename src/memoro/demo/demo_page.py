"""The demo's page: one HTML file with its images inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from memoro.answer import AnswerDict
from memoro.console import format_bytes
from memoro.data import ImageSet, Splits
from memoro.engine.composition import Composition
from memoro.files import write_whole
from memoro.pages.charts import Points, bar_chart, line_chart, meter
from memoro.pages.elements import Html, picture, render_page, table, tag
from memoro.training import TrainResult

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
    noticed: float
    """The share of the other set's images that the task calls unfamiliar."""


@dataclass(frozen=True)
class Cost:
    """In plain base passes."""

    composed: float
    separate: float
    """One pass per task, as separate models would need."""


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
            f"{found.noticed:.0%}",
            str(task.from_layer),
            format_bytes(found.file.stat().st_size),
        ])  # fmt: skip
    return rows


def write_page(path: Path, model: Composition, results: dict[str, DemoResult], cost: Cost, same: str) -> Path:
    """Writes the page; returns its path. `same` says whether the backbone's own output is unchanged."""
    curves = [
        tag("figure", tag("figcaption", name), line_chart([("", _curve(found))], "epoch", "validation accuracy"))
        for name, found in results.items()
    ]
    costs = {
        "the backbone alone": 1.0,
        f"all {len(results)} tasks in one pass": cost.composed,
        "one pass per task": cost.separate,
    }
    parts = [
        tag("h1", f"{len(results)} tasks on one frozen backbone"),
        tag("p", f"{model.backbone}. With all tasks attached, its own output is ", tag("b", same),
            f". One pass for all tasks costs {cost.composed:.2f} plain passes; one pass per task costs "
            f"{cost.separate:.2f}."),
        table(RESULT_COLUMNS, result_rows(results)),
        tag("h2", "Answers of all tasks to some test images, from one pass"),
        tag("p", "Green: correct. Red: wrong. Grey: the task was not trained on this kind of image; “unfamiliar” means "
            "that it detected this."),
        tag("div", *_cards(model, results), class_="cards"),
        tag("h2", "Cost, in plain passes of the backbone"),
        bar_chart(costs, ""),
        tag("h2", "Training"),
        tag("p", "Validation accuracy of every run over its epochs; the selected run is drawn thick. All runs of a "
            "chart shared each base pass."),
        tag("div", *curves, class_="charts"),
    ]  # fmt: skip
    write_whole(path, render_page("memoro demo", *parts).encode())
    return path


def _cards(model: Composition, results: dict[str, DemoResult]) -> list[Html]:
    """Some test images of both sets with every task's answer, all from one pass."""
    labels = {name: _labels(found) for name, found in results.items()}
    images, targets = [], []
    for names in SAME_IMAGES:
        test = _test(results[names[0]])
        for at in (number * len(test) // SAMPLES for number in range(SAMPLES)):
            images.append(test.open(at))
            targets.append({name: labels[name][test.key(at)] for name in names})
    answered = zip(images, model.predict(images), targets, strict=True)
    return [_card(image, answers, target) for image, answers, target in answered]


def _card(image: Image.Image, answers: Mapping[str, AnswerDict], target: dict[str, str]) -> Html:
    """An image with the answers of all tasks, of which those in `target` were trained on such images."""
    lines = []
    for name, answer in answers.items():
        look, status, text = "other", "other", f"{name}: {answer['label']} {answer['probability']:.0%}"
        if answer.get("unfamiliar"):
            text = f"{name}: unfamiliar ({answer['label']}?)"
        elif name in target and target[name] != answer["label"]:
            look, status, text = "wrong", "bad", f"{text} (is {target[name]})"
        elif name in target:
            look, status = "right", "good"
        lines.append(tag("li", tag("span", text, class_=status), meter(answer["probability"], look)))
    bars = tag("ul", *lines, class_="bars")
    return tag("div", picture(image, "test image", form="PNG", class_="pixels"), bars, class_="card")


def _test(found: DemoResult) -> ImageSet:
    assert found.splits.test is not None
    return found.splits.test


def _labels(found: DemoResult) -> dict[str, str]:
    """The label of each test image, by the hash of its content."""
    test = _test(found)
    return {test.key(at): test.labels[int(test.targets[at])] for at in range(len(test))}


def _curve(found: DemoResult) -> Points:
    """Validation accuracy of the best run."""
    return [(entry["epoch"], entry["val_accuracy"]) for entry in found.result.history]
