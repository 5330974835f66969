"""What a read-out answers, computed step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import memoro
from memoro.backbones import Backbone
from memoro.data import ImageSet
from memoro.engine.streams import pool_pass
from memoro.regimes import find_regime
from memoro.tasks.task import Task

SOLVED: dict[str, Any] = {"regime": "readout", "image_size": 20, "workers": 0, "quiet": True}


SHARE = find_regime("joint").readout


def pixels_of(backbone: Backbone, images: ImageSet) -> Tensor:
    steps = backbone.preprocessing.at(20)
    return torch.stack([steps.to_tensor(images.open(at)) for at in range(len(images))]).to(backbone.dtype)


def read(backbone: Backbone, task: Task, pixels: Tensor) -> Tensor:
    """What a task's read-out adds to its logits, written out."""
    assert task.readout is not None
    assert task.spec.readout is not None
    with torch.no_grad():
        pooled = pool_pass(backbone.anatomy, pixels, task.spec.readout.from_layer).flatten(1)
        return pooled @ task.readout.weight.T + task.readout.bias


def logits(backbone: Backbone, *tasks: Task, pixels: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return memoro.compose(backbone, tasks)(pixels)
