"""Where a task looked: its attention, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memoro.backbones import Anatomy
from memoro.engine.streams import Attention, Bank, Plan, run_streams
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
        """(b, rows, columns): attention to patches, averaged over heads and layers. For a picture."""
        return self.patches.mean(dim=(0, 2))


def explain_task(
    anatomy: Anatomy, pixels: Tensor, plan: Plan, bank: Bank, tasks: Sequence[Task], index: int
) -> Explanation:
    """The attention of task `index` on these images, from a plan that computes it."""
    task = tasks[index]
    row = plan.order.index(index)
    seen: list[tuple[int, Tensor, Tensor, Tensor | None, list[int]]] = []

    def watch(layer: int, attention: Attention) -> None:
        rows = attention.group.rows.tolist()
        if row in rows:
            at = rows.index(row)
            others = [row] if attention.group.tokens is None else attention.group.tokens[at].tolist()
            cells = None if attention.cells is None else attention.cells[:, :, at]
            seen.append((layer, attention.base[:, :, at], attention.tokens[:, :, at], cells, others))

    _, context = anatomy.embed(pixels)
    run_streams(anatomy, pixels, plan, bank, watch=watch)
    batch, heads, (rows, columns) = len(pixels), anatomy.heads, context.grid
    names = {plan.order.index(i): tasks[i].name for i in plan.order if i != index}
    cell_count = {plan.order.index(i): tasks[i].cells for i in plan.order}
    own_cells: list[Tensor] = []
    parents: dict[str, list[Tensor]] = {name: [] for name in names.values()}
    for _, _, tokens, cells, others in seen:
        left = tokens.new_zeros(batch, heads, 0) if cells is None else cells
        attention = dict.fromkeys(names.values(), tokens.new_zeros(batch, heads))
        for place, other in enumerate(others):
            part, left = left[..., : cell_count[other]], left[..., cell_count[other] :]
            if other == row:
                own_cells.append(part)
            else:
                attention[names[other]] = tokens[..., place] + part.sum(dim=-1)
        for name, share in attention.items():
            parents[name].append(share)

    def stack(parts: list[Tensor], *tail: int) -> Tensor:
        return torch.stack(parts) if parts else pixels.new_zeros(0, batch, heads, *tail)

    return Explanation(
        task=task.name,
        layers=tuple(layer for layer, *_ in seen),
        patches=stack(
            [base[..., anatomy.prefix :].reshape(batch, heads, rows, columns) for _, base, *_ in seen], rows, columns
        ),
        prefix=stack([base[..., : anatomy.prefix] for _, base, *_ in seen], anatomy.prefix),
        itself=stack([tokens[..., 0] for _, _, tokens, *_ in seen]),
        memory=stack(own_cells, task.cells),
        parents={name: stack(attention) for name, attention in parents.items()},
    )
