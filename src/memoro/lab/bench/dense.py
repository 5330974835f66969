"""The usual implementation, for comparison: all tokens in one sequence, separated by a dense mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from memoro.backbones import Backbone
from memoro.tasks.task import Task


class DenseMask:
    """Tasks that extend nothing and start at layer 0, side by side. Mask and memory are computed in advance."""

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
