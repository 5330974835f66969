"""The tasks' weights as the engine reads them: class tokens, memory as keys and values, low-rank weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    lora: tuple[Mapping[int, LowRank], ...]
    """The low-rank weights of all tasks at each layer, by rank."""


@dataclass(frozen=True)
class LowRank:
    """Low-rank weights of several tasks of one rank, at one layer."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """By the name of the matrix: A (g, r, in) and B (g, out, r); of "qkv", (g, 3, r, in) and (g, 3, out, r)."""

    def pick(self, places: Tensor) -> LowRank:
        """Those of some of the tasks."""
        return LowRank({name: (a[places], b[places]) for name, (a, b) in self.pairs.items()})

    def update(self, matrix: str, inputs: Tensor) -> Tensor:
        """What the tasks' weights add to a matrix's output, given the input (b, g, in) of each task: (b, g, out)."""
        a, b = self.pairs[matrix]
        inputs = inputs.transpose(0, 1)
        if matrix != "qkv":
            return torch.bmm(torch.bmm(inputs, a.mT), b.mT).transpose(0, 1)
        tasks, batch, _ = inputs.shape
        low = torch.bmm(inputs, a.flatten(1, 2).mT).reshape(tasks, batch, 3, -1).transpose(1, 2)
        out = torch.bmm(low.flatten(0, 1), b.flatten(0, 1).mT)
        return out.reshape(tasks, 3, batch, -1).permute(2, 0, 1, 3).flatten(2)


def build_bank(anatomy: Anatomy, tasks: Sequence[Task]) -> Bank:
    """The tasks' weights on the backbone's device and in its dtype, memory already projected to keys and values.

    Differentiable with respect to the tasks.
    """
    weight = anatomy.tensors["patch.weight"]
    if not tasks:
        return Bank(weight.new_zeros(0, anatomy.dim), (None,) * anatomy.depth, ({},) * anatomy.depth)
    tokens = torch.stack([task.class_token.to(weight) for task in tasks])
    memory = (_layer_memory(block, tasks, layer, weight) for layer, block in enumerate(anatomy.blocks))
    return Bank(tokens, tuple(memory), tuple(_stack_lora(tasks, anatomy.depth, weight)))


def bank_offsets(tasks: Sequence[Task], layer: int) -> dict[int, int]:
    """Where each task's cells start in a layer's bank."""
    offsets, at = dict.fromkeys(range(len(tasks)), 0), 0
    for i in _in_bank(tasks, layer):
        offsets[i] = at
        at += tasks[i].cells
    return offsets


def lora_members(tasks: Sequence[Task], layer: int) -> dict[int, list[int]]:
    """The tasks with low-rank weights at a layer, by rank, in the bank's order: by fork, as in a plan of all tasks."""
    members: dict[int, list[int]] = {}
    for i in sorted(range(len(tasks)), key=lambda i: tasks[i].from_layer):
        if tasks[i].rank and tasks[i].from_layer <= layer:
            members.setdefault(tasks[i].rank, []).append(i)
    return members


def _stack_lora(tasks: Sequence[Task], depth: int, like: Tensor) -> list[dict[int, LowRank]]:
    """The low-rank weights of all tasks at each layer. Tasks of the same rank and fork are stacked with all their
    layers at once: the gradient of a layer taken from each task would be as large as the whole task."""
    kinds: dict[tuple[int, int], list[Task]] = {}
    for task in sorted((task for task in tasks if task.rank), key=lambda task: task.from_layer):
        kinds.setdefault((task.rank, task.from_layer), []).append(task)
    layers: list[dict[int, dict[str, list[Tensor]]]] = [{} for _ in range(depth)]
    for (rank, fork), own in kinds.items():
        for name in own[0].lora:
            stacked = torch.stack([task.lora[name] for task in own], dim=1).to(like).unbind()
            for layer, weights in enumerate(stacked, start=fork):
                layers[layer].setdefault(rank, {}).setdefault(name, []).append(weights)
    return [{rank: _join(parts) for rank, parts in ranks.items()} for ranks in layers]


def _join(parts: Mapping[str, Sequence[Tensor]]) -> LowRank:
    """Low-rank weights of one rank at one layer, from those of each fork."""
    whole = {name: tensors[0] if len(tensors) == 1 else torch.cat(list(tensors)) for name, tensors in parts.items()}
    names = dict.fromkeys(name[:-2] for name in whole)
    return LowRank({name: (whole[f"{name}_A"], whole[f"{name}_B"]) for name in names})


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
