"""How runs are trained: the recipe of each run, and the options of a whole training. All defaults are here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import nn

from memoro.backbones import Backbone
from memoro.backbones.backbone import BackboneRecord
from memoro.backbones.precision import PRECISION_HELP, Precision, check_precision
from memoro.clock import Phases
from memoro.console import plain_console
from memoro.data import Augment, DataOptions
from memoro.data.dataset import ClassFolder
from memoro.errors import TrainingError
from memoro.options import option, plain_int
from memoro.processes import ALONE, Processes, find_processes
from memoro.regimes import Regime, find_regime
from memoro.tasks.task import Task
from memoro.training.cached import Cache, find_cache

OptimizerName = Literal["sgd", "adamw"]

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

    lr: float = option(0.1, "Peak learning rate.")
    epochs: int = option(15, "Passes over the training images.")
    steps: int | None = option(None, "Optimiser steps, instead of epochs.")
    batch_size: int = option(32, "Images per batch.")
    optimizer: OptimizerName = option("sgd", "Optimiser to train with.", shown="adamw; sgd with recipe paper")
    momentum: float = option(0.9, "Momentum of sgd.")
    weight_decay: float = option(0.0, "Weight decay.", shown="0.01; 0 with recipe paper")
    clip: float = option(1.0, "Maximum gradient norm of each tensor; 0: no clipping.")
    """Memory starts small and feeds a LayerNorm, so its gradient is many times that of the head: a norm over all
    tensors would be the memory's and slow the head down."""
    memory_rate: float | None = option(
        None, "Learning rate of memory cells, as a fraction of lr.", shown="0.03 with sgd, 1 with adamw"
    )
    """The steps of adamw do not grow with the gradient. At the head's own rate, memory can attract all attention within
    a few steps."""
    warmup: int = option(5, "Steps of linear warm-up before the cosine schedule.")
    label_smoothing: float = option(0.0, "Probability spread evenly over all classes.")
    balance: bool = option(False, "Weight classes inversely to their frequency.")
    augment: Augment = field(default_factory=Augment)
    views: int | None = option(
        4,
        "Views of each image, used in turn: the plain one, then random ones. none: a new random view every epoch.",
        shown="1; 4 with recipe paper",
    )
    """New views in every epoch, as in the paper, leave nothing for a cache to keep."""
    patience: int = option(0, "Stop a run after this many epochs without a better validation score; 0: never.")
    accumulate: int = option(1, "Batches per optimiser step (gradient accumulation).")
    seed: int = option(0, "Seed of the initial weights.")
    """For tasks that `train` makes; a task given to `fit` has its own."""
    data_seed: int = option(0, "Seed of image order, augmentation and validation split.")
    val_fraction: float = option(0.15, "Fraction of train to hold out if there is no validation split.")

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(OptimizerName):
            raise TrainingError(
                f"unknown optimizer {self.optimizer!r}: choose one of {', '.join(get_args(OptimizerName))}."
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

    image_size: int | None = option(
        None, "Input size in pixels; resize and crop are scaled together.", shown="the backbone's"
    )
    cache: Cache | bool | None = option(
        None,
        "Cache the backbone's features and statistics of the images on disk.",
        shown="statistics always, features on a CPU if they fit",
        typed=bool | None,
    )
    others: Any = option(
        None,
        "50 or more photographs of anything else, to learn what is unfamiliar from: folder or .zip.",
        shown="those known for the backbone",
        typed=str | None,
    )
    """They are remembered for the backbone."""
    folds: int | None = option(
        None,
        "Cross-validation folds, to compare runs and to calibrate; 0: a validation split.",
        shown="4 for small datasets",
    )
    precision: Precision = option("auto", PRECISION_HELP)
    """`auto` leaves a model object as it is; what is trained, read-outs, losses and the optimiser are in float32."""
    folder: Path | None = option(
        None, "Run folder for metrics, settings, checkpoint and report.", shown="runs/TASK", typed=str | None
    )
    """None: nothing is written."""
    resume: bool = option(False, "Continue from the checkpoint in the run folder.")
    workers: int | None = option(None, "Processes that decode images.", shown="one per core")
    track: str | None = option(None, "Also log to tensorboard, wandb, mlflow or another of Accelerate's trackers.")
    """It needs a run folder."""
    quiet: bool = False
    """Show no progress bars, and print no notes."""
    log: Callable[[str], None] | None = None
    """Called with notes; None: they are printed to stderr."""
    phases: Phases = field(default_factory=Phases, compare=False, repr=False)
    """Measures how long each phase of this training takes."""
    processes: Processes = field(default=ALONE, compare=False, repr=False)
    """Those that train together: see `joined`."""

    def __post_init__(self) -> None:
        if self.folder is not None:
            object.__setattr__(self, "folder", Path(self.folder))  # a string is accepted
        if self.folds is not None and (self.folds < 0 or self.folds == 1):
            raise TrainingError(f"{self.folds} folds: choose 2 or more, or 0 for a validation split.")
        check_precision(self.precision)

    def joined(self, device: torch.device) -> TrainOptions:
        """The options in this process among those that train together: only the main one prints."""
        processes = find_processes(device)
        silent: dict[str, Any] = {} if processes.main else {"quiet": True, "log": None}
        return replace(self, processes=processes, **silent)

    @property
    def checkpoint(self) -> Path | None:
        return None if self.folder is None else self.folder / CHECKPOINT

    @property
    def written(self) -> Path | None:
        """The run folder if this process writes into it: the main one does."""
        return self.folder if self.processes.main else None

    def note(self, text: str) -> None:
        """Reports something that the user should know: a note, or a text that starts with `warning: `."""
        if self.log is not None or not self.quiet:
            text = text if text.startswith("warning: ") else f"note: {text}"
            (self.log or plain_console(stderr=True, soft_wrap=True).print)(text)

    def reading(self, recipe: Recipe, **given: Any) -> DataOptions:
        """How data is read for this training."""
        cache = self.wanted_cache
        given |= {"workers": self.workers, "quiet": self.quiet, "phases": self.phases}
        return DataOptions(seed=recipe.data_seed, cache=False if cache is None else cache.folder, **given)

    @property
    def wanted_cache(self) -> Cache | None:
        """The cache with its settings; one that is not `required` is used if it can be."""
        return find_cache(self.cache)


REMOVED = {
    "streaming": "data sets of the hub are downloaded; leave it out",
    "halving": "all runs are trained to the end; try fewer values, or stop runs with patience",
    "ensemble": "the best run becomes the task; to compare several, use seeds",
    "dtype": "precision says what the backbone computes in",
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
    """Raises if features are to be kept but no view occurs twice."""
    if recipe.views is None and cache is not None and cache.required:
        raise TrainingError(
            "a cache needs a fixed number of views, such as `views=4`: with `views=None`, every epoch draws new ones."
        )


def check_solved(given: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Raises if options were given that have no effect on a read-out."""
    gradients = {field.name for field in fields(Recipe)} - {"balance", "data_seed", "val_fraction"}
    usual = RECIPES["default"][1]
    names = [name for name, value in given.items() if value is not None]
    names += [name for name, value in changes.items() if name in gradients and value != getattr(usual, name)]
    if "augment" in names:
        own, plain = changes["augment"], usual.augment
        options = {"crop": "crop", "scale": "crop_scale", "flip": "flip"}
        names += [option for name, option in options.items() if getattr(own, name) != getattr(plain, name)]
        names.remove("augment")
    if names:
        shown = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
        raise TrainingError(f"regime 'readout' is solved in closed form, without training runs: leave out {shown}.")


def add_views(recipe: Recipe, options: TrainOptions) -> Recipe:
    """The recipe with several views of an image if random ones were asked for: `flip=0` and `crop="none"` do not."""
    augment, views = recipe.augment, RECIPES["paper"][1].views
    asked = augment.crop not in {None, "none"} or bool(augment.flip) or augment.scale != Augment().scale
    if recipe.views != 1 or not asked:
        return recipe
    options.note(f"random crops and flips need several views of an image: using {views} (`views`).")
    return replace(recipe, views=views)


# The keyword arguments of `train` and `fit` with their types, for editors and type checkers; a test compares them.
BackboneSource = str | Path | nn.Module | Backbone | BackboneRecord
TaskSource = Task | str | Path


class Settings(TypedDict, total=False):
    """How to train: see Recipe and TrainOptions."""

    epochs: int
    steps: int | None
    batch_size: int
    optimizer: OptimizerName
    momentum: float
    weight_decay: float
    clip: float
    memory_rate: float | None
    warmup: int
    label_smoothing: float
    balance: bool
    augment: Augment
    views: int | None
    patience: int
    accumulate: int
    seed: int
    data_seed: int
    val_fraction: float
    image_size: int | None
    cache: Cache | bool | None
    others: Any
    folds: int | None
    precision: Precision
    folder: str | Path | None
    resume: bool
    workers: int | None
    track: str | None
    quiet: bool
    log: Callable[[str], None] | None
    phases: Phases


class FitSettings(Settings, total=False):
    """The keyword arguments of `fit` that are fields of its recipe or options."""

    lr: float


class TrainSettings(Settings, total=False):
    """The keyword arguments of `train`, but for `label_column`, which decides what is returned."""

    backbone: BackboneSource
    device: str | None
    task: str | None
    kind: str | None
    regime: str | Regime | None
    cells: int | Iterable[int] | None
    rank: int | Iterable[int] | None
    from_layer: int | Iterable[int] | None
    lr: float | Iterable[float] | None
    seeds: int
    extends: TaskSource | Iterable[TaskSource]
    start_from: TaskSource | None
    image_column: str | None
    allow_absolute: bool
    max_unreadable: float
    class_folder: ClassFolder
    out: str | Path | None
    recipe: Recipe | str | None
    options: TrainOptions | None
