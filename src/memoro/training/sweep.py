"""A sweep: every combination of cells, forks, ranks, learning rates and seeds is a run; all runs share each pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table

from memoro.arguments import plain_int, several
from memoro.backbones import Backbone
from memoro.console import make_table
from memoro.data import Splits
from memoro.data.splits import SINGLE_IMAGES, Index, fold_numbers
from memoro.errors import TrainingError
from memoro.evaluation.metrics import COLUMNS, add_folds, measure, measure_task, recorded, score
from memoro.heads import HEADS
from memoro.images import Preprocessing
from memoro.regimes import Regime, TaskPlan
from memoro.regimes.regime import RATES
from memoro.tasks.spec import MAX_MEMBERS
from memoro.tasks.task import Task, join_members
from memoro.training.finish import FitResult
from memoro.training.fit import train_runs
from memoro.training.group import RunSpec
from memoro.training.recipe import Recipe, TrainOptions
from memoro.training.trust import add_calibration, was_seen
from memoro.training.warmstart import start_from

Sizes = tuple[int | None, ...]


class Setting(NamedTuple):
    """One combination. Sizes that are None are the regime's own."""

    cells: int | None
    from_layer: int | None
    rank: int | None
    lr: float
    seed: int


@dataclass(frozen=True)
class Grid:
    """What is varied. `seeds` vary the initial weights; order and views of the images are the same for all."""

    cells: Sizes = (None,)
    from_layers: Sizes = (None,)
    rates: tuple[float, ...] = RATES["sgd"]
    seeds: int = 1
    first_seed: int = 0
    ranks: Sizes = (None,)
    ensemble: bool = False
    """Whether the runs of all seeds of the best combination become one task, whose answers are their mean."""

    @property
    def choices(self) -> int:
        """How many tasks there are to choose from."""
        return len(self.settings()) // (self.seeds if self.ensemble else 1)

    def __post_init__(self) -> None:
        for name in ("cells", "from_layers", "ranks"):
            object.__setattr__(self, name, tuple(map(plain_int, several(getattr(self, name)))))
        rates: Any = self.rates
        try:
            object.__setattr__(self, "rates", tuple(map(float, several(rates))))
        except (TypeError, ValueError):
            raise TrainingError(f"lr {rates!r}: choose one or more numbers, such as 0.001.") from None
        if not (self.cells and self.from_layers and self.ranks and self.rates) or self.seeds < 1:
            raise TrainingError("a sweep needs at least one value each for cells, from_layer, rank, lr and seeds.")

    def number(self, setting: Setting) -> int:
        """Of the setting among those that would become one ensemble with it."""
        return setting.seed - self.first_seed

    def settings(self) -> list[Setting]:
        return [
            Setting(cells, layer, rank, rate, seed)
            for cells in dict.fromkeys(self.cells)
            for layer in dict.fromkeys(self.from_layers)
            for rank in dict.fromkeys(self.ranks)
            for rate in dict.fromkeys(self.rates)
            for seed in range(self.first_seed, self.first_seed + self.seeds)
        ]


@dataclass(frozen=True)
class SweepSpec:
    """One task to train with every setting of a grid, and its images."""

    plan: TaskPlan
    regime: Regime
    splits: Splits
    preprocessing: Preprocessing
    grid: Grid
    recipe: Recipe
    folds: int = 0
    """Score every setting by cross-validation on this many stratified folds of train; a last run learns from all images
    and becomes the task. 0: score on the validation split."""
    start: Task | None = None
    """A task whose weights every run starts from."""

    @property
    def score_name(self) -> str:
        """What the settings are compared by."""
        return f"{f'{self.folds}-fold' if self.folds else 'validation'} {COLUMNS[HEADS[self.splits.kind].main_metric]}"

    @property
    def held_out(self) -> list[Index]:
        """The training images of each fold."""
        assert self.splits.train is not None
        number = fold_numbers(self.splits.train, self.folds, self.recipe.data_seed)
        return [np.flatnonzero(number == fold) for fold in range(self.folds) if (number == fold).any()]

    def runs(self, backbone: Backbone) -> list[tuple[Setting, RunSpec]]:
        """The runs of each setting: one for each fold, then one that learns from all images."""
        parts: list[Index | None] = [None]
        if self.folds:
            held_out = self.held_out
            if not held_out:
                raise TrainingError(f"{self.splits.name}: folds need at least two images of a class: set folds to 0.")
            parts = [*held_out, None]
        elif self.splits.val is None and self.grid.choices > 1:
            why = "set `val_fraction` above 0"
            if SINGLE_IMAGES in self.splits.notes:
                why = "every class has a single image: give one `lr`, one seed and one of each size, or add images"
            raise TrainingError(f"{self.splits.name} has no validation images to choose by: {why}.")
        found: list[tuple[Setting, RunSpec]] = []
        start = None if self.start is None else self.start.content_hash()
        for setting in self.grid.settings():
            sizes = {name: size for name, size in setting._asdict().items() if name not in {"lr", "seed"}}
            own = []
            for part in parts:
                task = self.regime.build(backbone, replace(self.plan, **sizes, seed=setting.seed))
                task = task if self.start is None else start_from(self.start, task, self.grid.number(setting))
                task.update_spec(training={**task.spec.training, "seed": setting.seed})
                recipe = replace(self.recipe, lr=setting.lr, seed=setting.seed)
                made = setting._replace(**{name: getattr(task, name) for name in sizes})
                own.append((made, RunSpec(task, recipe, self.regime, self.splits, self.preprocessing, part, start)))
            if own[0][0] not in (made for made, _ in found):  # None may stand for a size that is given as well
                found += own
        return found


@dataclass(frozen=True)
class SweepRow:
    """One combination of cells, fork, rank and learning rate, over its seeds."""

    cells: int
    from_layer: int
    rank: int
    lr: float
    val: tuple[float, ...]
    """Best validation score of each seed that did not diverge."""
    val_loss: float
    test: tuple[float, ...]
    """Of the chosen one only: who sees those of the others is led to choose by them."""
    diverged: int
    chosen: bool = False

    @property
    def order(self) -> tuple[bool, float, float]:
        """Higher is better. A setting that diverged with some seed is not to be trusted: it comes after all others."""
        return self.diverged == 0, mean(self.val) if self.val else float("-inf"), -self.val_loss


@dataclass(frozen=True)
class SweepResult:
    task: Any
    """The chosen one: the best seed of the combination with the best mean validation score, or an ensemble of all its
    seeds."""
    best: FitResult
    """Its result; without metrics if every run of this task diverged, but not those of others."""
    rows: list[SweepRow]
    results: list[FitResult]
    """Of all runs."""


def check_ensemble(count: int, seeds: int, regime: Regime) -> None:
    """Raises if `count` runs with other seeds cannot become one task."""
    if not isinstance(seeds, int) or seeds < 1:
        raise TrainingError(f"seeds {seeds!r}: choose a whole number, 1 or more.")
    if not isinstance(count, int):
        raise TrainingError(f"ensemble {count!r}: choose a whole number, 1 to {MAX_MEMBERS}.")
    if not 1 <= count <= MAX_MEMBERS:
        raise TrainingError(f"an ensemble has 1 to {MAX_MEMBERS} members, not {count}.")
    if count == 1:
        return
    if not regime.composes:
        raise TrainingError(f"regime {regime.name!r} trains no tasks, so it has no ensembles: leave out `ensemble`.")
    if regime.name == "head":
        raise TrainingError(
            "the mean of linear heads is a linear head: leave out `ensemble`, or choose another regime."
        )
    if seeds > 1:
        raise TrainingError("`ensemble` and `seeds` cannot be combined: leave out one of them.")


def run_sweeps(
    backbone: Backbone, sweeps: Sequence[SweepSpec], options: TrainOptions | None = None, **changes: Any
) -> list[SweepResult]:
    """Trains all settings of all sweeps in one pass and chooses for each by validation score.

    Fields of the options can be given by name, except for `image_size`: each spec has its preprocessing.
    """
    options = replace(options or TrainOptions(), **changes)
    runs = [sweep.runs(backbone) for sweep in sweeps]
    results = iter(train_runs(backbone, [spec for pairs in runs for _, spec in pairs], options))
    chosen = []
    for sweep, pairs in zip(sweeps, runs, strict=True):
        gathered: dict[Setting, list[FitResult]] = {}
        for setting, _ in pairs:
            gathered.setdefault(setting, []).append(next(results))
        chosen.append(_choose(sweep, gathered))
        for row in chosen[-1].rows:
            if row.val and row.diverged:
                which = f"{row.cells} cells, rank {row.rank}, from layer {row.from_layer}, lr {row.lr:g}"
                seeds = f"{row.diverged} of {row.diverged + len(row.val)} seeds"
                options.note(f"{sweep.plan.name}: {which} diverged with {seeds} and is ranked last.")
    if not any(result.best.metrics for result in chosen):
        names = ", ".join(sweep.splits.name for sweep in sweeps)
        raise TrainingError(f"{names}: all settings diverged: choose smaller learning rates.")
    return chosen


Score = tuple[float, float]
"""(validation score, -validation loss)"""


def _choose(sweep: SweepSpec, gathered: dict[Setting, list[FitResult]]) -> SweepResult:
    figure = HEADS[sweep.splits.kind].main_metric
    scored: dict[Setting, list[tuple[Score, FitResult] | None]] = {}
    for setting, results in gathered.items():
        found = _score_folds(results, sweep) if sweep.folds else _score(results[0], figure)
        scored.setdefault(setting._replace(seed=sweep.grid.first_seed), []).append(found)
    rows = []
    for setting, seeds in scored.items():
        finished = [one for one in seeds if one is not None]
        test = [result.metrics.get(figure) for _, result in finished if result.metrics["split"] == "test"]
        loss = -mean(score[1] for score, _ in finished) if finished else float("inf")
        rows.append(
            SweepRow(
                *(setting.cells or 0, setting.from_layer or 0, setting.rank or 0, setting.lr),
                val=tuple(score[0] for score, _ in finished),
                val_loss=loss,
                test=tuple(x for x in test if x is not None),
                diverged=len(seeds) - len(finished),
            )
        )
    _, candidates = max(zip(rows, scored.values(), strict=True), key=lambda pair: pair[0].order)
    everything = [result for results in gathered.values() for result in results]
    finished = [one for one in candidates if one is not None]
    if finished:
        _, chosen = max(finished, key=lambda one: one[0])
    else:
        chosen = next(result for result in everything if not result.metrics)
    keys = [key for key, seeds in scored.items() if any(one is not None and one[1] is chosen for one in seeds)]
    if sweep.grid.ensemble and finished:
        own = {setting: results for setting, results in gathered.items() if all(result.metrics for result in results)}
        members = [own[key] for key in own if key._replace(seed=sweep.grid.first_seed) in keys]
        chosen = chosen if len(members) == 1 else _join_members(sweep, members)
    shown = [
        replace(row, chosen=key in keys, test=row.test if keys == [key] else ())
        for key, row in zip(scored, rows, strict=True)
    ]
    return SweepResult(chosen.task, chosen, shown, everything)


def _join_members(sweep: SweepSpec, members: Sequence[Sequence[FitResult]]) -> FitResult:
    """The ensemble of the last runs of several settings, measured and calibrated by the mean of their logits."""
    together = [average_results(results) for results in zip(*members, strict=True)]
    whole = replace(together[-1], task=join_members([results[-1].task for results in members]))
    task, training = whole.task, whole.task.spec.training
    rates = list(dict.fromkeys(results[-1].task.spec.training["lr"] for results in members))
    facts = {
        "ensemble": task.members,
        "lr": rates[0] if len(rates) == 1 else rates,
        "trained_parameters": training["trained_parameters"] * task.members,
    }
    task.update_spec(training={**training, **facts})
    if sweep.folds:
        scored = _score_folds([*together[:-1], whole], sweep)
        assert scored is not None
        return scored[1]
    if whole.validated is not None:
        add_calibration(task, whole.validated, "validation", seen=was_seen(task, sweep.splits.val))
    assert whole.logits is not None
    assert whole.targets is not None
    split = whole.metrics["split"]
    metrics = {"split": split, **measure_task(task, whole.logits, whole.targets, fitted_on=split == "val")}
    task.update_spec(metrics=recorded(task.kind, metrics, whole.logits, whole.targets))
    return replace(whole, metrics=metrics)


def average_results(results: Sequence[FitResult]) -> FitResult:
    """The first of several results over the same images, with the mean of their logits."""
    first = results[0]
    logits = [result.logits for result in results if result.logits is not None]
    validated = [result.validated for result in results if result.validated is not None]
    if validated:
        first = replace(first, validated=(torch.stack([found for found, _ in validated]).mean(dim=0), validated[0][1]))
    return replace(first, logits=torch.stack(logits).mean(dim=0)) if logits else first


def _score(result: FitResult, figure: str) -> tuple[Score, FitResult] | None:
    """By the epoch whose weights were kept; None for a run that diverged."""
    if not result.metrics:
        return None
    if not result.history:  # a read-out
        return score(result.task.kind, result.metrics), result
    nothing = float("-inf")
    scores = [(entry.get(f"val_{figure}", nothing), -entry.get("val_loss", -nothing)) for entry in result.history]
    return max(scores), result


def _score_folds(results: Sequence[FitResult], sweep: SweepSpec) -> tuple[Score, FitResult] | None:
    """By the answers to all images, each from the run that did not see it; the last run gives the task."""
    (*folds, whole), splits = results, sweep.splits
    if not all(result.metrics for result in results):
        return None
    logits = torch.cat([fold.logits for fold in folds if fold.logits is not None])
    targets = torch.cat([fold.targets for fold in folds if fold.targets is not None])
    counts = [fold.metrics["images"] for fold in folds]
    whole = replace(whole, history=add_folds(whole.history, [fold.history for fold in folds], counts))
    judged = score(splits.kind, measure(splits.kind, splits.labels, logits, targets))
    add_calibration(whole.task, (logits, targets), f"{len(folds)} folds", seen=was_seen(whole.task, splits.train))
    tested = whole.metrics["split"] == "test"
    if not tested:
        assert splits.train is not None
        images = splits.train.subset(np.concatenate(sweep.held_out))
        whole = replace(whole, logits=logits, targets=targets, images=images)
    assert whole.logits is not None
    assert whole.targets is not None
    split = "test" if tested else f"{len(folds)} folds"
    found = measure_task(whole.task, whole.logits, whole.targets, fitted_on=not tested)
    whole = replace(whole, metrics={"split": split, **found})
    whole.task.update_spec(metrics=recorded(splits.kind, whole.metrics, whole.logits, whole.targets))
    return judged, whole


def sweep_table(name: str, rows: Sequence[SweepRow], score_name: str) -> Table:
    """Every combination with its score: the chosen one, then the others, best first."""
    ranked = sorted(rows, key=lambda row: (row.chosen, row.order), reverse=True)
    averaged = sum(row.chosen for row in rows)
    columns = {
        "cells": [str(row.cells) for row in ranked],
        "rank": [str(row.rank) for row in ranked],
        "from layer": [str(row.from_layer) for row in ranked],
        "lr": [f"{row.lr:g}" for row in ranked],
        score_name: [_mean_and_range(row.val) for row in ranked],
    }
    if not any(row.rank for row in rows):
        del columns["rank"]
    if any(row.test for row in rows):
        columns[f"test {score_name.partition(' ')[2]}"] = [
            _mean_and_range(row.test) if row.test else "" for row in ranked
        ]
    first = "the chosen one first" if averaged == 1 else f"the first {averaged} averaged"
    first = "all averaged" if averaged == len(rows) > 1 else first
    if any(row.diverged for row in rows):
        columns["diverged"] = [str(row.diverged or "") for row in ranked]
    return make_table(list(columns), zip(*columns.values(), strict=True), f"{name}: settings tried ({first})", left=0)


def _mean_and_range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = f"{mean(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"
