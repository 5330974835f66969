"""How long a plan takes and how much memory it needs, before it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memoro.backbones import Backbone
from memoro.clock import best_times
from memoro.images import Preprocessing, output_size
from memoro.lab.baselines import REGIMES, BaselinePlan
from memoro.lab.reproduce.measure import FOLDS, Budget
from memoro.lab.reproduce.methods import Method
from memoro.lab.reproduce.plan import Job
from memoro.training.run import build_forward

# In plain base passes per image, from `memoro lab bench train` (results/train.md).
KEPT, SHARED, RUN = 0.1, 1.0, 0.05
"""Reading an image's features, computing them, and one task's forward and backward from layer 0 on."""
UNMASKED = {"full": 3.2}
"""One run of a regime that changes base tokens, where it is not `UNMASKED_RUN`."""
UNMASKED_RUN = 2.2


@dataclass(frozen=True)
class Size:
    """How many images a set has."""

    train: int
    test: int


def base_passes(job: Job, sizes: dict[str, Size]) -> float:
    """What a job costs, in passes of the backbone over one image."""
    if job.kind == "counts":
        return 0.0
    if job.kind == "accuracy":
        return _accuracy_passes(job.methods, job.budget, sizes[job.sets[0]])
    if job.kind == "concat":
        # The first seed chooses the rates.
        budget = job.budget if job.number == 0 else replace(job.budget, judging_seeds=0)
        training = sum(_accuracy_passes([one], budget, sizes[name], 1) for one in job.methods for name in job.sets)
        return training + sum(sizes[name].test for name in job.sets) * 2.5 * len(job.sets)
    # Three sizes of a child, with up to three cases of each method, and its parents.
    cases = [method for method in job.methods for _ in range(3)]
    few = Size(min(840, sizes[job.sets[0]].train // 2), sizes[job.sets[0]].test * 3)
    return sum(_accuracy_passes(job.methods, job.budget, sizes[name], 1) for name in job.sets) + _accuracy_passes(
        cases, job.budget, few
    )


def training_steps(job: Job, sizes: dict[str, Size]) -> int:
    """Optimiser steps of its longest chain of runs: what shares passes counts once."""
    images = [_limited(sizes[name].train, job.budget) for name in job.sets]
    seeds = 1 if job.kind == "concat" else job.budget.seeds
    calls = sum(1 if method.composes else len(method.rates) + seeds for method in job.methods)
    calls = 2 if job.methods and job.methods[0].composes else calls
    return sum(calls * job.budget.step_count(count) for count in images)


def _limited(images: int, budget: Budget) -> int:
    return images if budget.most is None else min(images, budget.most)


def _accuracy_passes(methods: Sequence[Method], budget: Budget, size: Size, seeds: int | None = None) -> float:
    train = _limited(size.train, budget)
    folds = 1 if budget.val_fraction else budget.folds_of(train)
    held = train * (budget.val_fraction or folds / FOLDS)
    seeds = budget.seeds if seeds is None else seeds
    judging = [len(method.rates) * budget.judging_seeds * folds for method in methods]
    shown = budget.step_count(train) * budget.batch_size
    epochs = shown / train
    if not methods[0].composes:
        total = 0.0
        for method, runs in zip(methods, judging, strict=True):
            price = UNMASKED.get(method.regime, UNMASKED_RUN)
            learnt = shown * (1 if budget.val_fraction else 1 - 1 / FOLDS)  # images of a fold are not computed
            total += price * (runs * learnt + seeds * shown) + runs * held * epochs + seeds * size.test
        return total
    source = SHARED if budget.views is None else KEPT
    total = 0.0 if budget.views is None else 1.2 * train * budget.views
    judged = sum(_share(method) * runs for method, runs in zip(methods, judging, strict=True))
    measured = sum(_share(method) * seeds for method in methods)
    total += shown * (2 * source + RUN * (judged + measured))
    return total + held * epochs * (source + RUN * judged / 3) + size.test * (SHARED + RUN * measured / 3)


def _share(method: Method) -> float:
    """The part of the layers that a task's stream runs through."""
    depth = 12
    layer = REGIMES[method.regime].sizes(depth)["from_layer"] / depth if method.fork is None else method.fork
    return 1.0 - layer


def seconds_per_pass(backbone: Backbone, preprocessing: Preprocessing, batch: int = 8, rounds: int = 3) -> float:
    """Measured here: seconds of a plain pass, per image."""
    pixels = torch.zeros(batch, backbone.channels, *output_size(preprocessing)).to(backbone.device, backbone.dtype)
    with torch.no_grad():
        return best_times({"base": lambda: backbone.original(pixels)}, rounds)["base"] / batch


def training_bytes(backbone: Backbone, method: Method, batch: int, image_size: int) -> int:
    """Memory of a training step: weights, gradients, momentum, and what autograd keeps for backward.

    The last is counted by a forward pass of two images and scaled to the batch.
    """
    plan: dict[str, Any] = {"name": "memory", "labels": ["a", "b"], **method.sizes}
    model = REGIMES[method.regime].build(backbone, BaselinePlan(**plan))
    trained = REGIMES[method.regime].trains(model)
    weights = sum(tensor.nbytes for tensor in backbone.anatomy.tensors.values())
    own = sum(parameter.nbytes for parameter in model.parameters())
    states = 2 * sum(parameter.nbytes for parameter in trained.values())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    known = {
        tensor.untyped_storage().data_ptr() for tensor in [*backbone.anatomy.tensors.values(), *model.parameters()]
    }
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    pixels = torch.zeros(2, backbone.channels, image_size, image_size).to(backbone.device, backbone.dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = build_forward(backbone, [model])(pixels)[0]
    del out
    return int(weights + own + states + sum(kept.values()) * math.ceil(batch / 2))
