"""What `memoro train` and `memoro eval` do with their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from memoro.backbones import Backbone
from memoro.composition import check_together
from memoro.data import Splits, Streams, load_data, load_stream
from memoro.errors import TrainingError
from memoro.regimes import TaskPlan, find_regime
from memoro.report import fit_table, sweep_table
from memoro.task import Task, check_name
from memoro.taskfile import load_tasks, save_task
from memoro.train.fit import fit
from memoro.train.metrics import MAIN_FIGURE
from memoro.train.plots import draw_sweep
from memoro.train.recipe import Recipe
from memoro.train.sweep import Grid, run_sweep


@dataclass(frozen=True)
class TrainOrder:
    """What a user asked `memoro train` for, beside the recipe."""

    data: str
    task: str | None
    regime: str
    cells: int
    from_layer: int
    extends: Sequence[Path]
    image_size: int | None
    out: Path | None
    folder: Path | None
    resume: bool
    workers: int | None
    tensorboard: bool
    streaming: bool = False


def run_train(
    backbone: Backbone, order: TrainOrder, recipe: Recipe, *, quiet: bool, console: Console
) -> tuple[dict[str, Any], Table]:
    """Trains, writes the task file; returns a JSON-ready record and a table for people."""
    regime, parents = find_regime(order.regime), _parents(order.extends)
    if order.task is not None:
        check_name(order.task)  # before the images are read
    options: dict[str, Any] = {"val_fraction": recipe.val_fraction, "seed": recipe.data_seed}
    splits: Splits | Streams
    if order.streaming:
        splits = load_stream(order.data, **options)
    else:
        splits = load_data(order.data, **options, workers=order.workers, quiet=quiet)
    name = _announce(order, splits, console)
    plan = TaskPlan(
        name=name,
        labels=splits.labels,
        head=splits.kind,
        cells=order.cells,
        from_layer=order.from_layer,
        extends=parents,
        seed=recipe.seed,
    )
    task = regime.build(backbone, plan)
    out = order.out or Path(f"{name}.safetensors")
    folder = order.folder or Path("runs") / name
    result = fit(
        backbone,
        task,
        splits,
        recipe=recipe,
        regime=regime.name,
        image_size=order.image_size,
        folder=folder,
        resume=order.resume,
        workers=order.workers,
        quiet=quiet,
        tensorboard=order.tensorboard,
    )
    save_task(task, out)
    record = {
        "task": name,
        "file": str(out),
        "bytes": out.stat().st_size,
        "folder": str(folder),
        "metrics": result.metrics,
        "training": dict(task.spec.training),
        "notes": list(result.notes),
        "skipped": [list(entry) for entry in getattr(splits, "skipped", ())],
    }
    return record, fit_table(task, result.metrics, out)


def run_sweep_order(
    backbone: Backbone, order: TrainOrder, grid: Grid, recipe: Recipe, *, quiet: bool, console: Console
) -> tuple[dict[str, Any], Table]:
    """Sweeps, writes the chosen task's file and a picture; returns a JSON-ready record and a table for people."""
    regime, parents = find_regime(order.regime), _parents(order.extends)
    splits = load_data(
        order.data, val_fraction=recipe.val_fraction, seed=recipe.data_seed, workers=order.workers, quiet=quiet
    )
    name = _announce(order, splits, console)
    preprocessing = backbone.preprocessing if order.image_size is None else backbone.preprocessing.at(order.image_size)
    folder = order.folder or Path("runs") / name
    result = run_sweep(
        backbone,
        TaskPlan(name=name, labels=splits.labels, head=splits.kind, extends=parents),
        regime,
        grid,
        recipe,
        splits,
        preprocessing,
        folder=folder,
        resume=order.resume,
        workers=order.workers,
        quiet=quiet,
    )
    out = save_task(result.task, order.out or Path(f"{name}.safetensors"))
    picture = draw_sweep(folder / "sweep.png", name, result.rows, MAIN_FIGURE[splits.kind])
    record = {
        "task": name,
        "file": str(out),
        "picture": str(picture),
        "chosen": {"cells": result.task.cells, "from_layer": result.task.from_layer, **result.task.spec.training},
        "metrics": result.best.metrics,
        "runs": [asdict(row) for row in result.rows],
    }
    return record, sweep_table(name, result, out)


def _announce(order: TrainOrder, splits: Splits | Streams, console: Console) -> str:
    """The task's name; what there is to know about the data is told before the work begins."""
    for note in splits.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    return check_name(order.task or splits.name.replace("/", "-").replace("\\", "-"))


def _parents(files: Sequence[Path]) -> list[Task]:
    """The tasks of the files as living objects, each with its own parents in place."""
    loaded = [task for file in files for task in load_tasks(file)]
    check_together(loaded)
    tasks = {task.name: task for task in loaded}
    for task in loaded:
        task.extends = tuple(tasks[parent.name] for parent in task.extends)
    return loaded


def read_data_arguments(arguments: Sequence[str], names: Sequence[str]) -> str | dict[str, str]:
    """One set for all tasks, or `NAME=DATA` for each."""
    pairs = [argument.partition("=") for argument in arguments]
    sets = {name: data for name, equals, data in pairs if equals and name in names}
    if len(sets) == len(arguments):
        return sets
    if len(arguments) == 1 and ("=" not in arguments[0] or Path(arguments[0]).exists()):
        return arguments[0]
    raise TrainingError(f"give one set for all tasks, or NAME=DATA once for each, with names among {', '.join(names)}.")
