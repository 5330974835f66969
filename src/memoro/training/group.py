"""A group: runs over the same images, how they are examined, and where they stand."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import ImageSet, ImageStream, Loader, Splits, Streams
from memoro.errors import TrainingError
from memoro.evaluation.logits import AnyBatch, Batches
from memoro.heads import class_weights
from memoro.images import Preprocessing
from memoro.regimes import Baseline, Regime
from memoro.tasks.task import Task
from memoro.training.cached import Buffers, Cache, CachedLoader
from memoro.training.distributed import ALONE, Processes
from memoro.training.recipe import Recipe
from memoro.training.run import Goal, OwnPass, Run, SharedPass, ancestors, pass_for


@dataclass
class Progress:
    """Where a group stands. Everything else follows from it: data order and augmentation are pure functions."""

    step: int = 0
    """Optimiser steps taken."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    sums: dict[str, list[float]] = field(default_factory=dict)
    """Of the epoch under way, per run: loss, right answers, images."""


@dataclass(frozen=True)
class ValidationSet:
    """Images that some runs are scored on after every epoch."""

    loader: Batches
    runs: Sequence[Run]


@dataclass
class RunGroup:
    """Order and views of the images come from the first run's recipe, whose share of that all have in common."""

    runs: Sequence[Run]
    train: Batches
    val_sets: Sequence[ValidationSet] = ()
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
        # A checkpoint may lie between the last step of an epoch and its val_set: then batches are counted as done.
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

    def count(self, batches: Sequence[AnyBatch]) -> float:
        """Notes that a step is done; returns the images per second of this epoch so far."""
        self.progress.step += 1
        self.progress.batch += len(batches)
        self._images += sum(batch.total for batch in batches)
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


SHARED = ("epochs", "steps", "batch_size", "accumulate", "augment", "views", "precision", "data_seed")
"""What runs over the same images must have in common to share a pass."""


@dataclass(frozen=True)
class RunSpec:
    """One run to be."""

    task: Task | Baseline
    recipe: Recipe
    regime: Regime
    splits: Splits | Streams
    preprocessing: Preprocessing
    held: npt.NDArray[np.int64] | None = None
    """Training images that it does not learn from but is scored on: a fold."""

    def __post_init__(self) -> None:
        if not self.splits.train:
            raise TrainingError(f"{self.splits.name} has no training images.")

    @property
    def train(self) -> ImageSet | ImageStream:
        assert self.splits.train is not None
        return self.splits.train

    def start(self, first: RunSpec) -> Run:
        """The run at its beginning, in a group whose images are those of the `first` spec."""
        sample_weight = None
        if self.held is not None:
            sample_weight = torch.ones(len(self._set(self.train)))
            sample_weight[torch.from_numpy(self.held)] = 0.0
        other = self.splits is not first.splits
        balance = None
        if self.recipe.balance:
            targets = self._set(self.train).targets
            own = targets if sample_weight is None else targets[sample_weight > 0]
            balance = class_weights(self.splits.kind, own, len(self.splits.labels))
        goal = Goal(
            targets=self._set(self.train).targets if other else None,
            val_targets=self._val_targets(),  # an val_set may be shared with groups of other labels
            sample_weight=sample_weight,
            class_weights=balance,
        )
        return Run.start(self.task, self.recipe, self.regime.trains(self.task), goal)

    def _val_targets(self) -> Tensor | None:
        if self.held is not None:
            return self._set(self.train).targets[torch.from_numpy(self.held)]
        return self.splits.val.targets if isinstance(self.splits.val, ImageSet) else None

    def _set(self, images: ImageSet | ImageStream) -> ImageSet:
        if isinstance(images, ImageStream):
            raise TrainingError(
                f"{images.name}: a stream does not tell beforehand what it shows: leave out balance, folds and others."
            )
        return images


class RunGroups:
    """The groups of some specs, with the loaders that they share."""

    def __init__(
        self,
        backbone: Backbone,
        specs: Sequence[RunSpec],
        *,
        cache: Cache | None,
        workers: int | None,
        halving: bool = False,
        processes: Processes = ALONE,
    ) -> None:
        self._backbone, self._cache, self._workers, self._halving = backbone, cache, workers, halving
        self._processes = processes
        tasks = [spec.task for spec in specs if spec.regime.composes]
        self._first = min((task.from_layer for task in [*tasks, *ancestors(tasks)]), default=0)
        self.cached: list[CachedLoader] = []
        self._val_loaders: dict[Any, Batches] = {}
        self._val_buffers: Buffers = {}
        self.runs: list[Run] = []
        """In the order of the specs."""
        together: dict[Any, list[RunSpec]] = {}
        for spec in specs:
            common = [repr(getattr(spec.recipe, name)) for name in SHARED]
            key = (content_of(spec.train), spec.preprocessing, spec.regime.composes, *common)
            together.setdefault(key, []).append(spec)
        precisions = {spec.recipe.precision for spec in specs}
        if len(precisions) > 1:
            raise TrainingError(f"one pass has one precision, not {' and '.join(sorted(precisions))}.")
        started: dict[int, Run] = {}
        self.list = [self._group(some, started, at) for at, some in enumerate(together.values(), start=1)]
        self.runs = [started[id(spec)] for spec in specs]

    def _group(self, specs: Sequence[RunSpec], started: dict[int, Run], number: int) -> RunGroup:
        first = specs[0]
        runs = [spec.start(first) for spec in specs]
        started |= {id(spec): run for spec, run in zip(specs, runs, strict=True)}
        recipe = first.recipe
        train = self._loader(
            first, first.train, augment=recipe.augment, shuffle=True, seed=recipe.data_seed, views=recipe.views
        )
        val_sets: dict[int, tuple[Batches, list[Run]]] = {}
        for spec, run in zip(specs, runs, strict=True):
            loader = self.val_set(spec)
            if loader is not None:
                val_sets.setdefault(id(loader), (loader, []))[1].append(run)
        return RunGroup(
            runs=runs,
            train=train,
            val_sets=[ValidationSet(loader, some) for loader, some in val_sets.values()],
            name=f"{number}: {first.splits.name}",
            halving=self._halving,
        )

    def val_set(self, spec: RunSpec) -> Batches | None:
        """What a spec is scored on after every epoch, None where nothing was kept for that."""
        images = spec.splits.val
        if spec.held is not None:
            assert isinstance(spec.train, ImageSet)
            images = spec.train.subset(spec.held)
        if images is None:
            return None
        key = (content_of(images), spec.preprocessing, spec.regime.composes, spec.recipe.batch_size)
        if key not in self._val_loaders:
            self._val_loaders[key] = self._loader(spec, images)
        return self._val_loaders[key]

    def _loader(self, spec: RunSpec, images: ImageSet | ImageStream, **how: Any) -> Batches:
        size, here = spec.recipe.batch_size, self._processes
        common: dict[str, Any] = {"workers": self._workers, "rank": here.rank, "world": here.world}
        loader = Loader(images, spec.preprocessing, batch_size=size, **common, **how)
        if self._cache is None or isinstance(images, ImageStream) or not spec.regime.composes:
            return loader
        if how and spec.recipe.views is None:
            raise TrainingError("features can be kept of a fixed number of views only: set views, such as views=4.")
        room = None if how else self._val_buffers  # val_sets are held one after the other
        self.cached.append(CachedLoader(loader, self._backbone, self._cache, self._first, room))
        return self.cached[-1]


def content_of(images: ImageSet | ImageStream) -> str:
    """What a set shows, in its order: equal for the same images under other labels."""
    if isinstance(images, ImageStream):
        return f"{images.name} {id(images)}"
    if images.digests is not None:
        return hashlib.sha256(np.ascontiguousarray(images.digests).tobytes()).hexdigest()
    return f"{id(images.source)} {hashlib.sha256(images.rows.tobytes()).hexdigest()}"
