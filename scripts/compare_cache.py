"""Compares training on recomputed base passes with training on cached ones: accuracy, loss and size.

    python scripts/compare_cache.py a.zip --backbone FOLDER --out results/cache.md

Every row trains the same runs (the same seeds, rate, order and views of the images); only the source of the base
passes differs. Features are cached in a new folder for each row.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, get_args

import memoro
from memoro.engine.featurestore import StoreDtype
from memoro.regimes import REGIMES, TaskPlan
from memoro.training import Cache, Recipe, Run, TrainResult, train_runs
from reports import load_splits, make_parser, table, write_report

RECOMPUTED = "recomputed"


def train(
    backbone: memoro.Backbone, splits: Any, views: int, source: str, options: argparse.Namespace
) -> tuple[list[TrainResult], float]:
    """The runs of one row, and the size of the cache in gigabytes."""
    runs = []
    for seed in range(options.seeds):
        plan = TaskPlan(splits.name, splits.labels, cells=options.cells, seed=seed)
        recipe = Recipe(lr=options.lr, epochs=options.epochs, seed=seed, views=views)
        task, size = REGIMES["memory"].build(backbone, plan), backbone.preprocessing.at(options.image_size)
        runs.append(Run(task, recipe, REGIMES["memory"], splits, size))
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        cache = False if source == RECOMPUTED else Cache(Path(folder), dtype=source)  # type: ignore[arg-type]
        results = train_runs(backbone, runs, cache=cache)
        size_on_disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return results, size_on_disk / 1e9


def compare(backbone: memoro.Backbone, source: str, options: argparse.Namespace) -> dict[str, Any]:
    """Rows by views and source of the base passes."""
    splits = load_splits(source)
    rows: dict[str, Any] = {}
    for views in options.views:
        exact: list[TrainResult] = []
        for kind in (RECOMPUTED, *get_args(StoreDtype)):
            results, size = train(backbone, splits, views, kind, options)
            exact = exact or results
            apart = [
                abs(epoch["train_loss"] - right["train_loss"]) / right["train_loss"]
                for result, truth in zip(results, exact, strict=True)
                for epoch, right in zip(result.history, truth.history, strict=True)
            ]
            same = [
                float((result.logits.argmax(-1) == truth.logits.argmax(-1)).float().mean())  # type: ignore[union-attr]
                for result, truth in zip(results, exact, strict=True)
            ]
            rows[f"{views} {kind}"] = {
                "accuracy": [result.metrics["accuracy"] for result in results],
                "loss_apart": max(apart),
                "first_epoch_apart": max(apart[:: options.epochs]),
                "same_answers": statistics.mean(same),
                "gigabytes": size,
            }
            print(views, kind, rows[f"{views} {kind}"], flush=True)
    return rows


def write(results: dict[str, Any], options: argparse.Namespace) -> None:
    lines = [
        "# Cached features against recomputed ones",
        "",
        f"{Path(options.backbone).name} at {options.image_size} px, {options.cells} cells, lr {options.lr:g}, "
        f"{options.epochs} epochs, {options.seeds} seeds in one pass.",
        "Every row trains the same runs on the same views; only the source of the base passes differs.",
        "Accuracy on the test split, mean ± standard deviation of the seeds; *loss* is the largest relative difference",
        "from the training loss of the recomputed runs, in the first epoch and in any; *same answers* is the fraction",
        "of test images with the same answer as from the recomputed run.",
        "",
        "Made by `scripts/compare_cache.py`.",
    ]
    for name, found in results.items():
        rows = []
        for key, row in found.items():
            views, kind = key.split(" ")
            accuracy = f"{statistics.mean(row['accuracy']):.3f} ± {statistics.stdev(row['accuracy']):.3f}"
            loss = f"{row['first_epoch_apart']:.1e}, {row['loss_apart']:.1e}"
            differences = [loss, f"{row['same_answers']:.3f}", f"{row['gigabytes']:.2f}"]
            rows.append([views, kind, accuracy, *(["", "", ""] if kind == RECOMPUTED else differences)])
        lines += ["", f"## {name}", ""]
        lines += table(["views", "base passes", "accuracy", "loss", "same answers", "GB"], rows)
    write_report(options.out, results, lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--work", type=Path, help="folder for the features")
    parser.add_argument("--views", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--cells", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    backbone = memoro.load_backbone(options.backbone)
    results = {}
    for source in options.data:
        results[Path(source).stem] = compare(backbone, source, options)
        write(results, options)
    print(options.out.read_text())


if __name__ == "__main__":
    main()
