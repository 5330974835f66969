"""Calibration: probabilities and intervals, fitted on answers to images that the weights did not learn from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from memoro.heads import HEADS, HeadKind

MIN_IMAGES = 20
"""Fewer held-out images than this are not enough."""
MIN_EACH = 20
"""A label needs this many images with it, and as many without, for a temperature and a threshold of its own."""
GOLDEN = (math.sqrt(5) - 1) / 2
COVERAGE = 0.9
"""Share of new images whose number lies within a regression's interval."""
TEMPERATURES = (0.05, 20.0)
MOST_FITTED = 1 << 24
"""Logits that a temperature is fitted on; of more, those of evenly spaced images. Above a quarter of it, in float32."""
PARTS = 4
"""Parts of held-out answers, each of which is judged by a calibration fitted on the others."""


@dataclass(frozen=True)
class Calibration:
    """How a task's logits become probabilities and intervals."""

    temperature: tuple[float, ...]
    """What logits are divided by: one number (softmax), one per label (multilabel), none (regression)."""
    thresholds: tuple[float, ...]
    """multilabel: the calibrated probability at or above which a label is predicted."""
    spread: tuple[float, ...]
    """regression: half the width of the interval that covers `COVERAGE` of new images, one per output."""
    images: int
    """How many it was fitted on."""
    source: str
    """What it was fitted on: `validation`, `4 folds`, or the name of a set."""

    def apply(self, logits: Tensor) -> Tensor:
        """Calibrated logits (…, labels); a regression's numbers as they are. The best label stays the best."""
        if len(self.temperature) == 1:
            return logits / self.temperature[0]
        return logits / logits.new_tensor(self.temperature) if self.temperature else logits

    def decide(self, logits: Tensor) -> Tensor:
        """Calibrated logits of a multilabel task, shifted so that its thresholds are at zero."""
        limits = logits.new_tensor(self.thresholds).logit() if self.thresholds else 0.0
        return self.apply(logits) - limits


def fit_calibration(kind: HeadKind, logits: Tensor, targets: Tensor, source: str) -> Calibration | None:
    """The calibration that fits answers (n, labels) to images that the weights did not learn from.

    None for fewer than `MIN_IMAGES` of them.
    """
    logits, count = logits.detach(), len(targets)
    if count < MIN_IMAGES or not bool(torch.isfinite(logits).all()):
        return None
    logits, targets = thin_out(logits, targets.to(logits.device))
    if logits.dtype == torch.float64 or logits.numel() * 4 <= MOST_FITTED:
        logits, targets = logits.cpu().double(), targets.cpu()  # MPS has no float64
    else:
        logits = logits.float()
    head = HEADS[kind]
    if head.has_numbers:
        # Split conformal prediction: the interval covers a new image with at least this probability.
        rank = min(len(logits), math.ceil((len(logits) + 1) * COVERAGE))
        errors = (logits - targets.to(logits.dtype)).abs().sort(dim=0).values[rank - 1]
        return Calibration((), (), tuple(errors.tolist()), count, source)
    if head.has_classes:
        return Calibration((fit_temperature(logits, targets)[0],), (), (), count, source)
    truth = targets.to(logits.dtype)
    shared, own = fit_temperature(logits, truth)[0], _fit_each(logits, truth)
    temperatures, thresholds = [], []
    for answers, right, fitted in zip(logits.T, truth.T, own.tolist(), strict=True):
        enough = MIN_EACH <= int(right.sum()) <= len(truth) - MIN_EACH
        temperatures.append(fitted if enough else shared)
        thresholds.append(_threshold(head.probabilities(answers / temperatures[-1]), right) if enough else 0.5)
    return Calibration(tuple(temperatures), tuple(thresholds), (), count, source)


def thin_out(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Answers (n, labels) and the targets (n, …) on the same device: all, or those of evenly spaced images."""
    most = max(MIN_IMAGES, MOST_FITTED // logits.shape[1])
    if len(targets) <= most:
        return logits, targets
    kept = torch.linspace(0, len(targets) - 1, most, dtype=torch.double, device="cpu").round().long().to(logits.device)
    return logits[kept], targets[kept]


def decide_unseen(kind: HeadKind, logits: Tensor, targets: Tensor) -> Tensor | None:
    """What `Calibration.decide` gives for each part of these answers by a calibration fitted on the other parts.

    A calibration looks better than it is on the answers that it was fitted on. None if too few remain to fit one.
    """
    part = torch.randperm(len(targets), generator=torch.Generator("cpu").manual_seed(0), device="cpu") % PARTS
    logits, targets = logits.detach().cpu(), targets.cpu()
    decided = logits.clone()
    for number in range(PARTS):
        calibration = fit_calibration(kind, logits[part != number], targets[part != number], "the other parts")
        if calibration is None:
            return None
        decided[part == number] = calibration.decide(logits[part == number])
    return decided


def describe_calibration(calibration: Calibration | None, images: int) -> str:
    """What the record of a training says about its calibration, from this many images."""
    if calibration is not None:
        return f"{calibration.images} held-out images ({calibration.source})"
    if images < MIN_IMAGES:
        return f"none: fewer than {MIN_IMAGES} images were held out"
    return "none: not all logits are finite"


def fit_temperature(
    logits: Tensor, targets: Tensor, bounds: tuple[float, float] = TEMPERATURES, steps: int = 40
) -> tuple[float, float]:
    """The temperature with the lowest mean loss, and that loss. It is pulled towards 1 as by one more image: answers
    without a mistake would have none."""
    low, high = map(math.log, bounds)

    def loss(logarithm: float) -> float:
        scaled = logits / math.exp(logarithm)
        if targets.dtype.is_floating_point:
            total = functional.binary_cross_entropy_with_logits(scaled, targets, reduction="sum") / max(
                1, targets.numel() // len(targets)
            )
        else:
            total = functional.cross_entropy(scaled, targets, reduction="sum")
        return float(total) + logarithm**2 / 2

    # The loss is unimodal in the temperature: golden-section search.
    first, second = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    losses = loss(first), loss(second)
    for _ in range(steps):
        if losses[0] < losses[1]:
            high, second = second, first
            first = high - GOLDEN * (high - low)
            losses = loss(first), losses[0]
        else:
            low, first = first, second
            second = low + GOLDEN * (high - low)
            losses = losses[1], loss(second)
    middle = (low + high) / 2
    return math.exp(middle), loss(middle) / len(targets)


def _fit_each(logits: Tensor, truth: Tensor, steps: int = 40) -> Tensor:
    """`fit_temperature` for each label (n, labels) by itself, all in one search."""
    low, high = (torch.full_like(logits[0], math.log(bound)) for bound in TEMPERATURES)

    def loss(logarithm: Tensor) -> Tensor:
        scaled = logits / logarithm.exp()
        each = functional.binary_cross_entropy_with_logits(scaled, truth, reduction="none").sum(dim=0)
        return each + logarithm.square() / 2

    for _ in range(steps):
        first, second = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        left = loss(first) < loss(second)
        low, high = torch.where(left, low, first), torch.where(left, second, high)
    return ((low + high) / 2).exp()


def _threshold(answers: Tensor, truth: Tensor) -> float:
    """The threshold, between the probabilities of two images, with the highest F1."""
    order = answers.argsort(descending=True)
    ranked = answers[order].double()
    hits = truth[order].cumsum(0)
    f1 = 2 * hits / (torch.arange(1, len(truth) + 1, device=truth.device) + truth.sum())
    f1[:-1][ranked[:-1] == ranked[1:]] = -1.0  # equal images cannot be told apart
    best = int(f1.argmax())
    below = ranked[best + 1] if best + 1 < len(ranked) else ranked.new_zeros(())
    return float(((ranked[best] + below) / 2).clamp(0.01, 0.99))
