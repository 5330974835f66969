"""Compares `head` and `memory` on real sets: rates chosen on folds of the training data, means over seeds on test data.

    python scripts/compare_regimes.py --backbone FOLDER --out results/regimes.md a.zip b.zip

All of a set's runs share every pass of the backbone, which is computed once and kept: for each way and rate, a run for
each fold (first seed) and one on all training images for each seed.
"""

from __future__ import annotations

import argparse
import json
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

WAYS = {"head": ("head", 0), "memory, 0 cells": ("memory", 0), "5 cells": ("memory", 5), "10 cells": ("memory", 10)}


def compare(backbone: memoro.Backbone, source: str, options: argparse.Namespace) -> dict[str, Any]:
    """Each way's test accuracy, over seeds, at the rate that was best on the folds."""
    splits = memoro.load_data(source, val_fraction=0, quiet=True)
    assert splits.test is not None, f"{source} has no test split"
    assert splits.train is not None
    size, number = backbone.preprocessing.at(options.image_size), fold_numbers(splits.train, options.folds, 0)
    specs, tags = [], []
    for way in options.ways:
        regime, cells = WAYS[way]
        for lr in options.head_lr if regime == "head" else options.lr:
            parts = [(0, np.flatnonzero(number == fold)) for fold in range(options.folds)]
            for seed, held in [*parts, *((seed, None) for seed in range(options.seeds))]:
                plan = TaskPlan(splits.name, splits.labels, cells=cells, from_layer=options.from_layer, seed=seed)
                augment = Augment(scale=(options.crop_scale, 1.0))
                recipe = Recipe(lr=lr, epochs=options.epochs, seed=seed, views=options.views, augment=augment)
                task = REGIMES[regime].build(backbone, plan)
                specs.append(RunSpec(task, recipe, REGIMES[regime], splits, size, held))
                tags.append((way, lr, held is not None))
    started = time.monotonic()
    results = train_runs(backbone, specs, cache=Cache(options.cache), quiet=False)
    found: dict[str, Any] = {"train": len(splits.train), "test": len(splits.test)}
    seconds = round(time.monotonic() - started)
    for way in options.ways:
        folds: dict[float, list[Any]] = {}
        whole: dict[float, list[Any]] = {}
        for (name, lr, fold), result in zip(tags, results, strict=True):
            if name == way and result.metrics:
                (folds if fold else whole).setdefault(lr, []).append(result)
        scores = {
            lr: statistics.mean(float((r.logits.argmax(-1) == r.targets).float().mean()) for r in some)
            for lr, some in folds.items()
        }
        best = max(scores, key=lambda lr: scores[lr])
        test = [result.metrics["accuracy"] for result in whole[best]]
        found[way] = {
            "lr": best,
            "folds": scores,
            "test": test,
            "mean": statistics.mean(test),
            "seconds_of_all_ways_together": seconds,
            "by_rate": {str(lr): [r.metrics["accuracy"] for r in some] for lr, some in whole.items()},
        }
    return found


def write(path: Path, results: dict[str, Any], backbone: str, options: argparse.Namespace) -> None:
    """The table, and the same as JSON beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    lines = [
        "# Head against memory",
        "",
        f"{backbone} at {options.image_size} px, {options.epochs} epochs, batch 32, SGD, {options.views} view(s) of an "
        f"image. Rates are chosen on {options.folds} folds of train; then each way learns from all of train. Test "
        f"accuracy, mean of {options.seeds} seeds (± their standard deviation). `± se` is the binomial standard error "
        "of one test figure.",
        "",
        "Made by `scripts/compare_regimes.py`; every run's figure is in the JSON beside this file.",
        "",
        f"| set | train | test | {' | '.join(WAYS)} | ± se |",
        f"|---|---|---|{'---|' * (len(WAYS) + 1)}",
    ]
    for name, found in results.items():
        cells = []
        for way in WAYS:
            if way not in found:
                cells.append("")
                continue
            entry = found[way]
            cells.append(f"{entry['mean']:.3f} ± {statistics.pstdev(entry['test']):.3f} (lr {entry['lr']:g})")
        rate = next(found[way]["mean"] for way in WAYS if way in found)
        error = (rate * (1 - rate) / found["test"]) ** 0.5
        lines.append(f"| {name} | {found['train']} | {found['test']} | {' | '.join(cells)} | {error:.3f} |")
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--from-layer", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--views", type=int, default=1, help="1 is the plain view: no augmentation")
    parser.add_argument("--crop-scale", type=float, default=0.5)
    parser.add_argument("--cache", type=Path, default=Path("compare-features"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="measure these, keep the others")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.03, 0.1, 0.3])
    parser.add_argument("--head-lr", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
    options = parser.parse_args()
    torch.set_num_threads(2)
    backbone = memoro.load_backbone(options.backbone)
    results = (
        json.loads(options.out.with_suffix(".json").read_text()) if options.out.with_suffix(".json").is_file() else {}
    )
    for source in options.data:
        results.setdefault(Path(source).stem, {}).update(compare(backbone, source, options))
        write(options.out, results, Path(options.backbone).name, options)
        print(options.out.read_text())


if __name__ == "__main__":
    main()
