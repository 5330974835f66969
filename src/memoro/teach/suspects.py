"""Labels that are likely to be wrong: the answers without them say something else."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memoro.backbones import Backbone, load_backbone
from memoro.backbones.precision import Precision
from memoro.data import load_data
from memoro.data.dataset import Splits
from memoro.errors import TeachError
from memoro.evaluation.predictions import no_formula
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import Task
from memoro.tasks.taskfile import load_task
from memoro.teach.labels import Decision, label_text
from memoro.teach.learning import Learned, Lesson, find_groups, solve
from memoro.teach.photos import label_of
from memoro.training.recipe import TrainOptions
from memoro.training.statistics import StatisticsReader

LIKELY = 0.5
"""One of several labels is suspected where the answer without it gives it a smaller probability."""
OVERLAP = 0.15
"""Of the images of the smaller of two classes: from this share of confused ones on, the classes overlap."""
LEAST_CONFUSED = 3
CONTRADICTED = "contradicted by the answer without it"
FAR = 3.0
"""Standard deviations of the errors of numbers from which one is suspected."""


class Suspect(NamedTuple):
    """An image whose label should be looked at again."""

    path: str
    label: str
    answer: str
    """What is answered without this label."""
    probability: float | None
    """Of the label, by that answer; None for a number."""
    reason: str


class Doubt(NamedTuple):
    """The same by the position of its image in a lesson."""

    at: int
    answer: str
    probability: float | None
    reason: str = CONTRADICTED


def doubts(learned: Learned) -> list[Doubt]:
    """The suspected labels of a lesson, the least probable ones first, then near-duplicates with different labels."""
    lesson, answers, targets = learned.lesson, learned.left_out, learned.lesson.targets
    found: list[Doubt] = []
    if lesson.kind == "regression":
        errors = (answers - targets)[:, 0]
        spread = 1.4826 * float(errors.abs().median())
        far = (errors.abs() > FAR * max(spread, 1e-12)).nonzero().flatten()
        for at in far[errors[far].abs().argsort(descending=True)].tolist():
            found.append(Doubt(at, f"{float(answers[at, 0]):.4g}", None, "far from what is answered without it"))
    elif lesson.kind == "multilabel":
        given = torch.where(targets > 0.5, answers, 1 - answers)
        worst, label = given.min(dim=1)
        for at in worst.argsort(stable=True).tolist():
            if worst[at] < LIKELY:
                name = lesson.labels[int(label[at])]
                answer = f"not {name}" if targets[at, label[at]] > 0.5 else name
                found.append(Doubt(at, answer, float(worst[at])))
    else:
        for at in rank(learned).tolist():
            best = int(answers[at].argmax())
            if best != targets[at] and learned.possible[at]:
                share = float(answers[at, targets[at]])
                found.append(Doubt(at, lesson.labels[best], share))
        known = {doubt.at for doubt in found}
        found += [doubt for doubt in _copies(learned) if doubt.at not in known]
    return found


def rank(learned: Learned) -> Tensor:
    """The images of a lesson of classes, the one whose label is least likely first."""
    answers, targets = learned.left_out, learned.lesson.targets
    return answers.gather(1, targets[:, None])[:, 0].argsort(stable=True)


def overlaps(learned: Learned) -> list[tuple[str, str, int]]:
    """Pairs of classes that are often confused, and how many of their images are."""
    lesson = learned.lesson
    if lesson.kind != "softmax":
        return []
    chosen = learned.left_out.argmax(dim=1)
    counts = lesson.targets.bincount(minlength=len(lesson.labels)).tolist()
    pairs: Counter[tuple[int, int]] = Counter()
    for given, answered in zip(lesson.targets.tolist(), chosen.tolist(), strict=True):
        if given != answered:
            pairs[min(given, answered), max(given, answered)] += 1
    return [
        (lesson.labels[one], lesson.labels[other], count)
        for (one, other), count in pairs.most_common()
        if count >= max(LEAST_CONFUSED, OVERLAP * min(counts[one], counts[other]))
    ]


def suspects(
    data: Any,
    *,
    task: Task | str | Path | None = None,
    backbone: Any = None,
    device: str | None = None,
    precision: Precision = "auto",
    **reading: Any,
) -> list[Suspect]:
    """The labels of a data set that are likely to be wrong, most likely first: answers without an image and its
    near-duplicates say something else.

    `data` is anything that `load_data` takes, `reading` its options. A `task` names the backbone, the image size and
    the labels; without one, `backbone` is anything that `load_backbone` takes, and `precision` as there.
    """
    known = load_task(task) if isinstance(task, (str, Path)) else task
    if known is not None:
        reading = {"task": known.name, "kind": known.kind, "labels": known.labels, **reading}
    splits = data if isinstance(data, Splits) else load_data(data, val_fraction=0, quiet=True, **reading)
    images = splits.train or splits.val or splits.test
    assert images is not None
    source = known.spec.backbone if backbone is None and known is not None else backbone
    chosen: Backbone = load_backbone(*([] if source is None else [source]), device=device, precision=precision)
    steps = chosen.preprocessing if known is None else known.spec.preprocessing
    options = TrainOptions(quiet=True)
    flat = StatisticsReader(chosen, options).read(images, steps or chosen.preprocessing)
    labels = [label_of(images, at) for at in range(len(images))]
    decisions = {at: Decision("label", label) for at, label in enumerate(labels)}
    lesson = Lesson.of(decisions, images.kind, images.labels)
    if lesson is None:
        raise TeachError(f"{images.name}: labels can only be doubted where there are two classes, and images of each.")
    groups = find_groups(replace(images, kind="regression"))  # whatever the labels
    learned = solve(lesson, lambda index: flat(index).flatten(1), ReadOut.of(chosen.anatomy), groups)
    return [Suspect(images.where(doubt.at), label_text(labels[doubt.at]), *doubt[1:]) for doubt in doubts(learned)]


def suspects_csv(found: Sequence[Suspect]) -> str:
    """A CSV table that is safe to open in a spreadsheet."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Suspect._fields, *(map(no_formula, suspect) for suspect in found)])
    return text.getvalue()


def _copies(learned: Learned) -> list[Doubt]:
    """Images with a near-duplicate of another class."""
    targets, labels, found = learned.lesson.targets, learned.lesson.labels, []
    for number in (learned.groups.bincount() > 1).nonzero().flatten():
        members = (learned.groups == number).nonzero().flatten()
        for at in members.tolist():
            others = targets[members][targets[members] != targets[at]]
            if len(others):
                reason = f"a near-duplicate has the label {labels[int(others.mode().values)]}"
                share = float(learned.left_out[at, targets[at]])
                found.append(Doubt(at, labels[int(learned.left_out[at].argmax())], share, reason))
    return found
