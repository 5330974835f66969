"""Solving a read-out: a linear layer on the backbone's pooled statistics, in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from memoro.heads import HEADS, HeadKind, Scale
from memoro.tasks.calibration import fit_temperature, thin_out
from memoro.tasks.ridge import RidgeSystem
from memoro.tasks.spec import ReadOut, round_half
from memoro.tasks.task import Task

TEMPERATURES = (0.005, 5.0)
"""Answers of a regression to classes are between 0 and 1, or a little beyond."""


@dataclass(frozen=True)
class SolvedReadOut:
    """What `Task.attach_readout` takes, and the answers that calibrate and score it."""

    reads: ReadOut
    weight: Tensor
    """(labels, features), rounded to what float16 can hold, except for numbers far from 1."""
    bias: Tensor
    """(labels)"""
    held_out: Tensor
    """(m, labels): the logits for training images, of solutions without them and without their near-duplicates. Those
    of images without weight are left out of every solution."""
    answered: Tensor
    """(m) the numbers of these images: all of them, unless the answers would take too much memory."""
    penalty: float

    def attach(self, task: Task, share: float) -> None:
        """Makes it the task's read-out, with this share of its logits."""
        task.attach_readout(replace(self.reads, share=share), self.weight, self.bias)


def solve_readout(
    kind: HeadKind,
    reads: ReadOut,
    factorise: Callable[[Tensor | None], RidgeSystem],
    targets: Tensor,
    labels: int,
    *,
    sample_weight: Tensor | None = None,
    balance: bool = False,
    groups: Tensor | None = None,
) -> SolvedReadOut:
    """The read-out of `labels` outputs with the smallest squared error on training images.

    `factorise` gives the system of their statistics with these weights (n), `targets` are those of all. Images of one
    group (n) are left out together, those with a `sample_weight` (n) of 0 are not learned from. The penalty has the
    smallest loss of leave-one-out answers: cross-entropy, or squared error for numbers. A temperature that fits them is
    part of the weights, so logits are calibrated.
    """
    learned = torch.ones(len(targets), device="cpu") > 0 if sample_weight is None else sample_weight > 0
    head, weights = HEADS[kind], sample_weight
    scale = Scale.of(targets[learned]) if head.has_numbers else None
    several = not head.has_classes and scale is None
    middle = torch.full((labels,), 0.5 if several else 0.0, device="cpu")
    if balance and head.has_classes:
        by_class = head.class_weights(targets[learned], labels)
        assert by_class is not None
        weights = by_class[targets] if weights is None else weights * by_class[targets]
    elif balance and several:  # as if each label were on half of the images
        middle = targets[learned].float().mean(dim=0)

    def aim(index: Tensor) -> Tensor:
        if head.has_classes:
            return one_hot(targets[index], labels).float()
        return targets[index].float() if scale is None else scale.apply(targets[index]).float()

    def loss(answers: Tensor, index: Tensor) -> float:
        own = learned[index]
        if scale is not None:
            return float((answers[own] - aim(index[own])).square().mean())
        return fit(answers[own] - middle, index[own], 12)[1]

    def fit(answers: Tensor, index: Tensor, steps: int) -> tuple[float, float]:
        answers, index = thin_out(answers, index)
        wanted = targets[index] if head.has_classes else targets[index].float()
        return fit_temperature(answers, wanted, TEMPERATURES, steps)

    solved = factorise(weights).solve(aim, loss, groups)
    if scale is not None:
        weight = solved.weight * scale.std.float()[:, None]
        bias, held_out = scale.undo(solved.bias), scale.undo(solved.held_out)
    else:
        own = learned[solved.answered]
        temperature, _ = fit(solved.held_out[own] - middle, solved.answered[own], 40)
        weight, bias = solved.weight / temperature, (solved.bias - middle) / temperature
        held_out = (solved.held_out - middle) / temperature
    rounded = round_half(weight)
    bias = bias + (weight - rounded) @ solved.mean  # at the mean image, answers are as before rounding
    return SolvedReadOut(reads, rounded, bias.float(), held_out.float(), solved.answered, solved.penalty)
