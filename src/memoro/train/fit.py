"""`fit`: from a task and a set of images to a trained task and the figures to trust it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from memoro.backbones import Backbone
from memoro.composition import check_backbone
from memoro.data import ImageSet, ImageStream, Splits, Streams, load_data
from memoro.data.augment import output_size
from memoro.errors import CacheError, TrainingError
from memoro.extras import need
from memoro.progress import bar, plain_console
from memoro.regimes import Baseline, Regime, find_regime
from memoro.report import say_bytes
from memoro.task import Task
from memoro.train.cached import Cache, estimate, fill_caches
from memoro.train.checkpoint import read_identity
from memoro.train.lessons import Courses, Lesson
from memoro.train.loop import Training, Watcher, run_training
from memoro.train.processes import Processes, find_processes
from memoro.train.recipe import Recipe
from memoro.train.results import FitResult, examine
from memoro.train.runs import ancestors

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
    lessons = []
    for task, data in tasks:
        way = _regime_of(task, regime, backbone)
        splits = data if isinstance(data, (Splits, Streams)) else _load(data, task, recipe, workers, quiet)
        lessons.append(Lesson(task, recipe, way, splits, preprocessing))
    waves = _waves(lessons)
    done: dict[int, FitResult] = {}
    for number, wave in enumerate(waves, start=1):
        place = None if folder is None else Path(folder) / str(number) if len(waves) > 1 else Path(folder)
        results = teach(
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


def _waves(lessons: Sequence[Lesson]) -> list[list[Lesson]]:
    """The lessons in an order in which everything that a task extends is trained before it."""
    waves: list[list[Lesson]] = []
    waiting = list(lessons)
    while waiting:
        open_ones = {id(lesson.task) for lesson in waiting}
        wave = [lesson for lesson in waiting if not open_ones & {id(older) for older in ancestors([lesson.task])}]
        if not wave:
            raise TrainingError("these tasks extend each other in a circle.")
        waves.append(wave)
        waiting = [lesson for lesson in waiting if not any(lesson is done for done in wave)]
    return waves


def teach(
    backbone: Backbone,
    lessons: Sequence[Lesson],
    *,
    cache: Cache | None = None,
    halving: bool = False,
    folder: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    quiet: bool = True,
    tensorboard: bool = False,
) -> list[FitResult]:
    """Trains all lessons at once, one pass of the backbone for all of them at each step, and measures them.

    With `halving`, after every quarter of the epochs the worse half of each task's runs stops.
    """
    from memoro.train.folder import CHECKPOINT, RunFolder, draw_run
    from memoro.train.watch import ProgressBar

    need("accelerate", "torchmetrics", "matplotlib")
    tasks = [lesson.task for lesson in lessons]
    if len({id(task) for task in tasks}) < len(tasks):
        raise TrainingError("a task stands there twice: it can learn from one set; make a task for each.")
    backbone.check_unchanged()
    for task in [*tasks, *ancestors(tasks)]:
        check_backbone(task, backbone)
    for lesson in lessons:
        check_labels(lesson.task, lesson.splits)
        backbone.check_pixels(torch.empty(1, 3, *output_size(lesson.preprocessing)))
    processes = find_processes(backbone.device)
    quiet = quiet or not processes.main
    how: dict[str, Any] = {"workers": workers, "halving": halving, "processes": processes}
    checkpoint = None if folder is None else folder / CHECKPOINT
    cache = _as_before(_check_cache(cache, lessons), checkpoint if resume else None)
    courses = Courses(backbone, lessons, cache=cache, **how)
    if cache is not None:
        try:
            _fill(courses, cache, processes, quiet)
            if processes.local_rank:
                courses = Courses(backbone, lessons, cache=cache, **how)  # they read what is there now
        except CacheError as error:
            if cache.required:
                raise
            if not quiet:
                plain_console(stderr=True, soft_wrap=True).print(f"note: every pass is computed anew: {error}")
            cache = None
            courses = Courses(backbone, lessons, cache=None, **how)
    identity = {**_identity(backbone, lessons, cache), "halving": halving}
    place: RunFolder | None = None
    watchers: list[Watcher] = []
    if folder is not None and processes.main:
        names = list(dict.fromkeys(lesson.splits.name for lesson in lessons))
        facts = {"backbone": backbone.name, "fingerprint": backbone.fingerprint.digest}
        config = {**identity, **facts, "set": names[0] if len(names) == 1 else names}
        place = RunFolder(folder, config, tensorboard=tensorboard)
        watchers.append(place)
    training = Training(
        backbone=backbone,
        courses=courses.list,
        watchers=watchers,
        checkpoint=checkpoint,
        identity=identity,
        resume=resume,
        processes=processes,
    )
    title = tasks[0].name if len(tasks) == 1 else f"{len(tasks)} runs"
    with ProgressBar(title, sum(course.total_steps for course in courses.list), quiet) as shown:
        watchers.append(shown)
        seconds = run_training(training)
    if all(run.diverged for run in courses.runs):
        kept = "" if place is None else f" The last good checkpoint is in {place.checkpoint}."
        raise TrainingError(f"{tasks[0].name!r}: {courses.runs[0].stopped}.{kept}")
    results = examine(backbone, lessons, courses, folder, seconds, workers, processes)
    if place is not None and len(results) == 1 and results[0].logits is not None:
        draw_run(place.path, "", tasks[0], results[0])
    return results


def _check_cache(cache: Cache | None, lessons: Sequence[Lesson]) -> Cache | None:
    """The cache, None where nothing could be kept; an error where it was asked for and cannot serve."""
    apart = [lesson for lesson in lessons if not lesson.regime.composes]
    if cache is not None and cache.required and apart:
        raise TrainingError(
            f"regime {apart[0].regime.name!r} changes base tokens: there is no base pass to keep. Leave out the cache."
        )
    return None if len(apart) == len(lessons) else cache


def _as_before(cache: Cache | None, checkpoint: Path | None) -> Cache | None:
    """None where a training that goes on had not kept its features for lack of room: it must go on as it was."""
    if cache is None or cache.required or checkpoint is None or not checkpoint.is_file():
        return cache
    return cache if read_identity(checkpoint).get("features") is not None else None


def _fill(courses: Courses, cache: Cache, processes: Processes, quiet: bool) -> None:
    """The first process of each machine computes what is missing there, the others wait for it."""
    problem = None
    if processes.local_rank == 0:
        views, size = estimate(courses.cached)
        try:
            with ExitStack() as stack:
                title = f"features ({say_bytes(size)})"
                tick = stack.enter_context(bar(title, views)) if views and not quiet else (lambda images: None)
                fill_caches(courses.cached, cache, tick)
        except CacheError as error:
            problem = str(error)
    problems = [problem for problem in processes.collect(problem) if problem is not None]
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


def check_labels(task: Task | Baseline, splits: Splits | Streams) -> None:
    if splits.kind != task.kind:
        raise TrainingError(f"{task.name!r} has a {task.kind} head, but {splits.name} is a {splits.kind} set.")
    if tuple(task.labels) != splits.labels:
        raise TrainingError(f"{splits.name} has other labels than {task.name!r}: load it with labels=task.labels.")


def _spec_facts(task: Task | Baseline) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": task.name, "labels": task.labels, "kind": task.kind}
    if isinstance(task, Baseline):
        return {**facts, "sizes": dict(task.spec.sizes)}
    spec = task.spec
    return {
        **facts,
        "cells": spec.cells,
        "from_layer": spec.from_layer,
        "memory_norm": spec.memory_norm,
        "extends": [parent.content for parent in task.parents],
    }


def _identity(backbone: Backbone, lessons: Sequence[Lesson], cache: Cache | None) -> dict[str, Any]:
    """What must be the same for a resume to be the same training."""
    digests: dict[int, str | None] = {}
    for lesson in lessons:
        for images in (lesson.splits.train, lesson.splits.val):
            if id(images) not in digests:
                digests[id(images)] = _data_digest(images)
    return {
        "recipe": [lesson.recipe.to_json() for lesson in lessons],
        "task": [{**_spec_facts(lesson.task), "regime": lesson.regime.name} for lesson in lessons],
        "backbone": backbone.fingerprint.digest,
        "data": [
            {
                "train": digests[id(lesson.splits.train)],
                "val": digests[id(lesson.splits.val)],
                "held": None if lesson.held is None else hashlib.sha256(lesson.held.tobytes()).hexdigest(),
            }
            for lesson in lessons
        ],
        "preprocessing": [lesson.preprocessing.to_json() for lesson in lessons],
        "features": None if cache is None else cache.dtype,
    }


def _data_digest(images: ImageSet | ImageStream | None) -> str | None:
    """What a set holds, in its order: a resume on other images would not be the same training."""
    if not isinstance(images, ImageSet):
        return None if images is None else images.name
    whole = hashlib.sha256(images.targets.numpy().tobytes())
    for index in range(len(images)):
        whole.update((images.key(index) if images.digests is not None else images.where(index)).encode())
    return whole.hexdigest()
