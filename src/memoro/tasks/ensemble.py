"""Ensembles: runs with different seeds or learning rates as one task, whose answers are their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from memoro.errors import TaskError
from memoro.tasks.task import Task
from memoro.tasks.taskspec import LOW_RANK, READ_OUT


def join_members(tasks: Sequence[Task]) -> Task:
    """One task with the tokens of all: its logits are the mean of theirs. The rest is that of the first one.

    The tasks have the same labels, sizes and parents, and are not ensembles themselves.
    """
    first = tasks[0]
    for other in tasks[1:]:
        same = (first.spec.shapes, first.labels, first.kind, first.parents, first.spec.memory_norm)
        if same != (other.spec.shapes, other.labels, other.kind, other.parents, other.spec.memory_norm):
            raise TaskError(f"{first.name!r}: members of an ensemble need the same labels, sizes and parents.")
    if len(tasks) == 1:
        return first
    if first.members > 1:
        raise TaskError(f"{first.name!r} is an ensemble already.")
    states = [task.state_dict() for task in tasks]
    joined = {
        name: states[0][name] if name.startswith(READ_OUT) else torch.stack([state[name] for state in states])
        for name in first.spec.shapes
    }
    joined["head.weight"] = joined["head.weight"].transpose(0, 1).flatten(1) / len(tasks)
    joined["head.bias"] = joined["head.bias"].mean(dim=0)
    whole = Task.from_tensors(replace(first.spec, members=len(tasks)), joined, first.extends)
    whole._trained_with |= first._trained_with
    return whole


def split_members(task: Task) -> list[Task]:
    """What the engine computes: a task of one token for each member, with its part of the head."""
    if task.members == 1:
        return [task]
    spec, states = replace(task.spec, members=1, readout=None), task.state_dict()
    parts = {name: states[name] for name in states if name in {"class_token", "memory"} or name.startswith(LOW_RANK)}
    weights = states["head.weight"].chunk(task.members, dim=1)
    return [
        Task.from_tensors(
            spec,
            {
                **{name: tensor[member] for name, tensor in parts.items()},
                "head.weight": weights[member],
                "head.bias": states["head.bias"] / task.members,
            },
            task.extends,
        ).requires_grad_(False)
        for member in range(task.members)
    ]
