"""Measures what `memoro teach` saves: the labels needed by choice of images, and label errors that are noticed.

    python scripts/measure_teach.py a.zip b.zip --what labels --backbone FOLDER --image-size 112 --keep kept/ \\
        --out results/teach.md
    python scripts/measure_teach.py a.zip b.zip --what errors --keep kept/ --out results/teach.md --cleanlab bin/python
    python scripts/measure_teach.py a.zip --what minutes --keep kept/ --out results/teach.md

A simulated labeller knows all labels, and gives those of the images that are suggested. Statistics are kept as .npz
files in the folder `--keep`, with the answers of `errors`, which `--cleanlab` judges too: a Python with cleanlab.
`--choosing` marks sets that the default was chosen on. `minutes` labels 300 images of five classes over the routes of a
running `memoro teach`, a decision a second, trains, and asks the served task about the test images. Results of other
sets, backbones and ways stay in the report.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
from torch import Tensor

import memoro
from memoro.backbones import Backbone
from memoro.data import ImageSet, Loader
from memoro.engine.streams import pool_pass
from memoro.tasks.spec import ReadOut
from memoro.teach.labels import Decision
from memoro.teach.learning import LabelledImages, find_groups, solve
from memoro.teach.suggestions import Scene, suggest
from memoro.teach.suspects import rank
from reports import load_results, load_splits, make_parser, table, write_report

GRID = (10, 20, 30, 40, 50, 60, 70, 80, 100, 120, 140, 170, 200, 240, 280, 330, 390, 460, 540, 640, 750)
"""Numbers of labels; the last one is that of all training images."""
MOST_TRAIN, MOST_TEST = 1000, 500
MOST_CLASSES = {"cifar100": 20, "tinyimagenet200": 12}
SEEDS = 5
ENOUGH = 0.95
"""Of the accuracy of all labels."""
WRONG = 0.05
"""Of labels that are replaced by another class."""
CLASSES, PHOTOS = 5, 300
"""Of `minutes`."""
METHODS = "self_confidence", "normalized_margin"
CLEANLAB = """
import json, sys
import numpy as np
from cleanlab.rank import get_label_quality_scores
found = np.load(sys.argv[1])
scores = [[get_label_quality_scores(labels, answers, method=method) for method in sys.argv[2:]]
          for labels, answers in zip(found["labels"], found["answers"])]
print(json.dumps(np.argsort(scores, axis=2, kind="stable")[:, :, : int(found["count"])].tolist()))
"""


def cut(images: ImageSet, labels: Tensor, most: int) -> ImageSet:
    """The images of these classes, at most so many, the same ones at every call."""
    rows = np.flatnonzero(torch.isin(images.targets, labels).numpy())
    return images.subset(np.sort(np.random.default_rng(0).permutation(rows)[:most]))


def read_set(source: str, name: str, backbone: Backbone, size: int | None, keep: Path) -> dict[str, Tensor]:
    """Statistics, classes and groups of near-duplicates of a set's images; computed once."""
    file = keep / f"{Path(source).stem}-{name}.npz"
    if not file.is_file():
        keep.mkdir(parents=True, exist_ok=True)
        splits = load_splits(source)
        steps = backbone.preprocessing if size is None else backbone.preprocessing.at(size)
        classes = torch.from_numpy(np.random.default_rng(1).permutation(len(splits.labels)))
        chosen, found = classes[: MOST_CLASSES.get(Path(source).stem)], {}
        for part, images, most in (("train", splits.train, MOST_TRAIN), ("test", splits.test, MOST_TEST)):
            assert images is not None
            images = cut(images, chosen, most)
            first = ReadOut.of(backbone.anatomy).from_layer
            rows, order = [], []
            with torch.no_grad():
                for batch in Loader(images, steps, batch_size=32, workers=0).epoch(0):
                    rows.append(pool_pass(backbone.anatomy, batch.pixels, first).flatten(1).half())
                    order.append(batch.index)
            found[part] = torch.cat(rows)[torch.cat(order).argsort()].numpy()
            found[f"{part}_y"] = images.targets.numpy()
            found[f"{part}_g"] = find_groups(images).numpy()
        np.savez(file, **found)  # type: ignore[arg-type]
    kept = {name: torch.from_numpy(value) for name, value in np.load(file).items()}
    layers = backbone.depth - ReadOut.of(backbone.anatomy).from_layer
    return kept | {part: kept[part].reshape(len(kept[part]), layers, -1) for part in ("train", "test")}


def labelled(index: Tensor, targets: Tensor) -> LabelledImages | None:
    """The images of these numbers with their classes; None if there is one class only."""
    classes = [str(at) for at in range(int(targets.max()) + 1)]
    decisions = [Decision("label", str(target)) for target in targets.tolist()]
    return LabelledImages.of(zip(index.tolist(), decisions, strict=True), "softmax", classes)


class Labeller:
    """Labels images of a set as they are suggested, and measures what was learned on its test images."""

    def __init__(self, found: dict[str, Tensor], reads: ReadOut, dim: int) -> None:
        self.rows, self.test = found["train"].float(), found["test"].float()
        self.targets, self.truth = found["train_y"].long(), found["test_y"].long()
        self.reads, self.groups = reads, found["train_g"]
        self.tokens = torch.nn.functional.normalize(self.rows[:, -1, :dim], dim=1)

    def accuracy(self, index: Tensor) -> tuple[float, Tensor | None, tuple[str, ...]]:
        """The accuracy with these labels, and what is answered to all training images."""
        images = labelled(index, self.targets[index])
        if images is None:
            only = self.targets[index[0]]
            return float((self.truth == only).float().mean()), None, (str(int(only)),)
        learned = solve(images, lambda at: self.rows[at], self.reads, self.groups[index])
        names = torch.tensor([int(label) for label in images.labels])
        answers = learned.answer(lambda at: self.test[at], torch.arange(len(self.test)))
        right = float((names[answers.argmax(dim=1)] == self.truth).float().mean())
        return right, learned.answer(lambda at: self.rows[at], torch.arange(len(self.rows))), images.labels

    def run(self, by: str, grid: Sequence[int], seed: int) -> list[float]:
        """The accuracy at each number of labels."""
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed))
        index, labels, curve = torch.zeros(0).long(), tuple[str, ...](), list[float]()
        answers: Tensor | None = None
        for count in grid:
            rest = order[~torch.isin(order, index)]
            if by == "random" or (answers is None and by in {"uncertainty", "border"}):
                new = rest[: count - len(index)]
            else:
                known = None if answers is None else answers[rest]
                scene = Scene("softmax", labels, self.tokens, index, rest, known)
                new = torch.tensor([one.image for one in suggest(scene, count - len(index), by, seed)])
            index = torch.cat([index, new])
            right, answers, labels = self.accuracy(index)
            curve.append(right)
        return curve


def needed(grid: Sequence[int], curves: Sequence[Sequence[float]], full: float) -> int:
    """The first number of labels from which on the mean accuracy stays above 95 % of that of all labels."""
    last = len(grid)
    for at in reversed(range(len(grid))):
        if mean(curve[at] for curve in curves) < ENOUGH * full:
            break
        last = at
    return grid[last]


def measure_labels(found: dict[str, Tensor], reads: ReadOut, dim: int, ways: Sequence[str], known: Any) -> Any:
    """The curves of all seeds by way, and the accuracy of all labels."""
    labeller = Labeller(found, reads, dim)
    everything = len(labeller.rows)
    grid = [count for count in GRID if count < everything]
    full = known["full"] if "full" in known else labeller.accuracy(torch.arange(everything))[0]
    curves = known.get("curves", {})
    for way in ways:
        if way not in curves:
            curves[way] = [labeller.run(way, grid, seed) for seed in range(SEEDS)]
    reached = [*grid, everything]
    need = {way: needed(reached, [[*curve, full] for curve in some], full) for way, some in curves.items()}
    return {"images": everything, "grid": grid, "full": full, "curves": curves, "needed": need}


def measure_errors(found: dict[str, Tensor], reads: ReadOut, file: Path, python: str | None) -> Any:
    """The precision at as many suspects as there are wrong labels, of memoro and of cleanlab on the same answers."""
    rows, truth, groups = found["train"].float(), found["train_y"].long(), found["train_g"]
    classes, count = int(truth.max()) + 1, round(WRONG * len(truth))
    precision: dict[str, list[float]] = {}
    wrongs, labels, answers = [], [], []
    for seed in range(SEEDS):
        generator = np.random.default_rng(seed)
        wrong = generator.permutation(len(truth))[:count]
        targets = truth.clone()
        targets[wrong] = (truth[wrong] + torch.from_numpy(generator.integers(1, classes, count))) % classes
        images = labelled(torch.arange(len(rows)), targets)
        assert images is not None
        learned = solve(images, lambda at: rows[at], reads, groups)
        precision.setdefault("memoro", []).append(float(np.isin(rank(learned)[:count].numpy(), wrong).mean()))
        wrongs.append(wrong)
        labels.append(learned.images.targets.numpy())
        answers.append(learned.left_out.double().numpy())
    if python is not None:
        np.savez(file, labels=labels, answers=answers, count=count)
        said = subprocess.run([python, "-c", CLEANLAB, f"{file}.npz", *METHODS], capture_output=True, check=True)
        for wrong, chosen in zip(wrongs, json.loads(said.stdout), strict=True):
            for method, some in zip(METHODS, chosen, strict=True):
                name = f"cleanlab, {method.replace('_', ' ')}"
                precision.setdefault(name, []).append(float(np.isin(some, wrong).mean()))
    return {"images": len(rows), "wrong": count, "precision": precision}


def measure_minutes(source: str, backbone: str, size: int | None, folder: Path, decisions: int, pace: float) -> Any:
    """Seconds from the start of `memoro teach` to a served task, and its accuracy beside that of all labels."""
    splits = load_splits(source)
    assert splits.train is not None
    assert splits.test is not None
    names = sorted(splits.labels, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:CLASSES]
    classes = torch.tensor([splits.labels.index(name) for name in names])
    train, test = cut(splits.train, classes, PHOTOS), cut(splits.test, classes, MOST_TEST)
    truth, label = {}, splits.labels
    for at in range(len(train)):  # names and order say nothing
        data = train.read(at)
        name = f"{hashlib.sha256(data).hexdigest()[:12]}.jpg"
        truth[name] = label[int(train.targets[at])]
        for place in (folder / "photos", folder / "all" / truth[name]):
            place.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
    options = ["--backbone", backbone, *(["--image-size", str(size)] if size else [])]
    command = [sys.executable, "-m", "memoro", "teach", str(folder / "photos"), "--tasks", str(folder / "tasks")]
    start = time.monotonic()
    with subprocess.Popen([*command, *options, "--port", "0"], stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        url = next(found[1] for line in running.stderr if (found := re.search(r"on (http://[^ ]+)", line)))

        def ask(path: str, body: bytes | None = None, method: str | None = None) -> Any:
            kind = {"content-type": "application/json"} if path.endswith("labels") else {}
            with urlopen(Request(url + path, body, kind, method=method)) as answer:
                return json.load(answer)

        try:
            made = 0
            while made < min(decisions, len(truth)):
                for image in ask("/v1/teach/images?view=next&limit=12")["images"][: decisions - made]:
                    began = time.monotonic()
                    entry = {"key": image["key"], "state": "label", "label": truth[image["path"]]}
                    ask("/v1/teach/labels", json.dumps({"entries": [entry]}).encode())
                    made += 1
                    time.sleep(max(0.0, pace - (time.monotonic() - began)))
            labelled = time.monotonic() - start
            ask("/v1/teach/train", b"", "POST")
            while (training := ask("/v1/teach")["training"])["state"] == "training":
                time.sleep(0.5)
            assert training["state"] == "done", training
            seconds = time.monotonic() - start
            with ThreadPoolExecutor(8) as pool:  # the server answers those that wait together
                found = list(pool.map(lambda at: ask("/v1/predict", test.read(at))["images"][0], range(len(test))))
            served = [one["answers"]["photos"]["label"] for one in found]
        finally:
            running.terminate()
    everything = memoro.train(folder / "all", backbone=backbone, image_size=size, quiet=True)
    model = memoro.compose(memoro.load_backbone(backbone), [everything.task])
    answers = model.predict([test.read(at) for at in range(len(test))])
    full = [one[everything.task.name]["label"] for one in answers]

    def right(some: Sequence[str]) -> float:
        return mean(label[at] == one for at, one in zip(test.targets.tolist(), some, strict=True))

    counts = {"classes": names, "images": len(train), "decisions": made, "tested": len(test)}
    return counts | {"labelled": labelled, "seconds": seconds, "accuracy": right(served), "full": right(full)}


def report(results: dict[str, Any]) -> list[str]:
    lines = ["# memoro teach", "", "Made by `scripts/measure_teach.py`; the JSON beside this file has every curve.", ""]
    labels, errors = results.get("labels", {}), results.get("errors", {})
    if labels:
        lines += [f"![accuracy by number of labels; dotted: {ENOUGH:.0%} of that of all labels](teach.png)", ""]
    for choosing in (False, True):
        for name, sets in labels.items():
            chosen = {key: one for key, one in sets.items() if one.get("choosing", False) == choosing}
            if chosen:
                lines += report_labels(name, chosen, choosing)
    if errors:
        lines += [
            "## Label errors",
            "",
            f"{WRONG:.0%} of the training labels replaced by another class, drawn uniformly.",
        ]
        lines += [f"Precision at that many suspects, mean of {SEEDS} seeds.", ""]
    for name, sets in errors.items():
        ways = list(dict.fromkeys(way for one in sets.values() for way in one["precision"]))
        rows: list[list[Any]] = []
        for key, one in sets.items():
            shares = [f"{mean(one['precision'][way]):.3f}" if way in one["precision"] else "" for way in ways]
            rows.append([key, one["images"], one["wrong"], *shares])
        means = [mean(mean(one["precision"][way]) for one in sets.values() if way in one["precision"]) for way in ways]
        rows.append(["mean", "", "", *(f"{value:.3f}" for value in means)])
        lines += [f"### {name}", "", *table(["set", "images", "wrong", *ways], rows), ""]
    if results.get("minutes"):
        lines += ["## Minutes", "", "From the start of `memoro teach` on unlabelled images to a served task."]
        lines += ["Accuracy is of test images, beside that of a training on the labels of all images.", ""]
    for name, sets in results.get("minutes", {}).items():
        lines_of = []
        for key, one in sets.items():
            seconds = [f"{one[part]:.0f}" for part in ("labelled", "seconds")]
            shares = [f"{one[part]:.3f}" for part in ("accuracy", "full")]
            lines_of.append([key, ", ".join(one["classes"]), one["images"], one["decisions"], *seconds, *shares])
        columns = ["set", "classes", "images", "decisions", "s labelling", "s in all", "accuracy", "of all labels"]
        lines += [f"### {name}", "", *table(columns, lines_of), ""]
    return lines


def report_labels(name: str, sets: dict[str, Any], choosing: bool) -> list[str]:
    ways = list(dict.fromkeys(way for one in sets.values() for way in one["needed"]))
    title = "sets that the default was chosen on" if choosing else "labels needed"
    text = (
        f"The first number of labels after which the mean of {SEEDS} seeds stays above {ENOUGH:.0%} of the accuracy of "
        "all labels, and its ratio to random order."
    )
    rows: list[list[Any]] = []
    for key, one in sets.items():
        need = one["needed"]
        cells = [f"{need[way]} ({need[way] / need['random']:.2f})" if way in need else "" for way in ways]
        rows.append([key, one["images"], f"{one['full']:.3f}", *cells])
    ratios = [
        mean(o["needed"][way] / o["needed"]["random"] for o in sets.values() if way in o["needed"]) for way in ways
    ]
    rows.append(["mean ratio", "", "", *(f"{ratio:.2f}" for ratio in ratios)])
    lines = [f"## {name}: {title}", "", text, "", *table(["set", "images", "accuracy of all", *ways], rows), ""]
    for key, one in sets.items():
        shown = [
            at for at, count in enumerate(one["grid"]) if count in {10, 20, 40, 60, 80, 120, 170, 240, 330, 460, 640}
        ]
        means = [
            [way, *(f"{mean(curve[at] for curve in curves):.3f}" for at in shown)]
            for way, curves in one["curves"].items()
        ]
        lines += [f"Accuracy on {key} by number of labels:", ""]
        lines += [*table(["", *(one["grid"][at] for at in shown)], means), ""]
    return lines


def plot(results: dict[str, Any], file: Path) -> None:
    """Accuracy by number of labels: a row for each backbone, a column for each set."""
    from matplotlib.figure import Figure

    rows = {
        name: {key: one for key, one in sets.items() if not one.get("choosing", False)}
        for name, sets in results.get("labels", {}).items()
    }
    wide = max((len(sets) for sets in rows.values()), default=0)
    if not wide:
        return
    figure = Figure(figsize=(2.6 * wide, 2.5 * len(rows)), layout="constrained")
    places = figure.subplots(len(rows), wide, squeeze=False)
    for row, (name, sets) in zip(places, rows.items(), strict=True):
        for place, (key, one) in zip(row, sets.items(), strict=False):
            for way, curves in one["curves"].items():
                means = [mean(curve[at] for curve in curves) for at in range(len(one["grid"]))]
                place.plot(one["grid"], means, label=f"{way} ({one['needed'][way]})")
            place.axhline(ENOUGH * one["full"], color="grey", linestyle=":")
            place.set_title(f"{key}\n{name}", fontsize=7)
            place.set_xscale("log")
            place.tick_params(labelsize=6)
            place.legend(fontsize=6, loc="lower right")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--what", choices=["labels", "errors", "minutes"], required=True)
    parser.add_argument("--backbone", default="memoro-tiny")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--ways", default="random,auto,uncertainty")
    parser.add_argument("--choosing", action="store_true")
    parser.add_argument("--cleanlab", metavar="PYTHON")
    parser.add_argument("--decisions", type=int, default=150)
    parser.add_argument("--pace", type=float, default=1.0, help="seconds of a decision")
    given: argparse.Namespace = parser.parse_args()
    results = load_results(given.out)
    backbone = memoro.load_backbone(given.backbone)
    reads, name = ReadOut.of(backbone.anatomy), backbone.name
    title = name if given.image_size is None else f"{name} at {given.image_size} px"
    for source in given.data:
        stem = Path(source).stem
        if given.what == "minutes":
            with tempfile.TemporaryDirectory() as place:
                found = measure_minutes(
                    source, given.backbone, given.image_size, Path(place), given.decisions, given.pace
                )
            results.setdefault("minutes", {}).setdefault(title, {})[stem] = found
            print(title, stem, found, flush=True)
            write_report(given.out, results, report(results))
            continue
        found = read_set(source, name, backbone, given.image_size, given.keep)
        sets = results.setdefault(given.what, {}).setdefault(title, {})
        if given.what == "labels":
            sets[stem] = measure_labels(found, reads, backbone.dim, given.ways.split(","), sets.get(stem, {}))
            sets[stem]["choosing"] = given.choosing
        else:
            sets[stem] = measure_errors(found, reads, given.keep / f"{stem}-{name}-errors", given.cleanlab)
        print(
            title,
            stem,
            sets[stem].get("needed") or {k: mean(v) for k, v in sets[stem]["precision"].items()},
            flush=True,
        )
        write_report(given.out, results, report(results))
    plot(results, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
