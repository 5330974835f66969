"""A course: runs over the same images, how they are examined, and where they stand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import Batch, ImageSet, ImageStream
from memoro.engine import Features
from memoro.errors import TrainingError
from memoro.train.cached import CachedBatch
from memoro.train.processes import ALONE, Processes
from memoro.train.recipe import Recipe
from memoro.train.runs import OwnPass, Run, SharedPass, pass_for

AnyBatch = Batch | CachedBatch


class Batches(Protocol):
    """A loader of pixels or of features."""

    @property
    def images(self) -> ImageSet | ImageStream: ...

    def __len__(self) -> int: ...

    def epoch(self, number: int, start: int = 0) -> Iterator[AnyBatch]: ...


@dataclass
class Progress:
    """Where a course stands. Everything else follows from it: data order and augmentation are pure functions."""

    step: int = 0
    """Optimiser steps taken."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    sums: dict[str, list[float]] = field(default_factory=dict)
    """Of the epoch under way, per run: loss, right answers, images."""


@dataclass(frozen=True)
class Exam:
    """Images that some runs are scored on after every epoch."""

    loader: Batches
    runs: Sequence[Run]


@dataclass
class Course:
    """Order and views of the images come from the first run's recipe, whose share of that all have in common."""

    runs: Sequence[Run]
    train: Batches
    exams: Sequence[Exam] = ()
    name: str = ""
    halving: bool = False
    """After every quarter of the epochs, the worse half of each task's runs stops."""
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self._batches: Iterator[AnyBatch] | None = None
        self._pass: SharedPass | OwnPass | None = None
        self._began, self._images = 0.0, 0

    @property
    def recipe(self) -> Recipe:
        return self.runs[0].recipe

    @property
    def total_steps(self) -> int:
        if self.recipe.steps is not None:
            return self.recipe.steps
        return self.recipe.epochs * -(-len(self.train) // self.recipe.accumulate)

    @property
    def active(self) -> list[Run]:
        return [run for run in self.runs if run.stopped is None]

    @property
    def finished(self) -> bool:
        # A checkpoint may lie between the last step of an epoch and its exam: then batches are counted as done.
        return not self.active or (self.progress.step >= self.total_steps and not self.progress.batch)

    def take(self) -> list[AnyBatch]:
        """The batches of the next step; none where the epoch is over."""
        if self.progress.step >= self.total_steps:
            return []
        if self._batches is None:
            self._batches = self.train.epoch(self.progress.epoch, start=self.progress.batch)
            self._began, self._images = time.monotonic(), 0
        return list(islice(self._batches, self.recipe.accumulate))

    def shared(self, backbone: Backbone) -> SharedPass | OwnPass:
        """The pass of the runs that still take part."""
        if self._pass is None or len(self._pass.rows) > len(self.active):
            self._pass = pass_for(backbone, [run.task for run in self.active])
        return self._pass

    def count(self, group: Sequence[AnyBatch]) -> float:
        """Notes that a step is done; returns the images per second of this epoch so far."""
        self.progress.step += 1
        self.progress.batch += len(group)
        self._images += sum(batch.total for batch in group)
        return self._images / (time.monotonic() - self._began)

    def halve(self) -> None:
        """Stops the worse half of each task's runs by validation score, where a quarter of the epochs is over."""
        done, epochs = self.progress.epoch + 1, self.recipe.epochs
        same_quarter = 4 * done // epochs == 4 * (done - 1) // epochs
        if not self.halving or self.recipe.steps is not None or same_quarter or done >= epochs:
            return
        names = dict.fromkeys(run.task.name for run in self.active)
        for name in names:
            runs = [run for run in self.active if run.task.name == name and run.best_score is not None]
            runs.sort(key=lambda run: run.best_score or (0.0, 0.0), reverse=True)
            for run in runs[-(-len(runs) // 2) :]:
                run.stopped = f"not among the better half after epoch {done}"

    def next_epoch(self) -> None:
        self.progress.epoch += 1
        self.progress.batch = 0
        self.progress.sums = {}
        self._batches = None


def inputs_of(batch: AnyBatch, backbone: Backbone) -> Tensor | Features:
    """What a pass takes of a batch."""
    return batch.read() if isinstance(batch, CachedBatch) else batch.pixels.to(backbone.device, backbone.dtype)


def collect_logits(
    answer: Callable[[Any], Sequence[Tensor]],
    backbone: Backbone,
    loader: Batches,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    tick: Callable[[int], None] = lambda images: None,
    processes: Processes = ALONE,
) -> tuple[list[Tensor], Tensor]:
    """The logits that `answer` gives for each of its tasks over all images of a loader, and the targets, on the CPU.

    With several processes the loader gives each its part, and all get the whole, in the order of the images.
    """
    parts: list[tuple[list[Tensor], Tensor, Tensor]] = []
    with torch.no_grad():
        for batch in loader.epoch(0):
            if not len(batch.targets):
                continue
            with autocast():
                out = answer(inputs_of(batch, backbone))
            parts.append(([logits.float().cpu() for logits in out], batch.targets, batch.index))
            tick(len(batch.targets))
    parts = [part for share in processes.collect(parts) for part in share]
    if not parts:
        raise TrainingError(f"{loader.images.name}: there are no images to evaluate on.")
    answers, targets, places = zip(*parts, strict=True)
    order = torch.cat(places).argsort(stable=True)
    return [torch.cat(logits)[order] for logits in zip(*answers, strict=True)], torch.cat(targets)[order]
