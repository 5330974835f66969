"""Answers taken apart: figures of each class, and the most confident mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memoro.evaluation.metrics import confusion
from memoro.heads import HEADS, HeadKind
from memoro.tasks.calibration import Calibration

Rows = list[list[str]]


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: the image's position, what was predicted, and what is true."""

    index: int
    predicted: str
    true: str


def class_figures(
    kind: HeadKind, labels: Sequence[str], logits: Tensor, targets: Tensor, calibration: Calibration | None = None
) -> tuple[list[str], Rows]:
    """Columns and rows of a table with a row for each class, label or number, the worst first."""
    if kind == "softmax":
        return _of_classes(labels, logits, targets)
    if kind == "multilabel":
        return _of_labels(labels, _given(logits, calibration), targets)
    return _of_numbers(labels, HEADS[kind].probabilities(logits).cpu(), targets.cpu())  # MPS has no float64


def _of_classes(labels: Sequence[str], logits: Tensor, targets: Tensor) -> tuple[list[str], Rows]:
    matrix = confusion(logits, targets)
    found = []
    for at, label in enumerate(labels):
        row, right = matrix[at], int(matrix[at, at])
        images, said = int(row.sum()), int(matrix[:, at].sum())
        wrong = row.clone()
        wrong[at] = 0
        other = f"{labels[int(wrong.argmax())]} ({int(wrong.max())})" if wrong.any() else ""
        recall = right / images if images else 2.0  # classes without an image come last
        found.append((recall, [label, other, str(images), _ratio(right, images), _ratio(right, said)]))
    return ["class", "most often confused with", "images", "recall", "precision"], _sorted(found)


def _of_labels(labels: Sequence[str], said: Tensor, targets: Tensor) -> tuple[list[str], Rows]:
    true = targets >= 0.5
    found = []
    for at, label in enumerate(labels):
        hits, images, all_said = (int(x.sum()) for x in (said[:, at] & true[:, at], true[:, at], said[:, at]))
        f1 = 2 * hits / (images + all_said) if images + all_said else 2.0
        row = [label, str(images), str(hits), str(images - hits), str(all_said - hits), "-" if f1 > 1 else f"{f1:.3f}"]
        found.append((f1, row))
    return ["label", "images with it", "found", "missed", "false alarms", "F1"], _sorted(found)


def _of_numbers(labels: Sequence[str], answers: Tensor, targets: Tensor) -> tuple[list[str], Rows]:
    rows = []
    for at, label in enumerate(labels):
        true = targets[:, at].double()
        error, spread = answers[:, at] - true, float((true - true.mean()).square().sum())
        r2 = f"{1 - float(error.square().sum()) / spread:.3f}" if true.max() > true.min() else "-"
        span = f"{float(true.min()):.4g} to {float(true.max()):.4g}"
        rows.append([label, span, f"{float(error.abs().mean()):.4g}", f"{float(error.abs().max()):.4g}", r2])
    return ["number", "true values", "mean absolute error", "largest error", "R²"], rows


def find_mistakes(
    kind: HeadKind,
    labels: Sequence[str],
    logits: Tensor,
    targets: Tensor,
    most: int,
    calibration: Calibration | None = None,
) -> tuple[int, list[Mistake]]:
    """How many images were answered wrongly, and the most confident of these mistakes; of numbers, the largest errors.

    Several labels count as wrong where one of them is.
    """
    answers, targets = (
        HEADS[kind].probabilities(logits if calibration is None else calibration.apply(logits)),
        targets.cpu(),
    )
    if kind == "softmax":
        best, said = answers.max(dim=-1)
        wrong = said != targets
        order = _largest(torch.where(wrong, best, -1.0), most)
        return int(wrong.sum()), [
            Mistake(
                at,
                f"{labels[int(said[at])]} {_percent(best[at])}",
                f"{labels[int(targets[at])]} {_percent(answers[at, targets[at]])}",
            )
            for at in order
            if wrong[at]
        ]
    if kind == "multilabel":
        true = targets >= 0.5
        given = _given(logits, calibration)
        off = torch.where(given == true, -1.0, (answers - targets).abs())
        worst = off.max(dim=-1).values
        found = []
        for at in _largest(worst, most):
            parts = [i for i in _largest(off[at], 3) if off[at, i] > 0]
            text = ", ".join(f"{'not ' if true[at, i] else ''}{labels[i]} {_percent(answers[at, i])}" for i in parts)
            found.append(Mistake(at, text, ", ".join(labels[i] for i in true[at].nonzero().flatten()) or "none"))
        return int((worst > 0).sum()), [one for one in found if worst[one.index] > 0]
    errors = ((answers - targets) / targets.float().std(dim=0, correction=0).clamp(min=1e-12)).abs().max(dim=-1).values

    def numbers(row: Tensor) -> str:
        values = [f"{value:.4g}" for value in row.tolist()]
        return values[0] if len(values) == 1 else ", ".join(map(" ".join, zip(labels, values, strict=True)))

    order = _largest(errors, most)
    return len(targets), [Mistake(at, numbers(answers[at]), numbers(targets[at])) for at in order]


def _given(logits: Tensor, calibration: Calibration | None) -> Tensor:
    """Which labels a multilabel task gives."""
    return (logits if calibration is None else calibration.decide(logits)).cpu() >= 0


def _largest(values: Tensor, most: int) -> list[int]:
    order: list[int] = values.argsort(descending=True, stable=True)[:most].tolist()
    return order


def _sorted(found: list[tuple[float, list[str]]]) -> Rows:
    return [row for _, row in sorted(found, key=lambda one: one[0])]


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"


def _percent(value: Tensor) -> str:
    return f"{float(value):.0%}"
