"""Measures familiarity, calibration and routing on several sets, and compares what familiarity could be computed from.

    python scripts/measure_trust.py a.zip b.zip c.zip --backbone FOLDER --out results/trust.md --work trust-work

A task is trained for each set. Task files and features are kept in the work folder: what is there already is not
computed again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import memoro
from memoro.data import ImageSet, Loader, Splits
from memoro.evaluation.logits import collect_logits
from memoro.evaluation.metrics import measure
from memoro.evaluation.trust import auroc, false_positives
from memoro.heads import probabilities
from memoro.tasks.familiarity import FALSE_ALARMS, FamiliarityBank, fit_familiarity
from memoro.tasks.task import Task
from memoro.training.cached import CachedLoader, fill_caches
from memoro.training.run import build_forward
from reports import load_splits, make_parser, table, write_report

ALIKE = {"cifar10", "cifar100"}
"""Two sets of the same kind of picture: they are no pair."""
NEIGHBOURS = 5
Score = Callable[[Tensor], Tensor]


def cap(images: ImageSet | None, most: int) -> ImageSet:
    """At most so many images, the same ones at every call."""
    assert isinstance(images, ImageSet)
    return images.subset(np.sort(np.random.default_rng(0).permutation(len(images))[:most]))


def train_task(name: str, splits: Splits, backbone: memoro.Backbone, options: argparse.Namespace) -> Task:
    """The task of a set, from its file if that is there."""
    file = options.work / f"{name}-{options.regime}.safetensors"
    if not file.is_file():
        how: dict[str, Any] = {"image_size": options.image_size, "cache": memoro.Cache(options.work / "features")}
        memoro.train(splits, backbone=backbone, task=name, regime=options.regime, out=file, quiet=True, **how)
    return memoro.load_task(file)


def identity(task: Task) -> Task:
    """The same task with its final token as its logits."""
    dim = task.spec.backbone.dim
    tensors = {**task.state_dict(), "head.weight": torch.eye(dim), "head.bias": torch.zeros(dim)}
    spec = replace(task.spec, labels=tuple(map(str, range(dim))))
    return Task.from_tensors(spec, tensors, ())


def read_set(
    images: ImageSet, tasks: Mapping[str, Task], backbone: memoro.Backbone, options: argparse.Namespace
) -> dict[str, Any]:
    """Of all images: the targets, both of the base's tokens, and every task's logits and final token."""
    cache = memoro.Cache(options.work / "features")
    loader = Loader(images, backbone.preprocessing.at(options.image_size), batch_size=32, workers=0)
    first = min(task.from_layer for task in tasks.values())
    kept = CachedLoader(loader, backbone, cache, first)
    fill_caches([kept], cache, lambda count: None)
    models = [*tasks.values(), *(identity(task) for task in tasks.values())]
    forward = build_forward(backbone, models)

    def answer(features: Any) -> list[Tensor]:
        return [*forward(features), backbone.anatomy.finish_token(features.token)]

    found, targets = collect_logits(answer, backbone, kept)
    return {
        "targets": targets,
        "entering": kept.entering_tokens(range(len(images))),
        "final": found[-1],
        "logits": dict(zip(tasks, found, strict=False)),
        "own": dict(zip(tasks, found[len(tasks) : -1], strict=True)),
    }


# ---------------------------------------------------------------------------------- what familiarity could be


def low_rank(tokens: Tensor, targets: Tensor) -> Score:
    """What is shipped."""
    found = fit_familiarity(tokens, targets)
    assert found is not None
    bank = FamiliarityBank([found])
    return lambda new: -bank.measure(new)[:, 0]


def full_covariance(tokens: Tensor, targets: Tensor) -> Score:
    """The reference: class means and one full covariance, 10 % shrinkage."""
    x = tokens.double()
    means = torch.stack([x[targets == label].mean(dim=0) for label in torch.unique(targets)])
    numbers = torch.unique(targets, return_inverse=True)[1]
    within = x - means[numbers]
    covariance = within.T @ within / len(x)
    average = covariance.trace() / len(covariance)
    inverse = torch.linalg.inv(0.9 * covariance + 0.1 * average * torch.eye(len(covariance)))

    def score(new: Tensor) -> Tensor:
        away = new.double().unsqueeze(1) - means
        return -((away @ inverse) * away).sum(dim=-1).amin(dim=1)

    return score


def centroids(tokens: Tensor, targets: Tensor) -> Score:
    means = torch.stack([tokens[targets == label].mean(dim=0) for label in torch.unique(targets)])
    return lambda new: -torch.cdist(new, means).amin(dim=1)


def neighbours(tokens: Tensor, targets: Tensor) -> Score:
    unit = torch.nn.functional.normalize(tokens, dim=1)
    return lambda new: -torch.cdist(torch.nn.functional.normalize(new, dim=1), unit).kthvalue(NEIGHBOURS).values


TOKENS = {"entering": "token entering the last layer", "final": "final token", "own": "the task's final token"}
FITS: dict[str, Callable[[Tensor, Tensor], Score]] = {
    "low rank and residual": low_rank,
    "full covariance": full_covariance,
    "nearest centroid": centroids,
    f"{NEIGHBOURS} nearest neighbours": neighbours,
}
SHIPPED = f"low rank and residual, {TOKENS['entering']}"


def compare_scores(train: Mapping[str, Any], test: Mapping[str, Any]) -> dict[str, dict[tuple[str, str], Any]]:
    """By method and ordered pair of sets: AUROC and false positives at 95 % recall."""
    found: dict[str, dict[tuple[str, str], Any]] = {}
    for a in train:
        scores: dict[str, Callable[[Mapping[str, Any]], Tensor]] = {}
        for token, words in TOKENS.items():

            def pick(data: Mapping[str, Any], token: str = token, a: str = a) -> Tensor:
                tokens: Tensor = data["own"][a] if token == "own" else data[token]
                return tokens

            for how, fit in FITS.items():
                score = fit(pick(train[a]), train[a]["targets"])
                scores[f"{how}, {words}"] = lambda data, score=score, pick=pick: score(pick(data))
        scores["energy"] = lambda data, a=a: data["logits"][a].logsumexp(dim=-1)
        scores["softmax"] = lambda data, a=a: probabilities("softmax", data["logits"][a]).amax(dim=-1)
        for how, judge in scores.items():
            own = judge(test[a])
            for b in train:
                if b != a and {a, b} != ALIKE:
                    other = judge(test[b])
                    found.setdefault(how, {})[a, b] = (auroc(own, other), false_positives(own, other))
    return found


def hold_out(train: Mapping[str, Any], test: Mapping[str, Any]) -> dict[str, float]:
    """For each way to fit: mean AUROC between the images of a class that was left out and those of the others."""
    found: dict[str, list[float]] = {}
    for label in torch.unique(train["targets"])[:10]:
        kept, mine = train["targets"] != label, test["targets"] == label
        if not mine.any() or len(torch.unique(train["targets"])) < 3:
            continue
        for how, fit in FITS.items():
            score = fit(train["entering"][kept], train["targets"][kept])
            own, other = score(test["entering"][~mine]), score(test["entering"][mine])
            found.setdefault(how, []).append(auroc(own, other))
    return {how: mean(values) for how, values in found.items()}


def measure_tasks(tasks: Mapping[str, Task], test: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each task: calibration error before and after, accuracy told and not told, share of false alarms."""
    names = list(tasks)
    bank = FamiliarityBank([one for task in tasks.values() if (one := task.spec.familiarity) is not None])
    results = {}
    for at, (name, task) in enumerate(tasks.items()):
        logits, targets = test[name]["logits"][name], test[name]["targets"]
        calibration = task.spec.calibration
        assert calibration is not None
        before = measure("softmax", task.labels, logits, targets)
        after = measure("softmax", task.labels, calibration.apply(logits), targets)
        scores, shares = bank.judge(test[name]["entering"])
        candidates = [number for number, other in enumerate(names) if other != "cifar10" or name == "cifar10"]
        routed = torch.tensor(candidates)[scores[:, candidates].argmax(dim=1)] == at
        results[name] = {
            "images": len(targets),
            "accuracy": before["accuracy"],
            "same answers": after["accuracy"] == before["accuracy"],
            "ece before": before["calibration_error"],
            "ece after": after["calibration_error"],
            "not told": float((routed & (logits.argmax(dim=-1) == targets)).double().mean()),
            "routed": float(routed.double().mean()),
            "false alarms": float((shares[:, at] < FALSE_ALARMS).double().mean()),
            "bytes": task.spec.familiarity.bytes if task.spec.familiarity is not None else 0,
        }
    return results


def write(results: Mapping[str, Any], options: argparse.Namespace) -> None:
    pairs, tasks, held = results["pairs"], results["tasks"], results["held_out"]
    rows = []
    for how, found in pairs.items():
        values = {pair: value[0] for pair, value in found.items()}
        worst = min(values, key=lambda pair: values[pair])
        rate = mean(value[1] for value in found.values())
        rows.append([how, f"{mean(values.values()):.4f}", f"{values[worst]:.3f} ({worst})", f"{rate:.3f}"])
    rows.sort(key=lambda row: row[1], reverse=True)
    keys = ("accuracy", "ece before", "ece after", "not told", "routed", "false alarms")
    own = [
        [name, found["images"], *(f"{found[key]:.3f}" for key in keys), found["bytes"]] for name, found in tasks.items()
    ]
    middle = [f"{mean(found[key] for found in tasks.values()):.3f}" for key in keys]
    left_out = [[name, *(f"{found[how]:.3f}" for how in FITS)] for name, found in held.items() if found]
    lines = [
        "# Familiarity, calibration, routing",
        "",
        f"{Path(options.backbone).name} at {options.image_size} px, at most {options.most} training and "
        f"{options.most_test} test images of a set, one task of regime `{options.regime}` for each: "
        f"{', '.join(tasks)}.",
        "",
        "Made by `scripts/measure_trust.py`; the JSON beside this file has every pair.",
        "",
        f"## Own test images against those of another set ({len(pairs[SHIPPED])} ordered pairs)",
        "",
        f"What memoro ships is *{SHIPPED}*; the full covariance does not fit into a task file.",
        "",
        *table(["score", "mean AUROC", "worst pair", "mean FPR at 95 % recall"], rows),
        "",
        "## Tasks",
        "",
        "Expected calibration error over 15 bins, before and after calibration. `not told`: the image goes to the task "
        "with the highest score of all, and its answer is right. `false alarms`: own images with a familiarity below "
        f"{FALSE_ALARMS}.",
        "",
        *table(["task", "test images", *keys, "bytes"], [*own, ["mean", "", *middle, ""]]),
        "",
        "## A class that was left out of the description",
        "",
        "AUROC between test images of the other classes and those of the class, mean over (at most ten) classes; token "
        "entering the last layer.",
        "",
        *table(["set", *FITS], left_out),
    ]
    write_report(options.out, dict(results), lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--most", type=int, default=2000, help="training images of a set, at most")
    parser.add_argument("--most-test", type=int, default=600, help="test images of a set, at most")
    parser.add_argument("--regime", default="side", choices=["head", "memory", "side"])
    parser.add_argument("--work", type=Path, default=Path("trust-work"), help="folder for task files and features")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbone = memoro.load_backbone(options.backbone)
    options.work.mkdir(parents=True, exist_ok=True)
    sets: dict[str, Splits] = {}
    tasks: dict[str, Task] = {}
    for source in options.data:
        name, splits = Path(source).stem, load_splits(source)
        train, test = cap(splits.train, options.most), cap(splits.test, options.most_test)
        sets[name] = replace(splits, train=train, test=test)
        tasks[name] = train_task(name, sets[name], backbone, options)
        print(name, tasks[name].spec.metrics.get("accuracy"), flush=True)
    train = {name: read_set(cap(splits.train, options.most), tasks, backbone, options) for name, splits in sets.items()}
    test = {
        name: read_set(cap(splits.test, options.most_test), tasks, backbone, options) for name, splits in sets.items()
    }
    pairs = compare_scores(train, test)
    results = {
        "pairs": {how: {f"{a} / {b}": value for (a, b), value in found.items()} for how, found in pairs.items()},
        "tasks": measure_tasks(tasks, test),
        "held_out": {name: hold_out(train[name], test[name]) for name in sets},
    }
    write(results, options)
    print(options.out.read_text())


if __name__ == "__main__":
    main()
