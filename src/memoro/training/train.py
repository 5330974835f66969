"""What `memoro train`, `memoro sweep` and `memoro eval` do with their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from memoro.backbones import Backbone
from memoro.data import ImageSet, Splits, Streams, load_columns, load_data, load_stream
from memoro.data.splits import fold_numbers, hold_out
from memoro.engine.composition import check_together
from memoro.errors import TrainingError
from memoro.evaluation.metrics import MAIN_FIGURE
from memoro.evaluation.report import fit_table, sweep_table
from memoro.regimes import METHODS, Baseline, Regime, TaskPlan, find_regime
from memoro.regimes.baselinefile import save_baseline
from memoro.tasks.spec import check_name
from memoro.tasks.task import Task
from memoro.tasks.taskfile import load_tasks, save_task
from memoro.training.cached import Cache
from memoro.training.distributed import find_processes
from memoro.training.fit import FitResult, train_runs
from memoro.training.group import RunSpec
from memoro.training.recipe import Recipe
from memoro.training.runfolder import CHECKPOINT, draw_run, draw_sweep
from memoro.training.sweep import FOLDS, RATES, SMALL, Grid, Subject, SweepRow, run_sweeps

SUFFIX = ".safetensors"


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
    """A task file; a folder for those of several tasks, or where one of this name exists."""
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

    Of several processes, the main one writes and returns something. A task of several that diverged has
    `failed` in its record, and no file.
    """
    regime, parents = find_regime(order.regime), _parents(order.extends, backbone)
    order = normalise_options(order, regime, backbone)
    if order.task is not None:
        check_name(order.task)  # before the images are read
    cache = _cache(order, recipe, backbone)
    _check_target(order)
    sets = _load(order, recipe, quiet)
    sizes = {"width": order.width, "rank": order.rank}
    plans = [TaskPlan(name=name, labels=s.labels, head=s.kind, extends=parents, **sizes) for name, s in sets.items()]
    folds = _folds(list(sets.values()), order, recipe)
    subjects = [
        Subject(plan, _cut(splits, sets, order, recipe, number), number)
        for plan, splits, number in zip(plans, sets.values(), folds, strict=True)
    ]
    for note in unused_options(order, recipe, folds):
        console.print(f"note: {note}")
    for subject in subjects:
        for note in subject.splits.notes:
            console.print(f"note: {note}")
    folder = order.folder or Path("runs") / "+".join(sets)
    if order.resume and not (folder / CHECKPOINT).is_file():
        console.print(f"note: no checkpoint in {folder}: starting at the beginning.")
    common: dict[str, Any] = {
        "cache": cache,
        "folder": folder,
        "resume": order.resume,
        "workers": order.workers,
        "tensorboard": order.tensorboard,
        "quiet": quiet,
    }
    preprocessing = backbone.preprocessing if order.image_size is None else backbone.preprocessing.at(order.image_size)
    points = order.grid.points()
    if len(points) > 1 and not order.must_sweep and not all(_can_choose(subject) for subject in subjects):
        points = points[len(points) // 2 :][:1]
        console.print(f"note: nothing to choose a learning rate by: {points[0][2]:g} is taken.")
    if len(points) > 1 and not regime.composes:
        text = f"note: regime {regime.name!r} changes base tokens: each of its {len(points)} runs has its own passes."
        console.print(text)
    if len(points) > 1:
        swept = run_sweeps(
            backbone, subjects, regime, order.grid, recipe, preprocessing, halving=order.halving, **common
        )
        trained = [Trained(result.best, result.rows) for result in swept]
    else:
        [(cells, layer, rate, seed)] = points
        recipe = replace(recipe, lr=rate, seed=seed)
        specs = [
            RunSpec(
                regime.build(backbone, replace(subject.plan, cells=cells, from_layer=layer, seed=seed)),
                recipe,
                regime,
                subject.splits,
                preprocessing,
            )
            for subject in subjects
        ]
        results = train_runs(backbone, specs, **common)
        trained = [Trained(result, []) for result in results]
    if not find_processes(backbone.device).main:
        return {}, []
    records: list[dict[str, Any]] = []
    shown: list[RenderableType] = []
    for subject, found in zip(subjects, trained, strict=True):
        if not found.result.metrics:
            reason = found.result.notes[-1] if found.result.notes else "no finite numbers"
            records.append({"task": subject.plan.name, "failed": reason})
            shown.append(f"{subject.plan.name}: nothing was written: {reason}.")
            continue
        if found.rows and subject.splits.test is None:
            text = f"note: {subject.plan.name} has no test images: it was chosen by the figures below, so expect less."
            console.print(text)
        record, tables = write_outputs(subject, found, order, folder)
        records.append(record)
        shown += tables
    return records[0] if len(records) == 1 else {"tasks": records, "folder": str(folder)}, shown


def normalise_options(order: TrainOrder, regime: Regime, backbone: Backbone) -> TrainOrder:
    """The order without combinations that are the same, and without folds where they are no runs of the same pass."""
    grid = order.grid
    if regime.name == "head":
        return replace(order, grid=replace(grid, cells=(0,), from_layers=(backbone.depth,)))
    if regime.composes:
        return order
    cells = grid.cells if "cells" in METHODS[regime.name].sizes else grid.cells[:1]
    return replace(order, grid=replace(grid, cells=cells), folds=order.folds or 0)


def _cache(order: TrainOrder, recipe: Recipe, backbone: Backbone) -> Cache | None:
    """Where base passes are kept, if they are."""
    if order.keep and recipe.views is None:
        raise TrainingError(
            "features can be kept of a fixed number of views only: with --views 0, no view comes twice."
        )
    if order.keep is False or recipe.views is None or not (order.keep or backbone.device.type == "cpu"):
        return None
    return replace(order.cache, required=bool(order.keep))


def _can_choose(subject: Subject) -> bool:
    return subject.folds > 0 or subject.splits.val is not None


def _folds(sets: Sequence[Splits | Streams], order: TrainOrder, recipe: Recipe) -> list[int]:
    """On how many folds each set's runs are compared; 0: on a validation split. Columns of one table go alike."""
    if len(order.grid.points()) == 1 or order.halving:
        return [0] * len(sets)
    found = []
    for splits in sets:
        if not isinstance(splits, Splits) or splits.train is None or splits.val is not None:
            found.append(0)
        elif order.folds is None:
            found.append(FOLDS if _needs_folds(splits.train, splits.kind, recipe) else 0)
        else:
            found.append(order.folds)
    return found if not order.columns or all(found) else [0] * len(sets)


def _needs_folds(train: ImageSet, kind: str, recipe: Recipe) -> bool:
    """Whether a part of the images would be too small to choose by, and there are enough for folds."""
    if not 2 * FOLDS <= len(train) < SMALL:
        return False
    number = fold_numbers(train, FOLDS, recipe.data_seed)
    rarest = int(train.targets.bincount().min()) if kind == "softmax" else FOLDS
    return rarest >= FOLDS and all((number == fold).any() for fold in range(FOLDS))


def _cut(
    splits: Splits | Streams, sets: Mapping[str, Splits | Streams], order: TrainOrder, recipe: Recipe, folds: int
) -> Splits | Streams:
    """The splits with a validation split, or with a word on folds."""
    if not isinstance(splits, Splits) or splits.train is None:
        return splits
    if folds:
        note = f"{len(splits.train)} training images: runs are compared on {folds} folds of them, in the same pass."
        return replace(splits, notes=(*splits.notes, note))
    first = next(iter(sets.values()))
    like = first if order.columns and isinstance(first, Splits) else None
    return hold_out(splits, recipe.val_fraction, recipe.data_seed, like=like)


def unused_options(order: TrainOrder, recipe: Recipe, folds: Sequence[int]) -> list[str]:
    """What was asked for and does nothing here."""
    notes = []
    if order.folds and not any(folds):
        single = len(order.grid.points()) == 1
        reason = "there is one run" if single else "of --halving" if order.halving else "there is a validation split"
        notes.append(f"--folds {order.folds} is not used, because {reason}.")
    if recipe.patience and any(folds):
        notes.append("--patience is not used: runs on folds are judged together, at the end.")
    return notes


def write_outputs(
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
    mark = f"-{name}" if _several(order) else ""
    if found.rows or mark:  # a single run's pictures are there already
        draw_run(folder, mark, task, found.result)
    if found.rows:
        picture = draw_sweep(folder / f"sweep{mark}.png", name, found.rows, MAIN_FIGURE[splits.kind])
        chosen = {"cells": task.cells, "from_layer": task.from_layer, "lr": task.spec.training["lr"]}
        record |= {"picture": str(picture), "chosen": chosen, "runs": [asdict(row) for row in found.rows]}
        tables = [sweep_table(name, found.rows), *tables, f"picture: {picture}"]
    return record, tables


def _several(order: TrainOrder) -> bool:
    return len(order.data) > 1 or len(order.columns) > 1


def _check_target(order: TrainOrder) -> None:
    """Before the training, not after it."""
    out = order.out
    if out is not None and _several(order) and (out.is_file() or out.suffix == SUFFIX):
        raise TrainingError(f"--out {out} is a file, but several tasks need a folder, such as --out tasks/.")


def _target(name: str, order: TrainOrder) -> Path:
    if order.out is None:
        return Path(name + SUFFIX)
    if not order.out.is_dir() and not _several(order):
        return order.out
    order.out.mkdir(parents=True, exist_ok=True)
    return order.out / (name + SUFFIX)


def _load(order: TrainOrder, recipe: Recipe, quiet: bool) -> dict[str, Splits | Streams]:
    """The sets by task name. Validation splits are cut later: a sweep may want folds instead."""
    options: dict[str, Any] = {"seed": recipe.data_seed}
    if not order.streaming:
        options |= {"workers": order.workers, "quiet": quiet}
    if order.columns:
        if len(order.data) > 1 or order.task is not None or order.streaming:
            raise TrainingError("--label-column makes a task of each column of one table: give one DATA and no --task.")
        columns = load_columns(order.data[0], order.columns, val_fraction=0, **options)
        return {check_name(name): splits for name, splits in columns.items()}
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
