"""A sweep: every combination of cells, forks, rates and seeds is a run, and all runs share each pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from memoro.backbones import Backbone
from memoro.data import ImageSet, Splits, Streams
from memoro.data.splits import Index, fold_numbers
from memoro.errors import TrainingError
from memoro.evaluation.metrics import MAIN_FIGURE, measure
from memoro.images import Preprocessing
from memoro.regimes import Regime, TaskPlan
from memoro.tasks.task import Task
from memoro.training.cached import Cache
from memoro.training.fit import FitResult, train_runs
from memoro.training.group import RunSpec
from memoro.training.recipe import Recipe

RATES = {"sgd": (0.03, 0.1, 0.3), "adamw": (0.0003, 0.001, 0.003)}
"""Tried where nobody names a rate, by optimiser: what users should not have to know."""
SMALL = 500
"""Training images below which a part of them held out is too small to choose by, and folds are used."""
FOLDS = 4

Point = tuple[int, int, float, int]
"""(cells, from_layer, lr, seed)"""


@dataclass(frozen=True)
class Grid:
    """What is varied. `seeds` vary the initial weights; order and views of the images are the same for all."""

    cells: tuple[int, ...] = (5,)
    from_layers: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = RATES["sgd"]
    seeds: int = 1
    first_seed: int = 0

    def __post_init__(self) -> None:
        if not (self.cells and self.from_layers and self.rates) or self.seeds < 1:
            raise TrainingError("a sweep needs one value or more of cells, layers, rates and seeds.")

    def points(self) -> list[Point]:
        return [
            (cells, layer, rate, seed)
            for cells in dict.fromkeys(self.cells)
            for layer in dict.fromkeys(self.from_layers)
            for rate in dict.fromkeys(self.rates)
            for seed in range(self.first_seed, self.first_seed + self.seeds)
        ]


@dataclass(frozen=True)
class SweepRow:
    """One combination, over its seeds."""

    cells: int
    from_layer: int
    lr: float
    val: tuple[float, ...]
    """Best validation score of each seed that stayed finite."""
    val_loss: float
    test: tuple[float, ...]
    diverged: int

    @property
    def rank(self) -> tuple[float, float]:
        return (mean(self.val), -self.val_loss) if self.val else (float("-inf"), float("-inf"))


@dataclass(frozen=True)
class SweepResult:
    task: Task
    """The chosen one: of the best combination by mean validation score, the seed with the best; with halving, the
    best of all."""
    best: FitResult
    rows: list[SweepRow]
    results: list[FitResult]
    """Of all runs."""


@dataclass(frozen=True)
class Subject:
    """One task to be swept, and its images."""

    plan: TaskPlan
    splits: Splits | Streams
    folds: int = 0
    """Score every combination on so many stratified folds of train, each held out in a run of its own; a last run
    learns from all images and becomes the task. 0: score on the validation split."""


def run_sweeps(
    backbone: Backbone,
    subjects: Sequence[Subject],
    regime: Regime,
    grid: Grid,
    recipe: Recipe,
    preprocessing: Preprocessing,
    *,
    cache: Cache | None = None,
    halving: bool = False,
    folder: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    tensorboard: bool = False,
    quiet: bool = True,
) -> list[SweepResult]:
    """Trains all combinations of all subjects in one pass and chooses for each by validation score.

    Where all runs of one subject of several diverged, its best has no metrics; its notes say why.
    """
    if halving and any(subject.folds for subject in subjects):
        raise TrainingError("runs over folds are judged together, at the end: leave out halving, or set folds to 0.")
    places: list[tuple[int, Point]] = []
    specs: list[RunSpec] = []
    for number, subject in enumerate(subjects):
        parts = _parts(subject, recipe)
        for point in grid.points():
            cells, layer, rate, seed = point
            for held in parts:
                task = regime.build(backbone, replace(subject.plan, cells=cells, from_layer=layer, seed=seed))
                own = replace(recipe, lr=rate, seed=seed)
                specs.append(RunSpec(task, own, regime, subject.splits, preprocessing, held))
                places.append((number, point))
    results = train_runs(
        backbone,
        specs,
        cache=cache,
        halving=halving,
        folder=folder,
        resume=resume,
        workers=workers,
        tensorboard=tensorboard,
        quiet=quiet,
    )
    gathered: list[dict[Point, list[FitResult]]] = [{} for _ in subjects]
    for (number, point), result in zip(places, results, strict=True):
        gathered[number].setdefault(point, []).append(result)
    chosen = [_choose(subject, found, halving) for subject, found in zip(subjects, gathered, strict=True)]
    if not any(result.best.metrics for result in chosen):
        names = ", ".join(subject.splits.name for subject in subjects)
        raise TrainingError(f"{names}: every combination diverged: choose smaller learning rates.")
    return chosen


def _parts(subject: Subject, recipe: Recipe) -> list[Index | None]:
    """What each run of a combination holds out: every fold in turn, then nothing."""
    splits = subject.splits
    if not subject.folds:
        if splits.val is None:
            raise TrainingError(f"{splits.name} has no validation images to choose by: set val_fraction above 0.")
        return [None]
    assert isinstance(splits.train, ImageSet)
    number = fold_numbers(splits.train, subject.folds, recipe.data_seed)
    if (number < 0).all():
        raise TrainingError(f"{splits.name}: every image is alone of its kind: there are no folds, set folds to 0.")
    return [*(np.flatnonzero(number == fold) for fold in range(subject.folds) if (number == fold).any()), None]


@dataclass(frozen=True)
class _Scored:
    """One combination with one seed."""

    result: FitResult
    score: float
    loss: float


def _choose(subject: Subject, gathered: dict[Point, list[FitResult]], halving: bool) -> SweepResult:
    splits, figure = subject.splits, MAIN_FIGURE[subject.splits.kind]
    scored: dict[tuple[int, int, float], list[_Scored | None]] = {}
    for (cells, layer, rate, _), results in gathered.items():
        whole = _over_folds(results, splits, figure) if subject.folds else _by_history(results[0], figure)
        scored.setdefault((cells, layer, rate), []).append(whole)
    rows = [_row(key, some, figure) for key, some in scored.items()]
    best = max(rows, key=lambda row: row.rank)
    candidates = scored[best.cells, best.from_layer, best.lr]
    if halving:  # the seeds of a combination stopped at different times: their mean says nothing
        candidates = [one for some in scored.values() for one in some]
    winners = [one for one in candidates if one is not None]
    everything = [result for some in gathered.values() for result in some]
    if winners:
        chosen = max(winners, key=lambda one: (one.score, -one.loss)).result
    else:
        chosen = next(result for result in everything if not result.metrics)
    return SweepResult(chosen.task, chosen, rows, everything)


def _by_history(result: FitResult, figure: str) -> _Scored | None:
    """By the validation score of the epoch whose weights were kept."""
    if not result.metrics or not result.history:
        return None
    score, loss = max((entry.get(f"val_{figure}", float("-inf")), -entry["val_loss"]) for entry in result.history)
    return _Scored(result, score, -loss)


def _over_folds(results: Sequence[FitResult], splits: Splits | Streams, figure: str) -> _Scored | None:
    """By the answers to all images, each from the run that had not seen it; the last run is what comes out."""
    *folds, whole = results
    if not all(result.metrics for result in results):
        return None
    logits = torch.cat([fold.logits for fold in folds if fold.logits is not None])
    targets = torch.cat([fold.targets for fold in folds if fold.targets is not None])
    found = measure(splits.kind, splits.labels, logits, targets)
    value = found.get(figure)
    if splits.test is None:
        metrics = {"split": f"{len(folds)} folds", **found}
        whole = replace(whole, metrics=metrics, logits=logits, targets=targets)
        whole.task.describe(metrics={name: value for name, value in whole.metrics.items() if value is not None})
    return _Scored(whole, float("-inf") if value is None else value, found["loss"])


def _row(key: tuple[int, int, float], seeds: Sequence[_Scored | None], figure: str) -> SweepRow:
    finished = [one for one in seeds if one is not None]
    return SweepRow(
        *key,
        val=tuple(one.score for one in finished),
        val_loss=mean(one.loss for one in finished) if finished else float("inf"),
        test=tuple(
            one.result.metrics[figure]
            for one in finished
            if one.result.metrics["split"] == "test" and one.result.metrics.get(figure) is not None
        ),
        diverged=len(seeds) - len(finished),
    )
