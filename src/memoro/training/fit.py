"""What a training gave: figures of the best weights, on images that they never learned from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import bar, plain_console, say_bytes
from memoro.data import ImageSet, Loader, Splits, Streams, load_data
from memoro.data.augment import output_size
from memoro.errors import CacheError, TrainingError
from memoro.evaluation.evaluate import check_labels
from memoro.evaluation.logits import Batches, collect_logits
from memoro.evaluation.metrics import measure
from memoro.extras import need
from memoro.regimes import Baseline, Regime, find_regime
from memoro.tasks.task import Task
from memoro.training.cached import Cache, estimate, fill_caches
from memoro.training.checkpoint import read_identity, run_identity
from memoro.training.distributed import ALONE, Processes, find_processes
from memoro.training.group import RunGroups, RunSpec, content_of
from memoro.training.loop import Training, Watcher, run_training
from memoro.training.recipe import Recipe
from memoro.training.run import Run, ancestors, pass_for


@dataclass(frozen=True)
class FitResult:
    """What a training gave."""

    task: Any
    """The Task, or the Baseline, now with its best weights."""
    history: list[dict[str, Any]]
    """One entry an epoch."""
    metrics: dict[str, Any]
    """Figures on the test split, or on the validation split where there is none; `split` says which. Empty for a run
    that left a shared pass because its loss diverged; `notes` tell."""
    folder: Path | None
    notes: tuple[str, ...]
    logits: Tensor | None = field(default=None, repr=False)
    """What it answered to those images."""
    targets: Tensor | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Any]:
        """`task, history, metrics = fit(…)`"""
        return iter((self.task, self.history, self.metrics))


def examine(
    backbone: Backbone,
    specs: Sequence[RunSpec],
    groups: RunGroups,
    folder: Path | None,
    seconds: float,
    workers: int | None,
    processes: Processes = ALONE,
) -> list[FitResult]:
    """Each spec's result: figures of its best weights on what it never learned from, where there is such a thing."""
    loaders: dict[str, Batches] = {}
    by_images: dict[str, list[tuple[RunSpec, Run]]] = {}
    for spec, run in zip(specs, groups.runs, strict=True):
        if run.diverged:
            continue
        val_set = groups.val_set(spec) if spec.held is not None or not spec.splits.test else None
        images = val_set.images if val_set is not None else spec.splits.test or spec.train
        key = f"{content_of(images)} {spec.preprocessing} {spec.regime.composes}"
        if key not in loaders:
            share: dict[str, Any] = {"workers": workers, "rank": processes.rank, "world": processes.world}
            size = spec.recipe.batch_size
            loaders[key] = Loader(images, spec.preprocessing, batch_size=size, **share) if val_set is None else val_set
        by_images.setdefault(key, []).append((spec, run))
    answers: dict[int, tuple[Tensor, Tensor]] = {}
    for key, some in by_images.items():
        answer = pass_for(backbone, [run.task for _, run in some])
        logits, targets = collect_logits(answer, backbone, loaders[key], processes=processes)
        for (spec, run), out in zip(some, logits, strict=True):
            answers[id(run)] = out, _final_targets(spec, targets)
    results = []
    for spec, run in zip(specs, groups.runs, strict=True):
        notes = spec.splits.notes if run.stopped is None else (*spec.splits.notes, run.stopped)
        if run.diverged:
            results.append(FitResult(run.task, run.history, {}, folder, notes))
            continue
        out, targets = answers[id(run)]
        metrics = {"split": _split_name(spec), **measure(run.task.kind, run.task.labels, out, targets)}
        _describe(spec, run, metrics, seconds)
        results.append(FitResult(run.task, run.history, metrics, folder, notes, out, targets))
    return results


def _split_name(spec: RunSpec) -> str:
    if spec.held is not None:
        return "fold"
    return "test" if spec.splits.test else "val" if spec.splits.val else "train"


def _final_targets(spec: RunSpec, collected: Tensor) -> Tensor:
    """What the spec's own set says of the images: a loader is shared by tasks with other labels."""
    if spec.held is not None:
        assert isinstance(spec.train, ImageSet)
        return spec.train.targets[torch.from_numpy(spec.held)]
    final = spec.splits.test or spec.splits.val or spec.train
    return final.targets if isinstance(final, ImageSet) else collected


def _describe(spec: RunSpec, run: Run, metrics: dict[str, Any], seconds: float) -> None:
    """Writes into the task how it came about."""
    images = spec.train
    run.task.describe(
        preprocessing=spec.preprocessing,
        training={
            "data": spec.splits.name,
            "images": len(images) if isinstance(images, ImageSet) else images.length,
            "regime": spec.regime.name,
            "optimizer": run.recipe.optimizer,
            "lr": run.recipe.lr,
            "batch_size": run.recipe.batch_size,
            "epochs": len(run.history),
            "steps": run.history[-1]["step"],
            "best_epoch": run.best_epoch,
            "seed": run.recipe.seed,
            "trained_parameters": sum(parameter.numel() for parameter in run.trained.values()),
            "seconds": round(seconds, 1),
        },
        metrics={name: value for name, value in metrics.items() if value is not None},
    )


VIEWS = 4
"""Views of an image that a cache keeps unless the recipe says."""


def fit(
    backbone: Backbone,
    task: Task | Baseline,
    data: Any,
    *,
    recipe: Recipe | None = None,
    regime: str | None = None,
    image_size: int | None = None,
    cache: Cache | bool = False,
    folder: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    quiet: bool = False,
    tensorboard: bool = False,
    **changes: Any,
) -> FitResult:
    """Trains `task` in place on `data` (anything that load_data takes, or Splits) and measures it.

    This is one run with one rate; the commands `memoro train` and `memoro sweep` try several in one pass.
    The recipe's fields can be given by name: `fit(backbone, task, "photos", epochs=5, lr=0.03)`. With `cache`, base
    passes are kept on disk and read back in later epochs. With `folder`, figures, settings, pictures and a checkpoint
    are kept there, and `resume` goes on from that checkpoint. A Baseline is trained in passes of its own.
    """
    return fit_tasks(
        backbone,
        [(task, data)],
        recipe=recipe,
        regime=regime,
        image_size=image_size,
        cache=cache,
        folder=folder,
        resume=resume,
        workers=workers,
        quiet=quiet,
        tensorboard=tensorboard,
        **changes,
    )[0]


def fit_tasks(
    backbone: Backbone,
    tasks: Sequence[tuple[Task | Baseline, Any]],
    *,
    recipe: Recipe | None = None,
    regime: str | None = None,
    image_size: int | None = None,
    cache: Cache | bool = False,
    folder: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    quiet: bool = False,
    tensorboard: bool = False,
    **changes: Any,
) -> list[FitResult]:
    """Trains several tasks, each on its own data, in one pass of the backbone a step; otherwise as `fit`.

    Each comes out as if trained alone. Tasks over the same images (`load_columns`) share every image's base pass. A
    task that extends another one of the list waits until that is done.
    """
    recipe = build_recipe(recipe, changes)
    kept = (Cache() if cache else None) if isinstance(cache, bool) else cache
    if kept is not None and recipe.views is None:
        recipe = replace(recipe, views=VIEWS)
    preprocessing = backbone.preprocessing if image_size is None else backbone.preprocessing.at(image_size)
    specs = []
    for task, data in tasks:
        way = _regime_of(task, regime, backbone)
        splits = data if isinstance(data, (Splits, Streams)) else _load(data, task, recipe, workers, quiet)
        specs.append(RunSpec(task, recipe, way, splits, preprocessing))
    waves = _waves(specs)
    done: dict[int, FitResult] = {}
    for number, wave in enumerate(waves, start=1):
        place = None if folder is None else Path(folder) / str(number) if len(waves) > 1 else Path(folder)
        results = train_runs(
            backbone,
            wave,
            cache=kept,
            folder=place,
            resume=resume,
            workers=workers,
            quiet=quiet,
            tensorboard=tensorboard,
        )
        done |= {id(result.task): result for result in results}
    return [done[id(task)] for task, _ in tasks]


def _regime_of(task: Task | Baseline, name: str | None, backbone: Backbone) -> Regime:
    """The regime of this name; without one, what the task was made for."""
    own = task.regime if isinstance(task, Baseline) else None
    regime = find_regime(name or own or ("head" if task.from_layer == backbone.depth else "memory"))
    if regime.composes != (own is None) or (own is not None and regime.name != own):
        made = "a task" if own is None else f"a baseline of regime {own!r}"
        raise TrainingError(f"{task.name!r} is {made}: regime {regime.name!r} trains what its own build() makes.")
    return regime


def _waves(specs: Sequence[RunSpec]) -> list[list[RunSpec]]:
    """The specs in an order in which everything that a task extends is trained before it."""
    waves: list[list[RunSpec]] = []
    waiting = list(specs)
    while waiting:
        open_ones = {id(spec.task) for spec in waiting}
        wave = [spec for spec in waiting if not open_ones & {id(older) for older in ancestors([spec.task])}]
        if not wave:
            raise TrainingError("these tasks extend each other in a circle.")
        waves.append(wave)
        waiting = [spec for spec in waiting if not any(spec is done for done in wave)]
    return waves


def train_runs(
    backbone: Backbone,
    specs: Sequence[RunSpec],
    *,
    cache: Cache | None = None,
    halving: bool = False,
    folder: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    quiet: bool = True,
    tensorboard: bool = False,
) -> list[FitResult]:
    """Trains all specs at once, one pass of the backbone for all of them at each step, and measures them.

    With `halving`, after every quarter of the epochs the worse half of each task's runs stops.
    """
    from memoro.training.runfolder import CHECKPOINT, ProgressBar, RunFolder, draw_run

    need("accelerate", "torchmetrics", "matplotlib")
    tasks = [spec.task for spec in specs]
    if len({id(task) for task in tasks}) < len(tasks):
        raise TrainingError("a task stands there twice: it can learn from one set; make a task for each.")
    backbone.check_unchanged()
    for task in [*tasks, *ancestors(tasks)]:
        task.spec.check_backbone(backbone)
    for spec in specs:
        check_labels(spec.task, spec.splits)
        spec.task.prepare_training(backbone)
        backbone.check_pixels(torch.empty(1, 3, *output_size(spec.preprocessing)))
    processes = find_processes(backbone.device)
    quiet = quiet or not processes.main
    how: dict[str, Any] = {"workers": workers, "halving": halving, "processes": processes}
    checkpoint = None if folder is None else folder / CHECKPOINT
    cache = _as_before(_check_cache(cache, specs), checkpoint if resume else None)
    groups = RunGroups(backbone, specs, cache=cache, **how)
    if cache is not None:
        try:
            _fill(groups, cache, processes, quiet)
            if processes.local_rank:
                groups = RunGroups(backbone, specs, cache=cache, **how)  # they read what is there now
        except CacheError as error:
            if cache.required:
                raise
            if not quiet:
                plain_console(stderr=True, soft_wrap=True).print(f"note: every pass is computed anew: {error}")
            cache = None
            groups = RunGroups(backbone, specs, cache=None, **how)
    identity = {**run_identity(backbone, specs, cache), "halving": halving}
    place: RunFolder | None = None
    watchers: list[Watcher] = []
    if folder is not None and processes.main:
        names = list(dict.fromkeys(spec.splits.name for spec in specs))
        facts = {"backbone": backbone.name, "fingerprint": backbone.fingerprint.digest}
        config = {**identity, **facts, "set": names[0] if len(names) == 1 else names}
        place = RunFolder(folder, config, tensorboard=tensorboard)
        watchers.append(place)
    training = Training(
        backbone=backbone,
        groups=groups.list,
        watchers=watchers,
        checkpoint=checkpoint,
        identity=identity,
        resume=resume,
        processes=processes,
    )
    title = tasks[0].name if len(tasks) == 1 else f"{len(tasks)} runs"
    with ProgressBar(title, sum(group.total_steps for group in groups.list), quiet) as shown:
        watchers.append(shown)
        seconds = run_training(training)
    if all(run.diverged for run in groups.runs):
        kept = "" if place is None else f" The last good checkpoint is in {place.checkpoint}."
        raise TrainingError(f"{tasks[0].name!r}: {groups.runs[0].stopped}.{kept}")
    results = examine(backbone, specs, groups, folder, seconds, workers, processes)
    if place is not None and len(results) == 1 and results[0].logits is not None:
        draw_run(place.path, "", tasks[0], results[0])
    return results


def _check_cache(cache: Cache | None, specs: Sequence[RunSpec]) -> Cache | None:
    """The cache, None where nothing could be kept; an error where it was asked for and cannot serve."""
    apart = [spec for spec in specs if not spec.regime.composes]
    if cache is not None and cache.required and apart:
        raise TrainingError(
            f"regime {apart[0].regime.name!r} changes base tokens: there is no base pass to keep. Leave out the cache."
        )
    return None if len(apart) == len(specs) else cache


def _as_before(cache: Cache | None, checkpoint: Path | None) -> Cache | None:
    """None where a training that goes on had not kept its features for lack of room: it must go on as it was."""
    if cache is None or cache.required or checkpoint is None or not checkpoint.is_file():
        return cache
    return cache if read_identity(checkpoint).get("features") is not None else None


def _fill(groups: RunGroups, cache: Cache, processes: Processes, quiet: bool) -> None:
    """The first process of each machine computes what is missing there, the others wait for it."""
    problem = None
    if processes.local_rank == 0:
        views, size = estimate(groups.cached)
        try:
            with ExitStack() as stack:
                title = f"features ({say_bytes(size)})"
                tick = stack.enter_context(bar(title, views)) if views and not quiet else (lambda images: None)
                fill_caches(groups.cached, cache, tick)
        except CacheError as error:
            problem = str(error)
    problems = [problem for problem in processes.all_gather(problem) if problem is not None]
    if problems:
        raise CacheError(problems[0])


def build_recipe(recipe: Recipe | None, changes: dict[str, Any]) -> Recipe:
    """The recipe with some fields replaced; an unknown field is an error that lists them."""
    known = [field.name for field in fields(Recipe)]
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise TrainingError(f"a recipe has no {unknown[0]!r}. There are: {', '.join(known)}.")
    return replace(recipe or Recipe(), **changes)


def _load(data: Any, task: Task | Baseline, recipe: Recipe, workers: int | None, quiet: bool) -> Splits:
    return load_data(
        data,
        kind=None if task.kind == "softmax" else task.kind,
        labels=task.labels,
        val_fraction=recipe.val_fraction,
        seed=recipe.data_seed,
        workers=workers,
        quiet=quiet,
    )
