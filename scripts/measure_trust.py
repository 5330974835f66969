"""Measures familiarity, calibration and routing on several sets, and compares what familiarity could be computed from.

    python scripts/measure_trust.py a.zip b.zip --backbone FOLDER --out results/trust.md --work trust-work

A task is trained for each set, with `memoro train`'s defaults but for fewer learning rates and forks. Task files and
features are kept in the work folder, so a later call computes only what is missing; results of other backbones stay in
the report.
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
from torch.nn.functional import linear, normalize

import memoro
from distillation.classifier import solve_classifier
from memoro.bench.clock import best_times
from memoro.data import ImageSet, Loader, Splits
from memoro.engine.streams import BasePass
from memoro.evaluation.logits import collect_logits
from memoro.evaluation.metrics import measure
from memoro.evaluation.trust import auroc, false_positives
from memoro.heads import energy, probabilities
from memoro.images import synthetic_image
from memoro.tasks.familiarity import FALSE_ALARMS, FOLDS, Familiarity, FamiliarityBank, fit_familiarity
from memoro.tasks.task import Task
from memoro.training.cached import CachedLoader, fill_caches
from memoro.training.run import build_forward
from reports import load_results, make_parser, table, write_report

ALIKE = {"cifar10", "cifar100"}
"""Two sets of the same kind of picture: they are reported beside the other pairs, and never routed together."""
NEIGHBOURS = 5
HELD_OUT = 3
"""Classes of a set that are left out, one at a time."""
STRENGTH = 0.03
"""What scikit-learn calls C, of the classifiers without a class."""
RATES = (0.001, 0.003)
TASKS = 100
Score = Callable[[Tensor], Tensor]


def cap(images: ImageSet | None, most: int) -> ImageSet:
    """At most so many images, the same ones at every call."""
    assert isinstance(images, ImageSet)
    return images.subset(np.sort(np.random.default_rng(0).permutation(len(images))[:most]))


def train_task(name: str, splits: Splits, backbone: memoro.Backbone, options: argparse.Namespace) -> Task:
    """The task of a set, from its file if that is there."""
    file = options.work / f"{name}.safetensors"
    if not file.is_file():
        how: dict[str, Any] = {"image_size": options.image_size, "cache": memoro.Cache(options.work / "features")}
        memoro.train(splits, backbone=backbone, task=name, lr=RATES, out=file, quiet=True, **how)
    return memoro.load_task(file)


def read_set(images: ImageSet, tasks: Mapping[str, Task], backbone: memoro.Backbone, options: Any) -> dict[str, Any]:
    """Of all images: the targets, both of the base's tokens, and every task's logits."""
    cache = memoro.Cache(options.work / "features")
    loader = Loader(images, backbone.preprocessing.at(options.image_size), batch_size=32, workers=0)
    kept = CachedLoader(loader, backbone, cache, min(task.from_layer for task in tasks.values()))
    fill_caches([kept], cache, lambda count: None)
    forward = build_forward(backbone, list(tasks.values()))

    def answer(features: Any) -> list[Tensor]:
        return [*forward(features), backbone.anatomy.finish_token(features.token)]

    found, targets = collect_logits(answer, backbone, kept)
    tokens = {"entering": kept.entering_tokens(range(len(images))), "final": found[-1]}
    return {"targets": targets, "logits": dict(zip(tasks, found, strict=False)), **tokens}


def read_background(backbone: memoro.Backbone, options: argparse.Namespace, count: int = 30) -> dict[str, Tensor]:
    """The mean of both tokens over synthetic images."""
    preprocessing, (height, width) = backbone.preprocessing.at(options.image_size), backbone.image_size
    images = [synthetic_image(number).resize((width, height)) for number in range(count)]
    base = BasePass(backbone.anatomy, torch.stack([preprocessing.to_tensor(image) for image in images]))
    with torch.no_grad():
        *_, last = base
        return {"entering": last.token.mean(dim=0), "final": backbone.anatomy.finish_token(base.token).mean(dim=0)}


# ---------------------------------------------------------------------------------- what familiarity could be


def low_rank(tokens: Tensor, targets: Tensor, background: Tensor) -> Score:
    """What is shipped."""
    found = fit_familiarity(tokens, targets, background)
    assert found is not None
    bank = FamiliarityBank([found])
    return lambda new: -bank.measure(new)[:, 0]


def full_covariance(tokens: Tensor, targets: Tensor, background: Tensor) -> Score:
    """The reference: class means and one full covariance, 10 % shrinkage, relative to the background."""
    x = tokens.double()
    means = torch.stack([x[targets == label].mean(dim=0) for label in torch.unique(targets)])
    numbers = torch.unique(targets, return_inverse=True)[1]
    within = x - means[numbers]
    covariance = within.T @ within / len(x)
    average = covariance.trace() / len(covariance)
    inverse = torch.linalg.inv(0.9 * covariance + 0.1 * average * torch.eye(len(covariance)))
    squares = ((means @ inverse) * means).sum(dim=-1)

    def score(new: Tensor) -> Tensor:
        moved = new.double() @ inverse
        distances = ((moved * new).sum(dim=-1, keepdim=True) - 2 * moved @ means.T + squares).amin(dim=1)
        return -distances / (new - background).norm(dim=-1)

    return score


def centroids(tokens: Tensor, targets: Tensor, background: Tensor) -> Score:
    means = torch.stack([tokens[targets == label].mean(dim=0) for label in torch.unique(targets)])
    return lambda new: -torch.cdist(new, means).amin(dim=1)


def neighbours(tokens: Tensor, targets: Tensor, background: Tensor) -> Score:
    unit = normalize(tokens, dim=1)
    return lambda new: -torch.cdist(normalize(new, dim=1), unit).kthvalue(NEIGHBOURS).values


TOKENS = {"entering": "token entering the last layer", "final": "final token"}
FITS: dict[str, Callable[[Tensor, Tensor, Tensor], Score]] = {
    "low rank": low_rank,
    "full covariance": full_covariance,
    "nearest centroid": centroids,
    f"{NEIGHBOURS} nearest neighbours": neighbours,
}
RELATIVE = ("low rank", "full covariance")
"""Relative to the background. Both are compared without it as well."""
SURE = "low rank, relative, answers count"
SHIPPED = f"{SURE}, {TOKENS['entering']}"
TOKEN_ONLY = f"low rank, relative, {TOKENS['entering']}"
REFERENCE = f"full covariance, relative, {TOKENS['entering']}"


def fit_scores(tokens: Tensor, targets: Tensor, background: Tensor) -> dict[str, Score]:
    found: dict[str, Score] = {}
    for how, fit in FITS.items():
        score = fit(tokens, targets, background)
        if how in RELATIVE:
            found[f"{how}, relative"] = score
            found[how] = lambda new, score=score: score(new) * (new - background).norm(dim=-1)  # type: ignore[misc]
        else:
            found[how] = score
    return found


LOGITS: dict[str, Score] = {
    "energy": lambda logits: logits.logsumexp(dim=-1),
    "softmax": lambda logits: probabilities("softmax", logits).amax(dim=-1),
}


def compare(judge: Callable[[Mapping[str, Any]], Tensor], name: str, test: Mapping[str, Any]) -> dict[str, Any]:
    """By other set: AUROC and false positives at 95 % recall, of a score of the set `name`."""
    own = judge(test[name])
    others = {other: judge(data) for other, data in test.items() if other != name}
    return {f"{name} / {other}": (auroc(own, found), false_positives(own, found)) for other, found in others.items()}


def with_answers(found: Familiarity, tokens: Tensor, logits: Tensor) -> Tensor:
    """What is shipped: the distance also depends on the energy of the task's answers."""
    return -FamiliarityBank([found]).measure(tokens, energy("softmax", logits).unsqueeze(1))[:, 0]


def compare_scores(
    tasks: Mapping[str, Task], train: Mapping[str, Any], test: Mapping[str, Any], background: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """By method and ordered pair of sets."""
    found: dict[str, dict[str, Any]] = {}
    for name in train:
        for token, words in TOKENS.items():
            for how, score in fit_scores(train[name][token], train[name]["targets"], background[token]).items():
                pairs = compare(lambda data, score=score, token=token: score(data[token]), name, test)  # type: ignore[misc]
                found.setdefault(f"{how}, {words}", {}).update(pairs)
        for how, score in LOGITS.items():
            pairs = compare(lambda data, score=score, name=name: score(data["logits"][name]), name, test)  # type: ignore[misc]
            found.setdefault(how, {}).update(pairs)
        described = tasks[name].spec.familiarity
        assert described is not None

        def judge(data: Mapping[str, Any], name: str = name, described: Familiarity = described) -> Tensor:
            return with_answers(described, data["entering"], data["logits"][name])

        found.setdefault(SHIPPED, {}).update(compare(judge, name, test))
    return found


def cross_fit(tokens: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Logits (n, classes) of classifiers that did not see the image."""
    fold, found = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0)) % FOLDS, []
    for number in range(FOLDS):
        found.append(
            linear(tokens, *solve_classifier(tokens[fold != number], targets[fold != number], classes, STRENGTH))
        )
    return torch.stack(found)[fold, torch.arange(len(tokens))]


def hold_out(train: Mapping[str, Any], test: Mapping[str, Any], background: Tensor) -> dict[str, float]:
    """By method: mean AUROC between test images of a class that no part of the method has seen and the others."""
    found: dict[str, list[float]] = {}
    labels = torch.unique(train["targets"])
    for label in labels[:: max(1, len(labels) // HELD_OUT)][:HELD_OUT] if len(labels) > 2 else ():
        kept, mine = train["targets"] != label, test["targets"] == label
        if not mine.any():
            continue
        targets = torch.unique(train["targets"][kept], return_inverse=True)[1]
        scores = fit_scores(train["entering"][kept], targets, background)
        values = {how: score(test["entering"]) for how, score in scores.items()}
        logits = linear(test["final"], *solve_classifier(train["final"][kept], targets, len(labels) - 1, STRENGTH))
        values |= {how: score(logits) for how, score in LOGITS.items()}
        described = fit_familiarity(train["entering"][kept], targets, background)
        assert described is not None
        assert described.out_of_fold is not None
        held = energy("softmax", cross_fit(train["final"][kept], targets, len(labels) - 1))
        values[SURE] = with_answers(described.with_answers(described.out_of_fold, held), test["entering"], logits)
        for how, value in values.items():
            found.setdefault(how, []).append(auroc(value[~mine], value[mine]))
    return {how: mean(values) for how, values in found.items()}


def measure_tasks(tasks: Mapping[str, Task], test: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each task: calibration error before and after, accuracy told and not told, share of false alarms."""
    routed = [name for name in tasks if name != "cifar10"]
    descriptions = {name: task.spec.familiarity for name, task in tasks.items()}
    bank = FamiliarityBank([one for name in routed if (one := descriptions[name]) is not None])
    results = {}
    for name, task in tasks.items():
        logits, targets = test[name]["logits"][name], test[name]["targets"]
        calibration, familiarity = task.spec.calibration, descriptions[name]
        assert calibration is not None
        assert familiarity is not None
        before = measure("softmax", task.labels, logits, targets)
        after = measure("softmax", task.labels, calibration.apply(logits), targets)
        energies = energy("softmax", logits).unsqueeze(1)
        shares = FamiliarityBank([familiarity]).judge(test[name]["entering"], energies)[1]
        results[name] = {
            "images": len(targets),
            "accuracy": before["accuracy"],
            "same answers": after["accuracy"] == before["accuracy"],
            "ece before": before["calibration_error"],
            "ece after": after["calibration_error"],
            "false alarms": float((shares < FALSE_ALARMS).double().mean()),
            "bytes": familiarity.bytes,
        }
        if name in routed:
            answers = [energy("softmax", test[name]["logits"][other]) for other in routed]
            scores, _ = bank.judge(test[name]["entering"], torch.stack(answers, dim=1))
            right = scores.argmax(dim=1) == routed.index(name)
            results[name]["found"] = float(right.double().mean())
            results[name]["not told"] = float((right & (logits.argmax(dim=-1) == targets)).double().mean())
    return results


def measure_cost(backbone: memoro.Backbone, task: Task, options: argparse.Namespace) -> float:
    """What it takes to judge images for many tasks, in base passes."""
    assert task.spec.familiarity is not None
    bank = FamiliarityBank([task.spec.familiarity] * TASKS)
    pixels, token = torch.randn(8, 3, options.image_size, options.image_size), torch.randn(8, backbone.dim)
    logits = torch.randn(8, len(task.labels))

    def judge() -> object:
        return bank.judge(token, torch.stack([energy("softmax", logits) for _ in range(TASKS)], dim=1))

    with torch.no_grad():
        best = best_times({"base": lambda: backbone.original(pixels), "judge": judge}, 5)
    return best["judge"] / best["base"]


def is_alike(pair: str) -> bool:
    return set(pair.split(" / ")) == ALIKE


def describe(results: Mapping[str, Any]) -> list[str]:
    """The part of the report about one backbone: what has been measured so far."""
    parts = {"pairs": _pairs, "tasks": _tasks, "held_out": _held_out}
    lines = [
        f"## {results['backbone']}",
        "",
        f"{results['image_size']} px, at most {results['train']} training and {results['test']} test images of a set.",
        "",
    ]
    for part, write in parts.items():
        if results.get(part):
            lines += [*write(results[part]), ""]
    if "cost" in results:
        lines += [f"**Cost** of judging 8 images for {TASKS} tasks: {results['cost']:.4f} of a base pass.", ""]
    return lines


def _pairs(pairs: Mapping[str, Any]) -> list[str]:
    rows = []
    for how, found in pairs.items():
        values = {pair: value[0] for pair, value in found.items() if not is_alike(pair)}
        worst = min(values, key=lambda pair: values[pair])
        rate = mean(value[1] for pair, value in found.items() if not is_alike(pair))
        alike = ", ".join(f"{value[0]:.3f}" for pair, value in found.items() if is_alike(pair))
        rows.append([how, f"{mean(values.values()):.4f}", f"{values[worst]:.3f} ({worst})", f"{rate:.3f}", alike])
    rows.sort(key=lambda row: row[1], reverse=True)
    token_only, reference = (
        mean(value[0] for pair, value in pairs[how].items() if not is_alike(pair)) for how in (TOKEN_ONLY, REFERENCE)
    )
    return [
        f"**Own test images against those of another set**, {sum(not is_alike(pair) for pair in pairs[SHIPPED])} "
        "ordered pairs; beside them cifar10 and cifar100, which show the same kind of picture. What memoro ships is "
        f"*{SHIPPED}*: the distance grows where the answer has less energy than those to held-out images. The full "
        f"covariance does not fit into a task file, and gains {reference - token_only:.4f} where answers do not count.",
        "",
        *table(["score", "mean AUROC", "worst pair", "mean FPR at 95 % recall", "cifar10 and cifar100"], rows),
    ]


def _tasks(tasks: Mapping[str, Any]) -> list[str]:
    keys = ("accuracy", "ece before", "ece after", "not told", "found", "false alarms", "bytes")

    def line(name: str, images: Any, found: Mapping[str, Any]) -> list[Any]:
        shown = (("" if key not in found else f"{found[key]:.3f}" if key != "bytes" else found[key]) for key in keys)
        return [name, images, *shown]

    routed = [found for found in tasks.values() if "found" in found]
    middle = {key: mean(found[key] for found in tasks.values() if key in found) for key in keys[:-1]}
    told, untold = (mean(found[key] for found in routed) for key in ("accuracy", "not told"))
    same = "are" if all(found["same answers"] for found in tasks.values()) else "are not"
    return [
        "**Tasks**, one of regime `side` for each set. Expected calibration error (ece) over 15 bins, before and after "
        f"calibration; the answers {same} the same. `not told`: the image goes to the task with the highest score of "
        f"{len(routed)} (without cifar10), and its answer is right; `found`: the task is right. `false alarms`: own "
        f"images with a familiarity below {FALSE_ALARMS}. `bytes`: what familiarity adds to the file. Mean accuracy of "
        f"the {len(routed)}: {told:.3f} told, {untold:.3f} not told.",
        "",
        *table(
            ["task", "test images", *keys],
            [*(line(name, found["images"], found) for name, found in tasks.items()), line("mean", "", middle)],
        ),
    ]


def _held_out(sets: Mapping[str, Any]) -> list[str]:
    held = {name: found for name, found in sets.items() if found}
    methods = list(next(iter(held.values()), {}))
    return [
        "**A class that was left out** of the description and of a head's training: AUROC between its test images and "
        f"those of the other classes, mean over at most {HELD_OUT} classes; descriptions of the token entering the "
        "last layer.",
        "",
        *table(["set", *methods], [[name, *(f"{found[how]:.3f}" for how in methods)] for name, found in held.items()]),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--most", type=int, default=2000, help="training images of a set, at most")
    parser.add_argument("--most-test", type=int, default=600, help="test images of a set, at most")
    parser.add_argument("--work", type=Path, default=Path("trust-work"), help="folder for task files and features")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbone = memoro.load_backbone(options.backbone)
    options.work.mkdir(parents=True, exist_ok=True)
    sets: dict[str, Splits] = {}
    tasks: dict[str, Task] = {}
    for source in options.data:
        name, splits = Path(source).stem, memoro.load_data(source, val_fraction=0, quiet=True, screen=False)
        sets[name] = replace(splits, train=cap(splits.train, options.most), test=cap(splits.test, options.most_test))
        tasks[name] = train_task(name, sets[name], backbone, options)
        print(name, tasks[name].spec.metrics.get("accuracy"), flush=True)
    train = {name: read_set(cap(splits.train, options.most), tasks, backbone, options) for name, splits in sets.items()}
    test = {
        name: read_set(cap(splits.test, options.most_test), tasks, backbone, options) for name, splits in sets.items()
    }
    background = read_background(backbone, options)
    results = load_results(options.out)
    setting = {"image_size": options.image_size, "train": options.most, "test": options.most_test}
    own = {"backbone": Path(options.backbone).name, **setting}
    results[own["backbone"]] = own
    parts: dict[str, Callable[[], Any]] = {
        "pairs": lambda: compare_scores(tasks, train, test, background),
        "tasks": lambda: measure_tasks(tasks, test),
        "held_out": lambda: {name: hold_out(train[name], test[name], background["entering"]) for name in sets},
        "cost": lambda: measure_cost(backbone, next(iter(tasks.values())), options),
    }
    for part, run in parts.items():
        own[part] = run()
        lines = [line for found in results.values() for line in describe(found)]
        text = "Made by `scripts/measure_trust.py`; the JSON beside this file has every pair."
        write_report(options.out, results, ["# Familiarity, calibration, routing", "", text, "", *lines])
        print(part, flush=True)


if __name__ == "__main__":
    main()
