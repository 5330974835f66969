"""Whitening: the class token in coordinates that a linear head learns quickly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

POWER, FLOOR = 0.75, 1e-3
"""A direction's features are divided by its standard deviation to this power; variances below this share of the mean
count as that."""


@torch.no_grad()
def whiten_output(student: Any, pixels: Tensor) -> None:
    """Rotate the student's tokens so that its last norm can scale the principal directions of its class token.

    A class token's directions differ in variance by a factor of 100,000, and those that tell similar classes apart have
    little of it: gradient descent on a head hardly reaches them. Rotated and scaled, all directions count. Every layer
    computes what it did before, in other coordinates. `pixels` (n, 3, side, side) are views to judge variances by.
    """
    vit, width = student.vit, student.config.hidden_size
    states = [vit(batch, output_hidden_states=True).hidden_states[-1][:, 0] for batch in pixels.split(64)]
    normed = nn.functional.layer_norm(torch.cat(states).double(), (width,), eps=vit.layernorm.eps)
    centred = normed - normed.mean(0)
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    # A norm subtracts the mean of the channels, so (1, …, 1) is the direction without variance: it stays as it is.
    spread = variances[1:].clamp(min=FLOOR * float(variances.mean())) ** (-POWER / 2)
    rotation = helmert(width).T @ directions[:, 1:].T + torch.full((width, width), 1 / width, dtype=torch.double)
    scale = torch.cat([spread, spread[-1:]])
    scale /= (centred @ rotation.T * scale).square().mean().sqrt()
    rotate(student, rotation)
    vit.layernorm.weight.copy_(scale)
    vit.layernorm.bias.copy_(-scale * (rotation @ normed.mean(0)))


def helmert(width: int) -> Tensor:
    """Orthonormal rows (width − 1, width) that are orthogonal to (1, …, 1); row i has no entry before column i.

    With directions in the order of their variance, no column of a weak direction gets anything of a stronger one.
    """
    rows = torch.zeros(width - 1, width, dtype=torch.double)
    for i in range(width - 1):
        left = width - 1 - i
        rows[i, i], rows[i, i + 1 :] = 1, -1 / left
        rows[i] *= math.sqrt(left / (left + 1))
    return rows


def rotate(student: Any, rotation: Tensor) -> None:
    """Rotate everything that layers write to the token and read from it; norms before them lose their own weights."""
    vit = student.vit

    def write(weight: Tensor, bias: Tensor) -> None:
        weight.copy_((rotation @ weight.double().flatten(1)).reshape(weight.shape))
        bias.copy_(rotation @ bias.double())

    def read(norm: Any, layers: list[Any]) -> None:
        for layer in layers:
            weight = layer.weight.double()
            layer.bias.copy_(layer.bias.double() + weight @ norm.bias.double())
            layer.weight.copy_(weight * norm.weight.double() @ rotation.T)
        nn.init.ones_(norm.weight)
        nn.init.zeros_(norm.bias)

    embeddings = vit.embeddings
    write(embeddings.patch_embeddings.projection.weight, embeddings.patch_embeddings.projection.bias)
    for start in (embeddings.cls_token, embeddings.position_embeddings):
        start.copy_(start.double() @ rotation.T)
    for layer in vit.layers:
        attention = layer.attention
        read(layer.layernorm_before, [attention.q_proj, attention.k_proj, attention.v_proj])
        write(attention.o_proj.weight, attention.o_proj.bias)
        read(layer.layernorm_after, [layer.mlp.fc1])
        write(layer.mlp.fc2.weight, layer.mlp.fc2.bias)
