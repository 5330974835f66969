"""Accuracy of methods on a set: rates chosen on held-out training images, then seeds, and the test split once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
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

    def train(self, runs: Sequence[Run]) -> list[TrainResult]:
        """All runs in one call; features are kept only for what composes."""
        options = self.options
        if not all(run.regime.composes for run in runs):
            options = replace(options, cache=False)
        if options.folder is not None:
            identity = json.dumps(run_identity(self.backbone, runs, options.wanted_cache))
            name = hashlib.sha256(identity.encode()).hexdigest()[:16]
            options = replace(options, folder=options.folder / name, resume=True)
        return train_runs(self.backbone, runs, options)


@dataclass(frozen=True)
class Selection:
    """The rate of a method that held-out training images chose."""

    lr: float
    scores: dict[float, list[float]]
    """By rate: the accuracy on all held-out images, for each seed; 0 where a run diverged."""
    curve: list[tuple[int, float]]
    """(step, held-out accuracy) at the chosen rate."""

    def to_json(self) -> dict[str, Any]:
        scores = {f"{rate:g}": [round(one, 4) for one in some] for rate, some in self.scores.items()}
        return {"lr": self.lr, "scores": scores, "curve": [(at, round(one, 4)) for at, one in self.curve]}


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
) -> dict[str, Selection]:
    """The best rate of each method by name. Methods must all compose, or none; the test split is not touched."""
    parts = held_out_parts(splits, budget)
    if not parts:
        raise DataError(f"{splits.name}: no class has two training images, so none can be held out: add images.")
    unseen = replace(splits, test=None)
    keys = [
        (method, lr, seed, part)
        for method in methods
        for lr in method.rates
        for seed in range(budget.judging_seeds)
        for part in parts
    ]
    runs = [
        make_run(bench, unseen, method, budget, lr, seed, part, extends.get(method.name, ()))
        for method, lr, seed, part in keys
    ]
    gathered: dict[tuple[str, float, int], list[TrainResult]] = {}
    for (method, lr, seed, _), result in zip(keys, bench.train(runs), strict=True):
        gathered.setdefault((method.name, lr, seed), []).append(result)
    return {method.name: _choose(method, gathered) for method in methods}


def _choose(method: Method, gathered: Mapping[tuple[str, float, int], list[TrainResult]]) -> Selection:
    scores: dict[float, list[float]] = {}
    for (name, lr, _), results in gathered.items():
        if name == method.name:
            scores.setdefault(lr, []).append(_accuracy(results))
    best = max(scores, key=lambda lr: mean(scores[lr]))
    histories = [result.history for result in gathered[method.name, best, 0]]
    curve = [
        (entries[0]["step"], mean(entry["val_accuracy"] for entry in entries))
        for entries in zip(*histories, strict=False)
    ]
    return Selection(best, scores, curve)


def _accuracy(results: Sequence[TrainResult]) -> float:
    """Over the images of all folds; 0 if a run diverged."""
    if not all(result.metrics for result in results):
        return 0.0
    right = sum(float(correct_of(result).sum()) for result in results)
    return right / sum(len(correct_of(result)) for result in results)


def train_seeds(
    bench: Bench,
    splits: Splits,
    rates: Sequence[tuple[Method, float]],
    budget: Budget,
    extends: Mapping[str, Sequence[Task]] = {},
    seeds: Iterable[int] | None = None,
) -> dict[str, list[TrainResult]]:
    """Each method's runs on all training images at its rate, one per seed, measured on the test split.

    An ensemble has several runs per seed, and a method may have several rates: the logits of all its runs of a seed
    are averaged.
    """
    if splits.test is None:
        raise DataError(f"{splits.name} has no test split: add a test/ folder beside train/.")
    chosen = list(range(budget.seeds) if seeds is None else seeds)
    keys = [
        (method, lr, seed, seed * method.ensemble + member)
        for method, lr in rates
        for seed in chosen
        for member in range(method.ensemble)
    ]
    runs = [
        make_run(bench, splits, method, budget, lr, own, extends=extends.get(method.name, ()))
        for method, lr, _, own in keys
    ]
    found: dict[str, dict[int, list[TrainResult]]] = {method.name: {} for method, _ in rates}
    for (method, _, seed, _), result in zip(keys, bench.train(runs) if runs else [], strict=True):
        found[method.name].setdefault(seed, []).append(result)
    return {name: [_average(results) for results in some.values()] for name, some in found.items()}


def _average(results: Sequence[TrainResult]) -> TrainResult:
    """The first of several results over the same images, with the mean of their logits."""
    logits = [result.logits for result in results if result.logits is not None]
    return replace(results[0], logits=torch.stack(logits).mean(dim=0)) if logits else results[0]


def make_run(
    bench: Bench,
    splits: Splits,
    method: Method,
    budget: Budget,
    lr: float,
    seed: int,
    held_out: Index | None = None,
    extends: Sequence[Task] = (),
) -> Run:
    task = method.build(bench.backbone, splits, seed, extends)
    recipe = budget.recipe(method, lr, seed)
    return Run(task, recipe, REGIMES[method.regime], splits, bench.preprocessing, held_out)


def measure_methods(
    bench: Bench, splits: Splits, methods: Sequence[Method], budget: Budget
) -> dict[str, dict[str, Any]]:
    """What is recorded of each method: its rate and how it was chosen, and the test accuracy of every seed."""
    selected = select_rates(bench, splits, methods, budget)
    rates = [(method, selected[method.name].lr) for method in methods]
    trained = train_seeds(bench, splits, rates, budget) if budget.seeds else {}
    records = {}
    for method in methods:
        task = method.build(bench.backbone, splits, 0)
        head = sum(parameter.numel() for parameter in task.head.parameters())
        total = sum(parameter.numel() for parameter in REGIMES[method.regime].trains(task).values())
        records[method.name] = {
            **selected[method.name].to_json(),
            **describe_splits(splits),
            **summarise(trained.get(method.name, [])),
            "parameters": total - head,
            "head": head,
        }
    return records


def summarise(results: Sequence[TrainResult]) -> dict[str, Any]:
    """The test accuracy of each run, which images each got right, and how many runs diverged."""
    return {
        **summarise_answers([correct_of(result) for result in results]),
        "diverged": sum(not result.metrics for result in results),
    }


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
