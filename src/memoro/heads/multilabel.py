"""Heads that answer with several labels, or none, for each image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memoro.heads.head import Head, Mistake, Table, largest, percent, ranked, shown, sort_rows


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
        for order, shares in ranked(answers):
            chosen = [labels[i] for i, share in zip(order, shares, strict=True) if share >= least[i]]
            rows.append({"labels": chosen, "probabilities": shown(labels, order, shares, top)})
            if limits:
                rows[-1]["thresholds"] = {labels[i]: limits[i] for i in order[:top]}
        return rows

    def figures(self, labels: Sequence[str], answers: Tensor, given: Tensor, targets: Tensor) -> Table:
        true, found = targets >= 0.5, []
        for at, label in enumerate(labels):
            hits, images, said = (int(x.sum()) for x in (given[:, at] & true[:, at], true[:, at], given[:, at]))
            f1 = 2 * hits / (images + said) if images + said else 2.0
            row = [label, str(images), str(hits), str(images - hits), str(said - hits), "-" if f1 > 1 else f"{f1:.3f}"]
            found.append((f1, row))
        return Table(["label", "images with it", "found", "missed", "false alarms", "F1"], sort_rows(found))

    def mistakes(
        self, labels: Sequence[str], answers: Tensor, given: Tensor, targets: Tensor, most: int
    ) -> tuple[int, list[Mistake]]:
        """An answer is wrong if one of its labels is."""
        true, found = targets >= 0.5, []
        off = torch.where(given == true, -1.0, (answers - targets).abs())
        worst = off.max(dim=-1).values
        for at in largest(worst, most):
            parts = [i for i in largest(off[at], 3) if off[at, i] > 0]
            text = ", ".join(f"{'not ' if true[at, i] else ''}{labels[i]} {percent(answers[at, i])}" for i in parts)
            found.append(Mistake(at, text, ", ".join(labels[i] for i in true[at].nonzero().flatten()) or "none"))
        return int((worst > 0).sum()), [mistake for mistake in found if worst[mistake.index] > 0]


def _average_precision(scores: Tensor, truth: Tensor) -> float:
    """The area under precision over recall, as a step function. Images of one score are counted together."""
    order = scores.argsort(descending=True)
    ends = (scores[order].diff() != 0).nonzero().flatten()
    ends = torch.cat([ends, ends.new_tensor([len(scores) - 1])])
    hits = truth[order].double().cumsum(dim=0)[ends]
    recall = hits / hits[-1]
    return float((hits / (ends + 1) * recall.diff(prepend=recall.new_zeros(1))).sum())
