"""The demo: five tasks on one backbone, four of them trained in one pass, one that extends another."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from memoro.backbones import load_backbone
from memoro.clock import best_times
from memoro.console import bar, make_table, quoted
from memoro.data import Augment, Splits, load_columns, load_data
from memoro.demo.demo_page import RESULT_COLUMNS, SAME_IMAGES, Cost, DemoResult, result_rows, write_page
from memoro.demo.drawings import COLUMNS, draw_letters, write_digits, write_parity_table
from memoro.engine.composition import Composition, compose
from memoro.engine.verify import sample_pixels
from memoro.errors import need
from memoro.evaluation.evaluate import evaluate
from memoro.tasks.taskfile import load_task, save_task
from memoro.training import Cache, TrainResult, train


def run_demo(console: Console, folder: Path, *, letters: int = 1400, digits: int = 1000, epochs: int = 14) -> Path:
    """Generates images, trains, composes, evaluates and writes a page about it; returns the page's path."""
    need("accelerate", "matplotlib", "datasets")
    need("sklearn", extra="demo")
    start = time.monotonic()
    torch.manual_seed(0)
    backbone = load_backbone("memoro-tiny")
    console.print(f"[bold]{backbone}[/], shipped with memoro. Its own classifier: {len(backbone.labels)} classes.")
    with bar("drawing images", 2) as tick:
        table = draw_letters(folder / "letters", letters)
        tick()
        images = write_digits(folder / "digits", digits)
        tick()
    sets = {**load_columns(table, COLUMNS, quiet=True), "digit": load_data(images, quiet=True)}
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
    samples = [*sorted(table.parent.glob("*.png"))[:8], *sorted(images.rglob("*.png"))[:8]]
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
