"""Familiarity: whether an image looks like those that a task was trained on, judged by the backbone's token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_DIRECTIONS = 128
MAX_BYTES = 54 << 10
"""Of directions and class means, in half precision: with 100 classes 31 directions of ViT-B, 57 of ViT-S."""
MAX_SCORES = 512
MIN_IMAGES = 20
"""Fewer images than this say too little."""
FOLDS = 5
SHRINKAGE = 0.1
"""Share of the mean variance in each variance: that of few images is too small in most directions."""
SMALLEST = 1e-12
"""Variances are at least this."""
NEAREST = 1e-3
"""Distances to the background are at least this, so that they can be divided by."""
FALSE_ALARMS = 0.01
"""Share of a task's own images that may be called unfamiliar."""


@dataclass(frozen=True, eq=False)
class Familiarity:
    """What a task's training images look like to the backbone: a Gaussian around each class mean.

    All classes have the same covariance: some principal directions, and one variance for all others. The distance of
    an image is the squared Mahalanobis distance of its token to the nearest mean, divided by the token's distance to
    the background: a task with diverse images is near to every plain image, and a plain image is near the background.

    The token is the base's class token as it enters the last layer, which is less specialised than the final one
    (results/trust.md).
    """

    center: Tensor
    """(dim) the mean token"""
    background: Tensor
    """(dim) the mean token of synthetic images"""
    directions: Tensor
    """(k, dim) orthonormal"""
    variances: Tensor
    """(k) within classes"""
    means: Tensor
    """(classes, k) of each class, along the directions, from the centre; one where images have no single class"""
    distances: Tensor
    """(q) of the task's own held-out images, ascending; quantiles where there are more than `MAX_SCORES`"""
    residual: float
    """Variance within classes, along each of the other directions."""
    images: int
    """How many held-out images `distances` stands for."""

    def limit(self, false_alarms: float = FALSE_ALARMS) -> float:
        """The distance beyond which an image is unfamiliar."""
        return float(self.distances[-max(1, math.ceil(false_alarms * len(self.distances)))])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a file holds as tensors."""
        return {name: getattr(self, name) for name in TENSORS}

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


TENSORS = ("center", "background", "directions", "variances", "means", "distances")


def tensor_shapes(record: Mapping[str, int], dim: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a description's tensors, from its sizes: directions, classes, scores."""
    k = record["directions"]
    return {
        "center": (dim,),
        "background": (dim,),
        "directions": (k, dim),
        "variances": (k,),
        "means": (record["classes"], k),
        "distances": (record["scores"],),
    }


class FamiliarityBank:
    """The descriptions of several tasks, stacked: a few products judge an image for all of them."""

    def __init__(self, items: Sequence[Familiarity], device: torch.device | str = "cpu") -> None:
        k, classes = (max(one.means.shape[axis] for one in items) for axis in (1, 0))
        dim, count = len(items[0].center), len(items)
        self.center, self.background = (
            torch.stack([getattr(one, name).float() for one in items]).to(device) for name in ("center", "background")
        )
        directions, weights = torch.zeros(count, k, dim), torch.zeros(count, k)
        means = torch.full((count, classes, k), torch.inf)
        for at, one in enumerate(items):
            own = len(one.directions)
            directions[at, :own] = one.directions.float()
            weights[at, :own] = one.variances.float().rsqrt()
            means[at, : len(one.means)] = 0.0
            means[at, : len(one.means), :own] = one.means.float() * weights[at, :own]
        self.directions, self.weights = directions.flatten(0, 1).to(device), weights.to(device)
        self.offsets = (directions @ self.center.cpu().unsqueeze(-1)).squeeze(-1).to(device)
        self.means, self.squares = means.nan_to_num(posinf=0.0).to(device), means.square().sum(-1).to(device)
        self.residual = torch.tensor([one.residual for one in items], device=device)
        lengths = [len(one.distances) for one in items]
        held_out = torch.full((count, max(lengths)), -1.0)  # no distance is smaller, so these are never counted
        for at, one in enumerate(items):
            held_out[at, : lengths[at]] = one.distances.float()
        self.held_out, self.lengths = held_out.to(device), torch.tensor(lengths, device=device)
        self._compare(items, device)

    def _compare(self, items: Sequence[Familiarity], device: torch.device | str) -> None:
        """Prepares what `judge` compares tasks with: all class means, in a space where the mean of all covariances is
        the identity."""
        directions = torch.cat([one.directions.double() for one in items])
        residuals = torch.tensor([one.residual for one in items], dtype=torch.double)
        excess = torch.cat([one.variances.double() - one.residual for one in items])
        covariance = (directions.T * excess) @ directions / len(items)
        covariance += residuals.mean() * torch.eye(len(covariance), dtype=torch.double)
        values, vectors = torch.linalg.eigh(covariance)
        whiten = vectors * values.clamp(min=SMALLEST).rsqrt()
        origin = torch.stack([one.center.double() for one in items]).mean(dim=0)
        found = [(one.means.double() @ one.directions.double() + one.center - origin) @ whiten for one in items]
        at = torch.zeros(len(items), max(map(len, found)), dtype=torch.long)
        missing = torch.ones_like(at, dtype=torch.bool)
        start = 0
        for row, own in enumerate(found):
            at[row, : len(own)] = torch.arange(start, start + len(own))
            missing[row, : len(own)] = False
            start += len(own)
        self.origin, self.whiten = origin.float().to(device), whiten.float().to(device)
        self.prototypes = torch.cat(found).float().to(device)
        self.at, self.missing = at.to(device), missing.to(device)

    def measure(self, tokens: Tensor) -> Tensor:
        """The distance of each image to each task's training images (b, tasks), from its token (b, dim)."""
        tokens = tokens.float()
        along = (tokens @ self.directions.T).reshape(-1, *self.offsets.shape) - self.offsets
        rest = (tokens.unsqueeze(1) - self.center).square().sum(-1) - along.square().sum(-1)
        scaled = along * self.weights
        products = torch.einsum("btk,tck->btc", scaled, self.means)
        nearest = (self.squares - 2 * products).amin(-1) + scaled.square().sum(-1)
        distances = nearest.clamp(min=0) + rest.clamp(min=0) / self.residual
        away: Tensor = (tokens.unsqueeze(1) - self.background).norm(dim=-1)
        return distances / away.clamp(min=NEAREST)

    def judge(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of each image and task (b, tasks): the score, and the familiarity.

        The score compares the tasks of the bank: the highest one tells whose image it is. It is the log-density per
        dimension, up to a constant, of a mixture of the task's classes, with one covariance for all classes of all
        tasks: with one for each task, those with diverse images would claim too many (results/trust.md). The
        familiarity is about one task alone: the share of its own held-out images that look at least as strange.
        """
        distances = self.measure(tokens)
        # Not searchsorted, which ONNX does not have.
        shares = (self.held_out >= distances.unsqueeze(-1)).sum(dim=-1) / self.lengths
        whitened = (tokens.float() - self.origin) @ self.whiten
        away = whitened.square().sum(dim=-1, keepdim=True) + self.prototypes.square().sum(dim=-1)
        exponents = (whitened @ self.prototypes.T - away / 2)[:, self.at].masked_fill(self.missing, -torch.inf)
        densities = exponents.logsumexp(dim=-1) - (~self.missing).sum(dim=-1).log()
        return densities / tokens.shape[1], shares


def fit_familiarity(tokens: Tensor, classes: Tensor | None, background: Tensor, *, seed: int = 0) -> Familiarity | None:
    """A description of training images from their tokens (n, dim), their classes (n), if each has one, and the mean
    token (dim) of synthetic images.

    The distances of held-out images are those of each fold to a description of the others. None for fewer than
    `MIN_IMAGES` images.
    """
    tokens = tokens.double().cpu()
    count = len(tokens)
    if count < MIN_IMAGES or not bool(torch.isfinite(tokens).all()):
        return None
    groups = torch.zeros(count, dtype=torch.long) if classes is None else classes.cpu()
    if count < 2 * len(set(groups.tolist())):  # images of their own class tell nothing about how much a class varies
        groups = torch.zeros_like(groups)
    background = background.float().cpu()
    whole = {**_describe(tokens, groups), "background": background}
    if not all(bool(torch.isfinite(torch.as_tensor(value)).all()) for value in whole.values()):
        return None  # beyond half precision
    fold = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) % FOLDS
    found = torch.empty(count)
    for number in range(FOLDS):
        own = fold == number
        fields = {**_describe(tokens[~own], groups[~own]), "background": background}
        part = Familiarity(**fields, distances=torch.ones(1), images=0)
        found[own] = FamiliarityBank([part]).measure(tokens[own])[:, 0]
    found = found.sort().values
    if count > MAX_SCORES:
        found = found[torch.linspace(0, count - 1, MAX_SCORES).round().long()]
    return Familiarity(**whole, distances=found, images=count)


def _describe(tokens: Tensor, groups: Tensor) -> dict[str, Any]:
    """The fields of a description except for those about held-out images, rounded as a file holds them."""
    count, dim = tokens.shape
    center = tokens.mean(dim=0).float()
    tokens = tokens - center
    numbers, groups = torch.unique(groups, return_inverse=True)
    sizes = groups.bincount(minlength=len(numbers)).unsqueeze(1)
    means = torch.zeros(len(numbers), dim, dtype=tokens.dtype).index_add_(0, groups, tokens) / sizes
    k = max(1, min(MAX_DIRECTIONS, MAX_BYTES // (2 * (dim + len(numbers))), dim, count - 1))
    directions = torch.linalg.eigh(tokens.T @ tokens).eigenvectors[:, -k:].T.half()
    own = directions.to(tokens.dtype)
    within = tokens - means[groups]
    along = within @ own.T
    average = within.square().sum(dim=1).mean() / dim
    # Outside the directions the class means are not known.
    rest = (tokens.square().sum() - (tokens @ own.T).square().sum()).clamp(min=0) / (count * max(dim - k, 1))
    # Tokens that are all the same have no variance.
    variance = (SHRINKAGE * average).clamp(min=1e-9)
    return {
        "center": center,
        "directions": directions,
        "variances": ((1 - SHRINKAGE) * along.square().mean(dim=0) + variance).float(),
        "means": (means @ own.T).half(),
        "residual": float((1 - SHRINKAGE) * rest + variance),
    }
