"""Compares regimes and recipes on real sets: rates selected on folds of the training data, test means over seeds.

    python scripts/compare_regimes.py a.zip b.zip --backbone FOLDER --out results/regimes.md

Tasks of a set share every pass of the backbone, which is computed once and cached: for each method and rate, a run per
fold (first seed), and one on all training images per seed. Baselines need passes of their own: their rate is selected
on one fold. Every method of every set is recorded when it is done, and skipped when the script is called again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memoro
from memoro.data import Augment, Splits
from memoro.data.splits import fold_numbers
from memoro.regimes import REGIMES, TaskPlan
from memoro.training import Cache, Recipe, RunSpec, train_runs
from reports import load_results, load_splits, make_parser, table, write_report

SGD, ADAMW = (0.03, 0.1, 0.3), {"optimizer": "adamw", "weight_decay": 0.01}
CROPS = {"views": 4, "augment": Augment(scale=(0.5, 1.0))}


@dataclass(frozen=True)
class Method:
    """What is trained and how; of the rates, the best on the folds is taken."""

    regime: str
    rates: tuple[float, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    fork: float | None = None
    """The layer of the fork, as a share of the depth; None: the regime's own."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """What differs from `Recipe`, with one plain view of each image."""


def _side(rates: tuple[float, ...] = (1e-3, 3e-3), fork: float | None = None, rank: int = 8, **recipe: Any) -> Method:
    return Method("side", rates, {"rank": rank}, fork, {**ADAMW, **recipe})


METHODS = {
    "head": Method("head", (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
    "head, adamw": Method("head", (1e-3, 3e-3, 1e-2), recipe=ADAMW),
    "memory, 0 cells": Method("memory", SGD, {"cells": 0}),
    "5 cells": Method("memory", SGD, {"cells": 5}),
    "10 cells": Method("memory", SGD, {"cells": 10}),
    "memory, 4 views": Method("memory", SGD, {"cells": 5}, recipe={"views": 4}),
    "memory, adamw": Method("memory", (1e-3, 3e-3), {"cells": 5}, recipe=ADAMW),
    "memory, adamw, fork 2/3": Method("memory", (1e-3, 3e-3), {"cells": 5}, 2 / 3, ADAMW),
    "side": _side(),
    "side, rank 4": _side(rank=4),
    "side, rank 16": _side(rank=16),
    "side, fork 5/6": _side(fork=5 / 6),
    "side, fork 1/3": _side(fork=1 / 3),
    "side, 5 cells": replace(_side(), sizes={"rank": 8, "cells": 5}),
    "side, decay 0.1": _side(weight_decay=0.1),
    "side, smoothing": _side(label_smoothing=0.1),
    "side, 30 epochs": _side(epochs=30),
    "side, mirrored": _side(views=2, augment=Augment(crop="none")),
    "side, 4 crops": _side(**CROPS),
    "side, 4 crops, 30 epochs": _side(epochs=30, **CROPS),
    "lora": Method("lora", (1e-3, 2e-3), {"rank": 8}, recipe=ADAMW),
    "lora-all": Method("lora-all", (5e-4, 1e-3), {"rank": 8}, recipe=ADAMW),
    "full": Method("full", (3e-5, 1e-4), recipe=ADAMW),
}


def specs_of(
    method: Method, backbone: memoro.Backbone, splits: Splits, options: argparse.Namespace, rates: Sequence[float]
) -> dict[tuple[float, bool, int], RunSpec]:
    """The runs of a method by rate, whether a fold is held out, and number of the fold or seed."""
    assert isinstance(splits.train, memoro.data.ImageSet)
    regime = REGIMES[method.regime]
    number = fold_numbers(splits.train, options.folds, 0)
    folds = [np.flatnonzero(number == fold) for fold in range(options.folds if regime.composes else 1)]
    sizes = dict(method.sizes)
    if method.fork is not None:
        sizes["from_layer"] = round(method.fork * backbone.depth)
    common = {"epochs": options.epochs, "views": 1, **method.recipe}
    found = {}
    for lr in rates:
        for seed, held in [*((0, held) for held in folds), *((seed, None) for seed in range(options.seeds))]:
            plan = TaskPlan(splits.name, splits.labels, seed=seed, **sizes)
            task, recipe = regime.build(backbone, plan), Recipe(lr=lr, seed=seed, **common)
            key = (lr, held is not None, seed if held is None else len(found))
            found[key] = RunSpec(task, recipe, regime, splits, backbone.preprocessing.at(options.image_size), held)
    return found


def measure(
    names: Sequence[str], backbone: memoro.Backbone, splits: Splits, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Each method's test accuracy, over seeds, at the rate that was best on the folds. Tasks share every pass."""
    chosen: dict[str, list[tuple[float, bool, int]]] = {}
    specs: list[RunSpec] = []
    for name in names:
        found = specs_of(METHODS[name], backbone, splits, options, METHODS[name].rates)
        if not REGIMES[METHODS[name].regime].composes:  # seeds at the best rate only: each run is passes of its own
            found = {key: spec for key, spec in found.items() if key[1]}
        chosen[name] = list(found)
        specs += found.values()
    started = time.monotonic()
    results = iter(train_runs(backbone, specs, cache=None if all_apart(names) else Cache(options.cache)))
    records = {}
    for name, keys in chosen.items():
        accuracy: dict[bool, dict[float, list[float]]] = {True: {}, False: {}}
        for lr, fold, _ in keys:
            metrics = next(results).metrics
            accuracy[fold].setdefault(lr, []).append(metrics["accuracy"] if metrics else 0.0)
        scores = {lr: statistics.mean(some) for lr, some in accuracy[True].items()}
        best = max(scores, key=lambda lr: scores[lr])
        if best not in accuracy[False] and options.seeds:
            found = specs_of(METHODS[name], backbone, splits, options, [best])
            last = [spec for key, spec in found.items() if not key[1]]
            accuracy[False][best] = [result.metrics["accuracy"] for result in train_runs(backbone, last, cache=False)]
        records[name] = {
            "lr": best,
            "folds": {str(lr): score for lr, score in scores.items()},
            "test": (test := accuracy[False].get(best, [])),
            "mean": statistics.mean(test) if test else None,
            "by_rate": {str(lr): some for lr, some in accuracy[False].items()},
        }
    seconds = round(time.monotonic() - started)
    for record in records.values():
        record |= {"seconds": seconds, "together_with": len(records) - 1}
    return records


def all_apart(names: Sequence[str]) -> bool:
    return not any(REGIMES[METHODS[name].regime].composes for name in names)


def groups_of(names: Sequence[str], options: argparse.Namespace) -> list[list[str]]:
    """The methods that can share every batch; a baseline is a group of its own."""
    groups: dict[str, list[str]] = {}
    for name in names:
        method = METHODS[name]
        common = [method.recipe.get(part) for part in ("epochs", "views", "augment")]
        groups.setdefault(repr(common) if REGIMES[method.regime].composes else name, []).append(name)
    return list(groups.values())


def cap(splits: Splits, most: int) -> Splits:
    """The splits with at most so many training images, the same ones at every call."""
    assert isinstance(splits.train, memoro.data.ImageSet)
    if len(splits.train) <= most:
        return splits
    chosen = np.sort(np.random.default_rng(0).permutation(len(splits.train))[:most])
    return replace(splits, train=splits.train.subset(chosen))


def format_entry(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    if entry["mean"] is None:  # screened only
        return f"*{max(entry['folds'].values()):.3f}* ({entry['lr']:g})"
    return f"{entry['mean']:.3f} ± {statistics.pstdev(entry['test']):.3f} ({entry['lr']:g})"


def write(results: dict[str, Any], options: argparse.Namespace) -> None:
    names = [name for name in METHODS if any(name in found for found in results.values())]
    rows = []
    for source, found in results.items():
        cells = [format_entry(found.get(name)) for name in names]
        rate = next(max(found[name]["folds"].values()) for name in names if name in found)
        error = (rate * (1 - rate) / found["test"]) ** 0.5
        rows.append([source, found["train"], found["test"], *cells, f"{error:.3f}"])
    lines = [
        "# Regimes and recipes",
        "",
        f"{Path(options.backbone).name} at {options.image_size} px, {options.epochs} epochs unless named, batch 32, "
        f"one plain view of an image unless named. Rates are selected on {options.folds} folds of train (baselines: on "
        f"one); then each method is trained on all of train. Test accuracy, mean of {options.seeds} seeds (± their "
        "standard deviation, and the rate); in italics, accuracy on the folds of what was only screened. `± se` is the "
        "binomial standard error of one test accuracy.",
        "",
        "Made by `scripts/compare_regimes.py`; the accuracy of every run is in the JSON beside this file.",
        "",
        *table(["set", "train", "test", *names, "± se"], rows),
    ]
    write_report(options.out, results, lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--most", type=int, default=2000, help="training images of a set, at most")
    parser.add_argument("--cache", type=Path, default=Path("compare-features"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["head", "memory, 4 views", "side"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbone = memoro.load_backbone(options.backbone)
    results = load_results(options.out)
    for source in options.data:
        splits = cap(load_splits(source), options.most)
        found = results.setdefault(Path(source).stem, {"train": len(splits.train), "test": len(splits.test)})
        for names in groups_of([name for name in options.methods if name not in found], options):
            found |= measure(names, backbone, splits, options)
            write(results, options)
            print({name: format_entry(found[name]) for name in names}, f"{found[names[0]]['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
