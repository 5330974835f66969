"""A checkpoint in the form of the public reproduction, made for a test's backbone."""

from __future__ import annotations

from pathlib import Path

import torch

from memoro.backbones import Backbone


def save_checkpoint(path: Path, backbone: Backbone, tasks: int, *, cells: int = 1, extend: bool = False) -> Path:
    """`tasks` tasks of two classes side by side; with `extend` each one extends all earlier ones."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    base = 26  # the backbone's own tokens
    mask = torch.full((base + tasks, base + tasks + tasks * cells), -1e9)
    mask[:, :base] = 0
    for task in range(tasks):
        mask[base + task, base + task] = 0
        if extend:
            mask[base + task, base : base + task] = 0
    state = {"layer.0.attention.attention.attention_mask": mask[None, None]}
    for number in range(tasks + 1):  # the first token and classifier are the backbone's own
        state[f"embeddings.cls_tokens.{number}"] = random(1, 1, backbone.dim)
        state[f"classifiers.{number}.weight"] = random(2, backbone.dim)
        state[f"classifiers.{number}.bias"] = random(2)
    for number in range(tasks):
        for layer in range(backbone.depth):
            state[f"layer.{layer}.attention.attention.memory_tokens.{number}"] = random(1, cells, backbone.dim)
    torch.save(state, path)
    return path
