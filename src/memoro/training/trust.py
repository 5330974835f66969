"""What a training adds to its tasks so that their answers can be relied on: calibration and familiarity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memoro.data import ImageSet
from memoro.engine.background import background_token
from memoro.engine.streams import entering_token
from memoro.evaluation.logits import collect_logits
from memoro.regimes import Baseline
from memoro.tasks.calibration import describe_calibration, fit_calibration
from memoro.tasks.familiarity import Familiarity, fit_familiarity
from memoro.tasks.task import Task
from memoro.training.cached import CachedLoader
from memoro.training.group import RunSpec, content_key
from memoro.training.loop import Trainer
from memoro.training.run import Run

MOST_IMAGES = 10_000
"""Training images that a description is made from."""


SEEN = "none: the earlier training may have seen these images; use memoro calibrate with new ones"


def add_calibration(
    task: Task | Baseline, held_out: tuple[Tensor, Tensor] | None, source: str, *, seen: bool = False
) -> None:
    """Calibrates a task on logits and targets of images that it did not learn from; records whether it was possible.

    `seen`: an earlier training may have learned from these images.
    """
    if isinstance(task, Baseline):
        return
    found = None if held_out is None or seen else fit_calibration(task.kind, *held_out, source)
    text = SEEN if seen else describe_calibration(found, 0 if held_out is None else len(held_out[1]))
    task.describe(calibration=found, training={**task.spec.training, "calibration": text})


class Describer:
    """Describes the training images of runs; runs over the same images and labels share a description."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._tokens: dict[Any, tuple[Tensor, Tensor]] = {}
        """Of the training images, and the background."""
        self._done: dict[Any, Familiarity | None] = {}

    def add_familiarity(self, spec: RunSpec, run: Run) -> None:
        """Gives a run's task the description of its training images, and records what it is made from."""
        images = spec.train
        if isinstance(spec.task, Baseline) or spec.held_out is not None:
            return
        if not isinstance(images, ImageSet):
            found, text = None, "none: a stream is read only once"
        else:
            key = (content_key(images), spec.preprocessing)
            if (*key, id(spec.splits)) not in self._done:
                samples = torch.linspace(0, len(images) - 1, min(len(images), MOST_IMAGES)).round().long()
                if key not in self._tokens:
                    tokens = self._read(spec, run, images, samples)
                    self._tokens[key] = tokens, background_token(self._trainer.backbone, spec.preprocessing)
                classes = images.targets[samples] if spec.splits.kind == "softmax" else None
                tokens, background = self._tokens[key]
                self._done[(*key, id(spec.splits))] = fit_familiarity(tokens, classes, background)
            found = self._done[(*key, id(spec.splits))]
            text = (
                "none: too few images, or tokens out of range"
                if found is None
                else f"{found.images} training images, out of fold"
            )
        spec.task.describe(familiarity=found, training={**spec.task.spec.training, "familiarity": text})

    def _read(self, spec: RunSpec, run: Run, images: ImageSet, samples: Tensor) -> Tensor:
        """The tokens (n, dim) of some training images: kept ones, or computed."""
        trainer = self._trainer
        loader = next(group.loader for group in trainer.groups if any(run is other for other in group.runs))
        if isinstance(loader, CachedLoader):
            return loader.entering_tokens(samples.tolist())
        part = trainer.loaders.evaluation(spec, images.subset(samples.numpy()), keep=False)
        gather = trainer.processes.all_gather
        (tokens,), _ = collect_logits(
            lambda pixels: [entering_token(trainer.backbone.anatomy, pixels)], trainer.backbone, part, all_gather=gather
        )
        return tokens
