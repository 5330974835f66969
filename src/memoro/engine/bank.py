"""The tasks' weights as the engine reads them: class tokens, and memory as keys and values of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memoro.backbones import Anatomy, Block
from memoro.tasks.task import Task


@dataclass(frozen=True)
class Bank:
    tokens: Tensor
    """(t, dim)"""
    memory: tuple[tuple[Tensor, Tensor] | None, ...]
    """Keys and values (h, cells, d) of all tasks at each layer. They do not depend on the image."""


def build_bank(anatomy: Anatomy, tasks: Sequence[Task]) -> Bank:
    """The tasks' weights on the backbone's device and in its dtype, memory already projected to keys and values.

    Differentiable with respect to the tasks.
    """
    weight = anatomy.tensors["patch.weight"]
    if not tasks:
        return Bank(weight.new_zeros(0, anatomy.dim), (None,) * anatomy.depth)
    tokens = torch.stack([task.class_token.to(weight) for task in tasks])
    memory = (_layer_memory(block, tasks, layer, weight) for layer, block in enumerate(anatomy.blocks))
    return Bank(tokens, tuple(memory))


def bank_offsets(tasks: Sequence[Task], layer: int) -> dict[int, int]:
    """Where each task's cells start in a layer's bank."""
    offsets, at = dict.fromkeys(range(len(tasks)), 0), 0
    for i in _in_bank(tasks, layer):
        offsets[i] = at
        at += tasks[i].cells
    return offsets


def _in_bank(tasks: Sequence[Task], layer: int) -> list[int]:
    """The tasks with cells at a layer, in the bank's order: first those whose memory passes the norm."""
    present = [i for i, task in enumerate(tasks) if task.from_layer <= layer and task.cells]
    return sorted(present, key=lambda i: tasks[i].spec.memory_norm != "pre")


def _layer_memory(block: Block, tasks: Sequence[Task], layer: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
    present = [tasks[i] for i in _in_bank(tasks, layer)]
    if not present:
        return None
    cells = [task.memory[layer - task.from_layer].to(like) for task in present]
    pre = sum(task.spec.memory_norm == "pre" for task in present)
    normed = [block.norm1(torch.cat(cells[:pre]))] if pre else []
    keys, values = block.kv(torch.cat([*normed, *cells[pre:]]).unsqueeze(0))
    return keys[0], values[0]
