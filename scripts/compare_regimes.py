"""Compares `head` and `memory` on real sets: rates selected on folds of the training data, test means over seeds.

    python scripts/compare_regimes.py a.zip b.zip --backbone FOLDER --out results/regimes.md

All runs of a set share every pass of the backbone, which is computed once and cached: for each method and rate, a run
per fold (first seed) and one on all training images per seed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memoro
from memoro.data import Augment
from memoro.data.splits import fold_numbers
from memoro.regimes import REGIMES, TaskPlan
from memoro.training import Cache, Recipe, RunSpec, train_runs
from reports import load_results, load_splits, make_parser, table, write_report

METHODS = {"head": ("head", 0), "memory, 0 cells": ("memory", 0), "5 cells": ("memory", 5), "10 cells": ("memory", 10)}


def compare(backbone: memoro.Backbone, source: str, options: argparse.Namespace) -> dict[str, Any]:
    """Each method's test accuracy, over seeds, at the rate that was best on the folds."""
    splits = load_splits(source)
    size, number = backbone.preprocessing.at(options.image_size), fold_numbers(splits.train, options.folds, 0)
    augment = Augment(scale=(options.crop_scale, 1.0))
    folds = [(0, np.flatnonzero(number == fold)) for fold in range(options.folds)]
    specs, tags = [], []
    for method in options.methods:
        name, cells = METHODS[method]
        for lr in options.head_lr if name == "head" else options.lr:
            for seed, held in [*folds, *((seed, None) for seed in range(options.seeds))]:
                plan = TaskPlan(splits.name, splits.labels, cells=cells, from_layer=options.from_layer, seed=seed)
                recipe = Recipe(lr=lr, epochs=options.epochs, seed=seed, views=options.views, augment=augment)
                task = REGIMES[name].build(backbone, plan)
                specs.append(RunSpec(task, recipe, REGIMES[name], splits, size, held))
                tags.append((method, lr, held is not None))
    started = time.monotonic()
    results = train_runs(backbone, specs, cache=Cache(options.cache))
    found: dict[str, Any] = {"train": len(splits.train), "test": len(splits.test)}
    seconds = round(time.monotonic() - started)
    for method in options.methods:
        accuracy: dict[bool, dict[float, list[float]]] = {True: {}, False: {}}
        for (name, lr, fold), result in zip(tags, results, strict=True):
            if name == method and result.metrics:
                accuracy[fold].setdefault(lr, []).append(result.metrics["accuracy"])
        scores = {lr: statistics.mean(some) for lr, some in accuracy[True].items()}
        best = max(scores, key=lambda lr: scores[lr])
        found[method] = {
            "lr": best,
            "folds": scores,
            "test": accuracy[False][best],
            "mean": statistics.mean(accuracy[False][best]),
            "seconds_of_all_methods_together": seconds,
            "by_rate": {str(lr): some for lr, some in accuracy[False].items()},
        }
    return found


def write(results: dict[str, Any], options: argparse.Namespace) -> None:
    rows = []
    for name, found in results.items():
        entries = [found.get(method) for method in METHODS]
        cells = [
            f"{entry['mean']:.3f} ± {statistics.pstdev(entry['test']):.3f} (lr {entry['lr']:g})" if entry else ""
            for entry in entries
        ]
        rate = next(entry["mean"] for entry in entries if entry)
        error = (rate * (1 - rate) / found["test"]) ** 0.5
        rows.append([name, found["train"], found["test"], *cells, f"{error:.3f}"])
    lines = [
        "# Head against memory",
        "",
        f"{Path(options.backbone).name} at {options.image_size} px, {options.epochs} epochs, batch 32, SGD, "
        f"{options.views} view(s) of an image. Rates are selected on {options.folds} folds of train; then each method "
        f"is trained on all of train. Test accuracy, mean of {options.seeds} seeds (± their standard deviation). "
        "`± se` is the binomial standard error of one test accuracy.",
        "",
        "Made by `scripts/compare_regimes.py`; the accuracy of every run is in the JSON beside this file.",
        "",
        *table(["set", "train", "test", *METHODS, "± se"], rows),
    ]
    write_report(options.out, results, lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--from-layer", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--views", type=int, default=1, help="1 is the plain view: no augmentation")
    parser.add_argument("--crop-scale", type=float, default=0.5)
    parser.add_argument("--cache", type=Path, default=Path("compare-features"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="keep the others' results")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.03, 0.1, 0.3])
    parser.add_argument("--head-lr", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
    options = parser.parse_args()
    torch.set_num_threads(2)
    backbone = memoro.load_backbone(options.backbone)
    results = load_results(options.out)
    for source in options.data:
        results.setdefault(Path(source).stem, {}).update(compare(backbone, source, options))
        write(results, options)
        print(options.out.read_text())


if __name__ == "__main__":
    main()
