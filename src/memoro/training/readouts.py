"""The read-outs of runs: solved in closed form, joined with what is trained, calibrated by leave-one-out answers."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import ImageSet
from memoro.data.near import near_groups
from memoro.evaluation.metrics import measure
from memoro.heads import HEADS
from memoro.images import Preprocessing
from memoro.tasks.readout import SolvedReadOut, solve_readout
from memoro.tasks.ridge import Read, RidgeSystem
from memoro.tasks.spec import ReadOut
from memoro.training.group import RunSpec, content_key
from memoro.training.recipe import TrainOptions
from memoro.training.statistics import StatisticsReader


class ReadOuts:
    """Solves read-outs; runs over the same images and labels share one."""

    def __init__(self, backbone: Backbone, reader: StatisticsReader, options: TrainOptions) -> None:
        self._reads, self._reader, self._options = ReadOut.of(backbone.anatomy), reader, options
        self._solved: dict[Any, SolvedReadOut] = {}
        self._systems: dict[Any, RidgeSystem] = {}

    def solve(self, spec: RunSpec) -> SolvedReadOut:
        """The read-out of a run's training images. The user is told how good it is."""
        images = spec.train
        key = content_key(images), spec.preprocessing, id(images.targets), spec.recipe.balance
        if key not in self._solved:
            started = time.monotonic()
            groups = near_groups(images)
            labels = spec.splits.labels
            found = solve_readout(
                spec.splits.kind,
                self._reads,
                lambda weights: self._factorise(images, spec.preprocessing, weights),
                images.targets,
                len(labels),
                balance=spec.recipe.balance,
                groups=torch.from_numpy(groups.numbers),
            )
            self._solved[key] = found
            figure = HEADS[spec.splits.kind].main_metric
            score = measure(spec.splits.kind, labels, found.held_out, images.targets).get(figure)
            seconds = time.monotonic() - started
            told = "" if score is None else f"{figure.replace('_', ' ')} {score:.3f} on images left out one by one, "
            self._options.note(f"{spec.splits.name}: read-out: {told}solved in {seconds:.1f} s.")
        return self._solved[key]

    def answers(self, spec: RunSpec, split: str, images: ImageSet) -> Tensor:
        """Its logits (n, labels) for the images of a split; those to training images are of solutions without them."""
        solved = self.solve(spec)
        if split == "fold":
            assert spec.held_out is not None
            return solved.held_out[torch.from_numpy(spec.held_out)]
        if images is spec.train:
            return solved.held_out
        read = self._flat(images, spec.preprocessing)
        blocks = torch.split(torch.arange(len(images), device="cpu"), 1024)
        return torch.cat([read(block).float() @ solved.weight.T + solved.bias for block in blocks])

    def _factorise(self, images: ImageSet, preprocessing: Preprocessing, weights: Tensor | None) -> RidgeSystem:
        """The system of these images; without weights, columns of labels share one."""
        if weights is not None:
            return RidgeSystem(len(images), self._flat(images, preprocessing), weights)
        key = content_key(images), preprocessing
        if key not in self._systems:
            self._systems[key] = RidgeSystem(len(images), self._flat(images, preprocessing))
        return self._systems[key]

    def _flat(self, images: ImageSet, preprocessing: Preprocessing) -> Read:
        read = self._reader.read(images, preprocessing)
        return lambda index: read(index).flatten(1)
