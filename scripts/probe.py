"""Head-only accuracy of backbones on sets of images: how good their frozen features are.

    python scripts/probe.py --out results/tiny.md --backbone memoro-tiny random FOLDER@112 -- a.zip b.zip

`random` is memoro-tiny's architecture with random weights; `FOLDER@112` is a checkpoint at 112 pixels. Each head is the
`head` regime on the plain view of every image, its rate chosen on the training images. Base passes are kept
(the final token only), so that adding a set later computes nothing twice.
"""

from __future__ import annotations

import argparse
import json
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
from memoro.training.sweep import Grid, Subject, run_sweeps

RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
FOLDS = 4
LARGE = 2000
"""Training images from which on a validation split is enough to choose by, and 15 epochs to learn."""


def load(name: str) -> tuple[memoro.Backbone, int | None]:
    """A backbone and the image size to use it at."""
    if name == "random":
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig.from_pretrained(Path(memoro.__file__).parent / "weights" / "memoro-tiny")
        torch.manual_seed(0)
        tiny = memoro.load_backbone("memoro-tiny")
        return memoro.load_backbone(ViTForImageClassification(config).eval(), processor=tiny.preprocessing), None
    folder, _, side = name.partition("@")
    return memoro.load_backbone(folder), int(side) if side else None


def probe(backbone: memoro.Backbone, side: int | None, source: str, options: argparse.Namespace) -> dict[str, Any]:
    """Test accuracy of the best head."""
    splits = memoro.load_data(source, val_fraction=0, quiet=True)
    assert splits.test is not None, f"{source} has no test split"
    preprocessing = backbone.preprocessing if side is None else backbone.preprocessing.at(side)
    assert splits.train is not None
    train = len(splits.train)
    large = train >= LARGE
    recipe = Recipe(epochs=15 if large else options.epochs, views=1, augment=Augment(crop="none", flip=0))
    if large:
        splits = hold_out(splits, recipe.val_fraction, recipe.data_seed)
    subject = Subject(TaskPlan(splits.name, splits.labels), splits, 0 if large else FOLDS)
    [found] = run_sweeps(
        backbone, [subject], REGIMES["head"], Grid((0,), (0,), RATES), recipe, preprocessing,
        cache=Cache(options.cache), quiet=False,
    )  # fmt: skip
    facts = {"test": len(splits.test), "train": train, "classes": len(splits.labels)}
    rate = found.best.task.spec.training["lr"]
    return {"accuracy": found.best.metrics["accuracy"], "lr": rate, **facts}


def speeds(loaded: dict[str, tuple[memoro.Backbone, int | None]]) -> dict[str, float]:
    """Images per second of plain passes over a batch of 32, all timed in turn, the best of ten."""

    def one_pass(backbone: memoro.Backbone, pixels: torch.Tensor) -> None:
        with torch.no_grad():
            backbone.original(pixels)

    passes = {}
    for name, (backbone, side) in loaded.items():
        size = backbone.image_size if side is None else (side, side)
        passes[name] = partial(one_pass, backbone, torch.randn(32, 3, *size))
    return {name: 32 / seconds for name, seconds in best_times(passes, 10, lambda: None).items()}


def write(path: Path, results: dict[str, Any]) -> None:
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    names = list(results["backbones"])
    sets = list(dict.fromkeys(name for found in results["backbones"].values() for name in found))
    lines = [
        "# Head-only accuracy",
        "",
        f"A linear head on the frozen final class token: regime `head`, plain views, its rate chosen on {FOLDS} folds",
        f"of the training images, then trained on all of them (from {LARGE:,} images on: chosen on 15 % of them).",
        "Accuracy on the test split. Made by `scripts/probe.py`.",
        "",
        f"| set | classes | train | test | {' | '.join(names)} |",
        f"|---|---|---|---|{'---|' * len(names)}",
    ]
    for name in sets:
        cells = [results["backbones"][one].get(name) for one in names]
        facts = next(cell for cell in cells if cell is not None)
        shown = " | ".join("" if cell is None else f"{cell['accuracy']:.3f}" for cell in cells)
        lines.append(f"| {name} | {facts['classes']} | {facts['train']} | {facts['test']} | {shown} |")
    common = [name for name in sets if all(name in results["backbones"][one] for one in names)]
    means = [statistics.mean(results["backbones"][one][name]["accuracy"] for name in common) for one in names]
    lines.append(f"| **mean of {len(common)}** | | | | {' | '.join(f'**{mean:.3f}**' for mean in means)} |")
    lines.append(f"| share of {names[-1]} | | | | {' | '.join(f'{mean / means[-1]:.0%}' for mean in means)} |")
    last = results["speeds"][names[-1]]
    shares = ", ".join(f"{name} {rate:.0f} ({last / rate:.2f})" for name, rate in results["speeds"].items())
    lines += [
        "",
        "Images per second of a plain pass, batch 32, timed in turn in one process, and the time as a share of",
    ]
    lines += [f"{names[-1]}'s: {shares}.", ""]
    path.write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--backbone", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("probe-features"))
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    file = options.out.with_suffix(".json")
    results = json.loads(file.read_text()) if file.is_file() else {"backbones": {}, "speeds": {}}
    loaded = {Path(name).name: load(name) for name in options.backbone}
    results["speeds"] = speeds(loaded)
    if any(results["backbones"].values()):
        write(options.out, results)
    for source in options.data:
        for name, (backbone, side) in loaded.items():
            found = results["backbones"].setdefault(name, {})
            if Path(source).stem not in found:
                found[Path(source).stem] = probe(backbone, side, source, options)
                write(options.out, results)
                print(name, Path(source).stem, found[Path(source).stem], flush=True)


if __name__ == "__main__":
    main()
