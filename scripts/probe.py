"""Head-only accuracy of backbones on sets of images: how good their frozen features are.

    python scripts/probe.py --out results/tiny.md --backbone memoro-tiny random FOLDER@112 -- a.zip b.zip

`random` is memoro-tiny's architecture with random weights; `FOLDER@112` is a checkpoint at 112 pixels. Each head is the
`head` regime on the plain view of every image, its rate chosen on validation data. Base passes are kept (the final
token only), so that adding a set later computes nothing twice.
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
from memoro.train import Cache, Recipe
from memoro.train.sweep import Grid, Subject, run_sweeps

RATES = (0.1, 0.3, 1.0, 3.0)


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
    splits = memoro.load_data(source, quiet=True)
    assert splits.test is not None, f"{source} has no test split"
    preprocessing = backbone.preprocessing if side is None else backbone.preprocessing.at(side)
    recipe = Recipe(epochs=options.epochs, views=1, augment=Augment(crop="none", flip=0))
    subject = Subject(TaskPlan(splits.name, splits.labels), splits)
    [found] = run_sweeps(
        backbone, [subject], REGIMES["head"], Grid((0,), (0,), RATES), recipe, preprocessing,
        cache=Cache(options.cache), quiet=False,
    )  # fmt: skip
    return {"accuracy": found.best.metrics["accuracy"], "test": len(splits.test), "train": len(splits.train or ())}


def speed(backbone: memoro.Backbone, side: int) -> float:
    """Images per second of a plain pass, the best of five batches of 32."""
    pixels, best = torch.randn(32, 3, side, side), 0.0
    with torch.no_grad():
        for _ in range(6):
            begun = time.perf_counter()
            backbone.original(pixels)
            best = max(best, 32 / (time.perf_counter() - begun))
    return best


def write(path: Path, results: dict[str, Any]) -> None:
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    names = list(results["backbones"])
    sets = list(dict.fromkeys(name for found in results["backbones"].values() for name in found))
    lines = [
        "# Head-only accuracy",
        "",
        "A linear head on the frozen final class token, plain views, rate chosen on 15 % of train. Test accuracy.",
        "Made by `scripts/probe.py`.",
        "",
        f"| set | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for name in sets:
        cells = [results["backbones"][one].get(name) for one in names]
        lines.append(f"| {name} | {' | '.join('' if c is None else format(c['accuracy'], '.3f') for c in cells)} |")
    common = [name for name in sets if all(name in results["backbones"][one] for one in names)]
    means = [statistics.mean(results["backbones"][one][name]["accuracy"] for name in common) for one in names]
    lines.append(f"| **mean of {len(common)}** | {' | '.join(f'**{mean:.3f}**' for mean in means)} |")
    speeds = ", ".join(f"{name} {rate:.0f}" for name, rate in results["speeds"].items())
    lines += ["", f"Images per second of a plain pass, batch 32, same process: {speeds}.", ""]
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
    for name, (backbone, side) in loaded.items():
        results["speeds"][name] = speed(backbone, side or backbone.image_size[0])
    for source in options.data:
        for name, (backbone, side) in loaded.items():
            found = results["backbones"].setdefault(name, {})
            if Path(source).stem not in found:
                found[Path(source).stem] = probe(backbone, side, source, options)
                write(options.out, results)
                print(name, Path(source).stem, found[Path(source).stem], flush=True)


if __name__ == "__main__":
    main()
