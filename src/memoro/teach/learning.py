"""What the labels so far teach: a read-out, its answers, and how far they can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from memoro.data.columns import encode, labels_in
from memoro.data.dataset import ImageSet
from memoro.data.screening import near_groups
from memoro.errors import DataError
from memoro.heads import HEADS, HeadKind
from memoro.tasks.readout import SolvedReadOut, solve_readout
from memoro.tasks.ridge import Read, RidgeSystem
from memoro.tasks.spec import ReadOut
from memoro.teach.labels import Decision, as_annotation

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
class LabelledImages:
    """The images that a read-out learns from."""

    index: Tensor
    """(l) their numbers."""
    labels: tuple[str, ...]
    """Classes with images, in the order of the session; for numbers, what they are called."""
    targets: Tensor
    kind: HeadKind
    judged: Tensor
    """(l) those that a person labelled. Accepted guesses say nothing about how good guesses are."""

    @classmethod
    def of(
        cls, decisions: Iterable[tuple[int, Decision]], kind: HeadKind, classes: Sequence[str]
    ) -> LabelledImages | None:
        """The images that have labels by these decisions; None if there are too few."""
        learned = [(at, one) for at, one in decisions if one.learned]
        annotations = [as_annotation(one.label) for _, one in learned]
        used = labels_in(annotations)
        labels = tuple(name for name in classes if name in used or kind == "regression")
        if len(learned) < LEAST or len(labels) < (LEAST if kind == "softmax" else 1):
            return None
        index = torch.tensor([at for at, _ in learned], device="cpu")
        judged = torch.tensor([one.state != "accept" for _, one in learned], device="cpu")
        return cls(index, labels, encode(annotations, labels, kind), kind, judged)


@dataclass(frozen=True, eq=False)
class Learned:
    """What was learned from labelled images."""

    images: LabelledImages
    readout: SolvedReadOut
    groups: Tensor
    """(l) near-duplicates have the same number; they are left out together."""

    @property
    def left_out(self) -> Tensor:
        """(l, labels) probabilities, or numbers, by solutions without the image and its near-duplicates."""
        return HEADS[self.images.kind].probabilities(self.readout.held_out)

    @property
    def possible(self) -> Tensor:
        """(l) whether the left-out answer can be right: not for the only image of a class."""
        targets = self.images.targets
        return targets.bincount()[targets] > 1 if self.images.kind == "softmax" else torch.ones(len(targets)) > 0

    def answer(self, read: Read, index: Tensor) -> Tensor:
        """(b, labels) probabilities, or numbers, for any images; labelled ones are not left out."""
        weight, bias = self.readout.weight, self.readout.bias
        parts = [read(block).float().flatten(1) @ weight.T + bias for block in torch.split(index, BLOCK)]
        return HEADS[self.images.kind].probabilities(torch.cat(parts) if parts else bias.new_zeros(0, len(bias)))

    def compared(self) -> tuple[Tensor, Tensor]:
        """(l, labels) which labels the images have, and which the left-out answers give them."""
        answers, targets, count = self.left_out, self.images.targets, len(self.images.labels)
        if self.images.kind == "softmax":
            return one_hot(targets, count) > 0, one_hot(answers.argmax(dim=1), count) > 0
        return targets > 0.5, answers > 0.5

    def figure(self) -> dict[str, float] | None:
        """How right left-out answers are, with an interval of 95 %, of the images that a person labelled and that can
        be judged: the share of images, or of their labels, or the mean error of numbers."""
        answers, targets = self.left_out, self.images.targets
        if self.images.kind == "softmax":
            scores = answers.argmax(dim=1) == targets
        elif self.images.kind == "multilabel":
            scores = ((answers > 0.5) == (targets > 0.5)).double().mean(dim=1)
        else:
            scores = (answers - targets).abs().mean(dim=1)
        scores = scores[self.images.judged & self.possible].double()
        if len(scores) < LEAST:
            return None
        mean = float(scores.mean())
        if self.images.kind == "softmax":
            low, high = _wilson(mean, len(scores))
        else:
            half = SURE * float(scores.std()) / math.sqrt(len(scores))
            low, high = max(0.0, mean - half), mean + half
        return {"images": len(scores), "value": mean, "low": low, "high": high}

    def by_class(self) -> dict[str, dict[str, Any]]:
        """For each class how many images are judged and answered rightly, and what others are mostly taken for."""
        if self.images.kind == "regression":
            return {}
        rows: dict[str, dict[str, Any]] = {}
        truth, answers = self.compared()
        for at, label in enumerate(self.images.labels):
            given = answers[truth[:, at] & self.possible]
            wrong = given[~given[:, at]].sum(dim=0)
            confused = self.images.kind == "softmax" and len(wrong.nonzero()) > 0
            rows[label] = {
                "judged": len(given),
                "right": int(given[:, at].sum()),
                "confused": self.images.labels[int(wrong.argmax())] if confused else None,
            }
        return rows


def solve(images: LabelledImages, read: Read, reads: ReadOut, groups: Tensor | None = None) -> Learned:
    """The read-out of labelled images. Those of one group (l) are left out together."""

    def factorise(weights: Tensor | None) -> RidgeSystem:
        return RidgeSystem(len(images.index), lambda rows: read(images.index[rows]), weights)

    solved = solve_readout(images.kind, reads, factorise, images.targets, len(images.labels), groups=groups)
    return Learned(images, solved, torch.arange(len(images.index)) if groups is None else groups)


def find_groups(images: ImageSet) -> Tensor:
    """(n) the groups of near-duplicates, whatever the labels."""
    try:
        return torch.from_numpy(near_groups(images).numbers)
    except (DataError, OSError):
        return torch.arange(len(images), device="cpu")


def advise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The class of which further labels would help most, how many, and why; None if it makes no difference. A row
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
