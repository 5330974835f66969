"""The demo: five tasks on one backbone, four of them trained in one pass, one that extends another."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console

from memoro.answer import AnswerDict
from memoro.backbones import load_backbone
from memoro.clock import best_times
from memoro.console import bar, format_bytes, make_table, quoted
from memoro.data import Augment, ImageSet, Splits, load_columns, load_data
from memoro.demo.drawings import COLUMNS, draw_letters, write_digits, write_parity_table
from memoro.engine.composition import Composition, compose
from memoro.engine.verify import sample_pixels
from memoro.errors import need
from memoro.evaluation.evaluate import evaluate
from memoro.files import write_whole
from memoro.pages.charts import Points, bar_chart, line_chart, meter
from memoro.pages.elements import Html, picture, render_page, table, tag
from memoro.tasks.taskfile import load_task, save_task
from memoro.training import Cache, TrainResult, train

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


def run_demo(console: Console, folder: Path, *, letters: int = 1400, digits: int = 1000, epochs: int = 14) -> Path:
    """Generates images, trains, composes, evaluates and writes a page about it; returns the page's path."""
    need("accelerate", "matplotlib", "datasets")
    need("sklearn", extra="demo")
    start = time.monotonic()
    torch.manual_seed(0)
    backbone = load_backbone("memoro-tiny")
    console.print(f"[bold]{backbone}[/], shipped with memoro. Its own classifier: {len(backbone.labels)} classes.")
    with bar("drawing images", 2) as tick:
        drawn = draw_letters(folder / "letters", letters)
        tick()
        images = write_digits(folder / "digits", digits)
        tick()
    sets = {**load_columns(drawn, COLUMNS, quiet=True), "digit": load_data(images, quiet=True)}
    parity = {"parity": load_data(write_parity_table(images), quiet=True)}

    def sweep(regime: str, sets: dict[str, Splits], **settings: Any) -> dict[str, TrainResult]:
        runs = folder / "runs" / f"{regime}-{'-'.join(sets)}"
        common: dict[str, Any] = {"epochs": epochs, "views": 2, "augment": Augment(crop="pad", flip=0.0)}
        common |= {"cache": Cache(folder / "features"), "folder": runs}
        found: dict[str, TrainResult] = train(dict(sets), backbone=backbone, regime=regime, **common, **settings)
        return found

    console.print(
        "\n[bold]1. Four tasks in one pass.[/] Letter, style and case are labels of the same images; digits are "
        "another set. Each task tries two forks and two learning rates, and is joined with a read-out of the upper "
        "layers: 16 runs, and each base pass is computed once."
    )
    grid: dict[str, Any] = {
        "from_layer": (backbone.depth // 3, backbone.depth * 2 // 3),
        "lr": (0.001, 0.003),
        "rank": 8,
    }
    found = sweep("joint", sets, **grid)
    console.print(
        "\n[bold]2. A task that extends another.[/] `parity` (odd or even) attends to the token of `digit`, "
        "which does not change."
    )
    found |= sweep("joint", parity, extends=found["digit"].task, **grid)
    sets |= parity
    console.print("\n[bold]3. A linear head for each task, for comparison[/], from the same cached passes.")
    heads = sweep("head", sets, lr=(0.1, 0.3, 1.0))

    files = {name: save_task(result.task, folder / f"{name}.safetensors") for name, result in found.items()}
    model = compose(backbone, [load_task(file) for file in files.values()])
    metrics = evaluate(backbone, list(model.tasks.values()), dict(sets))
    results = {
        name: DemoResult(
            files[name],
            sets[name],
            swept,
            metrics[name]["accuracy"],
            heads[name].metrics["accuracy"],
            _notice(model, name, sets),
        )
        for name, swept in found.items()
    }
    samples = [*sorted(drawn.parent.glob("*.png"))[:8], *sorted(images.rglob("*.png"))[:8]]
    pixels = sample_pixels(backbone, samples)
    receipt = model.verify(pixels)
    same = "bitwise equal" if receipt.base_equal else f"DIFFERENT by {receipt.base_difference:.2g}"
    cost = _measure_cost(model, pixels)
    console.print()
    console.print(make_table(RESULT_COLUMNS, result_rows(results), "Test accuracy of all tasks"))
    console.print("unfamiliar: the share of the other set's images that a task calls unfamiliar.")
    console.print("parity extends digit.")
    console.print(
        f"The backbone's own output with {len(results)} tasks attached: {same}. One pass for all: "
        f"{cost.composed:.2f} base passes; separate models: {cost.separate:.2f}."
    )
    page = write_page(folder / "report.html", model, results, cost, same)
    console.print(f"{time.monotonic() - start:.0f} s. Open {page}; task files are in {folder}/.")
    console.print(f"To try all {len(results)} tasks on your own images in a browser:", style="bold")
    console.print(f"  {quoted('memoro', 'serve', '--open', '--tasks', str(folder))}", soft_wrap=True, markup=False)
    return page


def _notice(model: Composition, name: str, sets: dict[str, Splits], most: int = 100) -> float:
    """The share of test images of the other set that a task calls unfamiliar."""
    (others,) = [names for names in SAME_IMAGES if name not in names]
    test = sets[others[0]].test
    assert test is not None
    answers = model.predict([test.open(at) for at in range(min(most, len(test)))], [name])
    return [answer[name].get("unfamiliar", False) for answer in answers].count(True) / len(answers)


def _measure_cost(model: Composition, pixels: torch.Tensor) -> Cost:
    """All tasks in one pass, and one after the other, in base passes."""
    alone = [model.alone(name) for name in model.names]
    with torch.no_grad():
        best = best_times(
            {
                "base": lambda: model.backbone.original(pixels),
                "composed": lambda: model(pixels),
                "separate": lambda: [one(pixels) for one in alone],
            },
            5,
        )
    return Cost(best["composed"] / best["base"], best["separate"] / best["base"])


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
        tag("p", "Validation accuracy of each task's best run over its epochs."),
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
