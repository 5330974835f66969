"""How good a task is, from its logits on a set of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memoro.heads import HeadKind, loss_sum, probabilities

MAIN_FIGURE: dict[HeadKind, str] = {
    "softmax": "accuracy",
    "multilabel": "mean_average_precision",
    "regression": "r2",
}
"""What runs are compared by."""


def measure(kind: HeadKind, labels: Sequence[str], logits: Tensor, targets: Tensor) -> dict[str, Any]:
    """JSON-ready figures over a whole set. `score` says how to compare runs: higher is better.

    softmax: accuracy, balanced accuracy, expected calibration error (15 bins), the five worst classes. multilabel:
    accuracy (share of right yes/no answers), exact match, mean average precision. regression: mean absolute error, R².
    """
    logits = logits.detach().float().cpu()
    targets = targets.cpu()
    count = len(targets)
    loss = float(loss_sum(kind, logits, targets)) / max(count, 1)
    found: dict[str, Any] = {"images": count, "loss": loss}
    if not count or not math.isfinite(loss):
        return found
    answers = probabilities(kind, logits)
    if kind == "softmax":
        found |= _softmax(labels, answers, targets)
    elif kind == "multilabel":
        found |= _multilabel(answers, targets)
    else:
        found |= _regression(answers, targets.float())
    return found


def score(kind: HeadKind, metrics: dict[str, Any]) -> tuple[float, float]:
    """What runs are compared by, higher is better: the kind's main figure, then a lower loss."""
    main = MAIN_FIGURE[kind]
    value, loss = metrics.get(main), metrics["loss"]
    return (-float("inf") if value is None else value), -loss


def confusion(logits: Tensor, targets: Tensor) -> Tensor:
    """(true, predicted) counts of a softmax task."""
    classes = logits.shape[-1]
    pairs = targets.cpu() * classes + logits.argmax(dim=-1).cpu()
    return pairs.bincount(minlength=classes * classes).view(classes, classes)


def _softmax(labels: Sequence[str], probabilities: Tensor, targets: Tensor) -> dict[str, Any]:
    from torchmetrics.functional.classification import multiclass_calibration_error

    right = probabilities.argmax(dim=-1) == targets
    counts = targets.bincount(minlength=len(labels))
    hits = targets[right].bincount(minlength=len(labels))
    recall = {labels[i]: float(hits[i] / counts[i]) for i in range(len(labels)) if counts[i]}
    worst = sorted(recall, key=lambda label: (recall[label], label))[:5]
    return {
        "accuracy": float(right.float().mean()),
        "balanced_accuracy": sum(recall.values()) / len(recall),
        "calibration_error": float(multiclass_calibration_error(probabilities, targets, len(labels), n_bins=15)),
        "worst_classes": {label: recall[label] for label in worst},
    }


def _multilabel(probabilities: Tensor, targets: Tensor) -> dict[str, Any]:
    from torchmetrics.functional.classification import binary_average_precision

    truth = targets >= 0.5
    right = (probabilities >= 0.5) == truth
    # Label by label: there may be a single one, and one without a positive image has no precision.
    each = [
        float(binary_average_precision(probabilities[:, label], truth[:, label].long()))
        for label in truth.any(dim=0).nonzero().flatten().tolist()
    ]
    return {
        "accuracy": float(right.float().mean()),
        "exact_match": float(right.all(dim=-1).float().mean()),
        "mean_average_precision": sum(each) / len(each) if each else None,
    }


def _regression(values: Tensor, targets: Tensor) -> dict[str, Any]:
    error = values - targets
    spread = (targets - targets.mean(dim=0)).square().sum()
    return {
        "mean_absolute_error": float(error.abs().mean()),
        "r2": float(1 - error.square().sum() / spread) if float(spread) > 0 else None,
    }
