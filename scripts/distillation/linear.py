"""Linear layers, solved by least squares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def normal_equations(x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides of weighted least squares from x to y, with a touch of ridge, in double precision."""
    x, y, w = x.flatten(0, -2), y.flatten(0, -2), weights.reshape(-1, 1)
    gram, cross = (x.T @ (w * x)).double(), (x.T @ (w * y)).double()
    return gram + 1e-4 * gram.diagonal().mean() * torch.eye(len(gram)), cross


def least_squares(x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the linear layer that best maps x to y."""
    w = weights[..., None] / weights.sum()
    axes = tuple(range(x.ndim - 1))
    mean_x, mean_y = (w * x).sum(axes), (w * y).sum(axes)
    weight = torch.linalg.solve(*normal_equations(x - mean_x, y - mean_y, weights)).float().T
    return weight, mean_y - weight @ mean_x


def set_linear(layer: Any, weight: Tensor, bias: Tensor) -> None:
    layer.weight.data.copy_(weight.reshape(layer.weight.shape))
    layer.bias.data.copy_(bias)
