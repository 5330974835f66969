"""`train`, `fit` and `fit_tasks`: plan, run, finish, save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from memoro.backbones import Backbone, load_backbone, require_backbone
from memoro.backbones.load import TINY, own_device
from memoro.backbones.precision import CHOSEN
from memoro.data import Splits, load_data
from memoro.data.dataset import MAX_UNREADABLE, ClassFolder
from memoro.engine.featurestore import total_bytes
from memoro.engine.plan import check_versions
from memoro.errors import CacheError, TrainingError, need
from memoro.evaluation.evaluate import check_labels
from memoro.files import left_behind
from memoro.images import output_size
from memoro.options import several
from memoro.regimes import Regime
from memoro.regimes.start import OPTIMISTIC, ancestors, compare_labels, load_parents, read_start, regime_of
from memoro.tasks.spec import Model
from memoro.tasks.task import Task, content_hashes
from memoro.training.cached import check_memory, what_is_kept
from memoro.training.checkpoint import read_identity
from memoro.training.finish import Finisher, finish_plans, record_time
from memoro.training.loop import Trainer
from memoro.training.plan import (
    Plan,
    check_seeds,
    choose_rates,
    choose_sizes,
    combine,
    cut_sets,
    find_notes,
    keep_known_rate,
    load_sources,
    name_folder,
    name_sources,
    preprocessing_of,
)
from memoro.training.recipe import (
    BackboneSource,
    FitSettings,
    Recipe,
    Settings,
    TaskSource,
    TrainOptions,
    TrainSettings,
    add_views,
    check_solved,
    find_recipe,
    merge_options,
)
from memoro.training.result import TrainResult, choose_target, name_files, save_report, save_tasks
from memoro.training.run import Run


@overload
def train(
    data: dict[str, Any], *, label_column: str | None = None, **settings: Unpack[TrainSettings]
) -> dict[str, TrainResult]: ...
@overload
def train(data: Any, *, label_column: list[str], **settings: Unpack[TrainSettings]) -> dict[str, TrainResult]: ...
@overload
def train(data: Any, *, label_column: str | None = None, **settings: Unpack[TrainSettings]) -> TrainResult: ...
def train(
    data: Any,
    *,
    backbone: BackboneSource = TINY,
    device: str | None = None,
    task: str | None = None,
    kind: str | None = None,
    regime: str | Regime | None = None,
    cells: int | Iterable[int] | None = None,
    rank: int | Iterable[int] | None = None,
    from_layer: int | Iterable[int] | None = None,
    lr: float | Iterable[float] | None = None,
    seeds: int = 1,
    extends: TaskSource | Iterable[TaskSource] = (),
    start_from: TaskSource | None = None,
    label_column: str | Sequence[str] | None = None,
    image_column: str | None = None,
    allow_absolute: bool = False,
    max_unreadable: float = MAX_UNREADABLE,
    class_folder: ClassFolder = "outer",
    out: str | Path | None = None,
    recipe: Recipe | str | None = None,
    options: TrainOptions | None = None,
    **changes: Unpack[Settings],
) -> TrainResult | dict[str, TrainResult]:
    """Makes a task from images: `pets = memoro.train("photos/pets", backbone="facebook/dinov2-small").task`.

    `data` is anything that load_data takes, or a dict from task names to such: then all are trained in one pass, and a
    dict of results is returned. A list of label columns does the same for the columns of one table. `kind` says what
    the labels are: `class`, `labels` (several for an image) or `number`; by default the data decides. `image_column`,
    `allow_absolute`, `max_unreadable` and `class_folder` are as in `load_data`. `backbone` is a Backbone, or anything
    that load_backbone takes; then `device` (None: a GPU if there is one) is used. `precision` is as there.

    `start_from` is an earlier task, or its file: its weights are the start, for the same labels, more or fewer of them.

    `recipe` is the name of one: `default` (regime `joint`, AdamW) or `paper` (regime `memory`, SGD). Where one of
    recipe and regime is not given, the other decides. Or it is a Recipe, whose learning rate is then the only one that
    is tried unless `lr` is given, for regime `joint` unless another is given. `regime` says what is trained, and
    `cells`, `rank` and `from_layer` where they are not given: see `REGIMES`.

    Several values of `cells`, `rank`, `from_layer` or `lr`, or several `seeds`, are tried in one pass, and the best by
    validation is kept; without `lr`, regimes but `joint` and `side` try three. Small sets are compared by
    cross-validation (`folds`; 0: on a validation split).

    Fields of the recipe and of the options can be given by name: `epochs=5`, `image_size=112`, `folder="runs/{task}"`.
    The task file is written to `out`, a file or folder, if that is given.
    """
    # Plan: what is trained, on what, and how.
    start = None if start_from is None else read_start(start_from, task)
    lr = recipe.lr if lr is None and isinstance(recipe, Recipe) else lr
    kept = backbone if isinstance(backbone, Backbone) and device is None else None
    place = None if kept else own_device(device)
    chosen, found = find_recipe(recipe, regime if start is None else regime_of(start, regime))
    found, options = merge_options(found, options, changes)
    options = options.joined(kept.device if kept else own_device(device))
    if not isinstance(recipe, Recipe) and "views" not in changes:
        found = add_views(found, options)
    sizes = {"cells": cells, "from_layer": from_layer, "rank": rank}
    if chosen.readout == 1:
        given = {"lr": lr, **sizes, "folds": options.folds}
        check_solved({**given, "seeds": None if seeds == 1 else seeds}, changes)
    rates = choose_rates(lr, chosen, found)
    seeds = check_seeds(seeds)
    columns = [label_column] if isinstance(label_column, str) else label_column
    if start is not None and type(data) is not dict and len(columns or ()) < 2:
        task, kind = task or start.name, kind or start.kind
    sources = name_sources(data, task, columns, start)
    target = None if out is None else choose_target(out, several=len(sources) > 1)
    backbone = load_backbone(backbone, device=place, precision=options.precision if chosen.composes else None)
    if options.precision == "auto" and backbone.checkpoint is not None and backbone.dtype == torch.bfloat16:
        options.note(CHOSEN)
    wanted = choose_sizes(sizes, chosen, start, backbone)
    settings = combine(rates, **wanted, seeds=range(found.seed, found.seed + seeds))
    parents = load_parents(several(extends), start)
    reading = options.reading(
        found, kind=kind, image_column=image_column, allow_absolute=allow_absolute, max_unreadable=max_unreadable,
        class_folder=class_folder, val_fraction=0,
    )  # fmt: skip
    with options.phases.during("reading"):
        sets = load_sources(sources, columns, reading)
    if start is not None:
        options.note(compare_labels(start, next(iter(sets.values()))))
        sets = {name: replace(splits, notes=(*splits.notes, OPTIMISTIC)) for name, splits in sets.items()}
    files = {} if target is None else name_files(target, list(sets))
    leftovers = [part for file in files.values() for part in left_behind(file)]
    plans = [
        Plan(
            name, chosen, splits,
            preprocessing_of(backbone, options, splits, None if start is None else start.spec.preprocessing),
            found, settings, folds, parents, start,
        )
        for name, splits, folds in cut_sets(sets, chosen, len(settings) > 1, options.folds, found)
    ]  # fmt: skip
    if lr is None and seeds == 1 and not any(isinstance(size, Iterable) for size in sizes.values()):
        plans = [keep_known_rate(plan, options) for plan in plans]
    options = name_folder(options, list(sets))
    for text in find_notes(plans, options):
        options.note(text)

    # Run, and finish.
    results = train_plans(backbone, plans, options)

    # Save: task files, and a report.
    results = save_tasks(results, files, leftovers, chosen, options)
    save_report(backbone, results, [plan.splits for plan in plans], options)
    many = type(data) is dict or not (label_column is None or isinstance(label_column, str))
    return dict(zip(sets, results, strict=True)) if many else results[0]


def fit(
    backbone: Backbone,
    task: Model,
    data: Any,
    *,
    regime: str | Regime | None = None,
    recipe: Recipe | str | None = None,
    options: TrainOptions | None = None,
    **changes: Unpack[FitSettings],
) -> TrainResult:
    """Trains `task` in place on `data` (anything that load_data takes, or Splits) and measures it.

    It starts from the task's weights (their seed is an argument of new_task) and prepares images as in its earlier
    training, if there was one and no `image_size` is given.

    `recipe` is a Recipe or the name of one (see `RECIPES`). Without it, the regime decides: the paper's, or for
    low-rank weights AdamW with a rate of 0.001. This is one run with one learning rate;
    `memoro.train` tries several in one pass. Fields of the recipe and of the options can be given by name:
    `fit(backbone, task, "photos", epochs=5, lr=0.03, folder="runs/photos")`. What is not a Task needs the regime
    that built it.
    """
    return fit_tasks(backbone, [(task, data)], regime=regime, recipe=recipe, options=options, **changes)[0]


def fit_tasks(
    backbone: Backbone,
    tasks: Sequence[tuple[Model, Any]],
    *,
    regime: str | Regime | None = None,
    recipe: Recipe | str | None = None,
    options: TrainOptions | None = None,
    **changes: Unpack[FitSettings],
) -> list[TrainResult]:
    """Trains several tasks, each on its own data, with one base pass per step; otherwise as `fit`.

    Each result is the same as if the task were trained alone. Tasks over the same images (`load_columns`) share every
    image's base pass. A task that extends another one of the list is trained after it.
    """
    require_backbone(backbone)
    if "seed" in changes:
        raise TrainingError(
            "seed is for initial weights, which these tasks already have: pass it to new_task, or use data_seed for "
            "the order of the images."
        )
    own = recipe if isinstance(recipe, Recipe) else None
    options = merge_options(own, options, changes)[1].joined(backbone.device)
    runs = []
    for task, data in tasks:
        chosen = regime_of(task, regime)
        found = merge_options(own or find_recipe(recipe, chosen)[1], None, changes)[0]
        with options.phases.during("reading"):
            reading = options.reading(found, kind=task.kind, labels=task.labels, val_fraction=found.val_fraction)
            splits = data if isinstance(data, Splits) else load_data(data, **vars(reading))
        preprocessing = preprocessing_of(backbone, options, splits, task.spec.preprocessing)
        runs.append(Run(task, found, chosen, splits, preprocessing))
    extended = {id(run): {id(older) for older in ancestors([run.task])} for run in runs}
    stages: list[list[Run]] = []
    waiting = runs
    while waiting:
        untrained = {id(run.task) for run in waiting}
        stages.append([run for run in waiting if not untrained & extended[id(run)]])
        waiting = [run for run in waiting if untrained & extended[id(run)]]
    done: dict[int, TrainResult] = {}
    for number, stage in enumerate(stages, start=1):
        here = options
        if options.folder is not None and len(stages) > 1:
            here = replace(options, folder=options.folder / str(number))
        results = train_runs(backbone, stage, here)
        save_report(backbone, results, [run.splits for run in stage], here)
        done |= {id(result.task): result for result in results}
    return [done[id(task)] for task, _ in tasks]


def train_runs(
    backbone: Backbone, runs: Sequence[Run], options: TrainOptions | None = None, **changes: Any
) -> list[TrainResult]:
    """Trains all runs at once, with one base pass per step for all of them, and finishes them.

    Fields of the options can be given by name. `image_size` is not read: each run has its preprocessing.
    """
    options = replace(options or TrainOptions(), **changes).joined(backbone.device)
    finisher = run_all(backbone, runs, options)
    results = [finisher.finish([run]) for run in runs]
    record_time(results, options.phases)
    return results


def train_plans(
    backbone: Backbone, plans: Sequence[Plan], options: TrainOptions | None = None, **changes: Any
) -> list[TrainResult]:
    """Trains all runs of all plans at once; the best setting of each becomes its task. Otherwise as `train_runs`."""
    options = replace(options or TrainOptions(), **changes).joined(backbone.device)
    runs = [plan.start_runs(backbone) for plan in plans]
    finisher = run_all(backbone, [run for by_setting in runs for own in by_setting.values() for run in own], options)
    results = finish_plans(plans, runs, finisher, options)
    record_time(results, options.phases)
    return results


def run_all(backbone: Backbone, runs: Sequence[Run], options: TrainOptions) -> Finisher:
    """Trains all runs, and lets their tasks answer the images that they are measured on."""
    from memoro.training.runfolder import ProgressBar, RunFolder, lock_folder

    need("accelerate")
    if any(run.regime.composes for run in runs):
        backbone = load_backbone(backbone, precision=options.precision)
    _check_runs(backbone, runs)
    for run in runs:
        run.task.prepare_training(backbone)
    finisher = Finisher(backbone, options)
    with lock_folder(options.written) if options.written is not None else nullcontext():
        options.phases.switch("base passes")
        trainer = build_trainer(backbone, runs, options)
        for run in runs:
            if isinstance(run.task, Task):
                run.task.detach_readout()
            if run.regime.readout:
                finisher.solve(run)
        if options.written is not None:
            trainer.callbacks.append(RunFolder(options.written, trainer, track=options.track))
        if trainer.runs:
            name, steps = trainer.runs[0].task.name, sum(group.total_steps for group in trainer.groups)
            with ProgressBar(name, steps, options.quiet) as shown:
                trainer.callbacks.append(shown)
                trainer.on_validation = shown.update
                options.phases.switch("training")
                trainer.train()
            if all(run.diverged for run in trainer.runs):
                kept = "" if trainer.checkpoint is None else f" The last good checkpoint is in {trainer.checkpoint}."
                raise TrainingError(f"{name!r}: {trainer.runs[0].stopped}.{kept}")
        for callback in () if trainer.runs else trainer.callbacks:
            callback.on_train_begin([])
        options.phases.switch("evaluation")
        finisher.answer_held_out(trainer)
    if options.wanted_cache is not None and total_bytes(options.wanted_cache.folder):
        options.note(what_is_kept(options.wanted_cache))
    return finisher


def _check_runs(backbone: Backbone, runs: Sequence[Run]) -> None:
    tasks = [run.task for run in runs]
    for task in tasks:
        if sum(task is other for other in tasks) > 1:
            raise TrainingError(f"{task.name!r} was passed twice: create one task per dataset.")
        if isinstance(task, Task) and task.members > 1:
            raise TrainingError(f"{task.name!r} is an ensemble: continue its members with train(…, start_from=task).")
    backbone.check_unchanged(read_weights=True)
    older = ancestors(tasks)
    for task in [*tasks, *older]:
        task.spec.check_backbone(backbone)
    hashes = content_hashes(older)
    for task in older:
        check_versions(task, [parent for parent in task.extends if isinstance(parent, Task)], hashes)
    for run in runs:
        check_labels(run.task, run.splits)
        backbone.check_pixels(torch.empty(1, 3, *output_size(run.preprocessing), device="cpu"))


def build_trainer(backbone: Backbone, runs: Sequence[Run], options: TrainOptions) -> Trainer:
    """A trainer whose features are computed; without any if none can be kept, unless they are required."""
    cache, checkpoint = options.wanted_cache, options.checkpoint
    apart = [run.regime.name for run in runs if not run.regime.composes]
    if cache is not None and cache.required and apart:
        raise TrainingError(
            f"regime {apart[0]!r} has a pass of its own, so its features cannot be cached: leave out `cache`."
        )
    if cache is not None and not cache.required:
        new_views = any(run.recipe.views is None for run in runs if run.regime.composes)
        if len(apart) == len(runs) or new_views or backbone.device.type not in {"cpu", "cuda"}:
            cache = None
        elif options.resume and checkpoint is not None and checkpoint.is_file():
            # A training that started without features must continue without them.
            cache = None if read_identity(checkpoint).get("features") is None else cache
    trainer = Trainer(backbone, runs, options, cache=cache)
    try:
        if cache is not None and not cache.required and backbone.device.type != "cpu":
            check_memory(trainer.loaders.cached, backbone.device, options.processes)
        trainer.fill_cache()
    except CacheError as error:
        if cache is None or cache.required:
            raise
        options.note(f"training without the cache: {error}")
        trainer = Trainer(backbone, runs, options)
    return trainer
