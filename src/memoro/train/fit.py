"""`fit`: a task and images in, a trained task and the figures to trust it out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.composition import check_backbone
from memoro.data import ImageSet, ImageStream, Loader, Splits, Streams, load_data
from memoro.data.augment import output_size
from memoro.errors import TrainingError
from memoro.extras import need
from memoro.preprocessing import Preprocessing
from memoro.regimes import Regime, find_regime
from memoro.task import Task
from memoro.train.loop import Training, Watcher, collect_logits, run_training
from memoro.train.metrics import confusion, measure
from memoro.train.objective import class_weights
from memoro.train.recipe import Recipe
from memoro.train.runs import Run, SharedPass, ancestors

SHARED = ("epochs", "steps", "batch_size", "accumulate", "balance", "augment", "precision", "data_seed")
"""What runs of one pass have in common."""


@dataclass(frozen=True)
class FitResult:
    """What a training gave."""

    task: Task
    history: list[dict[str, Any]]
    """One entry an epoch."""
    metrics: dict[str, Any]
    """Figures on the test split, or on the validation split where there is none; `split` says which. Empty for a run
    that left a shared pass because its loss went beyond all bounds; `notes` tell."""
    folder: Path | None
    notes: tuple[str, ...]

    def __iter__(self) -> Iterator[Any]:
        """`task, history, metrics = fit(…)`"""
        return iter((self.task, self.history, self.metrics))


def fit(
    backbone: Backbone,
    task: Task,
    data: Any,
    *,
    recipe: Recipe | None = None,
    regime: str | None = None,
    image_size: int | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    quiet: bool = False,
    tensorboard: bool = False,
    **changes: Any,
) -> FitResult:
    """Trains `task` in place on `data` (anything that load_data takes, or Splits) and measures it.

    The recipe's fields can be given by name: `fit(backbone, task, "photos", epochs=5, lr=0.03)`. With `folder`,
    figures, settings, pictures and a checkpoint are kept there, and `resume` goes on from that checkpoint.
    """
    recipe = build_recipe(recipe, changes)
    way = find_regime(regime or ("head" if task.from_layer == backbone.depth else "memory"))
    splits = data if isinstance(data, (Splits, Streams)) else _load(data, task, recipe, workers, quiet)
    preprocessing = backbone.preprocessing if image_size is None else backbone.preprocessing.at(image_size)
    results = fit_many(
        backbone,
        [(task, recipe)],
        way,
        splits,
        preprocessing,
        folder=None if folder is None else Path(folder),
        resume=resume,
        workers=workers,
        quiet=quiet,
        tensorboard=tensorboard,
    )
    return results[0]


def fit_many(
    backbone: Backbone,
    settings: Sequence[tuple[Task, Recipe]],
    regime: Regime | Sequence[Regime],
    splits: Splits | Streams,
    preprocessing: Preprocessing,
    *,
    folder: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    quiet: bool = True,
    tensorboard: bool = False,
) -> list[FitResult]:
    """Trains several tasks on the same images, one pass of the backbone for all of them at each step."""
    from memoro.train.folder import RunFolder
    from memoro.train.watch import ProgressBar

    need("accelerate", "torchmetrics", "matplotlib")
    if not splits.train:
        raise TrainingError(f"{splits.name} has no training images.")
    backbone.check_pixels(torch.empty(1, 3, *output_size(preprocessing)))
    tasks, first = [task for task, _ in settings], settings[0][1]
    for task in [*tasks, *ancestors(tasks)]:
        check_backbone(task, backbone)
    for task, recipe in settings:
        check_labels(task, splits)
        differ = [name for name in SHARED if getattr(recipe, name) != getattr(first, name)]
        if differ:
            raise TrainingError(f"runs in one pass share their {', '.join(differ)}: train {task.name!r} by itself.")
    regimes = [regime] * len(settings) if isinstance(regime, Regime) else list(regime)
    runs = [Run.start(task, recipe, way.trains(task)) for (task, recipe), way in zip(settings, regimes, strict=True)]
    common: dict[str, Any] = {"batch_size": first.batch_size, "workers": workers}
    train = Loader(splits.train, preprocessing, augment=first.augment, shuffle=True, seed=first.data_seed, **common)
    val = None if splits.val is None else Loader(splits.val, preprocessing, **common)
    identity = {
        "recipe": [recipe.to_json() for _, recipe in settings],
        "task": [{**_spec_facts(task), "regime": way.name} for (task, _), way in zip(settings, regimes, strict=True)],
        "backbone": backbone.fingerprint.digest,
        "data": {name: _data_digest(part) for name, part in (("train", splits.train), ("val", splits.val))},
        "preprocessing": preprocessing.to_json(),
    }
    watchers: list[Watcher] = []
    place: RunFolder | None = None
    if folder is not None:
        config = {**identity, "backbone": backbone.name, "fingerprint": backbone.fingerprint.digest, "set": splits.name}
        place = RunFolder(folder, config, tensorboard=tensorboard)
        watchers.append(place)
    training = Training(
        backbone=backbone,
        runs=runs,
        train=train,
        val=val,
        weights=class_weights(splits.kind, _targets(splits.train)) if first.balance else None,
        watchers=watchers,
        checkpoint=None if place is None else place.checkpoint,
        identity=identity,
        resume=resume,
    )
    title = runs[0].task.name if len(runs) == 1 else f"{len(runs)} runs"
    with ProgressBar(title, training.total_steps, quiet) as bar:
        watchers.append(bar)
        progress = run_training(training)
    if all(run.diverged for run in runs):
        kept = "" if place is None else f" The last good checkpoint is in {place.checkpoint}."
        raise TrainingError(f"{runs[0].task.name!r}: {runs[0].stopped}.{kept}")

    final = splits.test or splits.val or splits.train
    split = next(name for name in ("test", "val", "train") if getattr(splits, name) is final)
    sound = [run for run in runs if not run.diverged]
    shared = SharedPass(backbone, [run.task for run in sound])
    logits, targets = collect_logits(shared, backbone, Loader(final, preprocessing, **common))
    answers = dict(zip(map(id, sound), logits, strict=True))
    results = []
    for run, way in zip(runs, regimes, strict=True):
        notes = splits.notes if run.stopped is None else (*splits.notes, run.stopped)
        if run.diverged:
            results.append(FitResult(run.task, run.history, {}, folder, notes))
            continue
        out = answers[id(run)]
        metrics = {"split": split, **measure(run.task.kind, run.task.labels, out, targets)}
        run.task.describe(
            preprocessing=preprocessing,
            training={
                "data": splits.name,
                "images": len(splits.train) if isinstance(splits.train, ImageSet) else splits.train.length,
                "regime": way.name,
                "optimizer": run.recipe.optimizer,
                "lr": run.recipe.lr,
                "batch_size": run.recipe.batch_size,
                "epochs": len(run.history),
                "steps": run.history[-1]["step"],
                "best_epoch": run.best_epoch,
                "seed": run.recipe.seed,
                "trained_parameters": sum(parameter.numel() for parameter in run.trained.values()),
                "seconds": round(progress.seconds, 1),
            },
            metrics={name: value for name, value in metrics.items() if value is not None},
        )
        if place is not None and len(runs) == 1:
            matrix = confusion(out, targets) if run.task.kind == "softmax" else None
            place.draw(run.task.name, run.history, matrix, run.task.labels)
        results.append(FitResult(run.task, run.history, metrics, folder, notes))
    return results


def build_recipe(recipe: Recipe | None, changes: dict[str, Any]) -> Recipe:
    """The recipe with some fields replaced; an unknown field is an error that lists them."""
    known = [field.name for field in fields(Recipe)]
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise TrainingError(f"a recipe has no {unknown[0]!r}. There are: {', '.join(known)}.")
    return replace(recipe or Recipe(), **changes)


def _load(data: Any, task: Task, recipe: Recipe, workers: int | None, quiet: bool) -> Splits:
    return load_data(
        data,
        kind=None if task.kind == "softmax" else task.kind,
        labels=task.labels,
        val_fraction=recipe.val_fraction,
        seed=recipe.data_seed,
        workers=workers,
        quiet=quiet,
    )


def check_labels(task: Task, splits: Splits | Streams) -> None:
    if splits.kind != task.kind:
        raise TrainingError(f"{task.name!r} has a {task.kind} head, but {splits.name} is a {splits.kind} set.")
    if tuple(task.labels) != splits.labels:
        raise TrainingError(f"{splits.name} has other labels than {task.name!r}: load it with labels=task.labels.")


def _spec_facts(task: Task) -> dict[str, Any]:
    spec = task.spec
    return {
        "name": spec.name,
        "labels": list(spec.labels),
        "kind": spec.kind,
        "cells": spec.cells,
        "from_layer": spec.from_layer,
        "memory_norm": spec.memory_norm,
        "extends": [parent.content for parent in task.parents],
    }


def _targets(images: ImageSet | ImageStream) -> Tensor:
    if isinstance(images, ImageStream):
        raise TrainingError(f"{images.name}: a stream does not tell how often each class occurs; leave out balance.")
    return images.targets


def _data_digest(images: ImageSet | ImageStream | None) -> str | None:
    """What a set holds, in its order: a resume on other images would not be the same training."""
    if not isinstance(images, ImageSet):
        return None if images is None else images.name
    whole = hashlib.sha256(images.targets.numpy().tobytes())
    for index in range(len(images)):
        whole.update((images.key(index) if images.digests is not None else images.where(index)).encode())
    return whole.hexdigest()
