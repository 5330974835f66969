"""A sweep: every combination of cells, forks, rates and seeds is a run, and all runs share each pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from memoro.backbones import Backbone
from memoro.data import Splits
from memoro.errors import TrainingError
from memoro.preprocessing import Preprocessing
from memoro.regimes import Regime, TaskPlan
from memoro.task import Task
from memoro.train.fit import FitResult, fit_many
from memoro.train.metrics import MAIN_FIGURE
from memoro.train.recipe import Recipe

RATES = (0.03, 0.1, 0.3)
"""Tried where nobody names a rate: what users should not have to know."""


@dataclass(frozen=True)
class Grid:
    """What is varied. `seeds` vary the initial weights; order and views of the images are the same for all."""

    cells: tuple[int, ...] = (5,)
    from_layers: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = RATES
    seeds: int = 1

    def __post_init__(self) -> None:
        if not (self.cells and self.from_layers and self.rates) or self.seeds < 1:
            raise TrainingError("a sweep needs one value or more of cells, layers, rates and seeds.")

    def points(self) -> list[tuple[int, int, float, int]]:
        """(cells, from_layer, lr, seed) of every run."""
        return [
            (cells, layer, rate, seed)
            for cells in dict.fromkeys(self.cells)
            for layer in dict.fromkeys(self.from_layers)
            for rate in dict.fromkeys(self.rates)
            for seed in range(self.seeds)
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
        return (mean(self.val), -self.val_loss) if self.val else (float("-inf"), 0.0)


@dataclass(frozen=True)
class SweepResult:
    task: Task
    """The chosen one: of the best combination by mean validation score, the seed with the best."""
    best: FitResult
    rows: list[SweepRow]


def run_sweep(
    backbone: Backbone,
    plan: TaskPlan,
    regime: Regime,
    grid: Grid,
    recipe: Recipe,
    splits: Splits,
    preprocessing: Preprocessing,
    *,
    folder: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    quiet: bool = True,
) -> SweepResult:
    """Trains all combinations in one pass and chooses by validation score."""
    if splits.val is None:
        raise TrainingError(f"{splits.name} has no validation images to choose by: set val_fraction above 0.")
    points = grid.points()
    settings = [
        (
            regime.build(backbone, replace(plan, cells=cells, from_layer=layer, seed=seed)),
            replace(recipe, lr=rate, seed=seed),
        )
        for cells, layer, rate, seed in points
    ]
    results = fit_many(
        backbone, settings, regime, splits, preprocessing, folder=folder, resume=resume, workers=workers, quiet=quiet
    )
    figure = MAIN_FIGURE[splits.kind]
    together: dict[tuple[int, int, float], list[FitResult]] = {}
    for (cells, layer, rate, _), result in zip(points, results, strict=True):
        together.setdefault((cells, layer, rate), []).append(result)
    rows = [_row(key, some, figure) for key, some in together.items()]
    best = max(rows, key=lambda row: row.rank)
    winners = [result for result in together[best.cells, best.from_layer, best.lr] if result.metrics]
    chosen = max(winners, key=lambda result: _best_val(result.history, figure))
    return SweepResult(chosen.task, chosen, rows)


def _row(key: tuple[int, int, float], results: Sequence[FitResult], figure: str) -> SweepRow:
    finished = [result for result in results if result.metrics and result.history]
    best = [_best_val(result.history, figure) for result in finished]
    return SweepRow(
        *key,
        val=tuple(score for score, _ in best),
        val_loss=mean(-loss for _, loss in best) if best else float("inf"),
        test=tuple(result.metrics[figure] for result in finished if result.metrics.get(figure) is not None),
        diverged=len(results) - len(finished),
    )


def _best_val(history: Sequence[dict[str, Any]], figure: str) -> tuple[float, float]:
    """The validation score and negative loss of the epoch whose weights were kept."""
    return max((entry.get(f"val_{figure}", float("-inf")), -entry["val_loss"]) for entry in history)
