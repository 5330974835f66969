"""The kinds of heads: one label, several labels, numbers. Their losses and probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from memoro.errors import DataError

HeadKind = Literal["softmax", "multilabel", "regression"]
PLAIN_KINDS: dict[str, HeadKind] = {"class": "softmax", "labels": "multilabel", "number": "regression"}
"""What users call the kinds."""


def find_kind(name: str) -> HeadKind:
    """The kind that a user names: `class`, `labels` or `number`, or a kind of head."""
    for plain, kind in PLAIN_KINDS.items():
        if name in {plain, kind}:
            return kind
    raise DataError(
        f"unknown kind {name!r}: choose class (one label per image), labels (several) or number; softmax, multilabel "
        "and regression are accepted too."
    )


def probabilities(kind: HeadKind, logits: Tensor) -> Tensor:
    """Logits (…, labels) as probabilities in float32; a regression's numbers as they are."""
    logits = logits.float()
    if kind == "softmax":
        return logits.softmax(dim=-1)
    return logits.sigmoid() if kind == "multilabel" else logits


def energy(kind: HeadKind, logits: Tensor) -> Tensor:
    """The log of the sum of the exponentials of logits (…, labels): high where one of them is. What is often called
    energy is its negative.

    0 for several labels and for numbers, whose answers are not one of a few.
    """
    logits = logits.float()
    return logits.logsumexp(dim=-1) if kind == "softmax" else logits.new_zeros(logits.shape[:-1])


def loss_sum(
    kind: HeadKind,
    logits: Tensor,
    targets: Tensor,
    *,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """The summed loss of a batch, in float32 at least: cross-entropy, binary cross-entropy or squared error.

    `weights` are per class and have mean 1 over the training images, so the sum is still divided by the number of
    images. `sample_weight` (b) weights each image.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if kind == "softmax":
        losses = functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        losses = losses if weights is None else losses * weights[targets]
    elif kind == "multilabel":
        targets = targets.to(logits.dtype) * (1 - smoothing) + 0.5 * smoothing
        each = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none", pos_weight=weights)
        losses = each.mean(dim=-1)
    else:
        losses = (logits - targets.to(logits.dtype)).square().mean(dim=-1)
    return (losses if sample_weight is None else losses * sample_weight).sum()


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of a regression's training targets, one of each per output.

    While a regression is trained, its head answers in these units; afterwards the scale is part of the head.
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, targets: Tensor) -> Scale:
        """The scale of targets (n, outputs); an output whose targets are all the same keeps its unit."""
        values = targets.double()
        std = values.std(dim=0, correction=0)
        return cls(values.mean(dim=0), torch.where(std > 0, std, 1.0))

    def apply(self, targets: Tensor) -> Tensor:
        """Targets in the user's units, standardised."""
        return (targets - self.mean.to(targets)) / self.std.to(targets)

    def undo(self, outputs: Tensor) -> Tensor:
        """Standardised outputs in the user's units."""
        return outputs * self.std.to(outputs) + self.mean.to(outputs)

    @torch.no_grad()
    def fold(self, head: nn.Linear) -> None:
        """Makes a head that answers in standardised units answer in the user's."""
        head.weight.mul_(self.std.to(head.weight)[:, None])
        head.bias.copy_(self.undo(head.bias))

    @torch.no_grad()
    def unfold(self, head: nn.Linear) -> None:
        """The inverse of `fold`."""
        head.weight.div_(self.std.to(head.weight)[:, None])
        head.bias.copy_(self.apply(head.bias))


def class_weights(kind: HeadKind, targets: Tensor, classes: int) -> Tensor | None:
    """Weights that balance rare and common classes: mean 1 over the images (softmax), or the ratio of
    images without a label to those with it (multilabel)."""
    if kind == "softmax":
        counts = targets.bincount(minlength=classes).float()
        present = counts > 0
        weights = torch.zeros_like(counts)
        weights[present] = len(targets) / (counts[present] * present.sum())
        return weights
    if kind == "multilabel":
        positive = targets.float().sum(dim=0).clamp(min=1)
        return (len(targets) - positive).clamp(min=1) / positive
    return None
