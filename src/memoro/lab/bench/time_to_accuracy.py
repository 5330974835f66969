"""Training time until a given accuracy on real test images, for several regimes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from memoro.backbones import Backbone
from memoro.console import make_table
from memoro.data import Augment, load_data
from memoro.errors import TrainingError
from memoro.lab.baselines import REGIMES, BaselinePlan
from memoro.lab.bench.step import RANK
from memoro.pages.plots import save_figure
from memoro.training.cached import Cache, CachedLoader, fill_caches
from memoro.training.loop import Trainer
from memoro.training.recipe import OptimizerName, Recipe, TrainOptions
from memoro.training.run import Run, RunGroup


@dataclass(frozen=True)
class Approach:
    """A regime with an optimiser and a learning rate that suit it."""

    name: str
    regime: str
    optimizer: OptimizerName
    lr: float
    cached: bool = False

    def epochs(self, most: int) -> int:
        """Epochs from the cache are so much shorter that there are four times as many of them."""
        return 4 * most if self.cached else most


APPROACHES = (
    *(Approach("side, from cache", "side", "adamw", lr, cached=True) for lr in (0.001, 0.003)),
    *(Approach("memory, from cache", "memory", "sgd", lr, cached=True) for lr in (0.1, 0.3)),
    *(Approach("memory", "memory", "sgd", lr) for lr in (0.1, 0.3)),
    *(Approach("lora", "lora", "adamw", lr) for lr in (0.001, 0.003)),
    *(Approach("lora-all", "lora-all", "adamw", lr) for lr in (0.0005, 0.001)),
    *(Approach("full", "full", "adamw", lr) for lr in (0.00003, 0.0001)),
)


@dataclass(frozen=True)
class TimeToAccuracy:
    """The result of one approach."""

    approach: Approach
    curve: list[tuple[float, float]]
    """Seconds of training so far and accuracy, after each epoch. The first includes the time to compute cached
    features; evaluation is not counted."""
    goal: float

    @property
    def best(self) -> float | None:
        """None for a run that diverged in its first epoch."""
        return max((accuracy for _, accuracy in self.curve), default=None)

    @property
    def seconds(self) -> float | None:
        """Until the goal; None if it was not reached."""
        return next((seconds for seconds, accuracy in self.curve if accuracy >= self.goal), None)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "best": self.best}


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


def bench_time_to_accuracy(
    backbone: Backbone,
    data: str,
    goal: float,
    *,
    approaches: Sequence[Approach] = APPROACHES,
    cells: int = 5,
    epochs: int = 6,
    batch: int = 16,
    image_size: int | None = None,
    workers: int | None = None,
    tick: Callable[[int], None] = lambda epochs: None,
) -> list[TimeToAccuracy]:
    """Trains each approach on the unaugmented training images of `data`, until the goal or the last epoch.

    Accuracy is on the test images (the validation images where there are none): this measures time and selects
    nothing. `tick` receives the number of epochs that are done or no longer needed.
    """
    splits = load_data(data, workers=workers, quiet=True)
    if splits.kind != "softmax" or splits.train is None:
        raise TrainingError(f"{splits.name}: time to an accuracy needs training images with one label each.")
    splits = replace(splits, val=splits.test or splits.val)
    preprocessing = backbone.preprocessing if image_size is None else backbone.preprocessing.at(image_size)
    plain = Recipe(batch_size=batch, views=1, augment=Augment(crop="none", flip=0))
    found = []
    for approach in approaches:
        most = approach.epochs(epochs)
        recipe = replace(plain, lr=approach.lr, optimizer=approach.optimizer, epochs=most)
        regime = REGIMES[approach.regime]
        own, rank = (None, RANK) if approach.regime == "side" else (cells, None)
        task = regime.build(backbone, BaselinePlan("goal", splits.labels, cells=own, rank=rank, seed=0))
        planned = Run(task, recipe, regime, splits, preprocessing)
        curve = _train(backbone, planned, approach.cached, goal, workers, tick)
        tick(most - len(curve))
        found.append(TimeToAccuracy(approach, curve, goal))
    return found


def epoch_count(epochs: int, approaches: Sequence[Approach] = APPROACHES) -> int:
    """The number of epochs that `bench_time_to_accuracy` reports to `tick`."""
    return sum(approach.epochs(epochs) for approach in approaches)


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
            fill_caches([group.loader], cache, lambda images: None)
        watch = _Stopwatch(goal, time.perf_counter() - start, tick)
        if cache is not None:
            fill_caches(trainer.loaders.cached, cache, lambda images: None)  # the validation images
        trainer.callbacks.append(watch)
        trainer.train()
        return watch.curve


def time_table(title: str, found: Sequence[TimeToAccuracy]) -> Table:
    """Seconds to the goal, a row for each approach."""
    rows = []
    for one in found:
        how, seconds = one.approach, one.seconds
        reached = "diverged" if one.best is None else "not reached" if seconds is None else f"{seconds:.0f}"
        best = "" if one.best is None else f"{one.best:.3f}"
        rows.append((how.name, how.optimizer, f"{how.lr:g}", reached, str(len(one.curve)), best))
    return make_table(("method", "optimiser", "lr", "seconds to the goal", "epochs", "best accuracy"), rows, title)


def draw_times(path: Path, title: str, found: Sequence[TimeToAccuracy]) -> Path:
    """Plots accuracy over seconds of training: a colour for each name, the first learning rate as a solid line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    names: list[str] = []
    for one in found:
        how = one.approach
        style = "--" if how.name in names else "-"
        names += [how.name] if how.name not in names else []
        if one.curve:
            seconds, accuracy = zip(*one.curve, strict=True)
            color, label = f"C{names.index(how.name)}", f"{how.name}, lr {how.lr:g}"
            axes.plot(seconds, accuracy, f"o{style}", color=color, label=label, markersize=4)
    if found:
        axes.axhline(found[0].goal, color="#555555", linewidth=1, linestyle=":")
    axes.set(title=title, xlabel="seconds of training", ylabel="test accuracy", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)
    return path
