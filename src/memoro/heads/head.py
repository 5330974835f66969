"""What depends on the kind of a task's head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

HeadKind = Literal["softmax", "multilabel", "regression"]


class Table(NamedTuple):
    """Text in columns."""

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: the image's position, what was predicted, and what is true."""

    index: int
    predicted: str
    true: str


class Head(ABC):
    """What depends on the kind of a task's head."""

    kind: HeadKind
    plain: str
    """What users call the kind."""
    noun: str
    """What a label is."""
    main_metric: str
    """What runs are compared by; higher is better."""
    calibrated_metrics: tuple[str, ...] = ()
    """The metrics that a calibration changes."""
    has_classes = False
    """Whether each image has exactly one label."""
    has_numbers = False
    """Whether a label is the name of a number."""

    @abstractmethod
    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (…, labels) as probabilities in float32; a regression's numbers as they are."""

    @abstractmethod
    def losses(self, logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        """(b) the loss of each image: cross-entropy, binary cross-entropy or squared error."""

    def loss_sum(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """The summed loss of a batch, in float32 at least.

        `weights` are per class and have mean 1 over the training images, so the sum is still divided by the number of
        images. `sample_weight` (b) weights each image.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = self.losses(logits, targets, smoothing, weights)
        return (losses if sample_weight is None else losses * sample_weight).sum()

    def class_weights(self, targets: Tensor, classes: int) -> Tensor | None:
        """Weights that balance rare and common classes: mean 1 over the images (softmax), or the ratio of images
        without a label to those with it (multilabel). None for numbers."""
        return None

    @abstractmethod
    def measure(self, labels: Sequence[str], answers: Tensor, targets: Tensor) -> dict[str, Any]:
        """JSON-ready metrics of `probabilities` (n, labels) over a whole set."""

    @abstractmethod
    def answer(
        self, labels: Sequence[str], answers: Tensor, top: int | None, limits: Sequence[float]
    ) -> list[dict[str, Any]]:
        """The fields of each image's `Answer`, from `probabilities` (b, labels).

        With `probabilities` of the `top` labels only. `limits` are from a calibration, one for each label: the
        thresholds of several labels, or half the widths of the intervals of numbers.
        """

    @abstractmethod
    def figures(self, labels: Sequence[str], answers: Tensor, given: Tensor, targets: Tensor) -> Table:
        """A table with a row for each class, label or number, the worst first.

        `answers` are `probabilities` (n, labels); `given` says which labels a task with several gives.
        """

    @abstractmethod
    def mistakes(
        self, labels: Sequence[str], answers: Tensor, given: Tensor, targets: Tensor, most: int
    ) -> tuple[int, list[Mistake]]:
        """How many images were answered wrongly, and the most confident of these mistakes."""


def ranked(answers: Tensor) -> list[tuple[list[int], list[float]]]:
    """For each image its labels, best first, with their probabilities."""
    # Sorted for the whole batch at once: a row at a time is slow if there are many tasks.
    order = torch.argsort(answers, dim=-1, descending=True, stable=True)
    return list(zip(order.tolist(), answers.gather(-1, order).tolist(), strict=True))


def shown(labels: Sequence[str], order: list[int], shares: list[float], top: int | None) -> dict[str, float]:
    return {labels[i]: share for i, share in zip(order[:top], shares[:top], strict=True)}


def largest(values: Tensor, most: int) -> list[int]:
    """The positions of the largest values, the largest first."""
    order: list[int] = values.argsort(descending=True, stable=True)[:most].tolist()
    return order


def sort_rows(found: list[tuple[float, list[str]]]) -> list[list[str]]:
    """The rows by their number, the smallest first."""
    return [row for _, row in sorted(found, key=lambda one: one[0])]


def percent(value: Tensor) -> str:
    return f"{float(value):.0%}"
