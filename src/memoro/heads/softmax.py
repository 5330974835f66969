"""Heads that answer with one class for each image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memoro.heads.head import Head, Mistake, Table, largest, percent, ranked, shown, sort_rows

BINS = 15


class Softmax(Head):
    """One class for each image."""

    kind, plain, noun, main_metric, has_classes = "softmax", "class", "class", "accuracy", True
    calibrated_metrics = ("calibration_error",)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().softmax(dim=-1)

    def losses(self, logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        losses = functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        return losses if weights is None else losses * weights[targets]

    def class_weights(self, targets: Tensor, classes: int) -> Tensor | None:
        counts = targets.bincount(minlength=classes).float()
        present = counts > 0
        weights = torch.zeros_like(counts)
        weights[present] = len(targets) / (counts[present] * present.sum())
        return weights

    def measure(self, labels: Sequence[str], answers: Tensor, targets: Tensor) -> dict[str, Any]:
        """Accuracy, balanced accuracy, expected calibration error, recall of the five worst classes, how many times the
        images of the smallest class the largest one has."""
        right = answers.argmax(dim=-1) == targets
        counts = targets.bincount(minlength=len(labels))
        hits = targets[right].bincount(minlength=len(labels))
        recall = {labels[i]: float(hits[i] / counts[i]) for i in range(len(labels)) if counts[i]}
        worst = sorted(recall, key=lambda label: (recall[label], label))[:5]
        return {
            "accuracy": float(right.float().mean()),
            "balanced_accuracy": sum(recall.values()) / len(recall),
            "calibration_error": _calibration_error(answers.amax(dim=-1), right),
            "majority_accuracy": float(counts.max() / counts.sum()),
            "imbalance": float(counts.max() / counts[counts > 0].min()),
            "worst_classes": {label: recall[label] for label in worst},
        }

    def answer(
        self, labels: Sequence[str], answers: Tensor, top: int | None, limits: Sequence[float]
    ) -> list[dict[str, Any]]:
        return [
            {"label": labels[order[0]], "probability": shares[0], "probabilities": shown(labels, order, shares, top)}
            for order, shares in ranked(answers)
        ]

    def figures(self, labels: Sequence[str], answers: Tensor, given: Tensor, targets: Tensor) -> Table:
        matrix, found = confusion(answers, targets), []
        for at, label in enumerate(labels):
            row, right = matrix[at], int(matrix[at, at])
            images, said = int(row.sum()), int(matrix[:, at].sum())
            wrong = row.clone()
            wrong[at] = 0
            other = f"{labels[int(wrong.argmax())]} ({int(wrong.max())})" if wrong.any() else ""
            recall = right / images if images else 2.0  # classes without an image come last
            found.append((recall, [label, other, str(images), _ratio(right, images), _ratio(right, said)]))
        return Table(["class", "most often confused with", "images", "recall", "precision"], sort_rows(found))

    def mistakes(
        self, labels: Sequence[str], answers: Tensor, given: Tensor, targets: Tensor, most: int
    ) -> tuple[int, list[Mistake]]:
        best, said = answers.max(dim=-1)
        wrong = said != targets
        return int(wrong.sum()), [
            Mistake(
                at,
                f"{labels[int(said[at])]} {percent(best[at])}",
                f"{labels[int(targets[at])]} {percent(answers[at, targets[at]])}",
            )
            for at in largest(torch.where(wrong, best, -1.0), most)
            if wrong[at]
        ]


def confusion(logits: Tensor, targets: Tensor) -> Tensor:
    """(true, predicted) counts."""
    classes = logits.shape[-1]
    pairs = targets.cpu() * classes + logits.argmax(dim=-1).cpu()
    return pairs.bincount(minlength=classes * classes).view(classes, classes)


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"


def _calibration_error(confidences: Tensor, right: Tensor) -> float:
    """The expected calibration error over `BINS` bins of equal width."""
    bins = (confidences * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64, device=bins.device)
    gaps.index_add_(0, bins, right.double() - confidences.double())
    return float(gaps.abs().sum() / len(right))
