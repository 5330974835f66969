"""The demo's group: five questions about images, four of them learned in one pass, all answered in one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from memoro.backbones import Backbone, load_backbone
from memoro.bench.clock import best_times
from memoro.console import bar
from memoro.data import Augment, Splits, load_columns, load_data
from memoro.demo.page import write_page
from memoro.demo.pictures import COLUMNS, draw_letters, table_of_parity, write_digits
from memoro.engine.composition import Composition, compose
from memoro.engine.verify import Verification
from memoro.evaluation.evaluate import evaluate
from memoro.extras import need
from memoro.regimes import REGIMES, TaskPlan
from memoro.tasks.task import Task
from memoro.tasks.taskfile import load_task, save_task
from memoro.training.cached import Cache
from memoro.training.recipe import Recipe
from memoro.training.sweep import Grid, Subject, SweepResult, run_sweeps


@dataclass(frozen=True)
class Answered:
    """One task of the demo, and how good it is."""

    task: Task
    file: Path
    splits: Splits
    sweep: SweepResult
    alone: float
    composed: float
    head: float
    """A linear head on the frozen backbone instead."""


@dataclass(frozen=True)
class Cost:
    """Seconds for one batch."""

    base: float
    composed: float
    separate: float
    """A pass for each task, as separate models would need."""


def run_demo(console: Console, folder: Path, *, letters: int = 1400, digits: int = 1000, epochs: int = 14) -> Path:
    """Makes images, trains, composes, measures, and writes a page about it; returns the page's path."""
    need("accelerate", "torchmetrics", "matplotlib", "datasets")
    need("sklearn", extra="demo")
    begun = time.monotonic()
    torch.manual_seed(0)
    backbone = load_backbone("memoro-tiny")
    console.print(f"[bold]{backbone}[/], shipped with memoro. Its own task: {len(backbone.labels)} classes of photos.")
    with bar("drawing images", 2) as tick:
        table = draw_letters(folder / "letters", letters)
        tick()
        photos = write_digits(folder / "digits", digits)
        tick()
    options: dict[str, Any] = {"quiet": True}
    sets = {**load_columns(table, COLUMNS, **options), "digit": load_data(photos, **options)}
    parity = load_data(table_of_parity(photos), **options)
    school = School(backbone, folder, epochs)

    console.print(
        "\n[bold]1. Four tasks in one pass.[/] Letter, style and case are asked of the same images, digits have their "
        "own; each with two forks and two learning rates: 16 runs, and every view's base pass is computed once."
    )
    found = school.learn(sets)
    console.print(
        "\n[bold]2. One task on top of another.[/] `parity` (odd or even) extends `digit`: it reads what that has "
        "learned. `digit` itself does not change."
    )
    found |= school.learn({"parity": parity}, extends=[found["digit"].task])
    sets["parity"] = parity
    console.print("\n[bold]3. A linear head each, for comparison[/], from the same stored passes.")
    heads = school.heads(sets)

    files = {name: save_task(result.task, folder / f"{name}.safetensors") for name, result in found.items()}
    model = compose(backbone, [load_task(file) for file in files.values()])
    figures = evaluate(backbone, list(model.tasks.values()), dict(sets))
    answered = {
        name: Answered(
            result.task, files[name], sets[name], result,
            alone=result.best.metrics["accuracy"], composed=figures[name]["accuracy"], head=heads[name],
        )
        for name, result in found.items()
    }  # fmt: skip
    pixels = _sample(backbone, sets)
    receipt = model.verify(pixels)
    cost = measure_cost(model, pixels)
    console.print()
    console.print(_table(answered, cost, receipt, len(model.tasks)))
    page = write_page(folder / "report.html", backbone, model, answered, cost, receipt)
    console.print(f"{time.monotonic() - begun:.0f} s. Files and pictures: {folder}/, the page to look at: {page}")
    return page


class School:
    """Trains the demo's tasks."""

    def __init__(self, backbone: Backbone, folder: Path, epochs: int) -> None:
        self._backbone, self._folder = backbone, folder
        self._recipe = Recipe(epochs=epochs, views=2, augment=Augment(crop="pad", flip=0.0))
        self._cache = Cache(folder / "features")

    def learn(self, sets: dict[str, Splits], extends: list[Task] | None = None) -> dict[str, SweepResult]:
        """The best of two forks and two rates, for each set."""
        grid = Grid((5,), (0, self._backbone.depth // 2), (0.1, 0.3))
        return self._sweep("memory", sets, grid, extends or [])

    def heads(self, sets: dict[str, Splits]) -> dict[str, float]:
        """Test accuracy of the best linear head, for each set."""
        grid = Grid((0,), (0,), (0.1, 0.3, 1.0))
        return {name: found.best.metrics["accuracy"] for name, found in self._sweep("head", sets, grid, []).items()}

    def _sweep(self, regime: str, sets: dict[str, Splits], grid: Grid, extends: list[Task]) -> dict[str, SweepResult]:
        subjects = [
            Subject(TaskPlan(name, splits.labels, splits.kind, extends=extends), splits)
            for name, splits in sets.items()
        ]
        results = run_sweeps(
            self._backbone,
            subjects,
            REGIMES[regime],
            grid,
            self._recipe,
            self._backbone.preprocessing,
            cache=self._cache,
            folder=self._folder / "runs" / f"{regime}-{'-'.join(sets)}",
            quiet=False,
        )
        return dict(zip(sets, results, strict=True))


def measure_cost(model: Composition, pixels: torch.Tensor) -> Cost:
    """All tasks in one pass, and one after the other."""
    alone = [model.alone(name) for name in model.names]

    def run(*models: Composition) -> None:
        with torch.no_grad():
            for one in models:
                one(pixels)

    def plain() -> None:
        with torch.no_grad():
            model.backbone.original(pixels)

    best = best_times({"base": plain, "composed": lambda: run(model), "separate": lambda: run(*alone)}, 5, lambda: None)
    return Cost(best["base"], best["composed"], best["separate"])


def _sample(backbone: Backbone, sets: dict[str, Splits]) -> torch.Tensor:
    """Some test images of each kind, as the backbone takes them."""
    pictures = []
    for name in ("letter", "digit"):
        test = sets[name].test
        assert test is not None
        pictures += [backbone.preprocessing.to_tensor(test.open(at)) for at in range(8)]
    return torch.stack(pictures)


def _table(answered: dict[str, Answered], cost: Cost, receipt: Verification, tasks: int) -> Table:
    table = Table(title="Test accuracy of all tasks", title_justify="left")
    table.add_column("task")
    for column in ("classes", "alone", "composed", "head only", "from layer", "rate", "file"):
        table.add_column(column, justify="right")
    for name, found in answered.items():
        parents = ", ".join(parent.name for parent in found.task.extends)
        table.add_row(
            f"{name}, extends {parents}" if parents else name,
            str(len(found.task.labels)),
            f"{found.alone:.3f}",
            f"{found.composed:.3f}",
            f"{found.head:.3f}",
            str(found.task.from_layer),
            f"{found.task.spec.training['lr']:g}",
            f"{found.file.stat().st_size / 1000:.0f} kB",
        )
    same = "equal to the bit" if receipt.base_equal else f"DIFFERENT by {receipt.base_difference:.2g}"
    table.caption = (
        f"The backbone's own answer with {tasks} tasks attached: {same}. One pass for all: "
        f"{cost.composed / cost.base:.2f} base passes; separate models: {cost.separate / cost.base:.2f}."
    )
    return table
