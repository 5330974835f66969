"""Compares `head` and `memory` on real sets: rates chosen on validation data, means over seeds on test data.

    python scripts/compare_regimes.py --backbone FOLDER --out results/regimes.md a.zip b.zip

All rates and seeds of a set are runs of one training: they share every pass of the backbone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import memoro
from memoro.data import Augment
from memoro.regimes import REGIMES, TaskPlan
from memoro.train import Lesson, Recipe, teach

WAYS = {"head": ("head", 0), "memory, 0 cells": ("memory", 0), "5 cells": ("memory", 5), "10 cells": ("memory", 10)}


def compare(backbone: memoro.Backbone, source: str, options: argparse.Namespace) -> dict[str, Any]:
    """Each way's test accuracy at the rate that was best on validation data, over seeds."""
    splits = memoro.load_data(source, quiet=True)
    assert splits.test is not None, f"{source} has no test split"
    lessons, tags = [], []
    size = backbone.preprocessing.at(options.image_size)
    for way, (regime, cells) in WAYS.items():
        for lr in options.head_lr if regime == "head" else options.lr:
            for seed in range(options.seeds):
                plan = TaskPlan(splits.name, splits.labels, cells=cells, from_layer=options.from_layer, seed=seed)
                recipe = Recipe(
                    lr=lr, epochs=options.epochs, seed=seed, augment=Augment(scale=(options.crop_scale, 1.0))
                )
                task = REGIMES[regime].build(backbone, plan)
                lessons.append(Lesson(task, recipe, REGIMES[regime], splits, size))
                tags.append((way, lr))
    started = time.monotonic()
    results = teach(backbone, lessons, quiet=False)
    found: dict[str, Any] = {"train": len(splits.train or ()), "test": len(splits.test), "runs": len(results)}
    found["seconds"] = round(time.monotonic() - started)
    for way in WAYS:
        rates: dict[float, list[Any]] = {}
        for (name, lr), result in zip(tags, results, strict=True):
            if name == way:
                rates.setdefault(lr, []).append(result)
        val = {
            lr: statistics.mean(max(e["val_accuracy"] for e in r.history) for r in some) for lr, some in rates.items()
        }
        loss = {lr: statistics.mean(min(e["val_loss"] for e in r.history) for r in some) for lr, some in rates.items()}
        best = max(val, key=lambda lr: (round(val[lr], 4), -loss[lr]))
        test = [result.metrics["accuracy"] for result in rates[best]]
        found[way] = {
            "lr": best,
            "val": val[best],
            "test": test,
            "mean": statistics.mean(test),
            "by_rate": {str(lr): [r.metrics["accuracy"] for r in some] for lr, some in rates.items()},
        }
    return found


def write(path: Path, results: dict[str, Any], backbone: str, options: argparse.Namespace) -> None:
    """The table, and the same as JSON beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    lines = [
        "# Head against memory",
        "",
        f"{backbone} at {options.image_size} px, {options.epochs} epochs, batch 32, SGD, inception crops of at least "
        f"{options.crop_scale:.0%}; 15 % of train held out for validation. Test accuracy, mean of {options.seeds} "
        "seeds (± their standard deviation), at the rate that was best on validation data. `± se` is the binomial "
        "standard error of one test figure.",
        "",
        "Made by `scripts/compare_regimes.py`; every run's figure is in the JSON beside this file.",
        "",
        f"| set | train | test | {' | '.join(WAYS)} | ± se |",
        f"|---|---|---|{'---|' * (len(WAYS) + 1)}",
    ]
    for name, found in results.items():
        cells = []
        for way in WAYS:
            entry = found[way]
            cells.append(f"{entry['mean']:.3f} ± {statistics.pstdev(entry['test']):.3f} (lr {entry['lr']:g})")
        rate = found["head"]["mean"]
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
    parser.add_argument("--crop-scale", type=float, default=0.5)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.03, 0.1, 0.3])
    parser.add_argument("--head-lr", type=float, nargs="+", default=[0.03, 0.1, 0.3, 1.0, 3.0])
    options = parser.parse_args()
    torch.set_num_threads(2)
    backbone = memoro.load_backbone(options.backbone)
    results = (
        json.loads(options.out.with_suffix(".json").read_text()) if options.out.with_suffix(".json").is_file() else {}
    )
    for source in options.data:
        results[Path(source).stem] = compare(backbone, source, options)
        write(options.out, results, Path(options.backbone).name, options)
        print(options.out.read_text())


if __name__ == "__main__":
    main()
