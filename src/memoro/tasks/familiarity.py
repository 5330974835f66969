"""Familiarity: whether an image looks like those that a task was trained on, judged by the backbone's token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

MAX_DIRECTIONS = 128
MAX_BYTES = 54 << 10
"""Of directions and class means, in half precision: with 100 classes 31 directions of ViT-B, 57 of ViT-S."""
MAX_SCORES = 512
MIN_IMAGES = 20
"""Fewer images than this are not enough."""
FOLDS = 5
SHRINKAGE = 0.1
"""Share of the mean variance in each variance: that of few images is too small in most directions."""
LARGEST, SMALLEST = 1e6, 1e-12
"""No value is larger, no variance smaller."""
NEAREST = 1e-3
"""Distances to the background are at least this, so that they can be divided by."""
FALSE_ALARMS = 0.01
"""Share of a task's own images that may be called unfamiliar."""
MIN_ANSWERS = 100
"""Held-out images with answers of the task, below which they do not count: familiarity would be coarse."""
IN_DISTANCE, IN_SCORE = 0.2, 10.0
"""How much the energy of an answer counts, in its standard deviations: in the logarithm of a distance, and in a score,
to which answers that are more certain than most add no more than `MOST_CERTAIN`."""
MOST_CERTAIN, LEAST_CERTAIN = 0.5, -20.0


@dataclass(frozen=True, eq=False)
class Familiarity:
    """What a task's training images look like to the backbone: a Gaussian around each class mean.

    All classes have the same covariance: some principal directions, and one variance for all others. The distance of
    an image is the squared Mahalanobis distance of its token to the nearest mean, divided by the token's distance to
    the background: a task with diverse images is near to every plain image, and a plain image is near the background.
    An image whose answer has less energy than those of held-out images is further away.

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
    energy: tuple[float, float] = (0.0, 0.0)
    """Mean and standard deviation of the energy (`heads.energy`) of the task's answers to held-out images. 0 and 0: its
    answers do not count, because too few images were held out."""
    validated: Tensor | None = None
    """(n) distance of each validation image, whatever the task answers, where its answers to those count. A file does
    not have it."""
    out_of_fold: Tensor | None = None
    """(n) distance of each image that it was fitted on to a description without it, whatever the task answers. A file
    does not have it."""

    def with_answers(self, distances: Tensor, energies: Tensor) -> Familiarity:
        """The same with distances that depend on the task's answers.

        Takes the distances (n) of held-out images, and the energies (n) of the answers to them by weights that did not
        learn from them. Nothing changes for fewer than `MIN_ANSWERS` of them, or if all energies are the same.
        """
        values = energies.double().cpu()
        if len(values) < MIN_ANSWERS or not float(values.std()) > 0:
            return self
        statistics = float(values.mean()), float(values.std())
        far = distances.cpu() * _factor(standardise(energies.cpu(), *statistics))
        found = replace(self, distances=_quantiles(far), images=len(far), energy=statistics)
        return found if found.valid else self

    def limit(self, false_alarms: float = FALSE_ALARMS) -> float:
        """The distance beyond which an image is unfamiliar, as `Routing.apply` decides; infinite where none is."""
        shares = torch.arange(len(self.distances), device=self.distances.device) / len(self.distances)
        below = int((shares < false_alarms).sum())
        return float(self.distances[-below]) if below else math.inf

    @property
    def valid(self) -> bool:
        """Whether its values are within bounds, so that no product overflows: none that `fit_familiarity` gives is
        beyond them."""
        # As Python floats: in half precision the bounds are infinity and zero. Comparisons with NaN are false.
        bounds = [[float(bound) for bound in tensor.aminmax()] for tensor in self.tensors.values()]
        lengths = self.directions.float().square().sum(dim=-1)
        return (
            all(low >= -LARGEST and high <= LARGEST for low, high in bounds)
            and SMALLEST <= self.residual <= LARGEST
            and bool(((lengths - 1).abs() <= 0.05).all())
            and float(self.variances.min()) >= SMALLEST
            and float(self.distances[0]) >= 0
            and abs(self.energy[0]) <= LARGEST
            and 0 <= self.energy[1] <= LARGEST
            and bool((self.distances[1:] >= self.distances[:-1]).all())
        )

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
    """The descriptions of several tasks: a few products judge an image for all of them.

    Directions and class means of all tasks are concatenated, however many each has: tasks of very different sizes take
    no more memory and time than those of the same size.
    """

    def __init__(self, items: Sequence[Familiarity], device: torch.device | str = "cpu") -> None:
        origin = torch.stack([one.center.double() for one in items]).mean(dim=0)
        lengths = [len(one.distances) for one in items]
        # No distance is smaller than -1, so these are never counted.
        held_out = torch.full((len(items), max(lengths)), -1.0, device="cpu")
        offsets, readers, shifts, squares = [], [], [], []
        for at, one in enumerate(items):
            held_out[at, : lengths[at]] = one.distances.float()
            directions, scale = one.directions.double(), one.variances.double().rsqrt()
            means = one.means.double() * scale
            reader = (means * scale) @ directions  # the product of a class mean and an image, both scaled: linear in it
            away = one.center - origin
            offsets.append((directions @ away).float())
            readers.append(reader.float())
            shifts.append((reader @ away).float())
            squares.append(means.square().sum(dim=-1).float())
        self.origin = origin.float().to(device)
        self.center, self.background = (
            torch.stack([getattr(one, name) - origin for one in items]).float().to(device)
            for name in ("center", "background")
        )
        self.directions = torch.cat([one.directions.float() for one in items]).to(device)
        self.weights = torch.cat([one.variances.float().reciprocal() for one in items]).to(device)
        self.offsets, self.readers = torch.cat(offsets).to(device), torch.cat(readers).to(device)
        self.shifts, self.squares = torch.cat(shifts).to(device), torch.cat(squares).to(device)
        self.residual = torch.tensor([one.residual for one in items], device=device)
        self.energy = torch.tensor([one.energy for one in items], device=device)
        self.held_out, self.lengths = held_out.to(device), torch.tensor(lengths, device=device)
        self.classes = torch.tensor([len(one.means) for one in items], device=device)
        numbers = torch.arange(len(items), device=device)
        self.class_task = numbers.repeat_interleave(self.classes)
        """The number of the task that each class mean belongs to."""
        self.direction_task = numbers.repeat_interleave(torch.tensor([len(x.directions) for x in items], device=device))
        self._compare(items, origin, device)

    def _compare(self, items: Sequence[Familiarity], origin: Tensor, device: torch.device | str) -> None:
        """Prepares what `judge` compares tasks with: all class means, in a space where the mean of all covariances is
        the identity."""
        directions = torch.cat([one.directions.double() for one in items])
        residuals = torch.tensor([one.residual for one in items], dtype=torch.double, device="cpu")
        excess = torch.cat([one.variances.double() - one.residual for one in items])
        covariance = (directions.T * excess) @ directions / len(items)
        covariance += residuals.mean() * torch.eye(len(covariance), dtype=torch.double, device="cpu")
        values, vectors = torch.linalg.eigh(covariance)
        whiten = vectors * values.clamp(min=SMALLEST).rsqrt()
        found = [(one.means.double() @ one.directions.double() + one.center - origin) @ whiten for one in items]
        self.whiten, self.prototypes = whiten.float().to(device), torch.cat(found).float().to(device)

    def measure(self, tokens: Tensor, energies: Tensor | None = None) -> Tensor:
        """The distance of each image to each task's training images (b, tasks), from its token (b, dim) and the energy
        of each task's answer (b, tasks); without energies, whatever the tasks answer."""
        tokens = tokens.float() - self.origin
        squares = (tokens @ self.directions.T - self.offsets).square()
        along, scaled = (_sum(part, self.direction_task, self.center) for part in (squares, squares * self.weights))
        rest = (tokens.unsqueeze(1) - self.center).square().sum(-1) - along
        gaps = self.squares - 2 * (tokens @ self.readers.T - self.shifts)
        nearest = _reduce(gaps, self.class_task, self.center, "amin") + scaled
        distances = nearest.clamp(min=0) + rest.clamp(min=0) / self.residual
        away: Tensor = (tokens.unsqueeze(1) - self.background).norm(dim=-1)
        distances = distances / away.clamp(min=NEAREST)
        if energies is not None:
            distances = distances * _factor(standardise(energies, *self.energy.T))
        return distances.clamp(max=LARGEST)

    def judge(self, tokens: Tensor, energies: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of each image and task (b, tasks): the score, and the familiarity. Takes what `measure` takes.

        The score compares the tasks of the bank: the highest one tells whose image it is. It is the log-density per
        dimension, up to a constant, of a mixture of the task's classes, with one covariance for all classes of all
        tasks: with one for each task, those with diverse images would claim too many (results/trust.md). A task whose
        answer has little energy has a lower one. The familiarity is about one task alone: the share of its own held-out
        images that look at least as strange.
        """
        distances = self.measure(tokens, energies)
        # Not searchsorted, which ONNX does not have.
        shares = (self.held_out >= distances.unsqueeze(-1)).sum(dim=-1) / self.lengths
        whitened = (tokens.float() - self.origin) @ self.whiten
        away = whitened.square().sum(dim=-1, keepdim=True) + self.prototypes.square().sum(dim=-1)
        exponents = whitened @ self.prototypes.T - away / 2
        # logsumexp over the classes of each task.
        largest = _reduce(exponents, self.class_task, self.center, "amax")
        total = _sum((exponents - largest[:, self.class_task]).exp(), self.class_task, self.center)
        densities = largest + total.log() - self.classes.log()
        if energies is not None:
            densities = densities + IN_SCORE * standardise(energies, *self.energy.T).clamp(max=MOST_CERTAIN)
        return densities / tokens.shape[1], shares


def standardise(energies: Tensor, mean: Tensor | float, spread: Tensor | float) -> Tensor:
    """Energies in standard deviations of those of held-out images; 0 where those are not known."""
    spread = torch.as_tensor(spread, device=energies.device)
    known = (energies - mean) / spread.clamp(min=SMALLEST)
    return torch.where(spread > 0, known.clamp(LEAST_CERTAIN, -LEAST_CERTAIN), 0.0)


def _factor(standardised: Tensor) -> Tensor:
    """What the distances of images are multiplied by, from the standardised energies of the answers to them."""
    return (-IN_DISTANCE * standardised).exp()


def _sum(values: Tensor, owner: Tensor, tasks: Tensor) -> Tensor:
    return values.new_zeros(values.shape[0], len(tasks)).scatter_add(1, owner.expand_as(values), values)


def _reduce(values: Tensor, owner: Tensor, tasks: Tensor, how: str) -> Tensor:
    start = values.new_full((values.shape[0], len(tasks)), torch.inf if how == "amin" else -torch.inf)
    return start.scatter_reduce(1, owner.expand_as(values), values, how)


def fit_familiarity(tokens: Tensor, classes: Tensor | None, background: Tensor) -> Familiarity | None:
    """A description of training images from their tokens (n, dim), their classes (n), if each has one, and the mean
    token (dim) of synthetic images.

    The distances of held-out images are those of each fold to a description of the others. None for fewer than
    `MIN_IMAGES` images, and for tokens that are not finite or too large.
    """
    tokens = tokens.double().cpu()
    count = len(tokens)
    if count < MIN_IMAGES or not bool(torch.isfinite(tokens).all()):
        return None
    groups = torch.zeros(count, dtype=torch.long, device="cpu") if classes is None else classes.cpu()
    if count < 2 * len(set(groups.tolist())):  # images of their own class tell nothing about how much a class varies
        groups = torch.zeros_like(groups)
    background = background.float().cpu()
    whole = {**_describe(tokens, groups), "background": background}
    if not Familiarity(**whole, distances=torch.ones(1, device="cpu"), images=0).valid:
        return None
    fold = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu") % FOLDS
    found = torch.empty(count, device="cpu")
    for number in range(FOLDS):
        own = fold == number
        fields = {**_describe(tokens[~own], groups[~own]), "background": background}
        part = Familiarity(**fields, distances=torch.ones(1, device="cpu"), images=0)
        found[own] = FamiliarityBank([part]).measure(tokens[own])[:, 0]
    known = Familiarity(**whole, distances=_quantiles(found), images=count, out_of_fold=found)
    return known if known.valid else None


def _quantiles(distances: Tensor) -> Tensor:
    """The distances in ascending order; at most `MAX_SCORES` of them."""
    found = distances.sort().values
    if len(found) > MAX_SCORES:
        found = found[torch.linspace(0, len(found) - 1, MAX_SCORES, device="cpu").round().long()]
    return found


def _describe(tokens: Tensor, groups: Tensor) -> dict[str, Any]:
    """The fields of a description except for those about held-out images, rounded as a file holds them."""
    count, dim = tokens.shape
    center = tokens.mean(dim=0).float()
    tokens = tokens - center
    numbers, groups = torch.unique(groups, return_inverse=True)
    sizes = groups.bincount(minlength=len(numbers)).unsqueeze(1)
    means = tokens.new_zeros(len(numbers), dim).index_add_(0, groups, tokens) / sizes
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
