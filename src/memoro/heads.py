"""The kinds of heads, and so of questions: one label, several labels, numbers. Their losses and probabilities."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

HeadKind = Literal["softmax", "multilabel", "regression"]


def probabilities(kind: HeadKind, logits: Tensor) -> Tensor:
    """Logits (…, labels) as probabilities in float32; a regression's numbers as they are."""
    logits = logits.float()
    if kind == "softmax":
        return logits.softmax(dim=-1)
    return logits.sigmoid() if kind == "multilabel" else logits


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

    `weights` are per class and have mean 1 over the training images, so that the sum is divided by the number of
    images all the same. `sample_weight` (b) say how much each image counts.
    """
    each = _losses(kind, logits, targets, smoothing, weights)
    return (each if sample_weight is None else each * sample_weight).sum()


def _losses(kind: HeadKind, logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
    """The loss of each image."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if kind == "softmax":
        each = functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        return each if weights is None else each * weights[targets]
    targets = targets.to(logits.dtype)
    if kind == "multilabel":
        targets = targets * (1 - smoothing) + 0.5 * smoothing
        each = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none", pos_weight=weights)
        return each.mean(dim=-1)
    return (logits - targets).square().mean(dim=-1)


def class_weights(kind: HeadKind, targets: Tensor, classes: int) -> Tensor | None:
    """Weights that make rare classes count as much as common ones: mean 1 over the images (softmax), or the ratio of
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
