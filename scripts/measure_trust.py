"""Measures familiarity, calibration and routing on several sets.

    python scripts/measure_trust.py a.zip b.zip --backbone FOLDER --photographs photos.zip --out results/trust.md

A read-out is solved for each set (`--regime readout`); familiarity is the same for every regime. Statistics are kept in
the work folder, so a later call computes only what is missing; results of other backbones stay in the report.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import memoro
from memoro.data import ImageSet
from memoro.engine.streams import pool_pass
from memoro.evaluation.calibrate import CHANGES, read_changes, read_photographs
from memoro.evaluation.evaluate import auroc
from memoro.evaluation.metrics import measure
from memoro.tasks.familiarity import FALSE_ALARMS, Familiarity, FamiliarityBank, Others, fit_familiarity
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import Task
from memoro.training import Cache
from memoro.training.cached import read_statistics
from reports import load_results, make_parser, table, write_report

ALIKE = {"cifar10", "cifar100"}
"""Two sets of the same kind of picture: they are left out of the pairs, and never routed together."""
HELD_OUT = 3
"""Classes of a set that are left out, one at a time."""
RATES = (0.01, 0.05)
"""Shares of own images that may be called unfamiliar."""
SHIPPED, DISTANCE, PHOTOGRAPHS = "distance and photographs (what ships)", "distance alone", "photographs alone"
CHANGED = 100
"""Test images of a set that are changed."""

Strange = Callable[[Tensor], Tensor]


def cap(images: ImageSet | None, most: int) -> ImageSet:
    """At most so many images, the same ones at every call."""
    assert isinstance(images, ImageSet)
    return images.subset(np.sort(np.random.default_rng(0).permutation(len(images))[:most]))


def parts_of(found: Familiarity, statistics: Tensor, targets: Tensor) -> dict[str, tuple[Strange, Tensor]]:
    """By score: how strange images are, and how strange held-out training images are."""
    plain = fit_familiarity(statistics, targets, None)
    assert plain is not None
    whole, distance = FamiliarityBank([found]), FamiliarityBank([plain])

    def apart(pooled: Tensor) -> Tensor:
        return whole.strangeness(pooled)[:, 0] - distance.strangeness(pooled)[:, 0]

    # The read-out's held-out answers are not kept: those to the training images would be too good.
    return {
        SHIPPED: (lambda pooled: whole.strangeness(pooled)[:, 0], found.held_out),
        DISTANCE: (lambda pooled: distance.strangeness(pooled)[:, 0], plain.held_out),
        PHOTOGRAPHS: (apart, torch.empty(0)),
    }


def compare_pairs(sets: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By score and ordered pair of sets: AUROC, and the share noticed at each rate of false alarms."""
    found: dict[str, dict[str, Any]] = {}
    for name, own in sets.items():
        scores = parts_of(own["familiarity"], own["train"], own["train targets"])
        for how, (strange, held_out) in scores.items():
            mine = strange(own["test"])
            for other, data in sets.items():
                if other == name or {name, other} == ALIKE:
                    continue
                theirs = strange(data["test"])
                noticed = [
                    float((theirs > held_out.quantile(1 - rate)).double().mean()) for rate in RATES if len(held_out)
                ]
                found.setdefault(how, {})[f"{name} / {other}"] = [auroc(-mine, -theirs), *noticed]
    return found


def measure_tasks(sets: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each task: calibration error before and after, accuracy told and not told, share of false alarms."""
    routed = [name for name in sets if name != "cifar10"]
    bank = FamiliarityBank([sets[name]["familiarity"] for name in routed])
    results = {}
    for name, own in sets.items():
        task, targets = own["task"], own["test targets"]
        assert task.readout is not None
        logits = task.readout(own["test"].flatten(1))
        before = measure("softmax", task.labels, logits, targets)
        after = measure("softmax", task.labels, task.spec.calibration.apply(logits), targets)
        alone = FamiliarityBank([own["familiarity"]])
        results[name] = {
            "images": len(targets),
            "accuracy": before["accuracy"],
            "ece before": before["calibration_error"],
            "ece after": after["calibration_error"],
            "false alarms": float((alone.judge(own["test"])[1] < FALSE_ALARMS).double().mean()),
            "bytes": own["familiarity"].bytes,
        }
        if name in routed:
            right = bank.judge(own["test"])[0].argmax(dim=1) == routed.index(name)
            results[name]["found"] = float(right.double().mean())
            results[name]["not told"] = float((right & (logits.argmax(dim=-1) == targets)).double().mean())
    return results


def hold_out(own: Mapping[str, Any], others: Others) -> float | None:
    """The mean AUROC between test images of a class that familiarity was not fitted on and the others."""
    found = []
    labels = torch.unique(own["train targets"])
    for label in labels[:: max(1, len(labels) // HELD_OUT)][:HELD_OUT] if len(labels) > 2 else ():
        kept, mine = own["train targets"] != label, own["test targets"] == label
        if mine.any():
            described = fit_familiarity(own["train"][kept], own["train targets"][kept], others, own["changes"])
            assert described is not None
            strange = FamiliarityBank([described]).strangeness(own["test"])[:, 0]
            found.append(auroc(-strange[~mine], -strange[mine]))
    return mean(found) if found else None


def change_images(
    backbone: memoro.Backbone, sets: Mapping[str, dict[str, Any]], size: int
) -> dict[str, dict[str, float]]:
    """By set and change: the share of changed own test images that is called unfamiliar."""
    preprocessing, first = backbone.preprocessing.at(size), ReadOut.of(backbone.anatomy).from_layer
    found: dict[str, dict[str, float]] = {}
    for name, own in sets.items():
        images = cap(own["images"], CHANGED)
        bank = FamiliarityBank([own["familiarity"]])
        for how, change in CHANGES.items():
            shares = []
            for start in range(0, len(images), 25):
                opened = [change(images.open(at)) for at in range(start, min(start + 25, len(images)))]
                pixels = torch.stack([preprocessing.to_tensor(image.convert("RGB")) for image in opened])
                with torch.no_grad():
                    shares.append(bank.judge(pool_pass(backbone.anatomy, pixels, first))[1])
            found.setdefault(name, {})[how] = float((torch.cat(shares) < FALSE_ALARMS).double().mean())
    return found


def describe(results: Mapping[str, Any]) -> list[str]:
    """The part of the report about one backbone: what has been measured so far."""
    lines = [
        f"## {results['backbone']}",
        "",
        f"{results['image_size']} px, at most {results['train']} training and {results['test']} test images of a set.",
        "",
    ]
    writers = {"pairs": _pairs, "tasks": _tasks, "changed": _changed, "held_out": _held_out}
    for part, write in writers.items():
        if results.get(part):
            lines += [*write(results[part]), ""]
    return lines


def _pairs(pairs: Mapping[str, Any]) -> list[str]:
    rows = []
    for how, found in pairs.items():
        worst = min(found, key=lambda pair: found[pair][0])
        columns = list(zip(*found.values(), strict=True))
        noticed = [f"{mean(one):.3f} ({min(one):.2f})" for one in columns[1:]]
        rows.append([how, f"{mean(columns[0]):.4f}", f"{found[worst][0]:.3f} ({worst})", *noticed])
    rows = [[*row, *[""] * (3 + len(RATES) - len(row))] for row in rows]
    return [
        f"**Own test images against those of another set**, {len(pairs[SHIPPED])} ordered pairs (without cifar10 and "
        "cifar100, which show the same kind of picture). `noticed`: the share of the other set's images beyond the "
        "limit that this share of held-out training images is beyond; the mean, and the least of a pair.",
        "",
        *table(["score", "mean AUROC", "worst pair", *(f"noticed at {rate:.0%}" for rate in RATES)], rows),
    ]


def _tasks(tasks: Mapping[str, Any]) -> list[str]:
    keys = ("accuracy", "ece before", "ece after", "not told", "found", "false alarms", "bytes")

    def line(name: str, images: Any, found: Mapping[str, Any]) -> list[Any]:
        shown = (("" if key not in found else f"{found[key]:.3f}" if key != "bytes" else found[key]) for key in keys)
        return [name, images, *shown]

    routed = [found for found in tasks.values() if "found" in found]
    middle = {key: mean(found[key] for found in tasks.values() if key in found) for key in keys[:-1]}
    told, untold = (mean(found[key] for found in routed) for key in ("accuracy", "not told"))
    return [
        "**Tasks**, a read-out for each set. Expected calibration error (ece) over 15 bins, before and after "
        "calibration by leave-one-out answers. `not told`: the image goes to the task with the highest score of "
        f"{len(routed)} (without cifar10), and its answer is right; `found`: the task is right. `false alarms`: own "
        f"test images with a familiarity below {FALSE_ALARMS}. `bytes`: what familiarity adds to the file. Mean "
        f"accuracy of the {len(routed)}: {told:.3f} told, {untold:.3f} not told.",
        "",
        *table(
            ["task", "test images", *keys],
            [*(line(name, found["images"], found) for name, found in tasks.items()), line("mean", "", middle)],
        ),
    ]


def _changed(sets: Mapping[str, Any]) -> list[str]:
    rows = [[name, *(f"{found[how]:.3f}" for how in CHANGES)] for name, found in sets.items()]
    rows.append(["mean", *(f"{mean(found[how] for found in sets.values()):.3f}" for how in CHANGES)])
    return [
        f"**Own test images after mild changes** ({CHANGED} of a set): the share that is called unfamiliar.",
        "",
        *table(["set", *CHANGES], rows),
    ]


def _held_out(sets: Mapping[str, Any]) -> list[str]:
    held = {name: found for name, found in sets.items() if found is not None}
    rows = [[name, f"{found:.3f}"] for name, found in held.items()]
    return [
        "**A class that was left out** of what familiarity was fitted on: AUROC between its test images and those of "
        f"the other classes, mean over at most {HELD_OUT} classes.",
        "",
        *table(["set", "AUROC"], [*rows, ["mean", f"{mean(held.values()):.3f}"]]),
    ]


def read_set(source: str, backbone: memoro.Backbone, others: Others, options: argparse.Namespace) -> dict[str, Any]:
    """A set's statistics, targets, task and familiarity."""
    splits = memoro.load_data(source, val_fraction=0, quiet=True, workers=0)
    splits = replace(splits, train=cap(splits.train, options.most), test=cap(splits.test, options.most_test))
    cache = Cache(options.work / "features")
    found: dict[str, Any] = {"images": splits.test}
    for part, images in (("train", splits.train), ("test", splits.test)):
        assert images is not None
        size = backbone.preprocessing.at(options.image_size)
        read = read_statistics(backbone, images, size, cache, workers=0)
        found |= {part: read(torch.arange(len(images))).float(), f"{part} targets": images.targets}
    how: dict[str, Any] = {"image_size": options.image_size, "cache": cache, "workers": 0, "quiet": True}
    found["task"] = memoro.train(splits, backbone=backbone, task=Path(source).stem, regime="readout", **how).task
    assert isinstance(found["task"], Task)
    found["changes"] = read_changes(backbone, backbone.preprocessing.at(options.image_size), splits.train)
    found["familiarity"] = fit_familiarity(found["train"], found["train targets"], others, found["changes"])
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--photographs", required=True)
    parser.add_argument("--precision", default=None, help="what the backbone computes in")
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--most", type=int, default=2000, help="training images of a set, at most")
    parser.add_argument("--most-test", type=int, default=600, help="test images of a set, at most")
    parser.add_argument("--work", type=Path, default=Path("trust-work"), help="folder for features")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbone = memoro.load_backbone(options.backbone, precision=options.precision)
    preprocessing = backbone.preprocessing.at(options.image_size)
    others = read_photographs(backbone, preprocessing, options.photographs, options.work / "features", workers=0)
    sets: dict[str, dict[str, Any]] = {}
    for source in options.data:
        sets[Path(source).stem] = read_set(source, backbone, others, options)
        print(Path(source).stem, flush=True)
    results = load_results(options.out)
    setting = {"image_size": options.image_size, "train": options.most, "test": options.most_test}
    own = {"backbone": Path(options.backbone).name, **setting}
    results[own["backbone"]] = own
    parts: dict[str, Callable[[], Any]] = {
        "pairs": lambda: compare_pairs(sets),
        "tasks": lambda: measure_tasks(sets),
        "changed": lambda: change_images(backbone, sets, options.image_size),
        "held_out": lambda: {name: hold_out(found, others) for name, found in sets.items()},
    }
    for part, run in parts.items():
        with torch.no_grad():
            own[part] = run()
        write(results, options)
        print(part, flush=True)


def write(results: Mapping[str, Any], options: argparse.Namespace) -> None:
    lines: Sequence[str] = [line for found in results.values() for line in describe(found)]
    text = "Made by `scripts/measure_trust.py`; the JSON beside this file has every pair."
    write_report(options.out, results, ["# Familiarity, calibration, routing", "", text, "", *lines])


if __name__ == "__main__":
    main()
