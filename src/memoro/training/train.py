"""`train`: from images to a task in one call, as `memoro train` and `memoro sweep` do it."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, overload

from rich.console import RenderableType
from rich.table import Table

from memoro.backbones import Backbone, load_backbone
from memoro.backbones.load import TINY, own_device
from memoro.console import format_bytes, format_count, make_table
from memoro.data import ImageSet, Splits, Streams, load_columns, load_data, load_stream
from memoro.data.splits import fold_numbers, hold_out
from memoro.engine.composition import check_together
from memoro.errors import DataError, TaskFileError, TrainingError
from memoro.evaluation.metrics import COLUMNS, MAIN_FIGURE, format_worst
from memoro.regimes import METHODS, Baseline, TaskPlan, find_regime
from memoro.regimes.baselinefile import save_baseline
from memoro.tasks.spec import check_name
from memoro.tasks.task import Task
from memoro.tasks.taskfile import load_tasks, save_task
from memoro.training.distributed import find_processes
from memoro.training.fit import FitResult, preprocessing_of
from memoro.training.recipe import Recipe, TrainOptions, merge_options
from memoro.training.sweep import LEARNING_RATES, Grid, SweepRow, SweepSpec, run_sweeps, sweep_table

SUFFIX = ".safetensors"
SMALL = 500
"""Below this number of training images, a validation split is too small to choose by: folds are used."""
FOLDS = 4

Sets = dict[str, Splits | Streams]


@dataclass(frozen=True)
class TrainResult(FitResult):
    """What `train` returns for a task: the best run, the settings that were tried, and the files that were written."""

    rows: Sequence[SweepRow] = ()
    """The settings that were compared, if there were several."""
    file: Path | None = None
    plot: Path | None = None
    """Validation scores over learning rates, where several were compared."""
    skipped: Sequence[Any] = ()
    """Images that could not be read: where, and why."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready record; `failed` where every run of the task diverged."""
        task = self.task
        if not self.metrics:
            return {"task": task.name, "failed": self.notes[-1]}
        record = {
            "task": task.name,
            "file": None if self.file is None else str(self.file),
            "bytes": None if self.file is None else self.file.stat().st_size,
            "folder": None if self.folder is None else str(self.folder),
            "metrics": self.metrics,
            "training": dict(task.spec.training),
            "notes": list(self.notes),
            "skipped": [list(entry) for entry in self.skipped],
        }
        if self.rows:
            sizes = {"cells": task.cells, "rank": task.rank, "from_layer": task.from_layer}
            chosen = {**sizes, "lr": task.spec.training["lr"]}
            plot = None if self.plot is None else str(self.plot)
            record |= {"picture": plot, "chosen": chosen, "runs": [asdict(row) for row in self.rows]}
        return record

    def tables(self) -> list[RenderableType]:
        """The same for people."""
        if not self.metrics:
            return [f"{self.task.name}: no file was written: {self.notes[-1]}."]
        compared = [sweep_table(self.task.name, self.rows)] if self.rows else []
        return [*compared, fit_table(self), *([f"plot: {self.plot}"] if self.plot else [])]


@overload
def train(data: dict[str, Any], **settings: Any) -> dict[str, TrainResult]: ...
@overload
def train(data: Any, *, label_column: list[str], **settings: Any) -> dict[str, TrainResult]: ...
@overload
def train(data: Any, **settings: Any) -> TrainResult: ...
def train(
    data: Any,
    *,
    backbone: Any = TINY,
    device: str | None = None,
    dtype: str | None = None,
    task: str | None = None,
    regime: str = "memory",
    cells: int | Sequence[int] | None = None,
    rank: int | Sequence[int] | None = None,
    from_layer: int | Sequence[int] | None = None,
    lr: float | Sequence[float] | None = None,
    seeds: int = 1,
    folds: int | None = None,
    extends: Sequence[Task | str | Path] = (),
    label_column: str | list[str] | None = None,
    streaming: bool = False,
    width: int = 5,
    out: str | Path | None = None,
    recipe: Recipe | None = None,
    options: TrainOptions | None = None,
    **changes: Any,
) -> Any:
    """Makes a task from images: `pets = memoro.train("photos/pets", backbone="facebook/dinov2-small").task`.

    `data` is anything that load_data takes, or a dict from task names to such: then all are trained in one pass, and a
    dict of results is returned. A list of label columns does the same for the columns of one table. `backbone` is a
    Backbone, or anything that load_backbone takes; then `device` (None: a GPU if there is one) and `dtype` are used.

    `regime` decides what is trained, and `cells`, `rank` and `from_layer` where they are not given: see `REGIMES`.
    Several values of `cells`, `rank`, `from_layer` or `lr`, or several `seeds`, are tried in one pass, and the best by
    validation is kept; without `lr`, a few learning rates are tried. Small sets are compared by cross-validation
    (`folds`; 0: on a validation split).

    Fields of the recipe and of the options can be given by name: `epochs=5`, `image_size=112`, `folder="runs/{task}"`.
    The task file is written to `out`, a file or folder, if that is given.
    """
    recipe, options = merge_options(recipe, options, changes)
    chosen, target = find_regime(regime), None if out is None else Path(out)
    columns = [label_column] if isinstance(label_column, str) else label_column
    sources = _name_sources(data, task, columns, streaming)
    if target is not None:
        _check_target(target, several=len(sources) > 1)
    if not isinstance(backbone, Backbone):
        backbone = load_backbone(backbone, device=own_device(device), dtype=dtype)
    main = find_processes(backbone.device).main
    if not main:
        options = replace(options, quiet=True, log=None)

    rates = LEARNING_RATES[recipe.optimizer][1:2] if streaming else LEARNING_RATES[recipe.optimizer]
    grid = Grid(
        _several(cells), _several(from_layer), rates if lr is None else _several(lr), seeds, recipe.seed, _several(rank)
    )
    if chosen.name == "head":
        grid = replace(grid, cells=(None,), from_layers=(None,))
    elif not chosen.composes:  # each run has its own passes: no folds unless asked for, and no settings that do nothing
        uses_cells = "cells" in METHODS[chosen.name].sizes
        grid, folds = replace(grid, cells=grid.cells if uses_cells else grid.cells[:1]), folds or 0
    plan = TaskPlan("", (), extends=_link_parents(extends), width=width)
    sets = _load(sources, columns, streaming, recipe, options)
    files = {} if target is None else {name: _file_of(name, target, several=len(sets) > 1) for name in sets}
    leftovers = [part for file in files.values() for part in file.parent.glob(f".{glob.escape(file.name[:40])}.*.part")]
    compared = _choose_folds(list(sets.values()), grid, folds, recipe, options)
    preprocessing = preprocessing_of(backbone, options)
    sweeps = [
        SweepSpec(
            replace(plan, name=name, labels=splits.labels, head=splits.kind),
            chosen, _cut_validation(splits, number, sets, recipe), preprocessing, grid, recipe, number,
        )
        for (name, splits), number in zip(sets.items(), compared, strict=True)
    ]  # fmt: skip
    asked = lr is not None or seeds > 1 or any(isinstance(sizes, Sequence) for sizes in (cells, rank, from_layer))
    if not asked and not all(sweep.folds or sweep.splits.val is not None for sweep in sweeps):
        grid = replace(grid, rates=(grid.rates[len(grid.rates) // 2],))
        sweeps = [replace(sweep, grid=grid, folds=0) for sweep in sweeps]
        options.note(f"no validation images to choose a learning rate with: using {grid.rates[0]:g}.")
    if options.folder is not None:
        options = replace(options, folder=Path(str(options.folder).replace("{task}", "+".join(sets))))
    for text in _notes(sweeps, folds, options):
        options.note(text)
    results = {}
    for sweep, found in zip(sweeps, run_sweeps(backbone, sweeps, options), strict=True):
        rows = found.rows if len(grid.settings()) > 1 else ()
        result = TrainResult(**vars(found.best), rows=rows, skipped=sweep.splits.skipped)
        if result.metrics and rows and result.metrics["split"] != "test":
            text = "has no test images: it was selected by its metrics, so they are optimistic."
            options.note(f"{sweep.plan.name} {text}")
        if result.metrics:
            result = _write_outputs(result, files.get(sweep.plan.name), several=len(sweeps) > 1, write=main)
        results[sweep.plan.name] = result
    for part in leftovers if main else ():  # of a write that was killed before this training began
        part.unlink(missing_ok=True)
    several = type(data) is dict or isinstance(label_column, list)
    return results if several else next(iter(results.values()))


def _check_target(out: Path, *, several: bool) -> None:
    """Raises before the training where its result could not be written."""
    if several and (out.is_file() or out.suffix == SUFFIX):
        raise TrainingError(f"--out {out} is a file, but several tasks need a folder, such as --out tasks/.")
    folder = out if several or out.is_dir() else out.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TrainingError(f"--out {out} cannot be written ({error.strerror}): choose another place.") from None


def _file_of(name: str, out: Path, *, several: bool) -> Path:
    return out / (name + SUFFIX) if several or out.is_dir() else out


def _several(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, Sequence) else (values,)


def _name_sources(data: Any, task: str | None, columns: list[str] | None, streaming: bool) -> dict[str | None, Any]:
    """The data of each task by its name; None where the data will name it."""
    if columns and (type(data) is dict or task is not None or streaming):
        raise TrainingError(
            "--label-column trains a task per column of one table: give one DATA, and no --task or --streaming."
        )
    if type(data) is dict and (task is not None or (streaming and len(data) > 1)):
        raise TrainingError("to train several tasks, give NAME=DATA for each, and no --task or --streaming.")
    sources: dict[str | None, Any] = data if type(data) is dict else dict.fromkeys(columns or (task,), data)
    for name, source in sources.items():
        if name is not None:
            check_name(name)
        if streaming and isinstance(source, (str, Path)) and Path(source).exists():
            raise DataError(
                f"{source} is a local file or folder: --streaming is for hub sets such as owner/name, with --steps "
                "1000 or so. Leave it out."
            )
    return sources


def _load(
    sources: dict[str | None, Any], columns: list[str] | None, streaming: bool, recipe: Recipe, options: TrainOptions
) -> Sets:
    """The sets by task name. Validation splits are cut later, as folds may be used instead."""
    how: dict[str, Any] = {"seed": recipe.data_seed, "workers": options.workers, "quiet": options.quiet}
    if columns:
        return dict(load_columns(next(iter(sources.values())), columns, val_fraction=0, **how))
    sets: Sets = {}
    for name, source in sources.items():
        if isinstance(source, (Splits, Streams)):
            splits: Splits | Streams = source
        elif streaming:
            splits = load_stream(source, val_fraction=recipe.val_fraction, seed=recipe.data_seed)
        else:
            splits = load_data(source, val_fraction=0, **how)
        sets[check_name(name or splits.name.replace("/", "-").replace("\\", "-"))] = splits
    return sets


def _link_parents(extends: Sequence[Task | str | Path]) -> list[Task]:
    """The tasks to build on. A task with mere records of its parents is replaced by a copy with the parents."""
    tasks = [task for source in extends for task in ([source] if isinstance(source, Task) else load_tasks(source))]
    unlinked = [task for task in tasks if any(not isinstance(parent, Task) for parent in task.extends)]
    if unlinked:
        check_together(tasks)
        linked = {task.name: task for task in tasks} | {task.name: copy(task) for task in unlinked}
        for task in unlinked:
            linked[task.name].extends = tuple(linked[parent.name] for parent in task.extends)
        return list(linked.values())
    return tasks


def _choose_folds(
    sets: Sequence[Splits | Streams], grid: Grid, folds: int | None, recipe: Recipe, options: TrainOptions
) -> list[int]:
    """The number of folds on which the settings of each set are compared; 0: a validation split."""
    if len(grid.settings()) == 1 or options.halving:
        return [0] * len(sets)
    found = []
    for splits in sets:
        if not isinstance(splits, Splits) or splits.train is None or splits.val is not None:
            found.append(0)
        else:
            found.append(_default_folds(splits.train, recipe) if folds is None else folds)
    return found if all(found) or _shared_table(sets) is None else [0] * len(sets)


def _default_folds(train: ImageSet, recipe: Recipe) -> int:
    """4 where a validation split would be too small to choose by and there are enough images for folds, else 0."""
    if not 2 * FOLDS <= len(train) < SMALL:
        return 0
    number = fold_numbers(train, FOLDS, recipe.data_seed)
    rarest = int(train.targets.bincount().min()) if train.kind == "softmax" else FOLDS
    return FOLDS if rarest >= FOLDS and all((number == fold).any() for fold in range(FOLDS)) else 0


def _shared_table(sets: Sequence[Splits | Streams]) -> Splits | None:
    """The first set where all are columns of one table: they are split alike, and so share every base pass."""
    first, *others = sets
    images = [one.train.source for one in sets if isinstance(one, Splits) and one.train is not None]
    alike = others and len(images) == len(sets) and all(source == images[0] for source in images)
    return first if alike and isinstance(first, Splits) else None


def _cut_validation(splits: Splits | Streams, folds: int, sets: Sets, recipe: Recipe) -> Splits | Streams:
    """The splits with a validation split, or with a note on folds."""
    if not isinstance(splits, Splits) or splits.train is None:
        return splits
    if folds:
        text = f"only {len(splits.train)} training images: runs are compared by {folds}-fold cross-validation."
        return replace(splits, notes=(*splits.notes, text))
    return hold_out(splits, recipe.val_fraction, recipe.data_seed, like=_shared_table(list(sets.values())))


def _notes(sweeps: Sequence[SweepSpec], folds: int | None, options: TrainOptions) -> list[str]:
    """Options without effect, and properties of the data."""
    notes, settings, regime = [], len(sweeps[0].grid.settings()), sweeps[0].regime
    if folds and not any(sweep.folds for sweep in sweeps):
        reason = "of --halving" if options.halving else "there is a validation split"
        notes.append(f"--folds {folds} is not used, because {'there is one run' if settings == 1 else reason}.")
    if sweeps[0].recipe.patience and any(sweep.folds for sweep in sweeps):
        notes.append("--patience is not used: the runs of a cross-validation are compared at the end.")
    notes += [text for sweep in sweeps for text in sweep.splits.notes]
    if options.resume and options.checkpoint is not None and not options.checkpoint.is_file():
        notes.append(f"there is no checkpoint in {options.folder}: starting from the beginning.")
    if settings > 1 and not regime.composes:
        notes.append(
            f"regime {regime.name!r} changes base tokens, so each of the {settings} runs needs passes of its own."
        )
    return notes


def _write_outputs(result: TrainResult, file: Path | None, *, several: bool, write: bool) -> TrainResult:
    """Writes the task's file and plots; returns the result with their paths."""
    from memoro.training.runfolder import draw_run, draw_sweep

    task, plot = result.task, None
    suffix = f"-{task.name}" if several else ""
    if result.rows and result.folder is not None:
        plot = result.folder / f"sweep{suffix}.png"
    if write and file is not None:
        try:
            save_baseline(task, file) if isinstance(task, Baseline) else save_task(task, file)
        except TaskFileError as error:
            rest = "" if result.folder is None else f" The training is saved in {result.folder}: --resume writes it."
            raise TaskFileError(f"{error}{rest}") from None
    if write and result.folder is not None and (result.rows or several):  # a single run's plots are there already
        draw_run(result.folder, suffix, result)
    if write and plot is not None:
        draw_sweep(plot, task.name, result.rows, MAIN_FIGURE[task.kind])
    return replace(result, file=file, plot=plot)


def fit_table(result: TrainResult) -> Table:
    """Metrics of the chosen run, its file and its training, for people."""
    task, metrics, training = result.task, result.metrics, result.task.spec.training
    where = f"{metrics['split']}, {format_count(metrics['images'], 'image')}"
    known = [name for name in COLUMNS if metrics.get(name) is not None]
    rows = [(f"{name.replace('_', ' ')} ({where})", f"{metrics[name]:.4f}") for name in known]
    rows += [
        ("worst classes", format_worst(metrics, 5)),
        ("file", "" if result.file is None else format_bytes(result.file.stat().st_size)),
        ("parameters trained", f"{training['trained_parameters']:,}"),
        ("best epoch", f"{training['best_epoch']} of {training['epochs']}"),
        ("time", f"{training['seconds']:.0f} s"),
    ]
    title = task.name if result.file is None else f"{task.name}: {result.file}"
    table = make_table(["", ""], [row for row in rows if row[1]], title)
    table.show_header = False
    return table
