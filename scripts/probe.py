"""Head-only accuracy of backbones on sets of images: how good their frozen features are.

    python scripts/probe.py --out results/tiny.md --backbone memoro-tiny random FOLDER@112 --unseen b
        --classifier tinyimagenet200.zip -- a.zip b.zip

`random` is memoro-tiny's architecture with random weights; `FOLDER@112` is a checkpoint at 112 pixels. The first
backbone is the student, the last one its teacher. Each head is the `head` regime on the plain view of every image, its
rate selected on the training images. Final tokens are cached and results are kept, so a later call adds sets to them.

`--unseen` names sets that the student's distillation never saw: they are averaged separately. `--classifier` compares
the student's own classifier with logistic regression on the teacher's final tokens, on the test images of a set whose
class folders have the names of the student's classes.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

import memoro
from distillation.classifier import solve_classifier
from memoro.clock import best_times
from memoro.data import Augment, ImageSet, Loader
from memoro.data.splits import hold_out
from memoro.evaluation.logits import collect_logits
from memoro.regimes import REGIMES
from memoro.training import Cache, Plan, Recipe, combine, train_plans
from memoro.training.cached import CachedLoader, fill_caches
from reports import load_results, load_splits, make_parser, table, write_report

RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
FOLDS = 4
LARGE = 2000
"""From this many training images on, a validation split replaces folds, and 15 epochs are enough."""
STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3)
"""What scikit-learn calls C: the inverse of the penalty of logistic regression."""

Loaded = tuple[memoro.Backbone, memoro.Preprocessing]


def stem(source: str) -> str:
    """The name of a set."""
    return Path(source).stem


def load(name: str) -> Loaded:
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
    folds = 0 if large else FOLDS
    plan = Plan(splits.name, REGIMES["head"], splits, preprocessing, recipe, combine(RATES), folds)
    [found] = train_plans(backbone, [plan], cache=Cache(options.cache))
    return {"accuracy": found.metrics["accuracy"], "lr": found.task.spec.training["lr"], **facts}


def speeds(loaded: dict[str, Loaded]) -> dict[str, float]:
    """Images per second of plain passes over a batch of 32, all timed in turn, the best of ten."""
    passes = {}
    for name, (backbone, preprocessing) in loaded.items():
        pixels = torch.randn(32, 3, *(preprocessing.size or backbone.image_size))
        passes[name] = partial(backbone.original, pixels)
    with torch.no_grad():
        return {name: 32 / seconds for name, seconds in best_times(passes, 10).items()}


def compare_classifiers(student: Loaded, teacher: Loaded, source: str, cache: Cache) -> dict[str, Any]:
    """Test accuracy of the student's own classifier, and of logistic regression on the teacher's final tokens."""
    splits = load_splits(source, labels=student[0].labels)
    loader = Loader(splits.test, student[1], batch_size=64)
    [logits], targets = collect_logits(lambda pixels: [student[0].original(pixels)], student[0], loader)
    features, labels = final_tokens(*teacher, splits.train, cache)
    held = torch.rand(len(labels), generator=torch.Generator().manual_seed(0)) < 0.1
    scores = {}
    for strength in STRENGTHS:
        solved = solve_classifier(features[~held], labels[~held], len(splits.labels), strength)
        scores[strength] = accuracy(linear(features[held], *solved), labels[held])
    best = max(scores, key=lambda strength: scores[strength])
    tokens, same = final_tokens(*teacher, splits.test, cache)
    assert torch.equal(same, targets)
    solved = solve_classifier(features, labels, len(splits.labels), best)
    return {
        "student": accuracy(logits, targets),
        "teacher": accuracy(linear(tokens, *solved), targets),
        "c": best,
        "classes": len(splits.labels),
        "train": len(labels),
        "test": len(targets),
    }


def final_tokens(
    backbone: memoro.Backbone, preprocessing: memoro.Preprocessing, images: ImageSet, cache: Cache
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a head reads of each image (n, dim), and the targets."""
    loader = CachedLoader(Loader(images, preprocessing, batch_size=64), backbone, cache, backbone.depth)
    fill_caches([loader], cache, what=f"tokens of {images.name}")
    [tokens], targets = collect_logits(lambda found: [backbone.anatomy.finish_token(found.token)], backbone, loader)
    return tokens, targets


def accuracy(logits: torch.Tensor, targets: torch.Tensor) -> float:
    return float((logits.argmax(-1) == targets).float().mean())


def group_rows(backbones: dict[str, Any], sets: list[str]) -> list[list[Any]]:
    """A row for each set, then the means over those that all backbones were probed on, also relative to the last."""
    rows: list[list[Any]] = []
    for name in sets:
        cells = [found.get(name) for found in backbones.values()]
        facts = next(cell for cell in cells if cell is not None)
        shown = ["" if cell is None else f"{cell['accuracy']:.3f}" for cell in cells]
        rows.append([name, facts["classes"], facts["train"], facts["test"], *shown])
    common = [name for name in sets if all(name in found for found in backbones.values())]
    if common:
        means = [statistics.mean(found[name]["accuracy"] for name in common) for found in backbones.values()]
        left_out = [name for name in sets if name not in common]
        title = f"**mean of {len(common)}**" + (f" (without {', '.join(left_out)})" if left_out else "")
        rows.append([title, "", "", "", *(f"**{mean:.3f}**" for mean in means)])
        shares = [f"{mean / means[-1]:.0%}" if means[-1] else "" for mean in means]
        rows.append([f"share of {list(backbones)[-1]}", "", "", "", *shares])
    return rows


def write(path: Path, results: dict[str, Any]) -> None:
    backbones = results["backbones"]
    names = list(backbones)
    sets = list(dict.fromkeys(name for found in backbones.values() for name in found))
    unseen = [name for name in sets if name in results["unseen"]]
    seen = [name for name in sets if name not in unseen]
    rows = group_rows(backbones, seen)
    if unseen:
        empty = [""] * (3 + len(names))
        rows = [["*seen in distillation*", *empty], *rows, ["*unseen*", *empty], *group_rows(backbones, unseen)]
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
    for name, found in results["classifier"].items():
        student, teacher = found["backbones"]
        lines += [
            "",
            f"Classifiers of {found['classes']} classes, on the {found['test']:,} test images of {name}:",
            f"{student}'s own {found['student']:.3f}; multinomial logistic regression on the final class tokens of",
            f"{teacher}, trained on {found['train']:,} images (C = {found['c']:g}), {found['teacher']:.3f}.",
        ]
    write_report(path, results, lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", nargs="+", required=True)
    parser.add_argument("--unseen", nargs="+", default=[], metavar="NAME", help="sets that distillation never saw")
    parser.add_argument("--classifier", metavar="ZIP", help="compare classifiers on this set")
    parser.add_argument("--cache", type=Path, default=Path("probe-features"))
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    results = {"backbones": {}, "speeds": {}, "unseen": [], "classifier": {}, **load_results(options.out)}
    sets = {stem(source): source for source in options.data}
    for name in map(stem, options.unseen):
        if name not in sets and not any(name in found for found in results["backbones"].values()):
            parser.error(f"--unseen {name}: that is none of the sets")
        results["unseen"] = [*results["unseen"], *([] if name in results["unseen"] else [name])]
    loaded = {Path(name).name: load(name) for name in options.backbone}
    results["speeds"] |= speeds(loaded)
    for name, source in sets.items():
        for label, (backbone, preprocessing) in loaded.items():
            found = results["backbones"].setdefault(label, {})
            if name not in found:
                found[name] = probe(backbone, preprocessing, source, options)
                write(options.out, results)
                print(label, name, found[name], flush=True)
    if options.classifier is not None and stem(options.classifier) not in results["classifier"]:
        first, *_, last = loaded
        compared = compare_classifiers(loaded[first], loaded[last], options.classifier, Cache(options.cache))
        results["classifier"][stem(options.classifier)] = {"backbones": [first, last], **compared}
    write(options.out, results)


if __name__ == "__main__":
    main()
