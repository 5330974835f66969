"""The recipe: how a task is trained. The paper's as the default, every part a field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from memoro.data import Augment
from memoro.errors import TrainingError

OptimizerName = Literal["sgd", "adamw"]
Precision = Literal["no", "bf16"]  # fp16 would need loss scaling; bf16 does not

WHOLE = {"epochs": 1, "steps": 1, "batch_size": 1, "accumulate": 1, "warmup": 0, "patience": 0, "views": 1}
"""The fields that are whole numbers, and the least that each may be."""
OPTIONAL = (("steps", None), ("views", None))


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum, clipping by norm, a short linear warm-up, then cosine: both counted in optimiser steps.

    The paper trains for 20,000 steps of 512 images; the default here is what a small set needs.
    """

    lr: float = 0.1
    epochs: int = 15
    steps: int | None = None
    """Optimiser steps instead of epochs."""
    batch_size: int = 32
    optimizer: OptimizerName = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of each tensor's gradient; 0 for none. Memory starts small and stands before a LayerNorm, so its
    gradient is many times that of the head: one norm over all would be the memory's alone, and hold the head back."""
    memory_rate: float | None = None
    """The memory's learning rate as a share of `lr`; None: 0.03 with sgd, 1 with adamw, whose steps do not grow with
    the gradient. At the head's own rate, memory can draw all attention to itself within a few steps."""
    warmup: int = 5
    label_smoothing: float = 0.0
    balance: bool = False
    """Weights classes by the inverse of how often they occur."""
    augment: Augment = field(default_factory=Augment)
    views: int | None = None
    """How many views of an image there are, in turn: the one of evaluation, then random ones. None: a new one every
    epoch, as in the paper."""
    patience: int = 0
    """Epochs without a better validation score after which a run stops; 0 for never."""
    accumulate: int = 1
    """Batches to a step: less memory for the same result."""
    precision: Precision = "no"
    seed: int = 0
    """Of the task's initial weights."""
    data_seed: int = 0
    """Of the order of the images and of their augmentation."""
    val_fraction: float = 0.15

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(OptimizerName):
            raise TrainingError(f"optimizer {self.optimizer!r} is none of {', '.join(get_args(OptimizerName))}.")
        if self.precision not in get_args(Precision):
            raise TrainingError(f"precision {self.precision!r} is none of {', '.join(get_args(Precision))}.")
        for name, least in WHOLE.items():
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= least) and (name, value) not in OPTIONAL:
                raise TrainingError(f"{name} {value!r}: choose a whole number, {least} or more.")
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise TrainingError(f"lr {self.lr}: choose a number above 0, such as 0.1 for sgd or 0.001 for adamw.")
        if not 0 <= self.label_smoothing < 1 or not 0 <= self.momentum < 1:
            raise TrainingError("label smoothing and momentum must be at least 0 and below 1.")
        if not (self.clip >= 0 and self.weight_decay >= 0):
            raise TrainingError(f"clip {self.clip} and weight decay {self.weight_decay} are numbers from 0 on.")
        if not 0 <= self.val_fraction < 1:
            raise TrainingError(f"val_fraction {self.val_fraction}: choose a share from 0 to below 1.")

    def rate(self, step: int, total: int) -> float:
        """The learning rate of optimiser step `step` (from 0) out of `total`."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, total - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def clip_scale(self, norm: float) -> float:
        """What a tensor's gradient of this norm is multiplied by so that it stays within `clip`."""
        return min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0

    def build_optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """One group a tensor, in their order; a group's `share` of the learning rate is less for memory."""
        memory = self.memory_rate if self.memory_rate is not None else 0.03 if self.optimizer == "sgd" else 1.0
        scales = {name: memory if name == "memory" else 1.0 for name in parameters}
        groups = [
            {"params": [parameter], "lr_scale": scales[name], "lr": self.lr * scales[name]}
            for name, parameter in parameters.items()
        ]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(groups, weight_decay=self.weight_decay, foreach=False)
        return torch.optim.SGD(groups, momentum=self.momentum, weight_decay=self.weight_decay, foreach=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
