"""Accuracy of methods on a set: rates chosen on held-out training images, then seeds, and the test split once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import Augment, ImageSet, Splits
from memoro.data.splits import Index, fold_numbers, strata, stratified_split
from memoro.errors import DataError
from memoro.images import Preprocessing
from memoro.lab.baselines import REGIMES
from memoro.lab.reproduce.methods import Method
from memoro.tasks.task import Task
from memoro.training import Recipe, Run, TrainOptions, TrainResult, train_runs
from memoro.training.checkpoint import run_identity

Correct = np.ndarray[Any, np.dtype[np.bool_]]
"""Whether each image was classified correctly."""
Planned = tuple[Method, float, int, Index | None]
"""A run: method, learning rate, seed, and the training images that are held out; None: the validation split."""

FOLDS = 4
JUDGES = 250
"""Folds are held out until this many images judge a rate: all four of a small set, one of a large one."""
FLAT = 0.01
"""A validation curve is flat if its last third gains no more accuracy than this."""


@dataclass(frozen=True)
class Budget:
    """How long the runs of a job are, and how many there are."""

    epochs: int = 10
    steps: int | None = None
    """Instead of epochs."""
    batch_size: int = 32
    views: int | None = 1
    augment: Augment = field(default_factory=Augment)
    most: int | None = 2000
    """Training images of a set, at most."""
    folds: int | None = None
    """Folds that judge rates; None: as many as a set needs (`JUDGES`)."""
    judging_seeds: int = 1
    seeds: int = 3
    """Runs at the chosen rate on all training images, each measured on the test split; 0: none."""
    val_fraction: float = 0.0
    """The fraction of train that becomes the validation split; 0: rates are compared on folds if there is none."""

    def recipe(self, method: Method, lr: float, seed: int) -> Recipe:
        common = {name: getattr(self, name) for name in ("epochs", "steps", "batch_size", "views", "augment")}
        return Recipe(lr=lr, seed=seed, **{**common, **method.recipe})

    def step_count(self, images: int) -> int:
        return self.steps or self.epochs * math.ceil(images / self.batch_size)

    def on_set(self, name: str) -> Budget:
        """The paper: Inception crops, and random crops for CIFAR-100."""
        return replace(self, augment=Augment(crop="pad")) if self.views is None and name == "cifar100" else self

    def folds_of(self, images: int) -> int:
        """How many of the four folds are held out in turn."""
        return self.folds or min(FOLDS, math.ceil(JUDGES * FOLDS / max(images, 1)))


@dataclass(frozen=True)
class Bench:
    """What methods are measured with: a backbone, its preprocessing, and options of the training."""

    backbone: Backbone
    preprocessing: Preprocessing
    options: TrainOptions = field(default_factory=lambda: TrainOptions(quiet=True))
    """With a `folder`, every training has a checkpoint in it and continues from that."""

    def train(
        self, splits: Splits, runs: Sequence[Planned], budget: Budget, extends: Mapping[str, Sequence[Task]] = {}
    ) -> list[TrainResult]:
        """All runs in one call; features are kept only for what composes. `extends`: the parents of each method."""
        built = [
            Run(
                method.build(self.backbone, splits, seed, extends.get(method.name, ())),
                budget.recipe(method, lr, seed),
                REGIMES[method.regime],
                splits,
                self.preprocessing,
                held_out,
            )
            for method, lr, seed, held_out in runs
        ]
        options = self.options
        if not all(method.composes for method, *_ in runs):
            options = replace(options, cache=False)
        if options.folder is not None:
            identity = json.dumps(run_identity(self.backbone, built, options.wanted_cache))
            name = hashlib.sha256(identity.encode()).hexdigest()[:16]
            options = replace(options, folder=options.folder / name, resume=True)
        return train_runs(self.backbone, built, options)


def is_flat(curve: Sequence[tuple[int, float]]) -> bool:
    """Whether the last third of the training no longer raised the accuracy on held-out images."""
    if len(curve) < 2:
        return False
    last, final = curve[-1]
    earlier = [accuracy for step, accuracy in curve[:-1] if 10 * step <= 7 * last] or [curve[0][1]]
    return final - earlier[-1] <= FLAT


def held_out_parts(splits: Splits, budget: Budget) -> list[Index | None]:
    """The folds of train that judge rates, None for the validation split; empty where no class has two images."""
    if splits.val is not None:
        return [None]
    train = _train_of(splits)
    number = fold_numbers(train, FOLDS, 0)
    return [np.flatnonzero(number == fold) for fold in range(budget.folds_of(len(train))) if (number == fold).any()]


def select_rates(
    bench: Bench, splits: Splits, methods: Sequence[Method], budget: Budget, extends: Mapping[str, Sequence[Task]] = {}
) -> dict[str, dict[str, Any]]:
    """How held-out training images chose the rate of each method, by name; the test split is not touched.

    `lr`: the rate; `scores`: the accuracy on all held-out images by rate, for each seed, 0 where a run diverged;
    `curve`: (step, held-out accuracy) at the chosen rate. Methods must all compose, or none.
    """
    parts = held_out_parts(splits, budget)
    if not parts:
        raise DataError(f"{splits.name}: no class has two training images, so none can be held out: add images.")
    keys = [(method, lr, seed) for method in methods for lr in method.rates for seed in range(budget.judging_seeds)]
    runs = [(*key, part) for key in keys for part in parts]
    results = bench.train(replace(splits, test=None), runs, budget, extends)
    gathered: dict[str, dict[tuple[float, int], list[TrainResult]]] = {method.name: {} for method in methods}
    for (method, lr, seed, _), result in zip(runs, results, strict=True):
        gathered[method.name].setdefault((lr, seed), []).append(result)
    return {name: _choose(some) for name, some in gathered.items()}


def _choose(gathered: Mapping[tuple[float, int], list[TrainResult]]) -> dict[str, Any]:
    scores: dict[float, list[float]] = {}
    for (lr, _), results in gathered.items():
        scores.setdefault(lr, []).append(_accuracy(results))
    best = max(scores, key=lambda lr: mean(scores[lr]))
    histories = [result.history for result in gathered[best, 0]]
    curve = [
        (entries[0]["step"], round(mean(entry["val_accuracy"] for entry in entries), 4))
        for entries in zip(*histories, strict=False)
    ]
    rounded = {f"{lr:g}": [round(one, 4) for one in some] for lr, some in scores.items()}
    return {"lr": best, "scores": rounded, "curve": curve}


def _accuracy(results: Sequence[TrainResult]) -> float:
    """Over the images of all folds; 0 if a run diverged."""
    if not all(result.metrics for result in results):
        return 0.0
    return float(np.concatenate([correct_of(result) for result in results]).mean())


def train_seeds(
    bench: Bench,
    splits: Splits,
    rates: Mapping[str, float],
    methods: Sequence[Method],
    budget: Budget,
    extends: Mapping[str, Sequence[Task]] = {},
    seeds: Sequence[int] | None = None,
) -> dict[str, list[TrainResult]]:
    """Each method's runs on all training images at its rate, one per seed, measured on the test split.

    An ensemble has several runs per seed, whose logits are averaged.
    """
    if splits.test is None:
        raise DataError(f"{splits.name} has no test split: add a test/ folder beside train/.")
    chosen = range(budget.seeds) if seeds is None else seeds
    members = [(method, seed, number) for method in methods for seed in chosen for number in range(method.ensemble)]
    runs = [(method, rates[method.name], seed * method.ensemble + number, None) for method, seed, number in members]
    found: dict[str, list[TrainResult]] = {method.name: [] for method in methods}
    together: list[TrainResult] = []
    for (method, _, number), result in zip(
        members, bench.train(splits, runs, budget, extends) if runs else [], strict=True
    ):
        together = [*together, result] if number else [result]
        if number == method.ensemble - 1:
            found[method.name].append(_average(together))
    return found


def _average(results: Sequence[TrainResult]) -> TrainResult:
    """The first of several results over the same images, with the mean of their logits."""
    logits = [result.logits for result in results if result.logits is not None]
    return replace(results[0], logits=torch.stack(logits).mean(dim=0)) if logits else results[0]


def measure_methods(
    bench: Bench, splits: Splits, methods: Sequence[Method], budget: Budget, extends: Mapping[str, Sequence[Task]] = {}
) -> dict[str, dict[str, Any]]:
    """What is recorded of each method: its rate and how it was chosen, the test accuracy of every seed, which images
    each got right, and how many runs diverged."""
    selected = select_rates(bench, splits, methods, budget, extends)
    rates = {name: found["lr"] for name, found in selected.items()}
    trained = train_seeds(bench, splits, rates, methods, budget, extends) if budget.seeds else {}
    return {
        name: {
            **found,
            **summarise_answers([correct_of(result) for result in trained.get(name, [])]),
            "diverged": sum(not result.metrics for result in trained.get(name, [])),
        }
        for name, found in selected.items()
    }


def count_parameters(bench: Bench, splits: Splits, method: Method) -> dict[str, int]:
    """How many parameters it trains, without the head and in the head."""
    task = method.build(bench.backbone, splits, 0)
    head = sum(parameter.numel() for parameter in task.head.parameters())
    total = sum(parameter.numel() for parameter in REGIMES[method.regime].trains(task).values())
    return {"parameters": total - head, "head": head}


def summarise_answers(rights: Sequence[Correct]) -> dict[str, Any]:
    """The accuracy of each model, and which images each got right, as hexadecimal bits: 0 for one that diverged."""
    return {
        "test": [round(float(right.mean()), 4) if len(right) else 0.0 for right in rights],
        "correct": [np.packbits(right).tobytes().hex() for right in rights],
    }


def correct_of(result: TrainResult) -> Correct:
    """Which images of the measured split were classified correctly; empty for a run that diverged."""
    if result.logits is None or result.targets is None:
        return np.zeros(0, dtype=bool)
    return compare_answers(result.logits, result.targets)


def compare_answers(logits: Tensor, targets: Tensor) -> Correct:
    """Which images were classified correctly."""
    return np.asarray((logits.argmax(-1).cpu() == targets.cpu()).numpy(), dtype=bool)


def describe_splits(splits: Splits) -> dict[str, int]:
    test = 0 if splits.test is None else len(splits.test)
    return {"train_images": len(_train_of(splits)), "test_images": test, "classes": len(splits.labels)}


def limit_training(splits: Splits, most: int | None) -> Splits:
    """The splits with at most this many training images, stratified, the same ones at every call."""
    train = _train_of(splits)
    if most is None or len(train) <= most:
        return splits
    fraction = most / len(train)
    _, chosen = stratified_split(strata(train.targets), fraction, 0)
    return replace(splits, train=train.subset(chosen))


def keep_classes(splits: Splits, groups: Mapping[str, Sequence[int]]) -> Splits:
    """The splits with new labels: each is made of the images of some classes; those of no label are left out."""
    number = {old: new for new, classes in enumerate(groups.values()) for old in classes}
    labels = tuple(groups)

    def change(images: ImageSet | None) -> ImageSet | None:
        if images is None:
            return None
        at = [index for index, target in enumerate(images.targets.tolist()) if target in number]
        part = images.subset(at)
        targets = torch.tensor([number[target] for target in part.targets.tolist()], device="cpu")
        return replace(part, labels=labels, targets=targets)

    return replace(splits, labels=labels, train=change(splits.train), val=change(splits.val), test=change(splits.test))


def _train_of(splits: Splits) -> ImageSet:
    if splits.train is None:
        raise DataError(f"{splits.name} has no training images: add a train/ folder of class folders.")
    return splits.train
