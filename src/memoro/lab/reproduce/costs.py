"""What methods cost: parameters and FLOPs, counted by running them (table 5); an estimate of how long a job takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from memoro.backbones import Backbone, load_backbone
from memoro.engine.composition import compose
from memoro.lab.baselines import BASELINES, REGIMES, BaselinePlan
from memoro.lab.baselines.dense import run_dense
from memoro.lab.bench.models import LABELS, random_vit
from memoro.lab.reproduce.measure import FOLDS, Budget
from memoro.lab.reproduce.methods import Method
from memoro.lab.reproduce.plan import Job

ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("full", "full", {}),
    ("head", "head", {}),
    ("class-full", "class-full", {}),
    *((f"memory-full {cells}", "memory-full", {"cells": cells}) for cells in (1, 5, 10, 20)),
    ("class (masked)", "memory", {"cells": 0}),
    ("memory 5 (masked)", "memory", {"cells": 5}),
    ("memory 5 (masked), fork 8", "memory", {"cells": 5, "from_layer": 8}),
    ("side 8, fork 8", "side", {"rank": 8}),
    ("adapter 5", "adapter", {"width": 5}),
    ("adapter 20", "adapter", {"width": 20}),
    ("lora 8", "lora", {"rank": 8}),
)
"""Name, regime and sizes of the rows of table 5."""


def count_flops(run: Callable[[Tensor], Any], pixels: Tensor) -> int:
    """FLOPs of the matrix products of a call, of which attention has some: fused kernels would hide them."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(pixels)
    return int(counter.get_total_flops())


def count_vit() -> dict[str, Any]:
    """Counts of all rows on ViT-B/32 at 224 px, and the FLOPs of a plain pass at other sizes."""
    backbone = load_backbone(random_vit(32))
    passes = {size: torch.zeros(1, 3, size, size, device="cpu") for size in (112, 224, 384)}
    return {
        "passes": {
            str(size): count_flops(partial(run_dense, backbone.anatomy, {}), pixels) for size, pixels in passes.items()
        },
        "rows": count_methods(backbone, ROWS, (224, 224)),
    }


def count_methods(
    backbone: Backbone, rows: Iterable[tuple[str, str, dict[str, Any]]], image_size: tuple[int, int]
) -> list[dict[str, Any]]:
    """What each method (name, regime, sizes) adds to one pass of the backbone for one image: `parameters` without the
    head, those of the `head`, and `flops` without the head's, two for a multiplication and an addition.

    A fully fine-tuned model shares nothing with the backbone: its pass counts as a whole.
    """
    pixels = torch.zeros(1, backbone.channels, *image_size).to(backbone.device, backbone.dtype)
    counts = []
    for name, regime, sizes in rows:
        model = REGIMES[regime].build(backbone, BaselinePlan("count", LABELS, **sizes))
        head = sum(parameter.numel() for parameter in model.head.parameters())
        total = sum(parameter.numel() for parameter in REGIMES[regime].trains(model).values())
        model.requires_grad_(False)
        if regime in BASELINES:
            own = count_flops(model, pixels)
            base = 0 if regime == "full" else count_flops(partial(run_dense, backbone.anatomy, {}), pixels)
        else:
            composition = compose(backbone, [model])
            composition(pixels)  # keys and values of memory are computed once, when a task is attached
            own, base = count_flops(composition, pixels), count_flops(backbone.original, pixels)
        flops = own - base - 2 * len(LABELS) * backbone.dim
        counts.append({"name": name, "parameters": total - head, "head": head, "flops": flops})
    return counts


# ---------------------------------------------------------------------------------------------------------- estimates

# In plain base passes per image, from `memoro lab bench train` (results/train.md).
KEPT, SHARED, RUN = 0.1, 1.0, 0.05
"""Reading an image's features, computing them, and one task's forward and backward from layer 0 on."""
FULL_RUN, UNMASKED_RUN = 3.2, 2.2
"""One run of full fine-tuning, and of another regime that changes base tokens."""


class Size(NamedTuple):
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
        budget = replace(job.budget, seeds=1, judging_seeds=job.budget.judging_seeds if job.number == 0 else 0)
        training = sum(_accuracy_passes([one], budget, sizes[name]) for one in job.methods for name in job.sets)
        return training + sum(sizes[name].test for name in job.sets) * 2.5 * len(job.sets)
    # Three sizes of a child, with up to three cases of each method, and its parents.
    cases = [method for method in job.methods for _ in range(3)]
    few = Size(min(840, sizes[job.sets[0]].train // 2), sizes[job.sets[0]].test * 3)
    parents = sum(_accuracy_passes(job.methods, replace(job.budget, seeds=1), sizes[name]) for name in job.sets)
    return parents + _accuracy_passes(cases, job.budget, few)


def _accuracy_passes(methods: Sequence[Method], budget: Budget, size: Size) -> float:
    train = size.train if budget.most is None else min(size.train, budget.most)
    folds = 1 if budget.val_fraction else budget.folds_of(train)
    shown = budget.step_count(train) * budget.batch_size
    judged = (budget.val_fraction or folds / FOLDS) * shown  # held-out images, after each epoch
    own = 0.0
    for method in methods:
        runs = len(method.rates) * budget.judging_seeds * folds
        own += _price(method) * (runs * (shown + judged / 3) + budget.seeds * (shown + size.test / 3))
    if not methods[0].composes:
        return own
    source = SHARED if budget.views is None else KEPT
    filled = 0.0 if budget.views is None else 1.2 * train * budget.views
    return own + filled + source * (2 * shown + judged) + SHARED * size.test


def _price(method: Method) -> float:
    """One run's forward and backward, for the part of the layers that a task's stream runs through."""
    if not method.composes:
        return FULL_RUN if method.regime == "full" else UNMASKED_RUN
    depth = 12
    layer = REGIMES[method.regime].sizes(depth)["from_layer"] / depth if method.fork is None else method.fork
    return RUN * (1.0 - layer)
