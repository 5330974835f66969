"""What is made from pooled statistics of the training images: read-outs, and what is familiar to a task."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import bar
from memoro.data import ImageSet, Loader
from memoro.data.screening import near_groups
from memoro.engine.streams import pool_pass
from memoro.errors import CacheError
from memoro.evaluation.calibrate import find_photographs, read_changes, read_photographs
from memoro.evaluation.logits import collect_logits
from memoro.evaluation.metrics import measure
from memoro.heads import HEADS
from memoro.images import Preprocessing
from memoro.tasks.familiarity import Familiarity, Others, fit_familiarity
from memoro.tasks.readout import SolvedReadOut, solve_readout
from memoro.tasks.ridge import Read, RidgeSystem
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import Task
from memoro.training.cached import CachedLoader, compute_missing
from memoro.training.recipe import TrainOptions
from memoro.training.run import Run, content_key

BATCH = 32
MOST_IMAGES = 10_000
"""Training images that a description is made from."""


class StatisticsReader:
    """Reads the statistics of sets of images; what is asked for again is not computed again."""

    def __init__(self, backbone: Backbone, options: TrainOptions) -> None:
        self._backbone, self._options = backbone, options
        self._known: dict[Any, Read] = {}

    def read(self, images: ImageSet, preprocessing: Preprocessing) -> Read:
        """A function from the numbers (b) of some images to their statistics (b, layers, statistics, dim), on the CPU:
        plain views, from the first layer that read-outs read."""
        key = content_key(images), preprocessing
        if key not in self._known:
            self._known[key] = self._kept(images, preprocessing) or self._computed(images, preprocessing)
        return self._known[key]

    def _kept(self, images: ImageSet, preprocessing: Preprocessing) -> Read | None:
        """Statistics on disk; None if none are to be kept, or they do not fit."""
        cache = self._options.wanted_cache
        if cache is None:
            return None
        loader = Loader(images, preprocessing, batch_size=BATCH, workers=self._options.workers)
        kept = CachedLoader(loader, self._backbone, cache, self._backbone.depth)
        try:
            compute_missing([kept], cache, "statistics", self._options.processes, quiet=self._options.quiet)
        except CacheError:
            if cache.required:
                raise
            return None
        return lambda index: kept.statistics(index.tolist())

    def _computed(self, images: ImageSet, preprocessing: Preprocessing) -> Read:
        """Statistics in memory."""
        anatomy, processes = self._backbone.anatomy, self._options.processes
        first = ReadOut.of(anatomy).from_layer
        common: dict[str, Any] = {"workers": self._options.workers, "rank": processes.rank, "world": processes.world}
        loader = Loader(images, preprocessing, batch_size=max(BATCH, processes.world), **common)

        def pool(pixels: Tensor) -> list[Tensor]:
            pooled = pool_pass(anatomy, pixels, first)
            half = pooled.half()
            return [half if bool(torch.isfinite(half).all()) else pooled]

        with bar("statistics", len(images), quiet=self._options.quiet) as tick:
            (found,), _ = collect_logits(
                pool, self._backbone, loader, tick=tick, all_gather=processes.all_gather, keep_dtype=True
            )
        return lambda index: found[index]


class ReadOuts:
    """Solves read-outs; runs over the same images and labels share one."""

    def __init__(self, backbone: Backbone, reader: StatisticsReader, options: TrainOptions) -> None:
        self._reads, self._reader, self._options = ReadOut.of(backbone.anatomy), reader, options
        self._solved: dict[Any, SolvedReadOut] = {}
        self._systems: dict[Any, RidgeSystem] = {}

    def solve(self, run: Run) -> SolvedReadOut:
        """The read-out of a run's training images. The user is told how good it is."""
        images = run.train
        key = content_key(images), run.preprocessing, id(images.targets), run.recipe.balance
        if key not in self._solved:
            started = time.monotonic()
            groups = near_groups(images)
            labels = run.splits.labels
            found = solve_readout(
                run.splits.kind,
                self._reads,
                lambda weights: self._factorise(images, run.preprocessing, weights),
                images.targets,
                len(labels),
                balance=run.recipe.balance,
                groups=torch.from_numpy(groups.numbers),
            )
            self._solved[key] = found
            figure = HEADS[run.splits.kind].main_metric
            score = measure(run.splits.kind, labels, found.held_out, images.targets[found.answered]).get(figure)
            seconds = time.monotonic() - started
            told = "" if score is None else f"{figure.replace('_', ' ')} {score:.3f} on images left out one by one, "
            self._options.note(f"{run.splits.name}: read-out: {told}solved in {seconds:.1f} s.")
        return self._solved[key]

    def answers(self, run: Run, split: str, images: ImageSet) -> Tensor:
        """Its logits (n, labels) for the images of a split; those to training images are of solutions without them."""
        solved = self.solve(run)
        if len(solved.answered) == len(run.train):  # of very many images, only some are left out
            if run.held_out is not None and split == "fold":
                return solved.held_out[torch.from_numpy(run.held_out)]
            if images is run.train:
                return solved.held_out
        read = self._reader.read(images, run.preprocessing)
        blocks = torch.split(torch.arange(len(images), device="cpu"), 1024)
        return torch.cat([read(block).float().flatten(1) @ solved.weight.T + solved.bias for block in blocks])

    def _factorise(self, images: ImageSet, preprocessing: Preprocessing, weights: Tensor | None) -> RidgeSystem:
        """The system of these images; without weights, columns of labels share one."""
        if weights is not None:
            return RidgeSystem(len(images), self._reader.read(images, preprocessing), weights)
        key = content_key(images), preprocessing
        if key not in self._systems:
            self._systems[key] = RidgeSystem(len(images), self._reader.read(images, preprocessing))
        return self._systems[key]


class Describer:
    """Describes the training images of runs; runs over the same images and labels share a description."""

    def __init__(self, backbone: Backbone, reader: StatisticsReader, options: TrainOptions) -> None:
        self._backbone, self._reader, self._options = backbone, reader, options
        self._done: dict[Any, Familiarity | None] = {}
        self._others: dict[Preprocessing, Others | None] = {}

    def add_familiarity(self, run: Run) -> None:
        """Gives a run's task the description of its training images, and records what it is made from."""
        images = run.train
        if not isinstance(run.task, Task) or run.held_out is not None:
            return
        key = content_key(images), run.preprocessing, id(run.splits)
        if key not in self._done:
            samples = torch.linspace(0, len(images) - 1, min(len(images), MOST_IMAGES), device="cpu").round().long()
            statistics = self._reader.read(images, run.preprocessing)(samples)
            classes = images.targets[samples] if HEADS[run.splits.kind].has_classes else None
            others = self._photographs(run.preprocessing)
            changes = None if others is None else read_changes(self._backbone, run.preprocessing, images)
            self._done[key] = fit_familiarity(statistics, classes, others, changes)
        found, text = self._done[key], "none: too few images, or tokens out of range"
        if found is not None:
            against = "ordinary photographs" if len(found.reader) else "no photographs"
            text = f"{found.images} training images, left out in turn, against {against}"
        run.task.update_spec(familiarity=found, training={**run.task.spec.training, "familiarity": text})

    def _photographs(self, preprocessing: Preprocessing) -> Others | None:
        if preprocessing not in self._others:
            options = self._options
            cache = options.wanted_cache
            folder = None if cache is None else cache.folder
            if options.others is None:
                found = find_photographs(self._backbone, preprocessing, folder)
            else:
                how: dict[str, Any] = {"workers": options.workers}
                found = read_photographs(self._backbone, preprocessing, options.others, folder, **how)
            self._others[preprocessing] = found
        return self._others[preprocessing]
