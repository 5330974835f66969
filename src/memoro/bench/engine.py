"""`memoro bench engine`: what a hundred tasks cost beside one plain pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from memoro.backbones import Backbone, load_backbone
from memoro.bench.clock import best_times
from memoro.bench.dense import DenseMask
from memoro.engine.composition import compose
from memoro.tasks.task import new_task


@dataclass(frozen=True)
class EngineRow:
    """One measurement. All costs are in plain base passes."""

    tasks: int
    fork: int
    engine: float
    limit: float
    """What the extra tokens would cost at the base's own price per token."""
    dense: float | None
    """One sequence with a dense mask (fork 0 only)."""
    separate: float
    """As many passes as tasks, each of one task: one was measured."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def random_vit(patch: int, *, image: int = 224, depth: int = 12, dim: int = 768, heads: int = 12) -> nn.Module:
    """A ViT with random weights: speed does not depend on what they are."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        patch_size=patch,
        image_size=image,
        num_hidden_layers=depth,
        hidden_size=dim,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
    )
    model: nn.Module = ViTModel(config, add_pooling_layer=False)
    return model.eval()


def bench_engine(
    backbone: Backbone,
    *,
    counts: Sequence[int] = (1, 10, 50, 100),
    forks: Sequence[int] = (0, 8),
    cells: int = 5,
    classes: int = 10,
    batch: int = 8,
    rounds: int = 5,
    tick: Callable[[], None] = lambda: None,
) -> list[EngineRow]:
    """Times base pass, engine and dense mask side by side."""
    height, width = backbone.image_size
    pixels = torch.randn(batch, backbone.channels, height, width).to(backbone.device, backbone.dtype)
    rows, columns = backbone.anatomy.patch
    grid = (height // rows, width // columns)
    tokens = backbone.anatomy.prefix + grid[0] * grid[1]
    labels = [str(i) for i in range(classes)]
    with torch.no_grad():
        candidates: dict[str, Callable[[], object]] = {"base": lambda: backbone.original(pixels)}
        for fork in forks:
            for count in sorted({1, *counts}):
                tasks = [new_task(backbone, f"task {i}", labels, cells=cells, from_layer=fork) for i in range(count)]
                model = compose(backbone, tasks)
                candidates[f"engine {fork} {count}"] = lambda model=model: model(pixels)  # type: ignore[misc]
                if fork == 0:
                    dense = DenseMask(backbone, tasks, grid)
                    candidates[f"dense {count}"] = lambda dense=dense: dense(pixels)  # type: ignore[misc]
        best = best_times(candidates, rounds, tick)
    base = best["base"]
    return [
        EngineRow(
            tasks=count,
            fork=fork,
            engine=best[f"engine {fork} {count}"] / base,
            limit=1 + count * (backbone.depth - fork) / backbone.depth / tokens,
            dense=best[f"dense {count}"] / base if fork == 0 else None,
            separate=count * best[f"engine {fork} 1"] / base,
        )
        for fork in forks
        for count in counts
    ]


def candidate_count(counts: Sequence[int], forks: Sequence[int]) -> int:
    """How many candidates `bench_engine` times: for a progress bar."""
    return 1 + len(forks) * len({1, *counts}) + (len({1, *counts}) if 0 in forks else 0)


def load_bench_backbone(patch: int, dtype: str = "float32") -> Backbone:
    """ViT-B with random weights at 224 pixels."""
    return load_backbone(random_vit(patch), dtype=dtype)
