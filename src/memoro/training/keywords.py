"""The keyword arguments of `train` and `fit` with their types, for editors and type checkers.

Those of `Settings` are the fields of Recipe, without its learning rate, and of TrainOptions; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from memoro.backbones import Backbone
from memoro.backbones.backbone import BackboneRecord
from memoro.backbones.precision import Precision
from memoro.data import Augment
from memoro.phases import Phases
from memoro.regimes import Regime
from memoro.tasks.task import Task
from memoro.training.cached import Cache
from memoro.training.recipe import OptimizerName, Recipe, TrainOptions

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
    ensemble: int | None
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
    out: str | Path | None
    recipe: Recipe | str | None
    options: TrainOptions | None
