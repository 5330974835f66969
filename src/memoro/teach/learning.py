"""What the labels so far teach: a read-out, its guesses for all images, and how far they can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memoro.data.columns import encode
from memoro.data.dataset import ImageSet
from memoro.data.screening import near_groups
from memoro.errors import DataError
from memoro.heads import HEADS, HeadKind
from memoro.tasks.readout import SolvedReadOut, solve_readout
from memoro.tasks.ridge import RidgeSystem
from memoro.tasks.spec import ReadOut
from memoro.teach.labels import Decision, as_annotation

Read = Callable[[Tensor], Tensor]
"""The statistics (b, features) of images by their numbers (b)."""
LEAST = 2
"""Classes, and images, that a read-out needs."""
BLOCK = 1024
SURE = 1.96
"""Standard errors on both sides of a mean, for an interval of 95 %."""
FEW = 5
"""Images of a class that are too few to judge it by."""
HELPFUL = 12
"""Further labels that are advised at a time, at most."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """The labelled images that a read-out learns from."""

    index: Tensor
    """(l) their numbers."""
    labels: tuple[str, ...]
    """Classes with images, in the order of the session; for numbers, what they are called."""
    targets: Tensor
    kind: HeadKind
    judged: Tensor
    """(l) those that a person labelled. Accepted guesses say nothing about how good guesses are."""

    @classmethod
    def of(cls, decisions: Mapping[int, Decision], kind: HeadKind, classes: Sequence[str]) -> Lesson | None:
        """The lesson of these decisions; None where there are too few."""
        learned = {at: one for at, one in decisions.items() if one.learned and one.label is not None}
        annotations = [as_annotation(one.label) for one in learned.values() if one.label is not None]
        used = {name for one in annotations for name in ([one] if isinstance(one, str) else one)}
        labels = tuple(classes) if kind == "regression" else tuple(name for name in classes if name in used)
        if len(learned) < LEAST or len(labels) < (LEAST if kind == "softmax" else 1):
            return None
        judged = torch.tensor([one.state != "accept" for one in learned.values()], device="cpu")
        index = torch.tensor(list(learned), device="cpu")
        return cls(index, labels, encode(annotations, labels, kind), kind, judged)

    def first(self, count: int) -> Lesson | None:
        """The lesson of the images that were labelled first."""
        targets, labels = self.targets[:count], self.labels
        if self.kind == "softmax":
            labels, targets = used_labels(labels, targets)
            if len(labels) < LEAST:
                return None
        return Lesson(self.index[:count], labels, targets, self.kind, self.judged[:count])

    def same(self, other: Lesson) -> bool:
        """Whether both have the same images and labels."""
        sizes = (self.labels, len(self.index)) == (other.labels, len(other.index))
        return sizes and self.continues(other) and torch.equal(self.judged, other.judged)

    def continues(self, other: Lesson) -> bool:
        """Whether it has the images of the other one with the same labels, and perhaps more after them."""
        count = len(other.index)
        if len(self.index) < count or not torch.equal(self.index[:count], other.index):
            return False
        if self.kind != "softmax":
            return torch.equal(self.targets[:count], other.targets)
        mine, others = self.targets[:count].tolist(), other.targets.tolist()
        return [self.labels[at] for at in mine] == [other.labels[at] for at in others]


@dataclass(frozen=True, eq=False)
class Learned:
    """A solved lesson."""

    lesson: Lesson
    readout: SolvedReadOut
    groups: Tensor
    """(l) near-duplicates have the same number; they are left out together."""

    @property
    def left_out(self) -> Tensor:
        """(l, labels) probabilities, or numbers, by solutions without the image and its near-duplicates."""
        return HEADS[self.lesson.kind].probabilities(self.readout.held_out)

    @property
    def possible(self) -> Tensor:
        """(l) whether the left-out answer can be right: not for the only image of a class."""
        targets = self.lesson.targets
        return targets.bincount()[targets] > 1 if self.lesson.kind == "softmax" else torch.ones(len(targets)) > 0

    def answer(self, read: Read, index: Tensor) -> Tensor:
        """(b, labels) probabilities, or numbers, for any images; for those of the lesson, they are not left out."""
        weight, bias = self.readout.weight, self.readout.bias
        parts = [read(block).float() @ weight.T + bias for block in torch.split(index, BLOCK)]
        return HEADS[self.lesson.kind].probabilities(torch.cat(parts) if parts else bias.new_zeros(0, len(bias)))

    def scores(self) -> Tensor:
        """(l) how right each left-out answer is: 1 or 0 for a class, the share of labels that are right, or the error
        of a number, without its sign."""
        answers, targets = self.left_out, self.lesson.targets
        if self.lesson.kind == "softmax":
            return (answers.argmax(dim=1) == targets).float()
        if self.lesson.kind == "multilabel":
            return ((answers > 0.5) == (targets > 0.5)).float().mean(dim=1)
        return (answers - targets).abs().mean(dim=1)

    def figure(self) -> dict[str, float] | None:
        """The mean score with an interval of 95 %, of the images that a person labelled and that can be judged."""
        scores = self.scores()[self.lesson.judged & self.possible].double()
        if len(scores) < LEAST:
            return None
        mean = float(scores.mean())
        if self.lesson.kind == "softmax":
            low, high = _wilson(mean, len(scores))
        else:
            half = SURE * float(scores.std()) / math.sqrt(len(scores))
            low, high = max(0.0, mean - half), mean + half
        return {"images": len(scores), "value": mean, "low": low, "high": high}

    def by_class(self) -> list[dict[str, Any]]:
        """For each class its images, how many of them are answered rightly, and what others are taken for."""
        if self.lesson.kind == "regression":
            return []
        answers, targets, labels = self.left_out, self.lesson.targets, self.lesson.labels
        rows: list[dict[str, Any]] = []
        for at, label in enumerate(labels):
            mine = self.possible & (targets == at if self.lesson.kind == "softmax" else targets[:, at] > 0.5)
            guesses = answers[mine]
            row: dict[str, Any] = {"label": label, "judged": int(mine.sum()), "confused": None}
            if self.lesson.kind == "softmax":
                chosen = guesses.argmax(dim=1)
                row["right"] = int((chosen == at).sum())
                if len(wrong := chosen[chosen != at]):
                    row["confused"] = labels[int(wrong.mode().values)]
            else:
                row["right"] = int((guesses[:, at] > 0.5).sum())
            rows.append(row)
        return rows


def used_labels(labels: Sequence[str], targets: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """The labels that class numbers (n) occur of, and the numbers among these."""
    used, numbers = torch.unique(targets, return_inverse=True)
    return tuple(labels[at] for at in used.tolist()), numbers


def solve(
    lesson: Lesson,
    read: Read,
    reads: ReadOut,
    groups: Tensor | None = None,
) -> Learned:
    """The read-out of a lesson. Images of one group (l) are left out together."""

    def factorise(weights: Tensor | None) -> RidgeSystem:
        return RidgeSystem(len(lesson.index), lambda rows: read(lesson.index[rows]), weights)

    solved = solve_readout(
        lesson.kind,
        reads,
        factorise,
        lesson.targets,
        len(lesson.labels),
        groups=groups,
    )
    return Learned(lesson, solved, torch.arange(len(lesson.index)) if groups is None else groups)


def find_groups(images: ImageSet) -> Tensor:
    """(n) the groups of near-duplicates, whatever the labels."""
    try:
        return torch.from_numpy(near_groups(images).numbers)
    except (DataError, OSError):
        return torch.arange(len(images), device="cpu")


def advise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The class of which further labels would help most, how many, and why; None where it makes no difference. A row
    of a class has its label, its labelled `images`, and how many of those that are `judged` are answered rightly."""
    if not rows:
        return None
    few = min(rows, key=lambda row: (row["images"], row["label"]))
    if few["images"] < FEW:
        return {"label": few["label"], "more": FEW - few["images"], "why": f"it has {few['images']} so far"}
    wrong, judged, name = max(
        ((row["judged"] - row["right"], row["judged"], row["label"]) for row in rows),
        key=lambda one: (one[0] ** 1.5 / max(1, one[1]), one[2]),
    )
    more = min(HELPFUL, max(FEW, math.ceil(float(np.median([row["images"] for row in rows])) / 2)))
    return {"label": name, "more": more, "why": f"{wrong} of its {judged} are answered wrongly"} if wrong else None


def _wilson(share: float, count: int) -> tuple[float, float]:
    """The interval of 95 % of a share; unlike the usual one it is right for few images, and near 0 and 1."""
    scale = 1 + SURE**2 / count
    middle = (share + SURE**2 / (2 * count)) / scale
    half = SURE / scale * math.sqrt(share * (1 - share) / count + SURE**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)
