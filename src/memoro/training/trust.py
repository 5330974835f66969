"""What a training adds to its tasks so that their answers can be relied on: calibration and familiarity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memoro.data import ImageSet, ImageStream
from memoro.engine.background import background_token
from memoro.engine.streams import entering_token
from memoro.evaluation.logits import Batches, collect_logits
from memoro.evaluation.training_images import learned_from
from memoro.heads import energy
from memoro.regimes import Baseline
from memoro.tasks.calibration import describe_calibration, fit_calibration
from memoro.tasks.familiarity import MIN_ANSWERS, Familiarity, FamiliarityBank, fit_familiarity
from memoro.tasks.task import Task
from memoro.training.cached import CachedLoader
from memoro.training.group import RunSpec, content_key
from memoro.training.loop import Trainer
from memoro.training.run import Run

MOST_IMAGES = 10_000
"""Training images that a description is made from."""


SEEN = "none: an earlier training may have seen these images; use memoro calibrate with new ones"


def was_seen(task: Task | Baseline, images: ImageSet | ImageStream | None) -> bool:
    """Whether an earlier training may have learned from images: of the task that this one started from, or of an
    ancestor."""
    return "history" in task.spec.training or learned_from(task, images, parents_only=True) is not None


def add_calibration(
    task: Task | Baseline, held_out: tuple[Tensor, Tensor] | None, source: str, *, seen: bool = False
) -> None:
    """Calibrates a task on logits and targets of images that it did not learn from; records whether it was possible.

    `seen`: an earlier training, or that of a task that it extends, may have learned from these images.
    """
    if isinstance(task, Baseline):
        return
    found = None if held_out is None or seen else fit_calibration(task.kind, *held_out, source)
    text = SEEN if seen else describe_calibration(found, 0 if held_out is None else len(held_out[1]))
    task.update_spec(calibration=found, training={**task.spec.training, "calibration": text})


def add_answers(task: Task | Baseline, logits: Tensor, index: npt.NDArray[np.int64]) -> None:
    """Lets the familiarity of a calibrated task depend on its answers, from the logits of held-out training images and
    their places among all."""
    if not isinstance(task, Task) or task.spec.calibration is None:
        return
    known = task.spec.familiarity
    # Fewer where only a part of the training images was described; classes with a single image are never held out.
    found = None if known is None else known.out_of_fold
    if known is not None and found is not None and int(index.max(initial=0)) < len(found):
        task.update_spec(familiarity=known.with_answers(found[index], energy(task.kind, logits)))


def add_validation_answers(task: Task, logits: Tensor) -> None:
    """The same from the logits of the validation images, where those of another task with its description counted."""
    known = task.spec.familiarity
    if known is not None and known.validated is not None:
        task.update_spec(familiarity=known.with_answers(known.validated, energy(task.kind, logits)))


class Describer:
    """Describes the training images of runs; runs over the same images and labels share a description."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._tokens: dict[Any, tuple[Tensor, Tensor]] = {}
        """Of the training images, and the background."""
        self._done: dict[Any, Familiarity | None] = {}
        self._far: dict[Any, Tensor] = {}
        """Distances of validation images."""

    def add_familiarity(self, spec: RunSpec, run: Run, val_logits: Tensor | None) -> None:
        """Gives a run's task the description of its training images, and records what it is made from.

        `val_logits` are its answers to the validation images, if it has any and is calibrated on them.
        """
        images = spec.train
        if isinstance(spec.task, Baseline) or spec.held_out is not None:
            return
        if not isinstance(images, ImageSet):
            found, text = None, "none: a stream is read only once"
        else:
            key = (content_key(images), spec.preprocessing)
            if (*key, id(spec.splits)) not in self._done:
                samples = torch.linspace(0, len(images) - 1, min(len(images), MOST_IMAGES), device="cpu").round().long()
                if key not in self._tokens:
                    group = next(group for group in self._trainer.groups if any(run is other for other in group.runs))
                    tokens = self._read(spec, group.loader, images, samples)
                    self._tokens[key] = tokens, background_token(self._trainer.backbone, spec.preprocessing)
                classes = images.targets[samples] if spec.splits.kind == "softmax" else None
                tokens, background = self._tokens[key]
                self._done[(*key, id(spec.splits))] = fit_familiarity(tokens, classes, background)
            found = self._done[(*key, id(spec.splits))]
            text = "none: too few images, or tokens out of range"
            if found is not None:
                text = f"{found.images} training images, out of fold"
                if val_logits is not None and len(val_logits) >= MIN_ANSWERS and spec.task.spec.calibration is not None:
                    energies = energy(spec.task.kind, val_logits)
                    distances = self._measure_val(spec, run, found)
                    answered = found.with_answers(distances, energies)
                    if answered is not found:
                        text = f"{found.images} training images, {answered.images} validation images"
                        found = replace(answered, validated=distances)
        spec.task.update_spec(familiarity=found, training={**spec.task.spec.training, "familiarity": text})

    def _measure_val(self, spec: RunSpec, run: Run, found: Familiarity) -> Tensor:
        """The distances (n) of the validation images, whatever the task answers."""
        images = spec.splits.val
        assert isinstance(images, ImageSet)
        if id(found) not in self._far:
            tokens = self._read(spec, run.val_loader, images, torch.arange(len(images), device="cpu"))
            self._far[id(found)] = FamiliarityBank([found]).measure(tokens)[:, 0]
        return self._far[id(found)]

    def _read(self, spec: RunSpec, loader: Batches | None, images: ImageSet, samples: Tensor) -> Tensor:
        """The tokens (n, dim) of some images of a loader: kept ones, or computed."""
        trainer = self._trainer
        if isinstance(loader, CachedLoader):
            return loader.entering_tokens(samples.tolist())
        part = trainer.loaders.evaluation(spec, images.subset(samples.numpy()), keep=False)
        gather = trainer.processes.all_gather
        (tokens,), _ = collect_logits(
            lambda pixels: [entering_token(trainer.backbone.anatomy, pixels)], trainer.backbone, part, all_gather=gather
        )
        return tokens
