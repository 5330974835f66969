"""`fit`: trains tasks that exist already, and measures their best weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from memoro.backbones import Backbone, load_backbone, require_backbone
from memoro.console import format_bytes, quoted
from memoro.data import Splits, load_data
from memoro.data.augment import output_size
from memoro.engine.featurestore import default_folder, total_bytes
from memoro.engine.plan import check_versions
from memoro.errors import CacheError, TrainingError
from memoro.evaluation.evaluate import check_labels
from memoro.evaluation.metrics import warn_of
from memoro.evaluation.training_images import learned_from
from memoro.extras import need
from memoro.images import Preprocessing
from memoro.regimes import Regime, find_regime
from memoro.tasks.spec import Model
from memoro.tasks.task import Task, content_hashes
from memoro.training.cached import Cache
from memoro.training.checkpoint import read_identity
from memoro.training.distributed import Processes, find_processes
from memoro.training.finish import FitResult, evaluate_runs, record_time
from memoro.training.group import RunSpec
from memoro.training.loop import Trainer
from memoro.training.readouts import ReadOuts
from memoro.training.recipe import Recipe, TrainOptions, find_recipe, merge_options
from memoro.training.run import ancestors
from memoro.training.statistics import StatisticsReader
from memoro.training.trust import Describer


def fit(
    backbone: Backbone,
    task: Model,
    data: Any,
    *,
    regime: str | Regime | None = None,
    recipe: Recipe | str | None = None,
    options: TrainOptions | None = None,
    **changes: Any,
) -> FitResult:
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
    **changes: Any,
) -> list[FitResult]:
    """Trains several tasks, each on its own data, with one base pass per step; otherwise as `fit`.

    Each result is the same as if the task were trained alone. Tasks over the same images (`load_columns`) share every
    image's base pass. A task that extends another one of the list is trained after it.
    """
    from memoro.training.report import report_training

    require_backbone(backbone)
    if "seed" in changes:
        raise TrainingError(
            "seed is for initial weights, which these tasks already have: pass it to new_task, or use data_seed for "
            "the order of the images."
        )
    regimes = [regime_of(task, regime) for task, _ in tasks]
    found = [recipe if isinstance(recipe, Recipe) else find_recipe(recipe, one)[1] for one in regimes]
    recipes = [merge_options(one, options, changes)[0] for one in found]
    options = merge_options(recipe if isinstance(recipe, Recipe) else None, options, changes)[1]
    specs = []
    for (task, data), own_regime, own_recipe in zip(tasks, regimes, recipes, strict=True):
        with options.phases.during("reading"):
            splits = data if isinstance(data, Splits) else _load(data, task, own_recipe, options)
        preprocessing = preprocessing_of(backbone, options, splits, task.spec.preprocessing)
        specs.append(RunSpec(task, own_recipe, own_regime, splits, preprocessing))
    stages = _stages(specs)
    done: dict[int, FitResult] = {}
    for number, stage in enumerate(stages, start=1):
        own = options
        if options.folder is not None and len(stages) > 1:
            own = replace(options, folder=options.folder / str(number))
        results = [judge(result, options) for result in train_runs(backbone, stage, own)]
        report_training(backbone, results, [spec.splits for spec in stage], own)
        done |= {id(result.task): result for result in results}
    return [done[id(task)] for task, _ in tasks]


def judge(result: FitResult, options: TrainOptions) -> FitResult:
    """The result with warnings among its notes where its metrics call for them; the user is told."""
    found = [warn_of(result.metrics, balanced=bool(result.task.spec.training.get("balance")))]
    if result.metrics.get("split", "train") != "train":
        learned = learned_from(result.task, result.images, parents_only=True)
        found.append(None if learned is None else f"{learned}, so its metrics are too good for new images.")
    texts = [text for text in found if text is not None]
    for text in texts:
        options.note(f"warning: {result.task.name}: {text}")
    return replace(result, notes=(*result.notes, *texts))


def preprocessing_of(
    backbone: Backbone, options: TrainOptions, splits: Splits, own: Preprocessing | None = None
) -> Preprocessing:
    """The backbone's preprocessing at the wanted size; without one, the task's `own` if it was trained before.

    Images of more than 8 bits have the scale that the task was trained with before, else that of its data set.
    """
    steps = own or backbone.preprocessing
    if options.image_size is not None:
        steps = backbone.preprocessing.at(options.image_size)
    levels = splits.train.levels if splits.train is not None else None
    white = None if own is None else own.white
    if white is None:
        white = None if levels is None else levels.white
    elif levels is not None and levels.high > white:
        options.note(
            f"warning: the task was trained with {white:,.6g} as white, and {splits.name} has values up to "
            f"{levels.high:,.6g}: brighter pixels become white. Train a new task where that matters."
        )
    return replace(steps, white=white)


def regime_of(task: Model, regime: str | Regime | None) -> Regime:
    """The regime that is given; without one, that of the task."""
    if regime is None and isinstance(task, Task):
        reads = task.spec.readout
        if reads is not None:
            regime = "readout" if reads.share == 1 else "joint"
        else:
            regime = "head" if task.from_layer == task.spec.backbone.depth else "side" if task.rank else "memory"
    if regime is None:
        raise TrainingError(f"{task.name!r} is not a task: pass the regime that built it, regime=….")
    found = find_regime(regime)
    if found.composes != isinstance(task, Task):
        made = "a task" if isinstance(task, Task) else "not a task"
        raise TrainingError(f"{task.name!r} is {made}; regime {found.name!r} only trains models that it built itself.")
    return found


def _load(data: Any, task: Model, recipe: Recipe, options: TrainOptions) -> Splits:
    return load_data(
        data,
        kind=task.kind,
        labels=task.labels,
        val_fraction=recipe.val_fraction,
        seed=recipe.data_seed,
        workers=options.workers,
        quiet=options.quiet,
        phases=options.phases,
    )


def _stages(specs: Sequence[RunSpec]) -> list[list[RunSpec]]:
    """The specs in stages, so that every task is trained after those that it extends."""
    stages: list[list[RunSpec]] = []
    waiting = list(specs)
    while waiting:
        untrained = {id(spec.task) for spec in waiting}
        stage = [spec for spec in waiting if not untrained & {id(older) for older in ancestors([spec.task])}]
        if not stage:
            raise TrainingError("these tasks extend each other in a cycle.")
        stages.append(stage)
        waiting = [spec for spec in waiting if not any(spec is done for done in stage)]
    return stages


def train_runs(
    backbone: Backbone, specs: Sequence[RunSpec], options: TrainOptions | None = None, **changes: Any
) -> list[FitResult]:
    """Trains all specs at once, with one base pass per step for all of them, and measures them.

    Fields of the options can be given by name. `image_size` is not read: each spec has its preprocessing.
    """
    from memoro.training.runfolder import lock_folder

    need("accelerate")
    options = replace(options or TrainOptions(), **changes)
    if any(spec.regime.composes for spec in specs):
        backbone = load_backbone(backbone, precision=options.precision)
    _check_specs(backbone, specs)
    for spec in specs:
        spec.task.prepare_training(backbone)
    processes = find_processes(backbone.device)
    if not processes.main:
        options = replace(options, quiet=True, log=None)
    with lock_folder(options.folder) if options.folder is not None and processes.main else nullcontext():
        return _train(backbone, specs, options, processes)


def _train(
    backbone: Backbone, specs: Sequence[RunSpec], options: TrainOptions, processes: Processes
) -> list[FitResult]:
    options.phases.switch("base passes")
    trainer = build_trainer(backbone, specs, options, processes)
    reader = StatisticsReader(backbone, options, processes)
    readouts = ReadOuts(backbone, reader, options)
    for spec in specs:
        if isinstance(spec.task, Task):
            spec.task.detach_readout()
        if spec.regime.readout:
            readouts.solve(spec)
    _run(trainer, options, processes)
    options.phases.switch("evaluation")
    results = evaluate_runs(trainer, readouts, Describer(backbone, reader, options))
    if processes.main and options.wanted_cache is not None and total_bytes(options.wanted_cache.folder):
        options.note(what_is_kept(options.wanted_cache))
    record_time(results, options.phases)
    return results


def _run(trainer: Trainer, options: TrainOptions, processes: Processes) -> None:
    """Trains all runs, with a progress bar and a run folder."""
    from memoro.training.runfolder import ProgressBar, RunFolder

    if options.folder is not None and processes.main:
        trainer.callbacks.append(RunFolder(options.folder, trainer, track=options.track))
    if not trainer.runs:
        for callback in trainer.callbacks:
            callback.on_train_begin([])
        return
    tasks = [run.task for run in trainer.runs]
    with ProgressBar(tasks[0].name, sum(group.total_steps for group in trainer.groups), options.quiet) as shown:
        trainer.callbacks.append(shown)
        trainer.on_validation = shown.update
        options.phases.switch("training")
        trainer.train()
    if all(run.diverged for run in trainer.runs):
        kept = "" if trainer.checkpoint is None else f" The last good checkpoint is in {trainer.checkpoint}."
        raise TrainingError(f"{tasks[0].name!r}: {trainer.runs[0].stopped}.{kept}")


def _check_specs(backbone: Backbone, specs: Sequence[RunSpec]) -> None:
    tasks = [spec.task for spec in specs]
    for task in tasks:
        if sum(task is other for other in tasks) > 1:
            raise TrainingError(f"{task.name!r} was passed twice: create one task per dataset.")
        if isinstance(task, Task) and task.members > 1:
            raise TrainingError(f"{task.name!r} is an ensemble: continue its members with train(…, start_from=task).")
    if backbone.dtype == torch.float16:
        raise TrainingError(
            f"{backbone.name} is in float16, in which gradients underflow: choose `precision='bfloat16'` or 'float32'."
        )
    backbone.check_unchanged(read_weights=True)
    older = ancestors(tasks)
    for task in [*tasks, *older]:
        task.spec.check_backbone(backbone)
    hashes = content_hashes(older)
    for task in older:
        check_versions(task, [parent for parent in task.extends if isinstance(parent, Task)], hashes)
    for spec in specs:
        check_labels(spec.task, spec.splits)
        backbone.check_pixels(torch.empty(1, 3, *output_size(spec.preprocessing), device="cpu"))


def build_trainer(backbone: Backbone, specs: Sequence[RunSpec], options: TrainOptions, processes: Processes) -> Trainer:
    """A trainer whose features are computed; without any where they do not fit and are not required."""
    cache = _choose_cache(options, backbone, specs)
    trainer = Trainer(backbone, specs, options, cache=cache, processes=processes)
    try:
        trainer.fill_cache()
    except CacheError as error:
        if cache is None or cache.required:
            raise
        options.note(f"training without the cache: {error}")
        trainer = Trainer(backbone, specs, options, processes=processes)
    return trainer


def _choose_cache(options: TrainOptions, backbone: Backbone, specs: Sequence[RunSpec]) -> Cache | None:
    """The cache, None where nothing can be kept; an error where it is required and cannot be used."""
    cache = options.wanted_cache
    if cache is None:
        return None
    if cache.required:
        for spec in specs:
            if not spec.regime.composes:
                raise TrainingError(
                    f"regime {spec.regime.name!r} has a pass of its own, so its features cannot be cached: "
                    "leave out `cache`."
                )
        return cache
    kept = [spec for spec in specs if spec.regime.composes]
    if not kept or backbone.device.type != "cpu" or any(spec.recipe.views is None for spec in kept):
        return None
    if options.resume and options.checkpoint is not None and options.checkpoint.is_file():
        # A training that started without features must continue without them.
        return None if read_identity(options.checkpoint).get("features") is None else cache
    return cache


def what_is_kept(cache: Cache) -> str:
    """How many features are on disk, where, and how to remove them."""
    command = ["memoro", "cache", "--clear", *([] if cache.folder == default_folder() else ["--folder", cache.folder])]
    size, limit = format_bytes(total_bytes(cache.folder)), format_bytes(cache.limit)
    where = f"{size} of features are cached in {cache.folder} for later trainings (at most {limit})"
    return f"{where}. To remove them: {quoted(*command)}"
