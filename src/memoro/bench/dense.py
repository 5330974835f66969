"""The usual way, to measure against: all tokens in one sequence, kept apart by a dense mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from memoro.backbones import Backbone
from memoro.tasks.task import Task


class DenseMask:
    """Tasks that extend nothing and start at layer 0, side by side. Mask and memory are prepared beforehand."""

    def __init__(self, backbone: Backbone, tasks: Sequence[Task], grid: tuple[int, int]) -> None:
        anatomy = backbone.anatomy
        self.anatomy, self.tasks = anatomy, tuple(tasks)
        base = anatomy.prefix + grid[0] * grid[1]
        count = len(self.tasks)
        owner = torch.tensor([i for i, task in enumerate(self.tasks) for _ in range(task.cells)], dtype=torch.long)
        readers = torch.arange(count).unsqueeze(1)
        allowed = torch.zeros(base + count, base + count + len(owner), dtype=torch.bool)
        allowed[:, :base] = True
        allowed[base:, base : base + count] = torch.eye(count, dtype=torch.bool)
        allowed[base:, base + count :] = owner == readers
        self.mask = allowed.to(backbone.device)
        self.memory = [
            block.kv(block.norm1(torch.cat([task.memory[layer] for task in self.tasks])).unsqueeze(0))
            for layer, block in enumerate(anatomy.blocks)
        ]

    def __call__(self, pixels: Tensor) -> list[Tensor]:
        """The base's answer, then each task's logits."""
        anatomy = self.anatomy
        tokens, _ = anatomy.embed(pixels)
        base = tokens.shape[1]
        own = anatomy.start(torch.stack([task.class_token for task in self.tasks])).expand(len(tokens), -1, -1)
        tokens = torch.cat([tokens, own], dim=1)
        for block, (memory_k, memory_v) in zip(anatomy.blocks, self.memory, strict=True):
            q, k, v = block.qkv(block.norm1(tokens))
            k = torch.cat([k, memory_k.expand(len(k), -1, -1, -1)], dim=2)
            v = torch.cat([v, memory_v.expand(len(v), -1, -1, -1)], dim=2)
            out = scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=block.scaling)
            tokens = block.mix(tokens, out.transpose(1, 2).flatten(2))
        final = anatomy.finish_token(tokens[:, base:])
        heads = [task.head(final[:, i]) for i, task in enumerate(self.tasks)]
        return [anatomy.finish(tokens[:, :base]), *heads]
