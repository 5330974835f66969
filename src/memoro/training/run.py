"""Runs, each one training of one task, and the groups of runs that share every batch."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memoro.backbones import Backbone
from memoro.data import ImageSet, Loader, Splits
from memoro.data.splits import Index
from memoro.engine.forward import Forward, Part, answer_together
from memoro.errors import TrainingError
from memoro.evaluation.logits import AnyBatch, Batches
from memoro.heads import HEADS, Scale
from memoro.images import Preprocessing
from memoro.regimes import Regime
from memoro.regimes.start import ancestors
from memoro.tasks.mask import trace_lineage
from memoro.tasks.spec import Model
from memoro.tasks.task import Task
from memoro.training.cached import Buffers, Cache, CachedLoader
from memoro.training.recipe import Recipe, TrainOptions, check_views

LEFT_OUT = "leave-one-out"
"""The split of a read-out without any other: each training image is answered by a solution without it."""
IN_COMMON = ("epochs", "steps", "batch_size", "accumulate", "views", "data_seed")
"""Fields of the recipe that are the same for all runs of a group."""
PROGRESS = ("step", "epoch", "batch", "sums")
"""Fields of a group that a checkpoint has."""
HALF_SCALE = 2.0**16
"""What losses are multiplied by in float16 at first, so that gradients do not underflow."""
GROWTH = 1000
"""After so many steps without an overflow, a scale that was halved is doubled again."""


@dataclass
class LossScale:
    """What the losses of one run are multiplied by. In other precisions than float16 it is 1, and stays so."""

    value: float = 1.0
    most: float = 1.0
    good_steps: int = 0
    """Steps since the scale was halved."""

    def shrink(self) -> bool:
        """Halves the scale because gradients overflowed; whether it could."""
        if self.value <= 1:
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True

    def count(self) -> None:
        """Counts a step without an overflow."""
        self.good_steps += 1
        if self.good_steps % GROWTH == 0 and self.value < self.most:
            self.value *= 2


@dataclass(eq=False)
class Run:
    """One training of one task: what it learns from what, and how; then how far it is."""

    task: Model
    recipe: Recipe
    regime: Regime
    splits: Splits
    preprocessing: Preprocessing
    held_out: Index | None = None
    """Indices of the training images that it is scored on instead of learning from them: a fold."""
    start_from: str | None = None
    """Content hash of the earlier task whose weights it starts from."""

    trained: dict[str, nn.Parameter] = field(default_factory=dict, init=False, repr=False)
    """The parameters that the regime trains; none if all is solved in closed form."""
    optimizer: torch.optim.Optimizer = field(init=False, repr=False)
    learns: Tensor | None = field(default=None, init=False, repr=False)
    """Weight of each training image (n,), on the CPU: 0 for those that are held out. None: all count alike."""
    sample_weight: Tensor | None = field(default=None, init=False, repr=False)
    """The same where the backbone is, as all that each step reads."""
    targets: Tensor | None = field(default=None, init=False, repr=False)
    """The targets of the training images, in their order; None: those that its batches carry."""
    class_weights: Tensor | None = field(default=None, init=False, repr=False)
    """See `Head.class_weights`."""
    scale: Scale | None = field(default=None, init=False, repr=False)
    """The scale of a regression's targets: within a training, the head answers in these units."""
    loss_scale: LossScale = field(default_factory=LossScale, init=False, repr=False)
    val_loader: Batches | None = field(default=None, init=False, repr=False)
    """The images of `val`; other runs may share the loader with labels of their own."""
    history: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)
    best: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    """The trained parameters at the best validation score so far; before the first one, those that a task began with,
    which it gets back if it diverges."""
    best_score: tuple[float, float] | None = field(default=None, init=False)
    best_epoch: int = field(default=-1, init=False)
    stopped: str | None = field(default=None, init=False)
    """Why it was stopped; None while it is active."""
    diverged: bool = field(default=False, init=False)
    answers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)
    """What the trained task answers, by split: its logits for the images of `evaluated`, and their targets."""

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
    def group_key(self) -> tuple[object, ...]:
        """Equal for runs that can share every batch."""
        common = [repr(getattr(self.recipe, name)) for name in IN_COMMON]
        views = self.recipe.augment.for_kind(self.splits.kind)
        return content_key(self.train), self.preprocessing, self.regime.composes, views, *common

    def start(self, first: Run, loaders: Loaders, device: torch.device, *, half: bool) -> None:
        """Gets ready for the first step, in a group whose batches are those of its `first` run."""
        if self.val is not None:
            self.val_loader = loaders.evaluation(self, self.val, keep=True)
        head, targets = HEADS[self.splits.kind], self.train.targets
        learned = targets
        if self.held_out is not None:
            self.learns = torch.ones(len(self.train), device="cpu")
            self.learns[torch.from_numpy(self.held_out)] = 0.0
            self.sample_weight, learned = self.learns.to(device), targets[self.learns > 0]
        if self.recipe.balance and (weights := head.class_weights(learned, len(self.splits.labels))) is not None:
            self.class_weights = weights.to(device)
        if self.splits is not first.splits:
            self.targets = targets.to(device)
        self.scale = Scale.of(learned) if head.has_numbers else None
        self.loss_scale = LossScale(HALF_SCALE, HALF_SCALE) if half else LossScale()
        self.trained = self.regime.trains(self.task)
        for parameter in self.task.parameters():
            parameter.requires_grad_(False)
        for parameter in self.trained.values():
            parameter.requires_grad_(True)
        self.optimizer = self.recipe.build_optimizer(self.trained)

    def step(self, gradients: Sequence[Tensor], norms: Sequence[float], loss: float, step: int, total: int) -> bool:
        """Clips the gradients, which are those of the scaled loss, and takes a step of the optimiser; whether it did.

        If some are not finite, the run has diverged, unless a smaller scale of the loss may help.
        """
        self.optimizer.zero_grad()
        finite = math.isfinite(sum(norms))
        if not finite and math.isfinite(loss) and self.loss_scale.shrink():
            return False
        norms = [norm / self.loss_scale.value for norm in norms]
        if not finite or not math.isfinite(loss):
            self.diverge(f"loss {loss:.3g}, gradient {math.hypot(*norms):.3g}", step + 1)
            return False
        for parameter, gradient, norm in zip(self.trained.values(), gradients, norms, strict=True):
            parameter.grad = gradient * (self.recipe.clip_scale(norm) / self.loss_scale.value)
        self.loss_scale.count()
        for settings in self.optimizer.param_groups:
            settings["lr"] = self.recipe.rate(step, total) * settings["lr_scale"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def diverge(self, what: str, step: int) -> None:
        self.diverged = True
        self.stopped = f"diverged at step {step} ({what}): choose a learning rate below {self.recipe.lr:g}"

    def keep_best(self, score: tuple[float, float], epoch: int) -> None:
        if self.best_score is None or score > self.best_score:
            self.best_score, self.best_epoch = score, epoch
            self.best = self.copy_trained()

    def copy_trained(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def restore_best(self) -> None:
        with torch.no_grad():
            for name, value in self.best.items() if self.diverged or self.best_score is not None else ():
                self.trained[name].copy_(value)
        self.task.finish_training()


@contextmanager
def standardised(runs: Sequence[Run]) -> Iterator[None]:
    """Within, the heads of regressions answer in the units of their `scale`; afterwards in the user's.

    A task that was never trained starts in units of its scale; if it is interrupted, it stays in them.
    """
    scaled = [(run.task, run.scale) for run in runs if run.scale is not None]
    trained = [(task, scale) for task, scale in scaled if task.spec.preprocessing is not None]
    for task, scale in trained:
        scale.unfold(task.head)
    try:
        yield
    except BaseException:
        for task, scale in trained:
            scale.fold(task.head)
        raise
    for task, scale in scaled:
        scale.fold(task.head)


@dataclass
class RunGroup:
    """Runs over the same images. Order and views of the images follow the first run's recipe.

    `PROGRESS` says how far it is; all else follows from that, since order and augmentation are pure functions.
    """

    runs: Sequence[Run]
    loader: Batches
    name: str = ""
    step: int = 0
    """Optimiser steps done."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    sums: dict[str, list[float]] = field(default_factory=dict)
    """Over this epoch, for each run by its number: loss, correct answers, images."""

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
        return not self.active or (self.step >= self.total_steps and not self.batch)

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
        if self.step >= self.total_steps:
            return []
        if self._batches is None:
            self._batches = self.loader.epoch(self.epoch, start=self.batch)
            self._began, self._images = time.perf_counter(), 0
        return list(islice(self._batches, self.recipe.accumulate))

    def forward(self, backbone: Backbone) -> Part:
        """The forward pass of the active runs' tasks."""
        if self._forward is None or len(self._forward[1]) > len(self.active):
            self._forward = join_tasks(backbone, [run.task for run in self.active if isinstance(run.task, Task)])
        return self._forward

    def count_step(self, batches: Sequence[AnyBatch]) -> float:
        """Counts a finished step; returns the images per second of this epoch so far."""
        self.step += 1
        self.batch += len(batches)
        self._images += sum(batch.total for batch in batches)
        return self._images / max(time.perf_counter() - self._began, 1e-9)  # a clock may not have ticked yet

    def next_epoch(self) -> None:
        self.epoch, self.batch, self.sums = self.epoch + 1, 0, {}
        self._batches = None


class Loaders:
    """Builds the loaders of some runs. Those of the same images are shared; with a cache they read kept features."""

    def __init__(self, backbone: Backbone, runs: Sequence[Run], cache: Cache | None, options: TrainOptions) -> None:
        self.cached: list[CachedLoader] = []
        self._backbone, self._cache = backbone, cache
        processes = options.processes
        self._load = partial(Loader, workers=options.workers, rank=processes.rank, world=processes.world)
        tasks = [run.task for run in runs if run.regime.composes]
        self._first_layer = min((task.from_layer for task in [*tasks, *ancestors(tasks)]), default=0)
        self._evaluation: dict[Any, Batches] = {}
        self._buffers: Buffers = {}

    def train(self, run: Run) -> Batches:
        """The training images, shuffled, in the views of the recipe."""
        recipe = run.recipe
        loader = self._load(
            run.train,
            run.preprocessing,
            batch_size=recipe.batch_size,
            augment=recipe.augment,
            views=recipe.used_views,
            shuffle=True,
            seed=recipe.data_seed,
        )
        return self._keep(run, loader, None)

    def evaluation(self, run: Run, images: ImageSet, *, keep: bool) -> Batches:
        """Plain views in order; `keep` says whether their features are worth keeping."""
        key = (content_key(images), run.preprocessing, run.regime.composes, run.recipe.batch_size, keep)
        if key not in self._evaluation:
            loader = self._load(images, run.preprocessing, batch_size=run.recipe.batch_size)
            # Validation sets are read one after the other, so they share buffers.
            self._evaluation[key] = self._keep(run, loader, self._buffers) if keep else loader
        return self._evaluation[key]

    def _keep(self, run: Run, loader: Loader, buffers: Buffers | None) -> Batches:
        """The loader, or one that reads features in its place."""
        if self._cache is None or not run.regime.composes:
            return loader
        check_views(run.recipe, self._cache)
        self.cached.append(CachedLoader(loader, self._backbone, self._cache, self._first_layer, buffers))
        return self.cached[-1]


def content_key(images: ImageSet) -> str:
    """Equal for sets of the same images in the same order, whatever their labels."""
    if images.digests is not None:
        return hashlib.sha256(np.ascontiguousarray(images.digests).tobytes()).hexdigest()
    return f"{id(images.source)} {hashlib.sha256(images.rows.tobytes()).hexdigest()}"


def join_tasks(backbone: Backbone, tasks: Sequence[Task]) -> Part:
    """The forward pass of tasks that are trained, with those that they extend. Runs may have tasks of the same name."""
    older = ancestors(tasks)
    together = [*tasks, *older]
    names = {id(task): str(number) for number, task in enumerate(together)}
    parents = [[names[id(parent)] for parent in task.extends] for task in together]
    lineage = trace_lineage(list(names.values()), parents, [task.from_layer for task in together])
    # Copies, so that ancestors get no gradient and keep their own flags; their read-outs are not asked.
    copies = [deepcopy(task).requires_grad_(False).to(backbone.device) for task in older]
    for copy in copies:
        copy.detach_readout()
    return Forward(backbone, [*tasks, *copies], lineage, live=True), tuple(range(len(tasks)))


def build_forward(backbone: Backbone, tasks: Sequence[Model]) -> Callable[[Any], list[Tensor]]:
    """A function from a batch's inputs to each model's logits. Tasks share a base pass, others have their own."""
    composed = [task for task in tasks if isinstance(task, Task)]
    if composed:
        assert len(composed) == len(tasks)
        part = join_tasks(backbone, composed)
        return lambda inputs: answer_together([part], [inputs])[0]
    return lambda pixels: [model(pixels) for model in tasks]
