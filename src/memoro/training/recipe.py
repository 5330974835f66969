"""How runs are trained: the recipe of each run, and the options of a whole training. All defaults are here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from memoro.arguments import plain_int
from memoro.console import plain_console
from memoro.data import Augment
from memoro.errors import TrainingError
from memoro.phases import Phases
from memoro.regimes import Regime, find_regime
from memoro.training.cached import Cache

OptimizerName = Literal["sgd", "adamw"]
Precision = Literal["no", "bf16"]  # fp16 would need loss scaling; bf16 does not

MINIMUM = {
    "epochs": 1,
    "steps": 1,
    "batch_size": 1,
    "accumulate": 1,
    "warmup": 0,
    "patience": 0,
    "views": 1,
    "seed": 0,
    "data_seed": 0,
}
"""The fields that are whole numbers, and the smallest value of each."""
OPTIONAL = ("steps", "views")
CHECKPOINT, METRICS, SKIPPED = "checkpoint.safetensors", "metrics.jsonl", "skipped.csv"
REPORT = "report.html"


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum, clipping by norm, a short linear warm-up, then cosine: both counted in optimiser steps.

    These defaults are those of `fit` and follow the paper, which trains for 20,000 steps of 512 images; here, for as
    long as a small set needs. `memoro.train` has a recipe of its own: see `RECIPES`.
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
    """Largest norm of each tensor's gradient; 0 for no limit. Memory starts small and feeds a LayerNorm, so its
    gradient is many times that of the head: a norm over all tensors would be the memory's and slow the head down."""
    memory_rate: float | None = None
    """The memory's learning rate as a fraction of `lr`; None: 0.03 with sgd, 1 with adamw, whose steps do not grow
    with the gradient. At the head's own rate, memory can attract all attention within a few steps."""
    warmup: int = 5
    label_smoothing: float = 0.0
    balance: bool = False
    """Weights classes by the inverse of how often they occur."""
    augment: Augment = field(default_factory=Augment)
    views: int | None = 4
    """Views of each image, used in turn: the one of evaluation, then random ones. None: a new random view in every
    epoch, as in the paper, which leaves nothing for a cache to keep."""
    patience: int = 0
    """Epochs without a better validation score after which a run stops; 0 for never."""
    accumulate: int = 1
    """Batches per optimiser step: less memory for the same result."""
    precision: Precision = "no"
    seed: int = 0
    """Seed of the initial weights of tasks that `train` and sweeps make; a task given to `fit` has its own."""
    data_seed: int = 0
    """Seed of the order of the images, their augmentation and the validation split."""
    val_fraction: float = 0.15

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(OptimizerName):
            raise TrainingError(
                f"unknown optimizer {self.optimizer!r}: choose one of {', '.join(get_args(OptimizerName))}."
            )
        if self.precision not in get_args(Precision):
            raise TrainingError(
                f"unknown precision {self.precision!r}: choose one of {', '.join(get_args(Precision))}."
            )
        if not isinstance(self.augment, Augment):
            raise TrainingError(f"augment {self.augment!r}: pass a memoro.data.Augment, such as Augment(flip=0.5).")
        for name, least in MINIMUM.items():
            value = plain_int(getattr(self, name))
            object.__setattr__(self, name, value)
            if not (isinstance(value, int) and value >= least) and not (value is None and name in OPTIONAL):
                raise TrainingError(f"{name} {value!r}: choose a whole number, {least} or more.")
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise TrainingError(f"lr {self.lr}: choose a number above 0, such as 0.1 for sgd or 0.001 for adamw.")
        if self.memory_rate is not None and not (self.memory_rate >= 0 and math.isfinite(self.memory_rate)):
            raise TrainingError(f"memory_rate {self.memory_rate}: choose a fraction of lr, 0 or more.")
        if not 0 <= self.label_smoothing < 1 or not 0 <= self.momentum < 1:
            raise TrainingError("label smoothing and momentum must be at least 0 and below 1.")
        if not (self.clip >= 0 and self.weight_decay >= 0):
            raise TrainingError(f"clip and weight_decay must be 0 or more, not {self.clip} and {self.weight_decay}.")
        if not 0 <= self.val_fraction < 1:
            raise TrainingError(f"val_fraction must be at least 0 and below 1, not {self.val_fraction}.")

    @property
    def used_views(self) -> int | None:
        """The views of an image that the epochs get to: no others need features. None: every epoch has new ones."""
        return self.views if self.views is None or self.steps is not None else min(self.views, self.epochs)

    def rate(self, step: int, total: int) -> float:
        """The learning rate of optimiser step `step` (from 0) out of `total`."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, total - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def clip_scale(self, norm: float) -> float:
        """The factor that brings a gradient of this norm within `clip`."""
        return min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0

    def build_optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """One parameter group per tensor, in order; memory has an `lr_scale` of its own."""
        memory = self.memory_rate if self.memory_rate is not None else 0.03 if self.optimizer == "sgd" else 1.0
        scales = {name: memory if name == "memory" else 1.0 for name in parameters}
        groups = [
            {"params": [parameter], "lr_scale": scales[name], "lr": self.lr * scales[name]}
            for name, parameter in parameters.items()
        ]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(groups, weight_decay=self.weight_decay, fused=True)
        return torch.optim.SGD(groups, momentum=self.momentum, weight_decay=self.weight_decay, fused=True)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


RECIPES: Mapping[str, tuple[str, Recipe]] = {
    "default": ("joint", Recipe(lr=0.001, optimizer="adamw", weight_decay=0.01, views=1)),
    "paper": ("memory", Recipe()),
}
"""What `memoro train` trains and how, by name: a regime, and its recipe."""


def find_recipe(recipe: Recipe | str | None, regime: str | Regime | None) -> tuple[Regime, Recipe]:
    """The regime and the recipe. Without a name, the regime decides; without both, they are those of `default`."""
    chosen = None if regime is None else find_regime(regime)
    if isinstance(recipe, Recipe):
        return chosen or find_regime(RECIPES["default"][0]), recipe
    name = recipe or ("default" if chosen is None else chosen.recipe)
    if name not in RECIPES:
        raise TrainingError(f"unknown recipe {name!r}: choose one of {', '.join(RECIPES)}.")
    return chosen or find_regime(RECIPES[name][0]), RECIPES[name][1]


@dataclass(frozen=True)
class TrainOptions:
    """How a training runs, whatever it trains: image size, kept features, run folder, processes, output."""

    image_size: int | None = None
    """Pixels of an image's edge; resize and crop scale alike. None: the backbone's own preprocessing."""
    cache: Cache | bool | None = None
    """Whether base passes are kept on disk and read back, and where. None: on a CPU, where they fit."""
    others: Any = None
    """Photographs, at least 50, of anything but what the tasks are about: what is unfamiliar is learned from them, and
    remembered for the backbone. None: those known already, if any."""
    folder: Path | None = None
    """Run folder for metrics, settings, the report and a checkpoint; None: nothing is written."""
    resume: bool = False
    """Continue from the run folder's checkpoint."""
    workers: int | None = None
    """Processes that decode images; None: one per core."""
    tensorboard: bool = False
    quiet: bool = False
    """Show no progress bars, and print no notes."""
    log: Callable[[str], None] | None = None
    """Called with notes; None: they are printed to stderr."""
    phases: Phases = field(default_factory=Phases, compare=False, repr=False)
    """Measures how long each phase of this training takes."""

    def __post_init__(self) -> None:
        if self.folder is not None:
            object.__setattr__(self, "folder", Path(self.folder))  # a string is accepted

    @property
    def checkpoint(self) -> Path | None:
        return None if self.folder is None else self.folder / CHECKPOINT

    def note(self, text: str) -> None:
        """Reports something that the user should know: a note, or a text that starts with `warning: `."""
        if self.log is not None or not self.quiet:
            text = text if text.startswith("warning: ") else f"note: {text}"
            (self.log or plain_console(stderr=True, soft_wrap=True).print)(text)

    @property
    def wanted_cache(self) -> Cache | None:
        """The cache with its settings; one that is not `required` is used where it can be."""
        if isinstance(self.cache, Cache):
            return self.cache
        return None if self.cache is False else Cache(required=bool(self.cache))


REMOVED = {
    "streaming": "data sets of the hub are downloaded; leave it out",
    "halving": "all runs are trained to the end; try fewer values, or stop runs with patience",
}
"""Options of earlier versions, and what to do without each."""


def merge_options(
    recipe: Recipe | None, options: TrainOptions | None, changes: Mapping[str, Any]
) -> tuple[Recipe, TrainOptions]:
    """Both with some fields replaced. `changes` may name fields of either."""
    known = [[field.name for field in fields(kind)] for kind in (Recipe, TrainOptions)]
    for name in changes:
        if name in REMOVED:
            raise TrainingError(f"{name} was removed: {REMOVED[name]}.")
        if name not in known[0] + known[1]:
            raise TrainingError(f"unknown training option {name!r}; the options are {', '.join(known[0] + known[1])}.")
    own = [{name: value for name, value in changes.items() if name in names} for names in known]
    recipe = recipe or Recipe()
    merged = replace(recipe, **own[0]), replace(options or TrainOptions(), **{"phases": Phases(), **own[1]})
    check_views(merged[0], merged[1].wanted_cache)
    return merged


def check_views(recipe: Recipe, cache: Cache | None) -> None:
    """Raises where features are to be kept but no view occurs twice."""
    if recipe.views is None and cache is not None and cache.required:
        raise TrainingError(
            "a cache needs a fixed number of views, such as 4: with views=None (--views 0) every epoch draws new ones."
        )
