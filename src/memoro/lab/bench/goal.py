"""`memoro lab bench train --data`: training time until a given accuracy on real test images, for several regimes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memoro.backbones import Backbone
from memoro.console import bar
from memoro.data import Augment, load_data
from memoro.errors import TrainingError
from memoro.lab.baselines import REGIMES, BaselinePlan
from memoro.lab.bench.models import Row
from memoro.lab.bench.train import RANK
from memoro.lab.tables.plots import Point, draw_panels
from memoro.training.cached import Cache, CachedLoader, fill_caches
from memoro.training.loop import Trainer
from memoro.training.recipe import OptimizerName, Recipe, TrainOptions
from memoro.training.run import Run, RunGroup
from memoro.training.train import train_runs


@dataclass(frozen=True)
class Approach:
    """A regime with an optimiser and a learning rate that suit it."""

    name: str
    regime: str
    optimizer: OptimizerName
    lr: float
    cached: bool = False

    def most_epochs(self, epochs: int) -> int:
        """Epochs from the cache are so much shorter that there are four times as many of them; a read-out is solved
        once."""
        return 1 if self.regime == "readout" else 4 * epochs if self.cached else epochs


APPROACHES = (
    Approach("readout", "readout", "adamw", 0.001),
    *(Approach("side, from cache", "side", "adamw", lr, cached=True) for lr in (0.001, 0.003)),
    *(Approach("memory, from cache", "memory", "sgd", lr, cached=True) for lr in (0.1, 0.3)),
    *(Approach("memory", "memory", "sgd", lr) for lr in (0.1, 0.3)),
    *(Approach("lora", "lora", "adamw", lr) for lr in (0.001, 0.003)),
    *(Approach("lora-all", "lora-all", "adamw", lr) for lr in (0.0005, 0.001)),
    *(Approach("full", "full", "adamw", lr) for lr in (0.00003, 0.0001)),
)


@dataclass
class _Stopwatch:
    """A callback that records accuracy over time and stops the run at the goal."""

    goal: float
    seconds: float
    tick: Callable[[int], None]
    curve: list[tuple[float, float]] = field(default_factory=list)

    def on_train_begin(self, groups: Sequence[RunGroup]) -> None:
        self._start = self._last = time.perf_counter()

    def on_step_end(self, group: RunGroup, entry: dict[str, Any]) -> None:
        self._last = time.perf_counter()

    def on_epoch_end(self, group: RunGroup, entries: list[dict[str, Any]]) -> None:
        self.seconds += self._last - self._start
        self._start = time.perf_counter()
        self.tick(1)
        for entry, run in zip(entries, group.runs, strict=False):  # no entry where the run diverged
            self.curve.append((self.seconds, entry["val_accuracy"]))
            if entry["val_accuracy"] >= self.goal:
                run.stopped = f"{self.goal:g} reached"


def bench_goal(
    backbone: Backbone,
    data: str,
    goal: float,
    *,
    approaches: Sequence[Approach] = APPROACHES,
    cells: int,
    epochs: int,
    batch: int,
    image_size: int | None = None,
    workers: int | None = None,
    quiet: bool = True,
) -> list[Row]:
    """Trains each approach on the unaugmented training images of `data`, until the goal or the last epoch.

    Accuracy is on the test images (the validation images where there are none): this measures time and selects
    nothing. `curve`: seconds of training so far and accuracy, after each epoch; the first includes the time to compute
    cached features, and evaluation is not counted. `seconds`: until the goal, None if it was not reached. `best`: None
    for a run that diverged in its first epoch. A read-out has one point.
    """
    splits = load_data(data, workers=workers, quiet=True)
    if splits.kind != "softmax" or splits.train is None:
        raise TrainingError(f"{splits.name}: time to an accuracy needs training images with one label each.")
    splits = replace(splits, val=splits.test or splits.val)
    preprocessing = backbone.preprocessing if image_size is None else backbone.preprocessing.at(image_size)
    rows = []
    with bar("time to accuracy", sum(one.most_epochs(epochs) for one in approaches), quiet=quiet) as tick:
        for one in approaches:
            regime, most = REGIMES[one.regime], one.most_epochs(epochs)
            augment = Augment(crop="none", flip=0)
            recipe = Recipe(one.lr, most, optimizer=one.optimizer, batch_size=batch, views=1, augment=augment)
            sizes: dict[str, Any] = {"side": {"rank": RANK}, "readout": {}}.get(one.regime, {"cells": cells})
            task = regime.build(backbone, BaselinePlan("goal", splits.labels, **sizes))
            planned = Run(task, recipe, regime, splits, preprocessing)
            if regime.readout == 1:
                curve = [_solve(backbone, planned, workers)]
            else:
                curve = _train(backbone, planned, one.cached, goal, workers, tick)
            tick(most - len(curve))
            row: Row = {"name": one.name, "optimizer": one.optimizer, "lr": one.lr, "curve": curve}
            row["seconds"] = next((seconds for seconds, accuracy in curve if accuracy >= goal), None)
            row["best"] = max((accuracy for _, accuracy in curve), default=None)
            rows.append(row)
    return rows


def _train(
    backbone: Backbone, planned: Run, cached: bool, goal: float, workers: int | None, tick: Callable[[int], None]
) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder)) if cached else None
        trainer = Trainer(backbone, [planned], TrainOptions(workers=workers), cache=cache)
        start = time.perf_counter()
        if cache is not None:
            [group] = trainer.groups
            assert isinstance(group.loader, CachedLoader)
            fill_caches([group.loader], cache, quiet=True)
        watch = _Stopwatch(goal, time.perf_counter() - start, tick)
        if cache is not None:
            fill_caches(trainer.loaders.cached, cache, quiet=True)  # the validation images
        trainer.callbacks.append(watch)
        trainer.train()
        return watch.curve


def _solve(backbone: Backbone, planned: Run, workers: int | None) -> tuple[float, float]:
    """Seconds of the base passes and of the solution of a read-out, and its accuracy."""
    options = TrainOptions(cache=False, workers=workers, quiet=True)
    [result] = train_runs(backbone, [planned], options)
    return options.phases.seconds["base passes"], float(result.metrics["accuracy"])


def draw_goal(path: Path, goal: float, rows: Sequence[Row]) -> Path:
    """Plots accuracy over seconds of training: a panel for each method, a line for each learning rate."""
    last = max((seconds for row in rows for seconds, _ in row["curve"]), default=1.0)
    panels: dict[str, dict[str, list[Point]]] = {}
    for row in rows:
        lines = panels.setdefault(row["name"], {"goal": [(0.0, goal, 0.0), (last, goal, 0.0)]})
        if row["curve"]:
            lines[f"lr {row['lr']:g}"] = [(seconds, accuracy, 0.0) for seconds, accuracy in row["curve"]]
    return draw_panels(path, panels, "seconds of training", "test accuracy", level=["goal"])
