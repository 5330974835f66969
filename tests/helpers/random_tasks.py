"""Tasks with random weights: what training would leave, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from memoro.backbones import Backbone
from memoro.tasks.spec import READ_OUT
from memoro.tasks.task import Task, new_task


def random_task(backbone: Backbone, name: str, *, seed: int = 0, **options: Any) -> Task:
    """A task far from its neutral start, as training would leave it."""
    options.setdefault("labels", ["a", "b", "c"])
    task = new_task(backbone, name, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in task.named_parameters():
            scale = 0.2 if name.startswith("lora.") else 1.0  # a product of two of these is added to the weights
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return task


SIZES: dict[str, Any] = {"cells": 2, "rank": 2, "from_layer": 1}


def members_of(backbone: Backbone, name: str = "three", **options: Any) -> list[Task]:
    """Three tasks of one name that answer differently."""
    return [random_task(backbone, name, seed=seed, **{**SIZES, **options}) for seed in range(3)]


def join_members(tasks: Sequence[Task]) -> Task:
    """The ensemble of tasks of the same labels, sizes and parents, as earlier versions trained it: its logits are the
    mean of theirs."""
    first, states = tasks[0], [task.state_dict() for task in tasks]
    joined = {
        name: states[0][name] if name.startswith(READ_OUT) else torch.stack([state[name] for state in states])
        for name in first.spec.shapes
    }
    joined["head.weight"] = joined["head.weight"].transpose(0, 1).flatten(1) / len(tasks)
    joined["head.bias"] = joined["head.bias"].mean(dim=0)
    return Task.from_tensors(replace(first.spec, members=len(tasks)), joined, first.extends)
