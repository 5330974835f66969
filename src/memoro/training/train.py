"""`train`: from images to a task in one call, as `memoro train` and `memoro sweep` do it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, overload

import torch

from memoro.arguments import plain_int, several
from memoro.backbones import Backbone, load_backbone
from memoro.backbones.load import TINY, own_device
from memoro.backbones.precision import CHOSEN
from memoro.data import Augment
from memoro.data.dataset import MAX_UNREADABLE
from memoro.engine.plan import check_together
from memoro.errors import TaskFileError, TrainingError
from memoro.files import keep_copy, left_behind
from memoro.regimes import Regime, TaskPlan
from memoro.tasks.task import Task, content_hashes
from memoro.tasks.taskfile import link_parents, load_tasks
from memoro.training.distributed import find_processes
from memoro.training.finish import record_time
from memoro.training.fit import judge, preprocessing_of, regime_of
from memoro.training.recipe import RECIPES, SKIPPED, Recipe, TrainOptions, find_recipe, merge_options
from memoro.training.result import TrainResult
from memoro.training.sources import choose_folds, cut_validation, load_sources, name_sources
from memoro.training.sweep import Grid, SweepSpec, check_ensemble, run_sweeps
from memoro.training.target import SUFFIX, check_target, file_of, has_content, read_target
from memoro.training.warmstart import OPTIMISTIC, compare_labels, read_start

MOST_BYTES = 80
"""Of the name of a run folder that joins those of several tasks."""


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
    task: str | None = None,
    kind: str | None = None,
    regime: str | Regime | None = None,
    cells: int | Iterable[int] | None = None,
    rank: int | Iterable[int] | None = None,
    from_layer: int | Iterable[int] | None = None,
    lr: float | Iterable[float] | None = None,
    seeds: int = 1,
    extends: Task | str | Path | Iterable[Task | str | Path] = (),
    start_from: Task | str | Path | None = None,
    label_column: str | Sequence[str] | None = None,
    image_column: str | None = None,
    allow_absolute: bool = False,
    max_unreadable: float = MAX_UNREADABLE,
    out: str | Path | None = None,
    recipe: Recipe | str | None = None,
    options: TrainOptions | None = None,
    **changes: Any,
) -> Any:
    """Makes a task from images: `pets = memoro.train("photos/pets", backbone="facebook/dinov2-small").task`.

    `data` is anything that load_data takes, or a dict from task names to such: then all are trained in one pass, and a
    dict of results is returned. A list of label columns does the same for the columns of one table. `kind` says what
    the labels are: `class`, `labels` (several for an image) or `number`; by default the data decides. `image_column`,
    `allow_absolute` and `max_unreadable` are as in `load_data`. `backbone` is a Backbone, or anything that
    load_backbone takes; then `device` (None: a GPU if there is one) is used. `precision` is as there.

    `start_from` is an earlier task, or its file: its weights are the start, for the same labels, more or fewer of them.

    `recipe` is the name of one: `default` (regime `joint`, AdamW) or `paper` (regime `memory`, SGD). Where one of
    recipe and regime is not given, the other decides. Or it is a Recipe, whose learning rate is then the only one that
    is tried unless `lr` is given, for regime `joint` unless another is given. `regime` says what is trained, and
    `cells`, `rank` and `from_layer` where they are not given: see `REGIMES`.

    Several values of `cells`, `rank`, `from_layer` or `lr`, or several `seeds`, are tried in one pass, and the best by
    validation is kept; without `lr`, regimes but `joint` and `side` try three. Small sets are compared by
    cross-validation (`folds`; 0: on a validation split). `ensemble=3` averages three seeds, which adds three tokens to
    a pass.

    Fields of the recipe and of the options can be given by name: `epochs=5`, `image_size=112`, `folder="runs/{task}"`.
    The task file is written to `out`, a file or folder, if that is given.
    """
    from memoro.training.report import report_training

    start = None if start_from is None else read_start(start_from, task)
    regime = regime if start is None else regime_of(start, regime)
    own_recipe = isinstance(recipe, Recipe)
    if lr is None and isinstance(recipe, Recipe):
        lr = recipe.lr
    chosen, recipe = find_recipe(recipe, regime)
    recipe, options = merge_options(recipe, options, changes)
    ensemble, folds = options.ensemble, options.folds
    target = None if out is None else read_target(out)
    if chosen.readout == 1:
        _check_solved(
            {
                "lr": lr,
                "cells": cells,
                "rank": rank,
                "from_layer": from_layer,
                "ensemble": ensemble,
                "folds": folds,
                "seeds": None if seeds == 1 else seeds,
            },
            changes,
        )
    seeds, ensemble = plain_int(seeds), plain_int(ensemble)
    if ensemble is None:
        ensemble = 1 if start is None or seeds != 1 else start.members
    check_ensemble(ensemble, seeds, chosen)
    rates = chosen.rates[recipe.optimizer]
    rates = rates[len(rates) // 2 :][:1] if chosen.readout == 1 else rates
    grid = Grid(
        several(cells),
        several(from_layer),
        several(rates if lr is None else lr),
        seeds=max(seeds, ensemble),
        first_seed=recipe.seed,
        ranks=several(rank),
        ensemble=ensemble > 1,
    )
    for rate in grid.rates:
        replace(recipe, lr=rate)  # raises where it is none
    columns = None if label_column is None else [label_column] if isinstance(label_column, str) else [*label_column]
    if start is not None and type(data) is not dict and len(columns or ()) < 2:
        task, kind = task or start.name, kind or start.kind
    sources = name_sources(data, task, columns)
    if start is not None and len(sources) > 1:
        raise TrainingError("`start_from` continues one task: give one set of images, and one `label_column` at most.")
    if target is not None:
        check_target(target, several=len(sources) > 1)
    stays = isinstance(backbone, Backbone) and device is None
    rounds = options.precision if chosen.composes else None
    backbone = load_backbone(backbone, device=None if stays else own_device(device), precision=rounds)
    main = find_processes(backbone.device).main
    if not main:
        options = replace(options, quiet=True, log=None)

    if options.precision == "auto" and backbone.checkpoint is not None and backbone.dtype == torch.bfloat16:
        options.note(CHOSEN)
    if not own_recipe and recipe.views == 1 and "views" not in changes and _asks_for_views(recipe.augment):
        recipe = replace(recipe, views=RECIPES["paper"][1].views)
        options.note(f"random crops and flips need several views of an image: using {recipe.views} (`views`).")
    grid = _with_sizes(grid, chosen, start, backbone)
    if not chosen.composes:  # each run has its own passes: no folds unless asked for
        folds = folds or 0
    plan = TaskPlan("", (), extends=_link_parents(several(extends)))
    missing = {parent.name for parent in start.extends} - {parent.name for parent in plan.extends} if start else ()
    if missing:
        parents = ", ".join(f"`extends={name}{SUFFIX}`" for name in sorted(missing))
        raise TrainingError(f"the task to start from extends {', '.join(sorted(missing))}: add {parents}.")
    options.phases.switch("reading")
    reading = {
        "kind": kind,
        "image_column": image_column,
        "allow_absolute": allow_absolute,
        "max_unreadable": max_unreadable,
    }
    sets = load_sources(sources, columns, recipe, options, **reading)
    options.phases.switch("start-up")
    if start is not None:
        name, splits = next(iter(sets.items()))
        options.note(compare_labels(start, splits))
        sets[name] = replace(splits, notes=(*splits.notes, OPTIMISTIC))
    files = {} if target is None else {name: file_of(name, target, several=len(sets) > 1) for name in sets}
    leftovers = [part for file in files.values() for part in left_behind(file)]
    compared = choose_folds(list(sets.values()), chosen, grid, folds, recipe)
    own_steps = None if start is None else start.spec.preprocessing
    sweeps = [
        SweepSpec(
            replace(plan, name=name, labels=splits.labels, head=splits.kind),
            chosen, cut_validation(splits, chosen, number, sets, recipe),
            preprocessing_of(backbone, options, splits, own_steps), grid, recipe, number, start,
        )
        for (name, splits), number in zip(sets.items(), compared, strict=True)
    ]  # fmt: skip
    asked = lr is not None or seeds > 1 or any(isinstance(sizes, Iterable) for sizes in (cells, rank, from_layer))
    if not asked:
        sweeps = [_with_known_rate(sweep, options) for sweep in sweeps]
    if start is not None and grid.seeds < start.members:
        options.note(
            f"only {grid.seeds} of the {start.members} members of {start.name!r} are trained further (`ensemble`)."
        )
    if options.folder is not None:
        options = replace(options, folder=Path(str(options.folder).replace("{task}", _name_folder(list(sets)))))
    for text in _notes(sweeps, folds, options):
        options.note(text)
    results = {}
    for sweep, found in zip(sweeps, run_sweeps(backbone, sweeps, options), strict=True):
        rows, best = found.rows if sweep.grid.choices > 1 else (), judge(found.best, options)
        result = TrainResult(**vars(best), rows=rows, score_name=sweep.score_name, skipped=sweep.splits.skipped)
        if result.metrics and rows and result.metrics["split"] != "test":
            text = (
                "no test split, so metrics are those of the images that settings were chosen on: they are optimistic."
            )
            options.note(f"{sweep.plan.name}: {text}")
        if result.metrics and isinstance(result.task, Task) and result.task.spec.calibration is None:
            why = str(result.task.spec.training["calibration"]).removeprefix("none: ")
            what = "values have no interval" if result.task.kind == "regression" else "probabilities are not calibrated"
            options.note(f"{sweep.plan.name}: {what} ({why}).")
        results[sweep.plan.name] = result
    record_time(list(results.values()), options.phases)
    for name, result in results.items():
        if result.metrics and name in files:
            results[name] = _save(result, files[name], chosen, options, write=main)
    for part in leftovers if main else ():  # of a write that was killed before this training began
        part.unlink(missing_ok=True)
    more = [{"settings": one.settings_table(), "file": one.file} for one in results.values()]
    report_training(backbone, list(results.values()), [sweep.splits for sweep in sweeps], options, more)
    many = type(data) is dict or not (label_column is None or isinstance(label_column, str))
    return results if many else next(iter(results.values()))


def _check_solved(sizes: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Raises where options were given that mean nothing for a read-out."""
    gradients = {field.name for field in fields(Recipe)} - {"balance", "data_seed", "val_fraction"}
    usual = RECIPES["default"][1]
    given = [name for name, value in sizes.items() if value is not None]
    given += [name for name, value in changes.items() if name in gradients and value != getattr(usual, name)]
    if "augment" in given:
        own, plain = changes["augment"], usual.augment
        options = {"crop": "crop", "scale": "crop_scale", "flip": "flip"}
        given += [option for name, option in options.items() if getattr(own, name) != getattr(plain, name)]
        given.remove("augment")
    if given:
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(given))
        raise TrainingError(f"regime 'readout' is solved in closed form, without training runs: leave out {names}.")


def _with_sizes(grid: Grid, regime: Regime, start: Task | None, backbone: Backbone) -> Grid:
    """The grid with the sizes of the task to start from, or without those that the regime does not have. Raises where
    others were asked for."""
    free = (None,)
    if start is not None:
        start.spec.check_backbone(backbone)
        own = replace(grid, cells=(start.cells,), from_layers=(start.from_layer,), ranks=(start.rank,))
        for name in ("cells", "from_layers", "ranks"):
            if getattr(grid, name) not in {free, getattr(own, name)}:
                raise TrainingError(
                    f"{start.name!r} keeps its cells, rank and layers: leave out `cells`, `rank` and `from_layer`."
                )
        return own
    if regime.name in {"head", "readout"}:
        if any(grid.cells) or grid.from_layers not in {free, (backbone.depth,)}:
            raise TrainingError(f"regime {regime.name!r} has no layers of its own: leave out `cells` and `from_layer`.")
        return replace(grid, cells=free, from_layers=free)
    if not regime.composes:
        for name, asked in (("cells", grid.cells), ("rank", grid.ranks)):
            if asked != free and name not in regime.sizes(backbone.depth):
                raise TrainingError(f"regime {regime.name!r} has no {name}: leave out `{name}`.")
    return grid


def _with_known_rate(sweep: SweepSpec, options: TrainOptions) -> SweepSpec:
    """The sweep with a single learning rate where there are no images to choose one with."""
    if sweep.folds or sweep.splits.val is not None or sweep.grid.choices == 1:
        return sweep
    middle = sweep.grid.rates[len(sweep.grid.rates) // 2]
    options.note(f"{sweep.plan.name}: no validation images to choose a learning rate with: using {middle:g}.")
    return replace(sweep, grid=replace(sweep.grid, rates=(middle,)))


def _name_folder(names: Sequence[str]) -> str:
    """`a+b` for the tasks a and b; for many, which no file name could hold, the first one and a hash of all."""
    whole = "+".join(names)
    if len(names) == 1 or len(whole.encode()) <= MOST_BYTES:
        return whole
    first = names[0].encode()[: MOST_BYTES // 2].decode(errors="ignore")
    return f"{first}+{len(names) - 1}-more-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _asks_for_views(augment: Augment) -> bool:
    """Whether random views were asked for: `flip=0` and `crop="none"` ask for plain ones."""
    return augment.crop not in {None, "none"} or bool(augment.flip) or augment.scale != Augment().scale


def _link_parents(extends: Iterable[Task | str | Path]) -> list[Task]:
    """The tasks to build on. A task with mere records of its parents is replaced by a copy with the parents."""
    tasks = [task for source in extends for task in ([source] if isinstance(source, Task) else load_tasks(source))]
    unlinked = [task for task in tasks if any(not isinstance(parent, Task) for parent in task.extends)]
    if unlinked:
        check_together(tasks)
        tasks = [copy(task) if any(task is one for one in unlinked) else task for task in tasks]
        link_parents(tasks, content_hashes(tasks))
    return tasks


def _notes(sweeps: Sequence[SweepSpec], folds: int | None, options: TrainOptions) -> list[str]:
    """Options without effect, and properties of the data."""
    notes, settings, regime = [], len(sweeps[0].grid.settings()), sweeps[0].regime
    if folds and not any(sweep.folds for sweep in sweeps):
        why = "there is only one setting" if sweeps[0].grid.choices == 1 else "there is a validation split"
        notes.append(f"`folds={folds}` is not used, because {why}.")
    if sweeps[0].recipe.patience and any(sweep.folds for sweep in sweeps):
        notes.append("`patience` is not used: the runs of a cross-validation are compared at the end.")
    notes += dict.fromkeys(text for sweep in sweeps for text in sweep.splits.notes)
    if options.folder is not None and any(sweep.splits.skipped for sweep in sweeps):
        notes.append(f"all images that were left out are listed in {options.folder / SKIPPED}.")
    if options.resume and options.checkpoint is not None and not options.checkpoint.is_file():
        notes.append(f"there is no checkpoint in {options.folder}: starting from the beginning.")
    if settings > 1 and not regime.composes:
        notes.append(f"regime {regime.name!r} has a pass of its own, so its {settings} runs need separate passes.")
    return notes


def _save(result: TrainResult, file: Path, regime: Regime, options: TrainOptions, *, write: bool) -> TrainResult:
    """Writes the task's file; another model that is there already is kept under another name."""
    task, previous = result.task, None
    if not write:
        return replace(result, file=file)
    try:
        if file.is_file() and not has_content(file, task, regime):
            previous = keep_copy(file)
            options.note(f"{file} was there already: the old file is kept as {previous}.")
        regime.save(task, file)
    except TaskFileError as error:
        again = "Fix the problem, then train again with `resume=True` to write the file."
        rest = "" if result.folder is None else f" The weights are saved in {result.folder}. {again}"
        raise TaskFileError(f"{error}{rest}") from None
    return replace(result, file=file, previous=previous)
