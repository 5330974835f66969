"""Heads that answer with a number for each label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memoro.heads.head import Head, Mistake, Table, largest


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

    def figures(self, labels: Sequence[str], answers: Tensor, given: Tensor, targets: Tensor) -> Table:
        rows = []
        for at, label in enumerate(labels):
            true = targets[:, at].double()
            error, spread = answers[:, at] - true, float((true - true.mean()).square().sum())
            r2 = f"{1 - float(error.square().sum()) / spread:.3f}" if true.max() > true.min() else "-"
            span = f"{float(true.min()):.4g} to {float(true.max()):.4g}"
            rows.append([label, span, f"{float(error.abs().mean()):.4g}", f"{float(error.abs().max()):.4g}", r2])
        return Table(["number", "true values", "mean absolute error", "largest error", "R²"], rows)

    def mistakes(
        self, labels: Sequence[str], answers: Tensor, given: Tensor, targets: Tensor, most: int
    ) -> tuple[int, list[Mistake]]:
        """The largest errors, in standard deviations of the true numbers."""
        errors = (answers - targets) / targets.float().std(dim=0, correction=0).clamp(min=1e-12)

        def show(row: Tensor) -> str:
            values = [f"{value:.4g}" for value in row.tolist()]
            return values[0] if len(values) == 1 else ", ".join(map(" ".join, zip(labels, values, strict=True)))

        order = largest(errors.abs().max(dim=-1).values, most)
        return len(targets), [Mistake(at, show(answers[at]), show(targets[at])) for at in order]


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
