"""Table 5: what each method adds to ViT-B/32, in parameters and FLOPs, counted by running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from memoro.backbones import Backbone, load_backbone
from memoro.engine.composition import compose
from memoro.lab.baselines import BASELINES, REGIMES, BaselinePlan
from memoro.lab.baselines.dense import run_dense
from memoro.lab.bench.models import random_vit
from memoro.lab.reproduce.methods import Method

CLASSES = 10
ROWS: tuple[tuple[str, str, dict[str, int]], ...] = (
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


@dataclass(frozen=True)
class Count:
    """What a method adds to one pass of the backbone for one image."""

    name: str
    parameters: int
    """Without the head."""
    head: int
    flops: int
    """Without the head's. Two for a multiplication and an addition."""


def count_flops(run: Callable[[Tensor], Any], pixels: Tensor) -> int:
    """FLOPs of the matrix products of a call, of which attention has some: fused kernels would hide them."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(pixels)
    return int(counter.get_total_flops())


def count_costs() -> dict[str, Any]:
    """Counts of all rows at 224 px, and the FLOPs of a plain pass at other sizes."""
    backbone = load_backbone(random_vit(32))
    pixels = {size: torch.zeros(1, 3, size, size, device="cpu") for size in (112, 224, 384)}
    return {
        "passes": {
            str(size): count_flops(partial(run_dense, backbone.anatomy, {}), some) for size, some in pixels.items()
        },
        "rows": [asdict(count_method(backbone, *row, pixels[224])) for row in ROWS],
    }


def count_methods(backbone: Backbone, methods: Sequence[Method], image_size: tuple[int, int]) -> list[dict[str, Any]]:
    """Counts of methods on a backbone that is there, with their forks."""
    pixels = torch.zeros(1, backbone.channels, *image_size).to(backbone.device, backbone.dtype)
    rows = [(method.name, method.regime, method.sizes_on(backbone.depth)) for method in methods]
    return [asdict(count_method(backbone, *row, pixels)) for row in rows]


def count_method(backbone: Backbone, name: str, regime: str, sizes: dict[str, int], pixels: Tensor) -> Count:
    """A fully fine-tuned model shares nothing with the backbone: its pass counts as a whole."""
    plan = BaselinePlan("count", [str(number) for number in range(CLASSES)], **sizes)  # type: ignore[arg-type]
    model = REGIMES[regime].build(backbone, plan)
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
    return Count(name, total - head, head, own - base - 2 * CLASSES * backbone.dim)
