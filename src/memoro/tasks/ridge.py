"""Ridge regression in closed form, its penalty chosen by exact leave-one-out answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

PENALTIES = tuple(10 ** (step / 3) for step in range(-5, 6))
"""Tried in turn, relative to features that are standardised and divided by the root of their number."""
MOST_DIMENSIONS = 2048
"""Up to this many images, the solution is exact. With more, features are projected to what this many of them span."""
MOST_KEPT = 1 << 25
"""Numbers of projected features that are kept in memory; more are computed a second time."""
BLOCK = 1024
MOST_JUDGED = 1 << 22
"""Answers by which penalties are compared."""
MOST_ANSWERS = 1 << 27
"""Leave-one-out answers that are kept; of more, those of evenly spaced images."""
NEGLIGIBLE = 1e-7
"""Directions whose share of the largest variance is smaller are left out."""
CONSTANT = 1e-6
"""A feature whose deviation is smaller than this share of the largest one is left out."""

Read = Callable[[Tensor], Tensor]
"""The features (b, …) of images by their numbers (b)."""
Aim = Callable[[Tensor], Tensor]
"""What the outputs should be (b, outputs) for images by their numbers (b)."""
Loss = Callable[[Tensor, Tensor], float]
"""How wrong answers (b, outputs) to images are, from these and the images' numbers (b)."""


@dataclass(frozen=True)
class Ridge:
    """A linear layer: `features @ weight.T + bias`."""

    weight: Tensor
    """(outputs, features)"""
    bias: Tensor
    """(outputs)"""
    mean: Tensor
    """(features) of all images"""
    penalty: float
    held_out: Tensor
    """(m, outputs): the answers to images by the solutions of all others, without their whole groups."""
    answered: Tensor
    """(m) the numbers of these images: all, unless there are more than `MOST_ANSWERS` answers."""


class RidgeSystem:
    """What the linear layers for some images have in common, whatever their outputs should be: standardised features,
    projected to their principal axes. It is factorised once.

    With a `sample_weight` (n), images count by it; those of weight 0 change nothing. Standardisation and projection are
    those of all images. Memory does not grow with the number of images, apart from the answers.
    """

    def __init__(self, count: int, read: Read, sample_weight: Tensor | None = None) -> None:
        self.count, self._read = count, read
        self.weights = (torch.ones(count, device="cpu") if sample_weight is None else sample_weight.cpu()).double()
        self.total = self.weights.sum()
        self._project_to(torch.linspace(0, count - 1, min(count, MOST_DIMENSIONS), device="cpu").round().long())
        self._find_axes()

    def solve(self, aim: Aim, loss: Loss, groups: Tensor | None = None) -> Ridge:
        """The linear layer with the smallest weighted squared error plus penalty. Images of one group (n) are left out
        together."""
        return _Solver(self, aim, [] if groups is None else _members(groups)).solve(loss)

    def _project_to(self, landmarks: Tensor) -> None:
        """Standardises by these images and projects to the space that they span, along its principal axes."""
        rows = self._read(landmarks).float().flatten(1)
        std, self.mean = torch.std_mean(rows, dim=0, correction=0)
        self._scale = torch.where(std > CONSTANT * std.max(), std, torch.inf).reciprocal()
        rows, weights = (rows - self.mean) * self._scale, self.weights[landmarks].float()
        rows = (rows - weights @ rows / weights.sum()) * weights.sqrt()[:, None]
        self._features = rows.shape[1]
        values, vectors = torch.linalg.eigh((rows @ rows.T).double() / self._features)
        known = values > NEGLIGIBLE * values[-1].clamp(min=1e-30)
        spread = vectors[:, known] * values[known].rsqrt()
        self._basis = rows.T @ spread.float() / self._features
        """(features, dimensions): products of projected features are those of the features, over their number."""

    def _find_axes(self) -> None:
        """The principal axes of all images."""
        size, keeps = self._basis.shape[1], self.count * self._basis.shape[1] <= MOST_KEPT
        squares = torch.zeros(size, size, dtype=torch.double, device="cpu")
        sums = torch.zeros(size, dtype=torch.double, device="cpu")
        kept = []
        for block in self.blocks():
            rows, own = self._project(block).double(), self.weights[block, None]
            squares += rows.T @ (own * rows)
            sums += (own * rows).sum(dim=0)
            kept += [rows] if keeps else []
        self._middle = sums / self.total
        values, self._axes = torch.linalg.eigh(squares - self.total * self._middle.outer(self._middle))
        self.values = values.clamp(min=0)
        self._kept = (torch.cat(kept) - self._middle) @ self._axes if keeps else None

    def blocks(self) -> Sequence[Tensor]:
        """The numbers of all images, some at a time."""
        parts: Sequence[Tensor] = torch.split(torch.arange(self.count, device="cpu"), BLOCK)
        return parts

    def rows(self, index: Tensor) -> Tensor:
        """Images (b, axes) along the principal axes, from their mean."""
        kept = self._kept
        found: Tensor = (self._project(index).double() - self._middle) @ self._axes if kept is None else kept[index]
        return found

    def unfold(self, coefficients: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Weight (outputs, features) and bias (outputs) of what is linear along the axes (axes, outputs), and has this
        level (outputs) at the mean."""
        turned = self._axes @ coefficients
        weight = (self._basis.double() @ turned).T * self._scale
        return weight, level - self._middle @ turned - weight @ self.mean.double()

    def _project(self, index: Tensor) -> Tensor:
        rows: Tensor = ((self._read(index).float().flatten(1) - self.mean) * self._scale) @ self._basis
        return rows


class _Solver:
    """The layers of one system for one kind of outputs, one for each penalty."""

    def __init__(self, system: RidgeSystem, aim: Aim, groups: Sequence[Tensor]) -> None:
        self._system, self._aim, self._groups = system, aim, groups
        products = aims = torch.zeros((), dtype=torch.double, device="cpu")
        for block in system.blocks():
            weighted = system.weights[block][:, None] * aim(block).double()
            products = products + system.rows(block).T @ weighted
            aims = aims + weighted.sum(dim=0)
        # Rows are from the mean, so that of the aims makes no difference.
        self._products, self._level = products, aims / system.total

    def solve(self, loss: Loss) -> Ridge:
        judged, answered = (self._some(most) for most in (MOST_JUDGED, MOST_ANSWERS))
        losses = {penalty: loss(self._answer(judged, penalty), judged) for penalty in PENALTIES}
        best = min(losses, key=lambda penalty: losses[penalty])
        weight, bias = self._system.unfold(self._products / (self._system.values + best)[:, None], self._level)
        return Ridge(weight.float(), bias.float(), self._system.mean, best, self._answer(answered, best), answered)

    def _some(self, most: int) -> Tensor:
        """The numbers of all images, or of evenly spaced ones, whose answers are at most so many numbers."""
        count, most = self._system.count, max(1, most // len(self._level))
        if count <= most:
            return torch.arange(count, device="cpu")
        return torch.linspace(0, count - 1, most, dtype=torch.double, device="cpu").round().long()

    def _answer(self, index: Tensor, penalty: float) -> Tensor:
        """The answers to these images that are left out, one at a time or group by group."""
        answers = self._leave_out(index[:BLOCK], penalty)
        if len(index) > BLOCK:  # filled in place: all parts and their copy would be twice as much
            first, answers = answers, answers.new_empty(len(index), answers.shape[1])
            answers[:BLOCK] = first
        for at in range(BLOCK, len(index), BLOCK):
            answers[at : at + BLOCK] = self._leave_out(index[at : at + BLOCK], penalty)
        place = torch.full((self._system.count,), -1, device="cpu")
        place[index] = torch.arange(len(index), device="cpu")
        for members in self._groups:
            wanted = place[members] >= 0
            if bool(wanted.any()):
                answers[place[members][wanted]] = self._leave_out_group(members, penalty)[wanted]
        return answers

    def _fit(self, index: Tensor, penalty: float) -> tuple[Tensor, Tensor, Tensor]:
        """Rows along the axes, those divided by the penalised eigenvalues, and the answers of the solution."""
        rows = self._system.rows(index)
        shrunk = rows / (self._system.values + penalty)
        return rows, shrunk, shrunk @ self._products + self._level

    def _leave_out(self, index: Tensor, penalty: float) -> Tensor:
        rows, shrunk, answers = self._fit(index, penalty)
        leverage = self._system.weights[index] * ((rows * shrunk).sum(dim=1) + 1 / self._system.total)
        aims = self._aim(index).double()
        found: Tensor = aims - (aims - answers) / (1 - leverage).clamp(min=1e-9)[:, None]
        return found.float()

    def _leave_out_group(self, index: Tensor, penalty: float) -> Tensor:
        rows, shrunk, answers = self._fit(index, penalty)
        roots, aims = self._system.weights[index].sqrt()[:, None], self._aim(index).double()
        kernel = rows @ shrunk.T + 1 / self._system.total
        own = torch.eye(len(index), device="cpu") - roots * kernel * roots.T
        errors = torch.linalg.solve(own, roots * (aims - answers))
        found: Tensor = answers - kernel @ (roots * errors)
        return found.float()


def _members(groups: Tensor) -> list[Tensor]:
    """The images of each group that has several."""
    order = groups.argsort(stable=True)
    starts = (groups[order].diff(prepend=groups[order][:1] - 1) != 0).nonzero().flatten().tolist()
    return [order[start:end] for start, end in pairwise([*starts, len(order)]) if end - start > 1]
