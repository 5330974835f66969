"""The kinds of heads: one class, several labels, numbers. All that depends on the kind is a method here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from memoro.errors import DataError

HeadKind = Literal["softmax", "multilabel", "regression"]


class Head(ABC):
    """What depends on the kind of a task's head."""

    kind: HeadKind
    plain: str
    """What users call the kind."""
    noun: str
    """What a label is."""
    main_metric: str
    """What runs are compared by; higher is better."""
    calibrated_metrics: tuple[str, ...] = ()
    """The metrics that a calibration changes."""
    has_classes = False
    """Whether each image has exactly one label."""
    has_numbers = False
    """Whether a label is the name of a number."""

    @abstractmethod
    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (…, labels) as probabilities in float32; a regression's numbers as they are."""

    @abstractmethod
    def losses(self, logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        """(b) the loss of each image: cross-entropy, binary cross-entropy or squared error."""

    def loss_sum(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """The summed loss of a batch, in float32 at least.

        `weights` are per class and have mean 1 over the training images, so the sum is still divided by the number of
        images. `sample_weight` (b) weights each image.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = self.losses(logits, targets, smoothing, weights)
        return (losses if sample_weight is None else losses * sample_weight).sum()

    def class_weights(self, targets: Tensor, classes: int) -> Tensor | None:
        """Weights that balance rare and common classes: mean 1 over the images (softmax), or the ratio of images
        without a label to those with it (multilabel). None for numbers."""
        return None

    @abstractmethod
    def measure(self, labels: Sequence[str], answers: Tensor, targets: Tensor) -> dict[str, Any]:
        """JSON-ready metrics of `probabilities` (n, labels) over a whole set."""

    @abstractmethod
    def answer(
        self, labels: Sequence[str], answers: Tensor, top: int | None, limits: Sequence[float]
    ) -> list[dict[str, Any]]:
        """The fields of each image's `Answer`, from `probabilities` (b, labels).

        With `probabilities` of the `top` labels only. `limits` are from a calibration, one for each label: the
        thresholds of several labels, or half the widths of the intervals of numbers.
        """


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
            {"label": labels[order[0]], "probability": shares[0], "probabilities": _shown(labels, order, shares, top)}
            for order, shares in _ranked(answers)
        ]


class Multilabel(Head):
    """Several labels, or none, for each image."""

    kind, plain, noun, main_metric = "multilabel", "labels", "label", "mean_average_precision"
    calibrated_metrics = ("f1", "exact_match", "label_accuracy")

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid()

    def losses(self, logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        targets = targets.to(logits.dtype) * (1 - smoothing) + 0.5 * smoothing
        each = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none", pos_weight=weights)
        return each.mean(dim=-1)

    def class_weights(self, targets: Tensor, classes: int) -> Tensor | None:
        positive = targets.float().sum(dim=0).clamp(min=1)
        return (len(targets) - positive).clamp(min=1) / positive

    def measure(self, labels: Sequence[str], answers: Tensor, targets: Tensor) -> dict[str, Any]:
        """Mean average precision and F1 (at a threshold of one half), both means over the labels that occur; exact
        match, label accuracy (over all yes/no answers)."""
        truth, said = targets >= 0.5, answers >= 0.5
        right, occurs = said == truth, truth.any(dim=0)
        # Without a positive image, precision is undefined.
        each = [_average_precision(answers[:, at], truth[:, at]) for at in occurs.nonzero().flatten().tolist()]
        f1 = 2 * (said & truth).sum(dim=0) / (said.sum(dim=0) + truth.sum(dim=0)).clamp(min=1)
        return {
            "mean_average_precision": sum(each) / len(each) if each else None,
            "f1": float(f1[occurs].mean()) if each else None,
            "exact_match": float(right.all(dim=-1).float().mean()),
            "label_accuracy": float(right.float().mean()),
        }

    def answer(
        self, labels: Sequence[str], answers: Tensor, top: int | None, limits: Sequence[float]
    ) -> list[dict[str, Any]]:
        least, rows = limits or (0.5,) * len(labels), []
        for order, shares in _ranked(answers):
            chosen = [labels[i] for i, share in zip(order, shares, strict=True) if share >= least[i]]
            rows.append({"labels": chosen, "probabilities": _shown(labels, order, shares, top)})
            if limits:
                rows[-1]["thresholds"] = {labels[i]: limits[i] for i in order[:top]}
        return rows


class Regression(Head):
    """A number for each label."""

    kind, plain, noun, main_metric, has_numbers = "regression", "number", "number", "r2", True

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.float()

    def losses(self, logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        return (logits - targets.to(logits.dtype)).square().mean(dim=-1)

    def measure(self, labels: Sequence[str], answers: Tensor, targets: Tensor) -> dict[str, Any]:
        """R² and mean absolute error, means over outputs."""
        targets = targets.double()  # in float32, the mean of equal numbers is not always one of them
        error = answers - targets
        known = targets.amax(dim=0) > targets.amin(dim=0)  # R² is undefined if all targets of an output are the same
        variation = (targets - targets.mean(dim=0)).square().sum(dim=0)
        each = 1 - error.square().sum(dim=0)[known] / variation[known]
        return {
            "r2": float(each.mean()) if len(each) else None,
            "mean_absolute_error": float(error.abs().mean()),
        }

    def answer(
        self, labels: Sequence[str], answers: Tensor, top: int | None, limits: Sequence[float]
    ) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [{"values": dict(zip(labels, row, strict=True))} for row in answers.tolist()]
        for row in rows if limits else ():
            pairs = zip(row["values"].items(), limits, strict=True)
            row["intervals"] = {name: [value - half, value + half] for (name, value), half in pairs}
        return rows


HEADS: Mapping[HeadKind, Head] = {head.kind: head for head in (Softmax(), Multilabel(), Regression())}


def find_kind(name: str) -> HeadKind:
    """The kind that a user names: `class`, `labels` or `number`, or a kind of head."""
    for head in HEADS.values():
        if name in {head.plain, head.kind}:
            return head.kind
    raise DataError(
        f"unknown kind {name!r}: choose class (one label per image), labels (several) or number; softmax, multilabel "
        "and regression are accepted too."
    )


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


def _ranked(answers: Tensor) -> list[tuple[list[int], list[float]]]:
    """For each image its labels, best first, with their probabilities."""
    # Sorted for the whole batch at once: a row at a time is slow if there are many tasks.
    order = torch.argsort(answers, dim=-1, descending=True, stable=True)
    return list(zip(order.tolist(), answers.gather(-1, order).tolist(), strict=True))


def _shown(labels: Sequence[str], order: list[int], shares: list[float], top: int | None) -> dict[str, float]:
    return {labels[i]: share for i, share in zip(order[:top], shares[:top], strict=True)}


BINS = 15


def _calibration_error(confidences: Tensor, right: Tensor) -> float:
    """The expected calibration error over `BINS` bins of equal width."""
    bins = (confidences * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64, device=bins.device)
    gaps.index_add_(0, bins, right.double() - confidences.double())
    return float(gaps.abs().sum() / len(right))


def _average_precision(scores: Tensor, truth: Tensor) -> float:
    """The area under precision over recall, as a step function. Images of one score are counted together."""
    order = scores.argsort(descending=True)
    ends = (scores[order].diff() != 0).nonzero().flatten()
    ends = torch.cat([ends, ends.new_tensor([len(scores) - 1])])
    hits = truth[order].double().cumsum(dim=0)[ends]
    recall = hits / hits[-1]
    return float((hits / (ends + 1) * recall.diff(prepend=recall.new_zeros(1))).sum())
