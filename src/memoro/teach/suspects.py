"""Labels that are likely to be wrong: the answers without them say something else."""

from __future__ import annotations

import csv
import io
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
from memoro.heads.softmax import confusion
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import Task
from memoro.tasks.taskfile import load_task
from memoro.teach.labels import Decision, label_text
from memoro.teach.learning import LabelledImages, Learned, find_groups, solve
from memoro.teach.photos import label_of
from memoro.training.cached import find_cache, read_statistics

LIKELY = 0.5
"""One of several labels is suspected if the answer without it gives it a smaller probability."""
OVERLAP = 0.15
"""Two classes overlap if at least this share of the images of the smaller one is confused."""
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
    """How probable the label is by that answer; None for a number."""
    reason: str = CONTRADICTED


def find_suspects(learned: Learned, paths: Sequence[str], given: Sequence[str]) -> list[Suspect]:
    """The suspected labels, the least probable ones first, then near-duplicates with different labels. `paths` and
    `given` labels are of the labelled images."""
    images, answers, targets = learned.images, learned.left_out, learned.images.targets
    if images.kind == "regression":
        errors = (answers - targets)[:, 0].abs()
        far = (errors > FAR * max(1.4826 * float(errors.median()), 1e-12)).nonzero().flatten()
        order = far[errors[far].argsort(descending=True)].tolist()
        reason = "far from what is answered without it"
        return [Suspect(paths[at], given[at], f"{float(answers[at, 0]):.4g}", None, reason) for at in order]
    if images.kind == "multilabel":
        worst, label = torch.where(targets > 0.5, answers, 1 - answers).min(dim=1)
        order = [at for at in worst.argsort(stable=True).tolist() if worst[at] < LIKELY]
        names = [("not " if targets[at, label[at]] > 0.5 else "") + images.labels[int(label[at])] for at in order]
        return [Suspect(paths[at], given[at], name, float(worst[at])) for at, name in zip(order, names, strict=True)]
    best = answers.argmax(dim=1)
    contradicted = (best != targets) & learned.possible
    ranked = rank(learned)
    order = ranked[contradicted[ranked]].tolist()
    reasons = dict.fromkeys(order, CONTRADICTED)
    for at, other in _other_copies(learned).items():
        reasons.setdefault(at, f"a near-duplicate has the label {images.labels[other]}")
    return [
        Suspect(paths[at], given[at], images.labels[int(best[at])], float(answers[at, targets[at]]), reason)
        for at, reason in reasons.items()
    ]


def rank(learned: Learned) -> Tensor:
    """(l) labelled images of classes, the one whose label is least likely first."""
    answers, targets = learned.left_out, learned.images.targets
    return answers.gather(1, targets[:, None])[:, 0].argsort(stable=True)


def overlaps(learned: Learned) -> list[tuple[str, str, int]]:
    """Pairs of classes that are often confused, and how many of their images are, most of them first."""
    labels = learned.images.labels
    if learned.images.kind != "softmax":
        return []
    matrix = confusion(learned.left_out, learned.images.targets)
    images, mixed = matrix.sum(dim=1), (matrix + matrix.T).triu(1)
    least = (OVERLAP * torch.minimum(images[:, None], images)).clamp(min=LEAST_CONFUSED)
    pairs = [(labels[one], labels[other], int(mixed[one, other])) for one, other in (mixed >= least).nonzero().tolist()]
    return sorted(pairs, key=lambda pair: -pair[2])


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
    read = read_statistics(chosen, images, steps or chosen.preprocessing, find_cache(None))
    labels = [label_of(images, at) for at in range(len(images))]
    decisions = [(at, Decision("label", label)) for at, label in enumerate(labels)]
    labelled = LabelledImages.of(decisions, images.kind, images.labels)
    if labelled is None:
        raise TeachError(f"{images.name}: suspects can only be found among two or more classes with images.")
    groups = find_groups(replace(images, kind="regression"))  # whatever the labels
    learned = solve(labelled, read, ReadOut.of(chosen.anatomy), groups)
    return find_suspects(learned, [images.where(at) for at in range(len(images))], list(map(label_text, labels)))


def suspects_csv(suspects: Sequence[Suspect]) -> str:
    """A CSV table that is safe to open in a spreadsheet."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Suspect._fields, *(map(no_formula, suspect) for suspect in suspects)])
    return text.getvalue()


def _other_copies(learned: Learned) -> dict[int, int]:
    """The images that have near-duplicates of other classes, and the most frequent of these classes."""
    targets, classes = learned.images.targets, {}
    for number in (learned.groups.bincount() > 1).nonzero().flatten():
        members = (learned.groups == number).nonzero().flatten()
        for at in members.tolist():
            others = targets[members][targets[members] != targets[at]]
            if len(others):
                classes[at] = int(others.mode().values)
    return classes
