"""Ridge regression in closed form, its penalty chosen by exact leave-one-out answers."""

from __future__ import annotations

from collections.abc import Callable
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
NEGLIGIBLE = 1e-7
"""Directions whose share of the largest variance is smaller are left out."""
CONSTANT = 1e-6
"""A feature whose deviation is smaller than this share of the largest one is left out."""

Read = Callable[[Tensor], Tensor]
"""The features (b, features) of images by their numbers (b)."""
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
    """(n, outputs): the answer to each image by the solution of all others, without its whole group."""


def solve_ridge(
    count: int,
    read: Read,
    aim: Aim,
    loss: Loss,
    *,
    sample_weight: Tensor | None = None,
    groups: Tensor | None = None,
) -> Ridge:
    """The linear layer with the smallest weighted squared error plus penalty over `count` images.

    Images of one group (n) are left out together. Standardisation and projection are those of all images. Apart from
    the answers, memory does not grow with the number of images.
    """
    return _Solver(count, read, aim, sample_weight, groups).solve(loss)


class _Solver:
    def __init__(self, count: int, read: Read, aim: Aim, sample_weight: Tensor | None, groups: Tensor | None) -> None:
        self._count, self._read, self._aim = count, read, aim
        self._weights = (torch.ones(count) if sample_weight is None else sample_weight.cpu()).double()
        self._groups = [] if groups is None else _members(groups)
        self._project_to(torch.linspace(0, count - 1, min(count, MOST_DIMENSIONS)).round().long())
        self._find_axes()

    def _project_to(self, landmarks: Tensor) -> None:
        """Standardises by these images and projects to the space that they span, along its principal axes."""
        rows = self._read(landmarks).float()
        std, self._mean = torch.std_mean(rows, dim=0, correction=0)
        self._scale = torch.where(std > CONSTANT * std.max(), std, torch.inf).reciprocal()
        rows, weights = (rows - self._mean) * self._scale, self._weights[landmarks].float()
        rows = (rows - weights @ rows / weights.sum()) * weights.sqrt()[:, None]
        self._features = rows.shape[1]
        values, vectors = torch.linalg.eigh((rows @ rows.T).double() / self._features)
        known = values > NEGLIGIBLE * values[-1].clamp(min=1e-30)
        spread = vectors[:, known] * values[known].rsqrt()
        self._basis = rows.T @ spread.float() / self._features
        """(features, dimensions): products of projected features are those of the features, over their number."""

    def _find_axes(self) -> None:
        """The principal axes of all images, and what the outputs should be along them."""
        weights, total = self._weights, self._weights.sum()
        size, keeps = self._basis.shape[1], self._count * self._basis.shape[1] <= MOST_KEPT
        squares, sums = torch.zeros(size, size, dtype=torch.double), torch.zeros(size, dtype=torch.double)
        products, aims, kept = torch.zeros(()).double(), torch.zeros(()).double(), []
        for block in torch.split(torch.arange(self._count), BLOCK):
            rows, own, wanted = self._project(block).double(), weights[block, None], self._aim(block).double()
            squares += rows.T @ (own * rows)
            sums += (own * rows).sum(dim=0)
            products = products + rows.T @ (own * wanted)
            aims = aims + (own * wanted).sum(dim=0)
            kept += [rows] if keeps else []
        self._middle, self._level = sums / total, aims / total
        values, self._axes = torch.linalg.eigh(squares - total * self._middle.outer(self._middle))
        self._values = values.clamp(min=0)
        self._turned = self._axes.T @ (products - total * self._middle.outer(self._level))
        self._kept = (torch.cat(kept) - self._middle) @ self._axes if keeps else None

    def solve(self, loss: Loss) -> Ridge:
        every = torch.arange(self._count)
        most = max(1, MOST_JUDGED // len(self._level))
        judged = every if self._count <= most else torch.linspace(0, self._count - 1, most).round().long()
        losses = {penalty: loss(self._answer(judged, penalty), judged) for penalty in PENALTIES}
        best = min(losses, key=lambda penalty: losses[penalty])
        coefficients = self._axes @ (self._turned / (self._values + best)[:, None])
        weight = (self._basis.double() @ coefficients).T * self._scale
        bias = self._level - self._middle @ coefficients - weight @ self._mean.double()
        return Ridge(weight.float(), bias.float(), self._mean, best, self._answer(every, best))

    def _answer(self, index: Tensor, penalty: float) -> Tensor:
        """The answers to these images that are left out, one at a time or group by group."""
        answers = torch.cat([self._leave_out(block, penalty) for block in torch.split(index, BLOCK)])
        place = torch.full((self._count,), -1)
        place[index] = torch.arange(len(index))
        for members in self._groups:
            wanted = place[members] >= 0
            if bool(wanted.any()):
                answers[place[members][wanted]] = self._leave_out_group(members, penalty)[wanted]
        return answers

    def _fit(self, index: Tensor, penalty: float) -> tuple[Tensor, Tensor, Tensor]:
        """Rows along the eigenvectors, those divided by the penalised eigenvalues, and the answers of the solution."""
        rows = self._turn(index) if self._kept is None else self._kept[index]
        shrunk = rows / (self._values + penalty)
        return rows, shrunk, shrunk @ self._turned + self._level

    def _leave_out(self, index: Tensor, penalty: float) -> Tensor:
        rows, shrunk, answers = self._fit(index, penalty)
        own = self._weights[index]
        leverage = own * ((rows * shrunk).sum(dim=1) + 1 / self._weights.sum())
        aims = self._aim(index).double()
        found: Tensor = aims - (aims - answers) / (1 - leverage).clamp(min=1e-9)[:, None]
        return found.float()

    def _leave_out_group(self, index: Tensor, penalty: float) -> Tensor:
        rows, shrunk, answers = self._fit(index, penalty)
        roots, aims = self._weights[index].sqrt()[:, None], self._aim(index).double()
        kernel = rows @ shrunk.T + 1 / self._weights.sum()
        errors = torch.linalg.solve(torch.eye(len(index)) - roots * kernel * roots.T, roots * (aims - answers))
        found: Tensor = answers - kernel @ (roots * errors)
        return found.float()

    def _turn(self, index: Tensor) -> Tensor:
        rows: Tensor = (self._project(index).double() - self._middle) @ self._axes
        return rows

    def _project(self, index: Tensor) -> Tensor:
        rows: Tensor = ((self._read(index).float() - self._mean) * self._scale) @ self._basis
        return rows


def _members(groups: Tensor) -> list[Tensor]:
    """The images of each group that has several."""
    order = groups.argsort(stable=True)
    starts = (groups[order].diff(prepend=groups[order][:1] - 1) != 0).nonzero().flatten().tolist()
    return [order[start:end] for start, end in pairwise([*starts, len(order)]) if end - start > 1]
