"""Compares regimes and recipes on real sets: rates selected on folds of the training data, test means over seeds.

    python scripts/compare_regimes.py a.zip b.zip --backbone FOLDER --out results/regimes.md

Tasks of a set share every pass of the backbone, which is computed once and cached: for each method and rate, a run per
fold (first seed), then one on all training images per seed at the best rate. Baselines need passes of their own: their
rate is selected on one fold. The paper's own comparisons are in `memoro lab reproduce`. Every method of every set is
recorded when it is done, and skipped when the script is called again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import memoro
from memoro.lab.reproduce.measure import FOLDS, Bench, Budget, limit_training, measure_methods
from memoro.lab.reproduce.methods import ADAMW, Method
from memoro.lab.tables.report import format_values
from memoro.training import Cache, TrainOptions
from reports import load_results, load_splits, make_parser, table, write_report

SGD = (0.03, 0.1, 0.3)
SIDE = Method("side", "side", (1e-3, 3e-3), {"rank": 8}, recipe=ADAMW)
LONGER = replace(SIDE, name="side, 30 epochs", recipe={**ADAMW, "epochs": 30})
METHODS = {
    method.name: method
    for method in (
        Method("head", "head", (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
        Method("memory, 0 cells", "memory", SGD, {"cells": 0}),
        Method("5 cells", "memory", SGD, {"cells": 5}),
        Method("10 cells", "memory", SGD, {"cells": 10}),
        Method("memory, 4 views", "memory", SGD, {"cells": 5}, recipe={"views": 4}),
        Method("memory, adamw", "memory", (1e-3, 3e-3), {"cells": 5}, recipe=ADAMW),
        SIDE,
        Method("readout", "readout", (0.001,), recipe=ADAMW),
        Method("default", "joint", (0.001,), recipe=ADAMW),
        LONGER,
        replace(LONGER, name="side, 30 epochs, ensemble of 3", ensemble=3),
        Method("lora", "lora", (1e-3, 2e-3), {"rank": 8}, recipe=ADAMW),
        Method("lora-all", "lora-all", (5e-4, 1e-3), {"rank": 8}, recipe=ADAMW),
        Method("full", "full", (3e-5, 1e-4), recipe=ADAMW),
    )
}


def measure(
    names: Sequence[str], bench: Bench, splits: memoro.data.Splits, budget: Budget
) -> dict[str, dict[str, Any]]:
    """Each method's test accuracy, over seeds, at the rate that was best on the folds. Tasks share every pass."""
    methods = [METHODS[name] for name in names]
    if not methods[0].composes:  # each run is passes of its own: one fold
        budget = replace(budget, folds=1)
    started = time.monotonic()
    found = measure_methods(bench, splits, methods, budget)
    common = {"seconds": round(time.monotonic() - started), "together_with": len(names) - 1}
    return {
        name: {
            "lr": one["lr"],
            "folds": {rate: statistics.mean(scores) for rate, scores in one["scores"].items()},
            "test": one["test"],
            "mean": statistics.mean(one["test"]) if one["test"] else None,
            **common,
        }
        for name, one in found.items()
    }


def groups_of(names: Sequence[str]) -> list[list[str]]:
    """The methods that can share every batch; a baseline is a group of its own."""
    groups: dict[str, list[str]] = {}
    for name in names:
        method = METHODS[name]
        common = [method.recipe.get(part) for part in ("epochs", "views")]
        groups.setdefault(repr(common) if method.composes else name, []).append(name)
    return list(groups.values())


def format_entry(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    if entry["mean"] is None:  # screened only
        return f"*{max(entry['folds'].values()):.3f}* ({entry['lr']:g})"
    return f"{format_values(entry['test'])} ({entry['lr']:g})"


def format_results(results: dict[str, Any]) -> list[str]:
    """The table of one backbone."""
    names = [name for name in METHODS if any(name in found for found in results.values())]
    rows = []
    for source, found in results.items():
        cells = [format_entry(found.get(name)) for name in names]
        rate = next(max(found[name]["folds"].values()) for name in names if name in found)
        error = (rate * (1 - rate) / found["test"]) ** 0.5
        rows.append([source, found["train"], found["test"], *cells, f"{error:.3f}"])
    return table(["set", "train", "test", *names, "± se"], rows)


def write(results: dict[str, Any], options: argparse.Namespace) -> None:
    sections = [["", f"## {name}", "", *format_results(found)] for name, found in results.items()]
    lines = [
        "# Regimes and recipes",
        "",
        f"{options.image_size} px, {options.epochs} epochs unless named, batch 32, "
        f"one plain view of an image unless named. Rates are selected on {options.folds} folds of train (baselines: on "
        f"one); then each method is trained on all of train. Test accuracy, mean of {options.seeds} seeds (± their "
        "standard deviation, and the rate); in italics, accuracy on the folds of what was only screened. `± se` is the "
        "binomial standard error of one test accuracy.",
        "",
        "Made by `scripts/compare_regimes.py`; the accuracy of every run is in the JSON beside this file.",
        *(line for section in sections for line in section),
    ]
    write_report(options.out, results, lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folds", type=int, default=FOLDS, choices=range(1, FOLDS + 1), help="quarters held out")
    parser.add_argument("--most", type=int, default=2000, help="training images of a set, at most")
    parser.add_argument("--cache", type=Path, default=Path("compare-features"))
    parser.add_argument("--cache-budget", type=float, help="gigabytes; default: a tenth of the disk's free space")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["head", "memory, 4 views", "side"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbone = memoro.load_backbone(options.backbone)
    training = TrainOptions(cache=Cache(options.cache, options.cache_budget), quiet=True)
    bench = Bench(backbone, backbone.preprocessing.at(options.image_size), training)
    budget = Budget(epochs=options.epochs, folds=options.folds, seeds=options.seeds)
    results = load_results(options.out)
    own = results.setdefault(Path(options.backbone).name, {})
    for source in options.data:
        splits = limit_training(load_splits(source), options.most)
        found = own.setdefault(Path(source).stem, {"train": len(splits.train), "test": len(splits.test)})
        for names in groups_of([name for name in options.methods if name not in found]):
            found |= measure(names, bench, splits, budget)
            write(results, options)
            print({name: format_entry(found[name]) for name in names}, f"{found[names[0]]['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
