"""Familiarity: whether an image looks like those that a task was trained on, judged by the backbone's token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_DIRECTIONS = 128
MAX_BYTES = 48 << 10
"""Of the directions, in half precision: 32 of ViT-B, 64 of ViT-S."""
MAX_SCORES = 512
MIN_IMAGES = 20
"""Fewer images than this say too little."""
FOLDS = 5
SHRINKAGE = 0.1
"""Share of the mean variance in each variance: that of few images is too small in most directions."""
FALSE_ALARMS = 0.01
"""Share of a task's own images that may be called unfamiliar."""


@dataclass(frozen=True, eq=False)
class Familiarity:
    """What a task's training images look like to the backbone: a Gaussian around each class mean.

    All classes have the same covariance: some principal directions, and one variance for all others. The distance of
    an image is the squared Mahalanobis distance of its token to the nearest mean.

    The token is the base's class token as it enters the last layer, which is less specialised than the final one
    (results/trust.md).
    """

    center: Tensor
    """(dim) the mean token"""
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


TENSORS = ("center", "directions", "variances", "means", "distances")


def tensor_shapes(record: Mapping[str, int], dim: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a description's tensors, from its sizes: directions, classes, scores."""
    k = record["directions"]
    return {
        "center": (dim,),
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
        self.center = torch.stack([one.center.float() for one in items]).to(device)
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
        self.sorted = [one.distances.float().to(device) for one in items]
        self.volume = torch.tensor([_log_determinant(one) for one in items], device=device)

    def measure(self, tokens: Tensor) -> Tensor:
        """The distance of each image to each task's training images (b, tasks), from its token (b, dim)."""
        tokens = tokens.float()
        along = (tokens @ self.directions.T).reshape(-1, *self.offsets.shape) - self.offsets
        rest = (tokens.unsqueeze(1) - self.center).square().sum(-1) - along.square().sum(-1)
        scaled = along * self.weights
        products = torch.einsum("btk,tck->btc", scaled, self.means)
        nearest = (self.squares - 2 * products).amin(-1) + scaled.square().sum(-1)
        distances: Tensor = nearest.clamp(min=0) + rest.clamp(min=0) / self.residual
        return distances

    def judge(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of each image and task (b, tasks): the score, and the familiarity.

        The score is the log-density per dimension, up to a constant of the backbone: it is comparable between tasks,
        and the highest one tells whose image it is (results/trust.md). The familiarity is the share of the task's own
        held-out images that look at least as strange.
        """
        distances = self.measure(tokens)
        scores = -(distances + self.volume) / (2 * tokens.shape[1])
        columns = zip(distances.T.contiguous(), self.sorted, strict=True)
        shares = [1 - torch.searchsorted(own, column) / len(own) for column, own in columns]
        return scores, torch.stack(shares, dim=1)


def _log_determinant(one: Familiarity) -> float:
    """Of the covariance."""
    others = one.directions.shape[1] - len(one.directions)
    return float(one.variances.double().log().sum()) + others * math.log(one.residual)


def fit_familiarity(tokens: Tensor, classes: Tensor | None, *, seed: int = 0) -> Familiarity | None:
    """A description of training images from their tokens (n, dim) and classes (n), if each has one.

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
    whole = _describe(tokens, groups)
    if not all(bool(torch.isfinite(torch.as_tensor(value)).all()) for value in whole.values()):
        return None  # beyond half precision
    fold = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) % FOLDS
    found = torch.empty(count)
    for number in range(FOLDS):
        own = fold == number
        part = Familiarity(**_describe(tokens[~own], groups[~own]), distances=torch.ones(1), images=0)
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
    k = max(1, min(MAX_DIRECTIONS, MAX_BYTES // (2 * dim), dim, count - 1))
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
