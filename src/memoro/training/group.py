"""Run groups: runs over the same images, which share every batch and base pass."""

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

from memoro.backbones import Backbone
from memoro.data import ImageSet, Loader, Splits
from memoro.engine.forward import Part
from memoro.errors import TrainingError
from memoro.evaluation.logits import AnyBatch, Batches
from memoro.heads import HEADS, Scale
from memoro.images import Preprocessing
from memoro.regimes import Regime
from memoro.tasks.spec import Model
from memoro.tasks.task import Task
from memoro.training.cached import Buffers, Cache, CachedLoader
from memoro.training.distributed import Processes
from memoro.training.recipe import Recipe, check_views
from memoro.training.run import Run, ancestors, join_tasks

LEFT_OUT = "leave-one-out"
"""The split of a read-out without any other: each training image is answered by a solution without it."""
IN_COMMON = ("epochs", "steps", "batch_size", "accumulate", "views", "data_seed")
"""Fields of the recipe that are the same for all runs of a group."""


@dataclass(frozen=True)
class RunSpec:
    """What to train on what, and how."""

    task: Model
    recipe: Recipe
    regime: Regime
    splits: Splits
    preprocessing: Preprocessing
    held_out: npt.NDArray[np.int64] | None = None
    """Indices of the training images that it is scored on instead of learning from them: a fold."""
    start_from: str | None = None
    """Content hash of the earlier task whose weights it starts from."""

    def __post_init__(self) -> None:
        if not self.splits.train:
            raise TrainingError(f"{self.splits.name} has no training images.")

    @property
    def train(self) -> ImageSet:
        assert self.splits.train is not None
        return self.splits.train

    @property
    def val(self) -> ImageSet | None:
        """The images that it is scored on after every epoch."""
        return self.splits.val if self.held_out is None else self.train.subset(self.held_out)

    @property
    def final(self) -> tuple[str, ImageSet]:
        """The split that its metrics are measured on: one that it did not learn from, if there is one."""
        if self.held_out is not None:
            return "fold", self.train.subset(self.held_out)
        if test := self.splits.new_test:
            return "test", test
        if self.splits.val:
            return "val", self.splits.val
        return LEFT_OUT if self.regime.readout == 1 else "train", self.train

    @property
    def evaluated(self) -> dict[str, ImageSet]:
        """`final`, and the validation split if it has one: what its task is calibrated on."""
        split, images = self.final
        val = {"val": self.splits.val} if self.held_out is None and self.splits.val else {}
        return {split: images, **val}

    @property
    def group_key(self) -> tuple[Any, ...]:
        """Equal for runs that can share every batch."""
        common = [repr(getattr(self.recipe, name)) for name in IN_COMMON]
        views = self.recipe.augment.for_kind(self.splits.kind)
        return content_key(self.train), self.preprocessing, self.regime.composes, views, *common

    def start(self, first: RunSpec, val_loader: Batches | None) -> Run:
        """The run before its first step, in a group whose batches are those of the `first` spec."""
        sample_weight = balance = None
        if self.held_out is not None:
            sample_weight = torch.ones(len(self.train), device="cpu")
            sample_weight[torch.from_numpy(self.held_out)] = 0.0
        learned = self.train.targets if sample_weight is None else self.train.targets[sample_weight > 0]
        if self.recipe.balance:
            balance = HEADS[self.splits.kind].class_weights(learned, len(self.splits.labels))
        val = self.val
        return Run.start(
            self.task,
            self.recipe,
            self.regime.trains(self.task),
            targets=self.train.targets if self.splits is not first.splits else None,
            sample_weight=sample_weight,
            scale=Scale.of(learned) if self.splits.kind == "regression" else None,
            class_weights=balance,
            val_loader=val_loader,
            val_targets=None if val is None else val.targets,  # other labels may share the loader
        )


@dataclass
class Progress:
    """How far a group is. Everything else follows from it: data order and augmentation are pure functions."""

    step: int = 0
    """Optimiser steps done."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    sums: dict[str, list[float]] = field(default_factory=dict)
    """Over this epoch, for each run: loss, correct answers, images."""


@dataclass
class RunGroup:
    """Runs over the same images. Order and views of the images follow the first run's recipe."""

    runs: Sequence[Run]
    loader: Batches
    name: str = ""
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self._batches: Iterator[AnyBatch] | None = None
        self._forward: Part | None = None
        self._began, self._images = 0.0, 0

    @property
    def recipe(self) -> Recipe:
        return self.runs[0].recipe

    @property
    def total_steps(self) -> int:
        if self.recipe.steps is not None:
            return self.recipe.steps
        return self.recipe.epochs * -(-len(self.loader) // self.recipe.accumulate)

    @property
    def active(self) -> list[Run]:
        return [run for run in self.runs if run.stopped is None]

    @property
    def finished(self) -> bool:
        # A checkpoint between an epoch's last step and its validation still counts the epoch's batches.
        return not self.active or (self.progress.step >= self.total_steps and not self.progress.batch)

    @property
    def val_sets(self) -> list[tuple[Batches, list[Run]]]:
        """Each validation loader, with the active runs that are scored on it."""
        found: dict[int, tuple[Batches, list[Run]]] = {}
        for run in self.active:
            if run.val_loader is not None:
                found.setdefault(id(run.val_loader), (run.val_loader, []))[1].append(run)
        return list(found.values())

    def next_batches(self) -> list[AnyBatch]:
        """The batches of the next step; none when the epoch is over."""
        if self.progress.step >= self.total_steps:
            return []
        if self._batches is None:
            self._batches = self.loader.epoch(self.progress.epoch, start=self.progress.batch)
            self._began, self._images = time.perf_counter(), 0
        return list(islice(self._batches, self.recipe.accumulate))

    def forward(self, backbone: Backbone) -> Part:
        """The forward pass of the active runs' tasks."""
        if self._forward is None or len(self._forward[1]) > len(self.active):
            self._forward = join_tasks(backbone, [run.task for run in self.active if isinstance(run.task, Task)])
        return self._forward

    def count_step(self, batches: Sequence[AnyBatch]) -> float:
        """Counts a finished step; returns the images per second of this epoch so far."""
        self.progress.step += 1
        self.progress.batch += len(batches)
        self._images += sum(batch.total for batch in batches)
        return self._images / max(time.perf_counter() - self._began, 1e-9)  # a clock may not have ticked yet

    def next_epoch(self) -> None:
        self.progress = Progress(self.progress.step, self.progress.epoch + 1)
        self._batches = None


class Loaders:
    """Builds the loaders of some runs. Those of the same images are shared; with a cache they read kept features."""

    def __init__(
        self, backbone: Backbone, specs: Sequence[RunSpec], cache: Cache | None, workers: int | None, here: Processes
    ) -> None:
        self.cached: list[CachedLoader] = []
        self._backbone, self._cache = backbone, cache
        self._common: dict[str, Any] = {"workers": workers, "rank": here.rank, "world": here.world}
        tasks = [spec.task for spec in specs if spec.regime.composes]
        self._first_layer = min((task.from_layer for task in [*tasks, *ancestors(tasks)]), default=0)
        self._evaluation: dict[Any, Batches] = {}
        self._buffers: Buffers = {}

    def train(self, spec: RunSpec) -> Batches:
        recipe = spec.recipe
        if spec.regime.composes:
            check_views(recipe, self._cache)
        how: dict[str, Any] = {
            "augment": recipe.augment,
            "shuffle": True,
            "seed": recipe.data_seed,
            "views": recipe.used_views,
        }
        return self._build(spec, spec.train, None, **how)

    def evaluation(self, spec: RunSpec, images: ImageSet, *, keep: bool) -> Batches:
        """Plain views in order; `keep` says whether their features are worth keeping."""
        key = (content_key(images), spec.preprocessing, spec.regime.composes, spec.recipe.batch_size, keep)
        if key not in self._evaluation:
            # Validation sets are read one after the other, so they share buffers.
            self._evaluation[key] = self._build(spec, images, self._buffers, keep=keep)
        return self._evaluation[key]

    def _build(
        self, spec: RunSpec, images: ImageSet, buffers: Buffers | None, keep: bool = True, **how: Any
    ) -> Batches:
        loader = Loader(images, spec.preprocessing, batch_size=spec.recipe.batch_size, **self._common, **how)
        if self._cache is None or not keep or not spec.regime.composes:
            return loader
        self.cached.append(CachedLoader(loader, self._backbone, self._cache, self._first_layer, buffers))
        return self.cached[-1]


def build_groups(specs: Sequence[RunSpec], loaders: Loaders) -> tuple[list[RunGroup], list[Run]]:
    """The groups that the runs form, and the runs in the order of the specs."""
    together: dict[Any, list[RunSpec]] = {}
    for spec in specs:
        together.setdefault(spec.group_key, []).append(spec)
    groups, started = [], dict[int, Run]()
    for number, (first, *rest) in enumerate(together.values(), start=1):
        loader = loaders.train(first)
        for spec in (first, *rest):
            images = spec.val
            started[id(spec)] = spec.start(
                first, None if images is None else loaders.evaluation(spec, images, keep=True)
            )
        runs = [started[id(spec)] for spec in (first, *rest)]
        groups.append(RunGroup(runs, loader, f"{number}: {first.splits.name}"))
    return groups, [started[id(spec)] for spec in specs]


def content_key(images: ImageSet) -> str:
    """Equal for sets of the same images in the same order, whatever their labels."""
    if images.digests is not None:
        return hashlib.sha256(np.ascontiguousarray(images.digests).tobytes()).hexdigest()
    return f"{id(images.source)} {hashlib.sha256(images.rows.tobytes()).hexdigest()}"
