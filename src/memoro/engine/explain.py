"""A task's attention, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memoro.backbones import Anatomy
from memoro.engine.bank import Bank
from memoro.engine.plan import Plan
from memoro.engine.streams import Attention, run_streams
from memoro.tasks.task import Task


@dataclass(frozen=True)
class Explanation:
    """Attention weights of one task's token. At each layer, image and head, all fields together sum to one."""

    task: str
    layers: tuple[int, ...]
    """The layers that the task's stream passes; the first axis of every tensor below."""
    patches: Tensor
    """(layers, b, h, rows, columns): to each patch of the image."""
    prefix: Tensor
    """(layers, b, h, tokens): to the base's class token, registers and the like."""
    itself: Tensor
    """(layers, b, h)"""
    memory: Tensor
    """(layers, b, h, cells): to its own memory."""
    parents: dict[str, Tensor]
    """(layers, b, h) for each task that it extends: to that one's token and memory together."""

    def heatmap(self) -> Tensor:
        """(b, rows, columns): attention to patches, averaged over heads and layers, for a plot."""
        return self.patches.mean(dim=(0, 2))


def explain_task(
    anatomy: Anatomy, pixels: Tensor, plan: Plan, bank: Bank, tasks: Sequence[Task], index: int
) -> Explanation:
    """The attention of task `index` on these images, from a plan that computes it."""
    task, batch, heads = tasks[index], len(pixels), anatomy.heads
    layers: list[int] = []
    base: list[Tensor] = []
    itself: list[Tensor] = []
    memory: list[Tensor] = []
    parents: dict[str, list[Tensor]] = {tasks[i].name: [] for i in plan.order if i != index}

    def watch(layer: int, attention: Attention) -> None:
        group = attention.group
        rows = [plan.order[row] for row in group.rows.tolist()]
        if index not in rows:
            return
        at = rows.index(index)
        seen = [index] if group.tokens is None else [plan.order[row] for row in group.tokens[at].tolist()]
        tokens = attention.tokens[:, :, at]
        cells = tokens.new_zeros(batch, heads, 0) if attention.cells is None else attention.cells[:, :, at]
        own, *others = torch.split(cells, [tasks[i].cells for i in seen], dim=-1)
        layers.append(layer)
        base.append(attention.base[:, :, at])
        itself.append(tokens[..., 0])
        memory.append(own)
        found = {
            tasks[i].name: tokens[..., place] + part.sum(dim=-1)
            for place, (i, part) in enumerate(zip(seen[1:], others, strict=True), start=1)
        }
        for name, weights in parents.items():
            weights.append(found.get(name, torch.zeros_like(tokens[..., 0])))

    def stack(parts: list[Tensor], *tail: int) -> Tensor:
        return torch.stack(parts) if parts else pixels.new_zeros(0, batch, heads, *tail)

    _, context = anatomy.embed(pixels)
    run_streams(anatomy, pixels, plan, bank, watch=watch)
    rows, columns = context.grid
    everything = stack(base, anatomy.prefix + rows * columns)
    return Explanation(
        task=task.name,
        layers=tuple(layers),
        patches=everything[..., anatomy.prefix :].reshape(len(layers), batch, heads, rows, columns),
        prefix=everything[..., : anatomy.prefix],
        itself=stack(itself),
        memory=stack(memory, task.cells),
        parents={name: stack(weights) for name, weights in parents.items()},
    )
