"""Accuracy, calibration and familiarity by precision: of the training, and of the answers.

    python scripts/compare_precision.py a.zip b.zip --backbone memoro-tiny --out results/precision.md

Every set is trained once in float32 and once in bfloat16; both tasks answer the test images in both precisions. What is
noticed are test images of the other sets. Results of other backbones stay in the report.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

import memoro
from memoro.data import ImageSet, Splits
from memoro.evaluation.evaluate import auroc
from memoro.evaluation.logits import collect_outputs
from memoro.evaluation.metrics import measure_task
from memoro.tasks.familiarity import FALSE_ALARMS
from memoro.tasks.task import Task
from reports import load_results, load_splits, make_parser, table, write_report

PRECISIONS = ("float32", "bfloat16")
COLUMNS = ("accuracy", "calibration_error", "false_alarms", "noticed", "auroc")


def cap(images: ImageSet | None, most: int) -> ImageSet | None:
    """At most so many images, the same ones at every call."""
    if images is None or len(images) <= most:
        return images
    return images.subset(np.sort(np.random.default_rng(0).permutation(len(images))[:most]))


def read_sets(options: argparse.Namespace) -> dict[str, Splits]:
    found = {}
    for source in options.data:
        splits = load_splits(source)
        train, test = cap(splits.train, options.most), cap(splits.test, options.most_test)
        found[Path(source).stem] = replace(splits, train=train, test=test)
    return found


def train(sets: Mapping[str, Splits], options: argparse.Namespace) -> dict[str, Task]:
    """A task for each set and precision."""
    cache = memoro.Cache(options.work, required=False)
    how: dict[str, Any] = {"image_size": options.image_size, "regime": options.regime, "workers": 0, "quiet": True}
    tasks = {}
    for (name, splits), precision in product(sets.items(), PRECISIONS):
        own = {"backbone": options.backbone, "precision": precision, "task": f"{name} {precision}", "cache": cache}
        tasks[f"{name} {precision}"] = memoro.train(splits, **own, **how).task
        print(name, precision, flush=True)
    return tasks


def run(sets: Mapping[str, Splits], options: argparse.Namespace) -> dict[str, Any]:
    """Figures by set, precision of the training and precision of the answers. All tasks answer in one pass."""
    tasks = train(sets, options)
    found: dict[str, Any] = {name: {trained: {} for trained in PRECISIONS} for name in sets}
    for answered in PRECISIONS:
        backbone = memoro.load_backbone(options.backbone, precision=answered)
        model, seen = memoro.compose(backbone, list(tasks.values())), {}
        for name, splits in sets.items():
            assert splits.test is not None
            seen[name] = collect_outputs(model, splits.test, model.names, workers=0)
            print(name, "answered in", answered, flush=True)
        for name, trained in product(sets, PRECISIONS):
            task = tasks[f"{name} {trained}"]
            outputs, targets = seen[name]
            own = outputs.recognition[task.name].familiarity
            others = torch.cat([seen[other][0].recognition[task.name].familiarity for other in sets if other != name])
            metrics = measure_task(task, outputs.logits[task.name], targets)
            found[name][trained][answered] = {
                "accuracy": metrics["accuracy"],
                "calibration_error": metrics["calibration_error"],
                "false_alarms": float((own < FALSE_ALARMS).double().mean()),
                "noticed": float((others < FALSE_ALARMS).double().mean()),
                "auroc": auroc(own, others),
            }
    return found


def describe(own: Mapping[str, Any]) -> list[str]:
    sets: Mapping[str, Any] = own["sets"]
    header = ["trained in", "answered in", *(column.replace("_", " ") for column in COLUMNS)]
    rows = [
        [
            trained,
            answered,
            *(f"{mean(one[trained][answered][column] for one in sets.values()):.4f}" for column in COLUMNS),
        ]
        for trained, answered in product(PRECISIONS, PRECISIONS)
    ]
    pairs = [
        [name, *(f"{one[trained][answered]['accuracy']:.3f}" for trained, answered in product(PRECISIONS, PRECISIONS))]
        for name, one in sets.items()
    ]
    settings = (
        f"{own['image_size']} px, regime {own['regime']}, at most {own['train']} training and {own['test']} test images"
    )
    return [
        f"## {own['backbone']}", "", f"{settings}. Means over {len(sets)} sets:", "", *table(header, rows), "",
        "Accuracy by set, trained and answered in:", "",
        *table(["set", *(f"{a}, {b}" for a, b in product(PRECISIONS, PRECISIONS))], pairs), "",
    ]  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", default="memoro-tiny")
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--regime", default="joint")
    parser.add_argument("--most", type=int, default=100_000, help="training images of a set, at most")
    parser.add_argument("--most-test", type=int, default=100_000, help="test images of a set, at most")
    parser.add_argument("--work", type=Path, default=Path("precision-work"), help="folder for features")
    options = parser.parse_args()
    results = load_results(options.out)
    own = {
        "backbone": Path(options.backbone).name, "image_size": options.image_size, "regime": options.regime,
        "train": options.most, "test": options.most_test,
    }  # fmt: skip
    results[str(own["backbone"])] = {**own, "sets": run(read_sets(options), options)}
    lines = [line for found in results.values() for line in describe(found)]
    text = "Made by `scripts/compare_precision.py`. Noticed: images of the other sets, at 1 % false alarms."
    write_report(options.out, results, ["# Precision", "", text, "", *lines])


if __name__ == "__main__":
    main()
