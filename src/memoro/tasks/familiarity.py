"""Familiarity: whether an image looks like those that a task was trained on, judged by the backbone's tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memoro.tasks.ridge import RidgeSystem

MAX_DIRECTIONS = 128
MAX_BYTES = 54 << 10
"""The most bytes of directions and class means, in half precision: with 100 classes, 31 directions for a ViT-B and 57
for a ViT-S."""
MAX_SCORES = 512
MIN_IMAGES = 20
"""The fewest images that are enough."""
FOLDS = 5
SHRINKAGE = 0.1
"""The share of the mean variance in each variance: with few images, variances are too small in most directions."""
LARGEST, SMALLEST = 1e6, 1e-12
"""No value is larger, no variance smaller."""
NEAREST = 1e-6
"""The smallest distance, so that it has a logarithm."""
LEAST_SPREAD = 1e-3
"""The smallest standard deviation of the two parts of strangeness: identical images have none to divide by."""
ROUTING = 10.0
"""How much strangeness counts beside log-densities in comparing tasks: chosen on held-out training images."""
FALSE_ALARMS = 0.01
"""Share of a task's own images that may be called unfamiliar."""
FEW_NOTICED = 0.5
"""A task that notices a smaller share of ordinary photographs is too diverse to tell."""
PRINCIPAL = 32
"""Principal directions that are kept of photographs: with all of 500, results are the same (results/trust.md)."""


@dataclass(frozen=True, eq=False)
class Others:
    """Pooled statistics of photographs that show nothing in particular: their mean and their principal directions."""

    mean: Tensor
    """(layers, statistics, dim)"""
    directions: Tensor
    """(k, layers, statistics, dim), each as long as the standard deviation along it."""

    @classmethod
    def of(cls, statistics: Tensor) -> Others:
        """Summarises statistics (n, layers, statistics, dim)."""
        rows = statistics.flatten(1).float()
        mean = rows.mean(dim=0)
        _, values, vectors = torch.linalg.svd((rows - mean) / math.sqrt(len(rows)), full_matrices=False)
        directions = (values[:PRINCIPAL, None] * vectors[:PRINCIPAL]).unflatten(1, statistics.shape[1:])
        return cls(mean.view(statistics.shape[1:]).half(), directions.half())

    def rows(self) -> Tensor:
        """Statistics (2 k, layers, statistics, dim) with this mean and this covariance."""
        mean, moved = self.mean.float(), self.directions.float() * math.sqrt(len(self.directions))
        return torch.cat([mean + moved, mean - moved])


@dataclass(frozen=True, eq=False)
class Familiarity:
    """What a task's training images look like to the backbone.

    An image's strangeness is the sum of two standardised parts. The first is the logarithm of the squared Mahalanobis
    distance of its token to the nearest class mean: all classes have the same covariance, some principal directions and
    one variance for all others. The token is the base's class token as it enters the last layer, which is less
    specialised than the final one (results/trust.md). The second is the answer of a linear layer on pooled statistics
    that separates the task's images from ordinary photographs; it is missing if there were none. So that it does not
    rest on how bright or sharp the images are, their mean after mild changes counts as the task's, too.
    """

    center: Tensor
    """(dim) the mean token"""
    directions: Tensor
    """(k, dim) orthonormal"""
    variances: Tensor
    """(k) within classes"""
    means: Tensor
    """(classes, k) of each class, along the directions, from the centre; one if images have no single class"""
    reader: Tensor
    """(features) the linear layer on the statistics from the first layer on that it reads; empty without one."""
    held_out: Tensor
    """(q) strangeness of the task's own held-out images, ascending; quantiles of more than `MAX_SCORES`"""
    residual: float
    """Variance within classes, along each of the other directions."""
    slope: float
    """Factor of the logarithm of the distance."""
    offset: float
    """Added to the strangeness, so that that of held-out images has the mean 0."""
    images: int
    """How many held-out images `held_out` stands for."""
    noticed: float = 1.0
    """Estimated share of ordinary photographs that `reader` alone tells from the task's images."""

    @property
    def coarse(self) -> bool:
        """Whether there are too few images, or too diverse ones, to tell what is unfamiliar."""
        return self.images * FALSE_ALARMS < 1 or self.noticed < FEW_NOTICED

    def limit(self, false_alarms: float = FALSE_ALARMS) -> float:
        """The strangeness beyond which an image is unfamiliar, as `Routing.apply` decides; infinite where none is."""
        shares = torch.arange(len(self.held_out), device=self.held_out.device) / len(self.held_out)
        below = int((shares < false_alarms).sum())
        return float(self.held_out[-below]) if below else math.inf

    @property
    def valid(self) -> bool:
        """Whether its values are within bounds, so that no product overflows: none that `fit_familiarity` gives is
        beyond them."""
        # As Python floats: in half precision the bounds are infinity and zero. Comparisons with NaN are false.
        bounds = [[float(bound) for bound in tensor.aminmax()] for tensor in self.tensors.values() if tensor.numel()]
        lengths = self.directions.float().square().sum(dim=-1)
        return (
            all(low >= -LARGEST and high <= LARGEST for low, high in bounds)
            and SMALLEST <= self.residual <= LARGEST
            and bool(((lengths - 1).abs() <= 0.05).all())
            and float(self.variances.min()) >= SMALLEST
            and 0 <= self.slope <= LARGEST
            and abs(self.offset) <= LARGEST
            and 0 <= self.noticed <= 1
            and bool((self.held_out[1:] >= self.held_out[:-1]).all())
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a file holds as tensors."""
        return {name: getattr(self, name) for name in TENSORS}

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


TENSORS = ("center", "directions", "variances", "means", "reader", "held_out")


def tensor_shapes(record: Mapping[str, int], dim: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a description's tensors, from its sizes: directions, classes, features, scores."""
    k = record["directions"]
    return {
        "center": (dim,),
        "directions": (k, dim),
        "variances": (k,),
        "means": (record["classes"], k),
        "reader": (record["features"],),
        "held_out": (record["scores"],),
    }


def entering_token(pooled: Tensor) -> Tensor:
    """The base's token (b, dim) as it enters the last layer, from statistics (b, layers, statistics, dim) of the last
    two layers or more."""
    return pooled[:, max(-2, -pooled.shape[1]), 0]


class FamiliarityBank:
    """The descriptions of several tasks: a few products judge an image for all of them.

    Directions and class means of all tasks are concatenated, however many each has: tasks of very different sizes take
    no more memory and time than those of the same size.
    """

    def __init__(self, items: Sequence[Familiarity], device: torch.device | str = "cpu") -> None:
        origin = torch.stack([one.center.double() for one in items]).mean(dim=0)
        lengths = [len(one.held_out) for one in items]
        # Nothing is less strange than minus infinity, so these are never counted.
        held_out = torch.full((len(items), max(lengths)), -math.inf, device="cpu")
        offsets, readers, shifts, squares = [], [], [], []
        for at, one in enumerate(items):
            held_out[at, : lengths[at]] = one.held_out.float()
            directions, scale = one.directions.double(), one.variances.double().rsqrt()
            means = one.means.double() * scale
            reader = (means * scale) @ directions  # the product of a class mean and an image, both scaled: linear in it
            away = one.center - origin
            offsets.append((directions @ away).float())
            readers.append(reader.float())
            shifts.append((reader @ away).float())
            squares.append(means.square().sum(dim=-1).float())
        self.origin = origin.float().to(device)
        self.center = torch.stack([one.center - origin for one in items]).float().to(device)
        self.directions = torch.cat([one.directions.float() for one in items]).to(device)
        self.weights = torch.cat([one.variances.float().reciprocal() for one in items]).to(device)
        self.offsets, self.readers = torch.cat(offsets).to(device), torch.cat(readers).to(device)
        self.shifts, self.squares = torch.cat(shifts).to(device), torch.cat(squares).to(device)
        self.residual, self.slope, self.offset = (
            torch.tensor([getattr(one, name) for one in items], device=device)
            for name in ("residual", "slope", "offset")
        )
        self.features = max(len(one.reader) for one in items)
        """How many of the last layers' statistics are read; descriptions that read fewer have zeros for the others."""
        padded = [torch.nn.functional.pad(one.reader.float(), (self.features - len(one.reader), 0)) for one in items]
        self.photographs = torch.stack(padded).to(device)
        self.held_out, self.lengths = held_out.to(device), torch.tensor(lengths, device=device)
        self.classes = torch.tensor([len(one.means) for one in items], device=device)
        numbers = torch.arange(len(items), device=device)
        self.class_task = numbers.repeat_interleave(self.classes)
        """The number of the task that each class mean belongs to."""
        sizes = torch.tensor([len(one.directions) for one in items], device=device)
        self.direction_task = numbers.repeat_interleave(sizes)
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

    def layers(self, statistics: int) -> int:
        """How many of the last layers it reads."""
        return max(2, self.features // (statistics * len(self.origin)))

    def measure(self, tokens: Tensor) -> Tensor:
        """The squared distance of tokens (b, dim) to the nearest class of each task (b, tasks)."""
        tokens = tokens.float() - self.origin
        squares = (tokens @ self.directions.T - self.offsets).square()
        along, scaled = (_sum(part, self.direction_task, self.center) for part in (squares, squares * self.weights))
        rest = (tokens.unsqueeze(1) - self.center).square().sum(-1) - along
        gaps = self.squares - 2 * (tokens @ self.readers.T - self.shifts)
        nearest = _reduce(gaps, self.class_task, self.center, "amin") + scaled
        return (nearest.clamp(min=0) + rest.clamp(min=0) / self.residual).clamp(NEAREST, LARGEST)

    def strangeness(self, pooled: Tensor) -> Tensor:
        """How strange images are to each task (b, tasks), from statistics (b, layers, statistics, dim)."""
        found = self.slope * self.measure(entering_token(pooled)).log() + self.offset
        if self.features:
            found = found - pooled.flatten(1)[:, -self.features :].float() @ self.photographs.T
        return found.clamp(-LARGEST, LARGEST)

    def judge(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """The score and the familiarity of each image for each task (b, tasks). Takes what `strangeness` takes.

        The score compares the tasks of the bank: the image most likely belongs to the task with the highest one. It is
        the log-density, up to a constant, of a mixture of the task's classes, less a multiple of the strangeness; per
        dimension. All classes of all tasks have one covariance: with one for each task, those with diverse images would
        claim too many. The familiarity is about one task alone: the share of its own held-out images that are at least
        as strange.
        """
        strangeness, tokens = self.strangeness(pooled), entering_token(pooled)
        # Not searchsorted, which ONNX does not have.
        shares = (self.held_out >= strangeness.unsqueeze(-1)).sum(dim=-1) / self.lengths
        whitened = (tokens.float() - self.origin) @ self.whiten
        away = whitened.square().sum(dim=-1, keepdim=True) + self.prototypes.square().sum(dim=-1)
        exponents = whitened @ self.prototypes.T - away / 2
        # logsumexp over the classes of each task.
        largest = _reduce(exponents, self.class_task, self.center, "amax")
        total = _sum((exponents - largest[:, self.class_task]).exp(), self.class_task, self.center)
        densities = largest + total.log() - self.classes.log()
        return (densities - ROUTING * strangeness) / tokens.shape[1], shares


def _sum(values: Tensor, owner: Tensor, tasks: Tensor) -> Tensor:
    return values.new_zeros(values.shape[0], len(tasks)).scatter_add(1, owner.expand_as(values), values)


def _reduce(values: Tensor, owner: Tensor, tasks: Tensor, how: str) -> Tensor:
    start = values.new_full((values.shape[0], len(tasks)), torch.inf if how == "amin" else -torch.inf)
    return start.scatter_reduce(1, owner.expand_as(values), values, how)


def fit_familiarity(
    statistics: Tensor, classes: Tensor | None, others: Others | None, changes: Tensor | None = None
) -> Familiarity | None:
    """A description of training images from their statistics (n, layers, statistics, dim), their classes (n), if each
    has one, and ordinary photographs, if there are any; `changes` (m, layers, statistics, dim) are what mild changes of
    some of the images add to their statistics.

    How strange held-out images are is found without them: distances by folds, the linear layer by leaving one out. None
    for fewer than `MIN_IMAGES` images, and for tokens that are not finite or too large.
    """
    tokens = entering_token(statistics).double().cpu()
    count = len(tokens)
    if count < MIN_IMAGES or not bool(torch.isfinite(tokens).all()):
        return None
    groups = torch.zeros(count, dtype=torch.long, device="cpu") if classes is None else classes.cpu()
    if count < 2 * len(set(groups.tolist())):  # images of their own class tell nothing about how much a class varies
        groups = torch.zeros_like(groups)
    nothing, one = torch.zeros(0, dtype=torch.float16, device="cpu"), torch.ones(1, device="cpu")
    plain: dict[str, Any] = {"reader": nothing, "held_out": one, "slope": 1.0, "offset": 0.0, "images": 0}
    whole = _describe(tokens, groups)
    if not Familiarity(**whole, **plain).valid:
        return None
    fold = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu") % FOLDS
    distances = torch.empty(count, device="cpu")
    for number in range(FOLDS):
        own = fold == number
        part = Familiarity(**_describe(tokens[~own], groups[~own]), **plain)
        distances[own] = FamiliarityBank([part]).measure(tokens[own])[:, 0]
    logarithms = distances.log()
    slope = 1 / max(float(logarithms.std()), LEAST_SPREAD)
    strange, offset = (logarithms - logarithms.mean()) * slope, -float(logarithms.mean()) * slope
    reader, noticed = nothing, 1.0
    if changes is not None and not bool(changes.isfinite().all()):
        changes = None
    if others is not None:
        reader, own_offset, answers, noticed = _separate(statistics, others, changes)
        strange, offset = strange - answers, offset + own_offset
    found: dict[str, Any] = {"reader": reader, "slope": slope, "offset": offset, "images": count, "noticed": noticed}
    known = Familiarity(**whole, held_out=_quantiles(strange), **found)
    return known if known.valid else None


def _separate(statistics: Tensor, others: Others, changes: Tensor | None) -> tuple[Tensor, float, Tensor, float]:
    """The linear layer that separates images from photographs, in standard deviations of its answers to the images: its
    weights, what is added to the strangeness, its answers to held-out images, and the share of photographs below the
    images' limit, if those are normally distributed.

    The mean image, changed, counts as much as all images together. Changed copies of all images would need as many
    passes, and answers without an image and its copies (LOG.md).
    """
    count, changed = len(statistics), statistics[:0].float().cpu()
    if changes is not None:
        changed = statistics.mean(dim=0, dtype=torch.float32).cpu() + changes.cpu()
    added = torch.cat([changed, others.rows()]).flatten(1)
    own, total = count + len(changed), count + len(added)
    aims = (torch.arange(total, device="cpu") < own).float()[:, None]
    balanced = torch.ones(total, device="cpu")
    balanced[count:own] = count / max(1, len(changed))
    balanced[:own] *= total / (2 * balanced[:own].sum())
    balanced[own:] = total / (2 * (total - own))

    def read(index: Tensor) -> Tensor:
        real = index < count
        rows = torch.empty(len(index), added.shape[1], device="cpu")
        rows[real] = statistics[index[real]].flatten(1).float().cpu()
        rows[~real] = added[index[~real] - count]
        return rows

    def loss(answers: Tensor, index: Tensor) -> float:
        return float((balanced[index, None] * (answers - aims[index]).square()).sum())

    solved = RidgeSystem(total, read, balanced).solve(lambda index: aims[index], loss)
    answers = solved.held_out[:count, 0]
    middle, spread = float(answers.mean()), max(float(answers.std()), LEAST_SPREAD)
    weight = solved.weight[0] / spread
    reader = weight.clamp(-6e4, 6e4).half()
    offset = (middle - float(solved.bias[0])) / spread - float((weight - reader.float()) @ solved.mean)
    limit = float(((answers - middle) / spread).quantile(FALSE_ALARMS))
    level = float(others.mean.flatten().float() @ reader.float()) - offset
    deviation = float((others.directions.flatten(1).float() @ reader.float()).norm())
    noticed = 0.5 * (1 + math.erf((limit - level) / max(deviation, NEAREST) / math.sqrt(2)))
    return reader, offset, (answers - middle) / spread, noticed


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
