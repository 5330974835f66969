"""Head-only accuracy of backbones on sets of images: how good their frozen features are.

    python scripts/probe.py --out results/tiny.md --backbone memoro-tiny random FOLDER@112 -- a.zip b.zip

`random` is memoro-tiny's architecture with random weights; `FOLDER@112` is a checkpoint at 112 pixels. The first
backbone is the student, the last one its teacher. Each head is the `head` regime on the plain view of every image, its
rate selected on the training images. Final tokens are cached and results are kept, so a later call adds sets to them.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

import memoro
from memoro.bench.clock import best_times
from memoro.data import Augment
from memoro.data.splits import hold_out
from memoro.regimes import REGIMES, TaskPlan
from memoro.training import Cache, Recipe
from memoro.training.sweep import Grid, SweepSpec, run_sweeps
from reports import load_results, load_splits, make_parser, table, write_report

RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
FOLDS = 4
LARGE = 2000
"""From this many training images on, a validation split replaces folds, and 15 epochs are enough."""


def load(name: str) -> tuple[memoro.Backbone, memoro.Preprocessing]:
    """A backbone, and its preprocessing at the size to use it at."""
    if name == "random":
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig.from_pretrained(Path(memoro.__file__).parent / "weights" / "memoro-tiny")
        torch.manual_seed(0)
        tiny = memoro.load_backbone("memoro-tiny").preprocessing
        return memoro.load_backbone(ViTForImageClassification(config).eval(), processor=tiny), tiny
    folder, _, side = name.partition("@")
    backbone = memoro.load_backbone(folder)
    return backbone, backbone.preprocessing.at(int(side)) if side else backbone.preprocessing


def probe(
    backbone: memoro.Backbone, preprocessing: memoro.Preprocessing, source: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Test accuracy of the best head."""
    splits = load_splits(source)
    facts = {"test": len(splits.test), "train": len(splits.train), "classes": len(splits.labels)}
    large = len(splits.train) >= LARGE
    recipe = Recipe(epochs=15 if large else options.epochs, views=1, augment=Augment(crop="none", flip=0))
    if large:
        splits = hold_out(splits, recipe.val_fraction, recipe.data_seed)
    plan, grid, folds = TaskPlan(splits.name, splits.labels), Grid((0,), (0,), RATES), 0 if large else FOLDS
    sweep = SweepSpec(plan, REGIMES["head"], splits, preprocessing, grid, recipe, folds)
    [found] = run_sweeps(backbone, [sweep], cache=Cache(options.cache))
    return {"accuracy": found.best.metrics["accuracy"], "lr": found.best.task.spec.training["lr"], **facts}


def speeds(loaded: dict[str, tuple[memoro.Backbone, memoro.Preprocessing]]) -> dict[str, float]:
    """Images per second of plain passes over a batch of 32, all timed in turn, the best of ten."""
    passes = {}
    for name, (backbone, preprocessing) in loaded.items():
        pixels = torch.randn(32, 3, *(preprocessing.size or backbone.image_size))
        passes[name] = partial(backbone.original, pixels)
    with torch.no_grad():
        return {name: 32 / seconds for name, seconds in best_times(passes, 10).items()}


def write(path: Path, results: dict[str, Any]) -> None:
    backbones = results["backbones"]
    names = list(backbones)
    sets = list(dict.fromkeys(name for found in backbones.values() for name in found))
    rows = []
    for name in sets:
        cells = [found.get(name) for found in backbones.values()]
        facts = next(cell for cell in cells if cell is not None)
        accuracies = ["" if cell is None else f"{cell['accuracy']:.3f}" for cell in cells]
        rows.append([name, facts["classes"], facts["train"], facts["test"], *accuracies])
    common = [name for name in sets if all(name in found for found in backbones.values())]
    means = [statistics.mean(found[name]["accuracy"] for name in common) for found in backbones.values()]
    rows.append([f"**mean of {len(common)}**", "", "", "", *(f"**{mean:.3f}**" for mean in means)])
    rows.append([f"relative to {names[-1]}", "", "", "", *(f"{mean / means[-1]:.0%}" for mean in means)])
    last = results["speeds"][names[-1]]
    rates = ", ".join(f"{name} {rate:.0f} ({last / rate:.2f})" for name, rate in results["speeds"].items())
    lines = [
        "# Head-only accuracy",
        "",
        f"A linear head on the frozen final class token: regime `head`, plain views, its rate selected on {FOLDS}",
        f"folds of the training images, then trained on all of them (from {LARGE:,} images on: selected on 15 % of",
        "them). Accuracy on the test split. Made by `scripts/probe.py`.",
        "",
        *table(["set", "classes", "train", "test", *names], rows),
        "",
        "Images per second of a plain pass, batch 32, timed in turn in one process, and the time relative to",
        f"{names[-1]}: {rates}.",
    ]
    write_report(path, results, lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", nargs="+", required=True)
    parser.add_argument("--cache", type=Path, default=Path("probe-features"))
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    results = {"backbones": {}, "speeds": {}, **load_results(options.out)}
    loaded = {Path(name).name: load(name) for name in options.backbone}
    results["speeds"] |= speeds(loaded)
    for source in options.data:
        for name, (backbone, preprocessing) in loaded.items():
            found = results["backbones"].setdefault(name, {})
            if Path(source).stem not in found:
                found[Path(source).stem] = probe(backbone, preprocessing, source, options)
                write(options.out, results)
                print(name, Path(source).stem, found[Path(source).stem], flush=True)
    write(options.out, results)


if __name__ == "__main__":
    main()
