"""`memoro lab bench engine`: the cost of many tasks relative to one plain pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from memoro.backbones import Backbone
from memoro.engine.composition import compose
from memoro.engine.forward import ReadOutBank
from memoro.lab.bench.models import LABELS, Row, new_tasks, time_candidates
from memoro.tasks.familiarity import FamiliarityBank, Others, fit_familiarity
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import Task


class DenseMask:
    """The usual implementation, for comparison: all tokens in one sequence, separated by a dense mask.

    For tasks that extend nothing and start at layer 0. Mask and memory are computed in advance.
    """

    def __init__(self, backbone: Backbone, tasks: Sequence[Task], grid: tuple[int, int]) -> None:
        self.anatomy, self.tasks = backbone.anatomy, tuple(tasks)
        base = self.anatomy.prefix + grid[0] * grid[1]
        count = len(self.tasks)
        owner = torch.tensor([i for i, task in enumerate(self.tasks) for _ in range(task.cells)], dtype=torch.long)
        allowed = torch.zeros(base + count, base + count + len(owner), dtype=torch.bool)
        allowed[:, :base] = True
        allowed[base:, base : base + count] = torch.eye(count, dtype=torch.bool)
        allowed[base:, base + count :] = owner == torch.arange(count).unsqueeze(1)
        self.mask = allowed.to(backbone.device)
        self.memory = [
            block.kv(block.norm1(torch.cat([task.memory[layer] for task in self.tasks])).unsqueeze(0))
            for layer, block in enumerate(self.anatomy.blocks)
        ]

    def __call__(self, pixels: Tensor) -> list[Tensor]:
        """The base's output, then each task's logits."""
        anatomy = self.anatomy
        tokens, _ = anatomy.embed(pixels)
        base = tokens.shape[1]
        own = anatomy.start(torch.stack([task.class_token for task in self.tasks])).expand(len(tokens), -1, -1)
        tokens = torch.cat([tokens, own], dim=1)
        for block, memory in zip(anatomy.blocks, self.memory, strict=True):
            q, k, v = block.qkv(block.norm1(tokens))
            k, v = (torch.cat([t, m.expand(len(t), -1, -1, -1)], dim=2) for t, m in zip((k, v), memory, strict=True))
            out = scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=block.scaling)
            tokens = block.mix(tokens, out.transpose(1, 2).flatten(2))
        final = anatomy.finish_token(tokens[:, base:])
        return [anatomy.finish(tokens[:, :base]), *(task.head(final[:, i]) for i, task in enumerate(self.tasks))]


def bench_engine(
    backbone: Backbone,
    *,
    counts: Sequence[int],
    forks: Sequence[int],
    cells: int,
    rank: int,
    batch: int,
    rounds: int,
    quiet: bool = True,
) -> list[Row]:
    """Times base pass, engine and dense mask side by side. All costs are in plain base passes.

    `limit`: what the extra tokens would cost at the base's own price per token. `dense`: one sequence with a dense mask
    (fork 0 only, without low-rank weights). `separate`: one pass per task, extrapolated from one. `familiarity`: what
    it adds to judge how familiar the images are to all tasks; `readouts`: what a read-out of each adds, pooling
    included. Both are not part of `engine`.
    """
    anatomy, (height, width) = backbone.anatomy, backbone.image_size
    pixels = torch.randn(batch, backbone.channels, height, width).to(backbone.device, backbone.dtype)
    grid = (height // anatomy.patch[0], width // anatomy.patch[1])
    tokens = anatomy.prefix + grid[0] * grid[1]
    # All tasks have the same description: its values do not matter.
    reads, classes = ReadOut.of(anatomy), len(LABELS)
    layers = backbone.depth - reads.from_layer
    seen = torch.randn(1000, layers, reads.statistics, backbone.dim)
    described = fit_familiarity(seen, torch.arange(1000) % classes, Others.of(seen[:100]))
    assert described is not None
    hidden = torch.randn(batch, tokens, backbone.dim).to(backbone.device, backbone.dtype)
    read = new_tasks(backbone, max(counts), cells=0, from_layer=backbone.depth)
    for task in read:
        task.attach_readout(reads, torch.randn(classes, layers * reads.statistics * backbone.dim), torch.zeros(classes))

    def pool() -> Tensor:
        return torch.stack([anatomy.pool(hidden) for _ in range(layers)], dim=1)

    with torch.no_grad():
        candidates: dict[str, Callable[[], object]] = {"base": lambda: backbone.original(pixels)}
        for count in counts:
            bank = FamiliarityBank([described] * count, backbone.device)
            own = ReadOutBank(read[:count])
            pooled = pool()
            candidates[f"familiarity {count}"] = lambda bank=bank, pooled=pooled: bank.judge(pooled)  # type: ignore[misc]
            candidates[f"readouts {count}"] = lambda own=own, count=count: own.answer(pool(), range(count))  # type: ignore[misc]
        for fork in forks:
            for count in sorted({1, *counts}):
                tasks = new_tasks(backbone, count, cells=cells, rank=rank, from_layer=fork)
                model = compose(backbone, tasks)
                candidates[f"engine {fork} {count}"] = lambda model=model: model(pixels)  # type: ignore[misc]
                if fork == 0 and not rank:
                    dense = DenseMask(backbone, tasks, grid)
                    candidates[f"dense {fork} {count}"] = lambda dense=dense: dense(pixels)  # type: ignore[misc]
        best = time_candidates("timing", candidates, rounds, quiet=quiet)
    cost = {name: seconds / best["base"] for name, seconds in best.items()}
    return [
        {
            "tasks": count,
            "fork": fork,
            "engine": cost[f"engine {fork} {count}"],
            "limit": 1 + count * (backbone.depth - fork) / backbone.depth / tokens,
            "dense": cost.get(f"dense {fork} {count}"),
            "separate": count * cost[f"engine {fork} 1"],
            "familiarity": cost[f"familiarity {count}"],
            "readouts": cost[f"readouts {count}"],
        }
        for fork in forks
        for count in counts
    ]
