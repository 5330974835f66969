"""What `memoro train`, `memoro sweep` and `memoro eval` do with their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from memoro.backbones import Backbone
from memoro.composition import check_together
from memoro.data import Splits, Streams, load_columns, load_data, load_stream
from memoro.data.splits import hold_out
from memoro.errors import TrainingError
from memoro.regimes import METHODS, Baseline, Regime, TaskPlan, find_regime
from memoro.regimes.baselinefile import save_baseline
from memoro.report import fit_table, sweep_table
from memoro.task import Task, check_name
from memoro.taskfile import load_tasks, save_task
from memoro.train.cached import Cache
from memoro.train.fit import teach
from memoro.train.folder import draw_run
from memoro.train.lessons import Lesson
from memoro.train.metrics import MAIN_FIGURE
from memoro.train.plots import draw_sweep
from memoro.train.processes import find_processes
from memoro.train.recipe import Recipe
from memoro.train.results import FitResult
from memoro.train.sweep import FOLDS, RATES, SMALL, Grid, Subject, SweepRow, run_sweeps


@dataclass(frozen=True)
class TrainOrder:
    """What a user asked `memoro train` or `memoro sweep` for, beside the recipe."""

    data: Sequence[str]
    task: str | None = None
    regime: str = "memory"
    grid: Grid = field(default_factory=Grid)
    """Several combinations are swept; a single one is trained as it is."""
    columns: Sequence[str] = ()
    extends: Sequence[Path] = ()
    image_size: int | None = None
    folds: int | None = None
    """0: a validation split; None: folds for small sets that are swept."""
    cache: Cache = field(default_factory=Cache)
    keep: bool | None = None
    """Whether base passes are kept there; None: where they fit, on a CPU."""
    out: Path | None = None
    folder: Path | None = None
    resume: bool = False
    workers: int | None = None
    tensorboard: bool = False
    streaming: bool = False
    halving: bool = False
    must_sweep: bool = False
    """Whether nothing to choose by is an error; else the middle combination is trained."""
    width: int = 5
    rank: int = 8


@dataclass(frozen=True)
class Trained:
    """One task that came out."""

    result: FitResult
    rows: list[SweepRow]
    """What was tried, if anything was."""


def default_grid(cells: int, from_layer: int, lr: float | None, recipe: Recipe, streaming: bool) -> Grid:
    """One combination; without a rate, a few of them."""
    rates = (lr,) if lr is not None else (RATES[recipe.optimizer][1],) if streaming else RATES[recipe.optimizer]
    return Grid((cells,), (from_layer,), rates, first_seed=recipe.seed)


def run_order(
    backbone: Backbone, order: TrainOrder, recipe: Recipe, *, quiet: bool, console: Console
) -> tuple[dict[str, Any], list[RenderableType]]:
    """Trains, writes the task files; returns a JSON-ready record and tables for people.

    Of several processes, the main one writes and returns something.
    """
    regime, parents = find_regime(order.regime), _parents(order.extends, backbone)
    order = _suit(order, regime)
    if order.task is not None:
        check_name(order.task)  # before the images are read
    cache = _cache(order, recipe, backbone)
    sets = _load(order, recipe, quiet)
    sizes = {"width": order.width, "rank": order.rank}
    plans = [TaskPlan(name=name, labels=s.labels, head=s.kind, extends=parents, **sizes) for name, s in sets.items()]
    subjects = [_subject(plan, splits, order, recipe) for plan, splits in zip(plans, sets.values(), strict=True)]
    for subject in subjects:
        for note in subject.splits.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
    folder = order.folder or Path("runs") / "+".join(sets)
    common: dict[str, Any] = {"folder": folder, "resume": order.resume, "workers": order.workers, "quiet": quiet}
    preprocessing = backbone.preprocessing if order.image_size is None else backbone.preprocessing.at(order.image_size)
    points = order.grid.points()
    if len(points) > 1 and not order.must_sweep and not all(_can_choose(subject) for subject in subjects):
        points = points[len(points) // 2 :][:1]
        console.print(f"note: nothing to choose a learning rate by: {points[0][2]:g} is taken.", highlight=False)
    if len(points) > 1 and not regime.composes:
        text = f"note: regime {regime.name!r} changes base tokens: each of its {len(points)} runs has its own passes."
        console.print(text, markup=False, highlight=False)
    if len(points) > 1:
        swept = run_sweeps(
            backbone,
            subjects,
            regime,
            order.grid,
            recipe,
            preprocessing,
            cache=cache,
            halving=order.halving,
            **common,
        )
        trained = [Trained(result.best, result.rows) for result in swept]
    else:
        [(cells, layer, rate, seed)] = points
        recipe = replace(recipe, lr=rate, seed=seed)
        lessons = [
            Lesson(
                regime.build(backbone, replace(subject.plan, cells=cells, from_layer=layer, seed=seed)),
                recipe,
                regime,
                subject.splits,
                preprocessing,
            )
            for subject in subjects
        ]
        results = teach(backbone, lessons, cache=cache, tensorboard=order.tensorboard, **common)
        trained = [Trained(result, []) for result in results]
    if not find_processes(backbone.device).main:
        return {}, []
    records, shown = [], []
    for subject, found in zip(subjects, trained, strict=True):
        record, tables = _deliver(subject, found, order, folder)
        records.append(record)
        shown += tables
    return records[0] if len(records) == 1 else {"tasks": records, "folder": str(folder)}, shown


def _suit(order: TrainOrder, regime: Regime) -> TrainOrder:
    """The order without what only runs that share a pass have for nothing: folds, and cells that change nothing."""
    if regime.composes:
        return order
    grid, method = order.grid, METHODS[regime.name]
    cells = grid.cells if "cells" in method.sizes else grid.cells[:1]
    return replace(order, grid=replace(grid, cells=cells), folds=order.folds or 0)


def _cache(order: TrainOrder, recipe: Recipe, backbone: Backbone) -> Cache | None:
    """Where base passes are kept, if they are."""
    if order.keep and recipe.views is None:
        raise TrainingError("features can be kept of a fixed number of views only: with 0, no view comes twice.")
    if order.keep is False or recipe.views is None or not (order.keep or backbone.device.type == "cpu"):
        return None
    return replace(order.cache, required=bool(order.keep))


def _can_choose(subject: Subject) -> bool:
    return subject.folds > 0 or subject.splits.val is not None


def _subject(plan: TaskPlan, splits: Splits | Streams, order: TrainOrder, recipe: Recipe) -> Subject:
    """How runs are compared: on the validation split, or on folds where that would be small."""
    if not isinstance(splits, Splits) or splits.train is None:
        return Subject(plan, splits)
    folds = 0 if len(order.grid.points()) == 1 or splits.val is not None or order.halving else order.folds
    if folds is None:
        rarest = int(splits.train.targets.bincount().min()) if splits.kind == "softmax" else len(splits.train)
        folds = FOLDS if len(splits.train) < SMALL and rarest >= FOLDS else 0
    if folds:
        note = f"{len(splits.train)} training images: runs are compared on {folds} folds of them, in the same pass."
        return Subject(plan, replace(splits, notes=(*splits.notes, note)), folds)
    return Subject(plan, hold_out(splits, recipe.val_fraction, recipe.data_seed))


def _deliver(
    subject: Subject, found: Trained, order: TrainOrder, folder: Path
) -> tuple[dict[str, Any], list[RenderableType]]:
    """Writes the task's file, and a picture of what was tried."""
    name, splits = subject.plan.name, subject.splits
    out, task = _target(name, order), found.result.task
    save_baseline(task, out) if isinstance(task, Baseline) else save_task(task, out)
    record = {
        "task": name,
        "file": str(out),
        "bytes": out.stat().st_size,
        "folder": str(folder),
        "metrics": found.result.metrics,
        "training": dict(task.spec.training),
        "notes": list(found.result.notes),
        "skipped": [list(entry) for entry in getattr(splits, "skipped", ())],
    }
    tables: list[RenderableType] = [fit_table(task, found.result.metrics, out)]
    mark = "" if len(order.data) == 1 and len(order.columns) < 2 else f"-{name}"
    if found.rows or mark:  # a single run's pictures are there already
        draw_run(folder, mark, task, found.result)
    if found.rows:
        picture = draw_sweep(folder / f"sweep{mark}.png", name, found.rows, MAIN_FIGURE[splits.kind])
        chosen = {"cells": task.cells, "from_layer": task.from_layer, "lr": task.spec.training["lr"]}
        record |= {"picture": str(picture), "chosen": chosen, "runs": [asdict(row) for row in found.rows]}
        tables = [sweep_table(name, found.rows), *tables, f"picture: {picture}"]
    return record, tables


def _target(name: str, order: TrainOrder) -> Path:
    several = len(order.data) > 1 or len(order.columns) > 1
    if order.out is None or not several:
        return order.out or Path(f"{name}.safetensors")
    order.out.mkdir(parents=True, exist_ok=True)
    return order.out / f"{name}.safetensors"


def _load(order: TrainOrder, recipe: Recipe, quiet: bool) -> dict[str, Splits | Streams]:
    """The sets by task name. Validation splits are cut later: a sweep may want folds instead."""
    options: dict[str, Any] = {"seed": recipe.data_seed}
    if not order.streaming:
        options |= {"workers": order.workers, "quiet": quiet}
    if order.columns:
        if len(order.data) > 1 or order.task is not None or order.streaming:
            raise TrainingError("--label-column makes a task of each column of one table: give one DATA and no --task.")
        return {
            check_name(name): splits
            for name, splits in load_columns(
                order.data[0], order.columns, val_fraction=recipe.val_fraction, **options
            ).items()
        }
    if len(order.data) == 1:
        named, data = order.task, order.data[0]
        if "=" in data and not Path(data).exists():
            named, _, data = data.partition("=")
        if order.streaming:
            splits: Splits | Streams = load_stream(data, val_fraction=recipe.val_fraction, **options)
        else:
            splits = load_data(data, val_fraction=0, **options)
        return {check_name(named or splits.name.replace("/", "-").replace("\\", "-")): splits}
    pairs = [entry.partition("=") for entry in order.data]
    names = [name for name, _, _ in pairs]
    if (
        order.task is not None
        or order.streaming
        or not all(data for _, _, data in pairs)
        or len(set(names)) < len(names)
    ):
        raise TrainingError("to train several tasks, give NAME=DATA for each, with names of their own.")
    return {check_name(name): load_data(data, val_fraction=0, **options) for name, _, data in pairs}


def _parents(files: Sequence[Path], backbone: Backbone) -> list[Task]:
    """The tasks of the files as living objects, each with its own parents in place."""
    loaded = [task.to(backbone.device) for file in files for task in load_tasks(file)]
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
