"""How long each way trains until it answers a given share of real test images right."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memoro.backbones import Backbone
from memoro.data import Augment, load_data
from memoro.errors import TrainingError
from memoro.regimes import REGIMES, TaskPlan
from memoro.training.cached import Cache, CachedLoader, fill_caches
from memoro.training.group import RunGroup, RunGroups, RunSpec
from memoro.training.loop import Training, run_training
from memoro.training.recipe import OptimizerName, Recipe


@dataclass(frozen=True)
class Approach:
    """One way to train, with an optimiser and a rate that suit it."""

    name: str
    regime: str
    optimizer: OptimizerName
    lr: float
    cached: bool = False


APPROACHES = (
    *(Approach("memory, from cache", "memory", "sgd", lr, cached=True) for lr in (0.1, 0.3)),
    *(Approach("memory", "memory", "sgd", lr) for lr in (0.1, 0.3)),
    *(Approach("lora", "lora", "adamw", lr) for lr in (0.001, 0.003)),
    *(Approach("full", "full", "adamw", lr) for lr in (0.00003, 0.0001)),
)

CHEAPER = 4
"""How many epochs from the cache there are to one that computes base passes: they still take less time."""


def epoch_count(epochs: int, approaches: Sequence[Approach] = APPROACHES) -> int:
    """Epochs that `bench_reach` ticks."""
    return sum(epochs * CHEAPER if approach.cached else epochs for approach in approaches)


@dataclass(frozen=True)
class TimeToAccuracy:
    """How far one approach came."""

    approach: Approach
    curve: list[tuple[float, float]]
    """Seconds of training so far and accuracy, after each epoch. Features that are kept are computed within the
    first; examining is not counted."""
    goal: float

    @property
    def best(self) -> float | None:
        """None for one that diverged before its first val_set."""
        return max((accuracy for _, accuracy in self.curve), default=None)

    @property
    def seconds(self) -> float | None:
        """Until the goal; None where it was not reached."""
        return next((seconds for seconds, accuracy in self.curve if accuracy >= self.goal), None)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "best": self.best}


@dataclass
class _Stopwatch:
    """Watches a training, notes accuracy over time and ends it at the goal."""

    goal: float
    spent: float
    tick: Callable[[int], None]
    curve: list[tuple[float, float]] = field(default_factory=list)

    def begin(self, groups: Sequence[RunGroup]) -> None:
        self._from = self._last = time.perf_counter()

    def step(self, group: RunGroup, entry: dict[str, Any]) -> None:
        self._last = time.perf_counter()

    def epoch(self, group: RunGroup, entries: list[dict[str, Any]]) -> None:
        self.spent += self._last - self._from
        self._from = time.perf_counter()
        self.tick(1)
        for entry, run in zip(entries, group.runs, strict=False):  # none where it diverged
            self.curve.append((self.spent, entry["val_accuracy"]))
            if entry["val_accuracy"] >= self.goal:
                run.stopped = f"{self.goal:g} reached"


def bench_reach(
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
    """Trains each approach from nothing on the plain views of `data`'s training images, until the goal or the end.

    Accuracy is that on the test images (the validation images where there are none): this measures time and chooses
    nothing. `tick` hears of epochs that are done or no longer needed.
    """
    splits = load_data(data, workers=workers, quiet=True)
    if splits.kind != "softmax" or splits.train is None:
        raise TrainingError(f"{splits.name}: time to an accuracy needs training images with one label each.")
    splits = replace(splits, val=splits.test or splits.val)
    preprocessing = backbone.preprocessing if image_size is None else backbone.preprocessing.at(image_size)
    found = []
    for approach in approaches:
        own = epochs * CHEAPER if approach.cached else epochs
        recipe = Recipe(
            lr=approach.lr, optimizer=approach.optimizer, epochs=own, batch_size=batch, views=1,
            augment=Augment(crop="none", flip=0),
        )  # fmt: skip
        regime = REGIMES[approach.regime]
        task = regime.build(backbone, TaskPlan("goal", splits.labels, cells=cells, seed=0))
        spec = RunSpec(task, recipe, regime, splits, preprocessing)
        curve = _follow(backbone, spec, approach.cached, goal, workers, tick)
        tick(own - len(curve))
        found.append(TimeToAccuracy(approach, curve, goal))
    return found


def _follow(
    backbone: Backbone, spec: RunSpec, cached: bool, goal: float, workers: int | None, tick: Callable[[int], None]
) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder)) if cached else None
        groups = RunGroups(backbone, [spec], cache=cache, workers=workers)
        begun = time.perf_counter()
        if cache is not None:
            [group] = groups.list
            assert isinstance(group.train, CachedLoader)
            fill_caches([group.train], cache, lambda images: None)
        watch = _Stopwatch(goal, time.perf_counter() - begun, tick)
        if cache is not None:
            fill_caches(groups.cached, cache, lambda images: None)  # the images of the val_set
        run_training(Training(backbone, groups.list, [watch]))
        return watch.curve


def draw_reach(path: Path, title: str, found: Sequence[TimeToAccuracy]) -> Path:
    """Accuracy over seconds of training, a line for each approach."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(reach.approach.name for reach in found))
    for reach in found:
        if not reach.curve:
            continue
        number = names.index(reach.approach.name)
        style = "-" if reach.approach == next(r.approach for r in found if r.approach.name == names[number]) else "--"
        seconds, accuracy = zip(*reach.curve, strict=True)
        label = f"{reach.approach.name}, lr {reach.approach.lr:g}"
        axes.plot(seconds, accuracy, f"o{style}", color=f"C{number}", label=label, markersize=4)
    if found:
        axes.axhline(found[0].goal, color="#555555", linewidth=1, linestyle=":")
    axes.set(title=title, xlabel="seconds of training", ylabel="test accuracy", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    return path
