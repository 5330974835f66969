"""Calibration: probabilities and intervals, fitted on answers to images that the weights did not learn from."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memoro.heads import HEADS, HeadKind

MIN_IMAGES = 20
"""Fewer held-out images than this are not enough."""
MIN_EACH = 20
"""A label needs this many images with it, and as many without, for a temperature and a threshold of its own."""
COVERAGE = 0.9
"""Share of new images whose number lies within a regression's interval."""
TEMPERATURES = (0.05, 20.0)
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

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
    logits, count = logits.detach().double().cpu(), len(targets)
    targets = targets.cpu()
    if count < MIN_IMAGES or not bool(torch.isfinite(logits).all()):
        return None
    head = HEADS[kind]
    if head.has_numbers:
        # Split conformal prediction: the interval covers a new image with at least this probability.
        rank = min(count, math.ceil((count + 1) * COVERAGE))
        errors = (logits - targets.double()).abs().sort(dim=0).values[rank - 1]
        return Calibration((), (), tuple(errors.tolist()), count, source)
    if head.has_classes:
        return Calibration((fit_temperature(logits, targets)[0],), (), (), count, source)
    truth = targets.double()
    shared = fit_temperature(logits, truth)[0]
    temperatures, thresholds = [], []
    for answers, right in zip(logits.T, truth.T, strict=True):
        enough = MIN_EACH <= int(right.sum()) <= count - MIN_EACH
        temperatures.append(fit_temperature(answers, right)[0] if enough else shared)
        thresholds.append(_threshold(head.probabilities(answers / temperatures[-1]), right) if enough else 0.5)
    return Calibration(tuple(temperatures), tuple(thresholds), (), count, source)


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

    golden = (math.sqrt(5) - 1) / 2  # the loss is unimodal in the temperature: golden-section search
    for _ in range(steps):
        first, second = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, second) if loss(first) < loss(second) else (first, high)
    middle = (low + high) / 2
    return math.exp(middle), loss(middle) / len(targets)


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
