"""What a training adds to its tasks so that their answers can be relied on: calibration and familiarity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import ImageSet
from memoro.evaluation.calibrate import find_photographs, read_photographs
from memoro.evaluation.training_images import learned_from
from memoro.images import Preprocessing
from memoro.tasks.calibration import describe_calibration, fit_calibration
from memoro.tasks.familiarity import Familiarity, Others, fit_familiarity
from memoro.tasks.spec import Model
from memoro.tasks.task import Task
from memoro.training.group import RunSpec, content_key
from memoro.training.recipe import TrainOptions
from memoro.training.statistics import StatisticsReader

MOST_IMAGES = 10_000
"""Training images that a description is made from."""


SEEN = "none: an earlier training may have seen these images; use memoro calibrate with new ones"


def was_seen(task: Model, images: ImageSet | None) -> bool:
    """Whether an earlier training may have learned from images: of the task that this one started from, or of an
    ancestor."""
    return "history" in task.spec.training or learned_from(task, images, parents_only=True) is not None


def add_calibration(task: Model, held_out: tuple[Tensor, Tensor] | None, source: str, *, seen: bool = False) -> None:
    """Calibrates a Task on logits and targets of images that it did not learn from; records whether it was possible.

    `seen`: an earlier training, or that of a task that it extends, may have learned from these images.
    """
    if not isinstance(task, Task):
        return
    found = None if held_out is None or seen else fit_calibration(task.kind, *held_out, source)
    text = SEEN if seen else describe_calibration(found, 0 if held_out is None else len(held_out[1]))
    task.update_spec(calibration=found, training={**task.spec.training, "calibration": text})


class Describer:
    """Describes the training images of runs; runs over the same images and labels share a description."""

    def __init__(self, backbone: Backbone, reader: StatisticsReader, options: TrainOptions) -> None:
        self._backbone, self._reader, self._options = backbone, reader, options
        self._done: dict[Any, Familiarity | None] = {}
        self._others: dict[Preprocessing, Others | None] = {}

    def add_familiarity(self, spec: RunSpec) -> None:
        """Gives a run's task the description of its training images, and records what it is made from."""
        images = spec.train
        if not isinstance(spec.task, Task) or spec.held_out is not None:
            return
        key = content_key(images), spec.preprocessing, id(spec.splits)
        if key not in self._done:
            samples = torch.linspace(0, len(images) - 1, min(len(images), MOST_IMAGES), device="cpu").round().long()
            statistics = self._reader.read(images, spec.preprocessing)(samples)
            classes = images.targets[samples] if spec.splits.kind == "softmax" else None
            self._done[key] = fit_familiarity(statistics, classes, self._photographs(spec.preprocessing))
        found, text = self._done[key], "none: too few images, or tokens out of range"
        if found is not None:
            against = "ordinary photographs" if len(found.reader) else "no photographs (`others` gives some)"
            text = f"{found.images} training images, left out in turn, against {against}"
        spec.task.update_spec(familiarity=found, training={**spec.task.spec.training, "familiarity": text})

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
