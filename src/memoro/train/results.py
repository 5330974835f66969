"""What a training gave: figures of the best weights, on images that they never learned from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import ImageSet, Loader
from memoro.train.course import Batches, collect_logits
from memoro.train.lessons import Courses, Lesson, content_of
from memoro.train.metrics import measure
from memoro.train.processes import ALONE, Processes
from memoro.train.runs import Run, pass_for


@dataclass(frozen=True)
class FitResult:
    """What a training gave."""

    task: Any
    """The Task, or the Baseline, now with its best weights."""
    history: list[dict[str, Any]]
    """One entry an epoch."""
    metrics: dict[str, Any]
    """Figures on the test split, or on the validation split where there is none; `split` says which. Empty for a run
    that left a shared pass because its loss went beyond all bounds; `notes` tell."""
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
    lessons: Sequence[Lesson],
    courses: Courses,
    folder: Path | None,
    seconds: float,
    workers: int | None,
    processes: Processes = ALONE,
) -> list[FitResult]:
    """Each lesson's result: figures of its best weights on what it never learned from, where there is such a thing."""
    loaders: dict[str, Batches] = {}
    groups: dict[str, list[tuple[Lesson, Run]]] = {}
    for lesson, run in zip(lessons, courses.runs, strict=True):
        if run.diverged:
            continue
        exam = courses.exam(lesson) if lesson.held is not None or not lesson.splits.test else None
        images = exam.images if exam is not None else lesson.splits.test or lesson.train
        key = f"{content_of(images)} {lesson.preprocessing} {lesson.regime.composes}"
        if key not in loaders:
            share: dict[str, Any] = {"workers": workers, "rank": processes.rank, "world": processes.world}
            size = lesson.recipe.batch_size
            loaders[key] = Loader(images, lesson.preprocessing, batch_size=size, **share) if exam is None else exam
        groups.setdefault(key, []).append((lesson, run))
    answers: dict[int, tuple[Tensor, Tensor]] = {}
    for key, some in groups.items():
        answer = pass_for(backbone, [run.task for _, run in some])
        logits, targets = collect_logits(answer, backbone, loaders[key], processes=processes)
        for (lesson, run), out in zip(some, logits, strict=True):
            answers[id(run)] = out, _final_targets(lesson, targets)
    results = []
    for lesson, run in zip(lessons, courses.runs, strict=True):
        notes = lesson.splits.notes if run.stopped is None else (*lesson.splits.notes, run.stopped)
        if run.diverged:
            results.append(FitResult(run.task, run.history, {}, folder, notes))
            continue
        out, targets = answers[id(run)]
        metrics = {"split": _split_name(lesson), **measure(run.task.kind, run.task.labels, out, targets)}
        _describe(lesson, run, metrics, seconds)
        results.append(FitResult(run.task, run.history, metrics, folder, notes, out, targets))
    return results


def _split_name(lesson: Lesson) -> str:
    if lesson.held is not None:
        return "fold"
    return "test" if lesson.splits.test else "val" if lesson.splits.val else "train"


def _final_targets(lesson: Lesson, collected: Tensor) -> Tensor:
    """What the lesson's own set says of the images: a loader is shared by tasks with other labels."""
    if lesson.held is not None:
        assert isinstance(lesson.train, ImageSet)
        return lesson.train.targets[torch.from_numpy(lesson.held)]
    final = lesson.splits.test or lesson.splits.val or lesson.train
    return final.targets if isinstance(final, ImageSet) else collected


def _describe(lesson: Lesson, run: Run, metrics: dict[str, Any], seconds: float) -> None:
    """Writes into the task how it came about."""
    images = lesson.train
    run.task.describe(
        preprocessing=lesson.preprocessing,
        training={
            "data": lesson.splits.name,
            "images": len(images) if isinstance(images, ImageSet) else images.length,
            "regime": lesson.regime.name,
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
