"""The teacher: what it makes of a view."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel

from distillation.views import to_tensor


class Teacher:
    """The frozen large model, at the image size that gives it the student's grid."""

    def __init__(self, name: str, grid: int, compiled: bool) -> None:
        self.model: Any = AutoModel.from_pretrained(name, dtype=torch.float32).eval().requires_grad_(False)
        self.dim: int = self.model.config.hidden_size
        self.grid, self.side = grid, grid * int(self.model.config.patch_size)
        processor: Any = AutoImageProcessor.from_pretrained(name, backend="pil")
        self.mean, self.std = tuple(processor.image_mean), tuple(processor.image_std)
        self.run = torch.compile(self.model) if compiled else self.model

    @torch.no_grad()
    def tokens(self, pixels: np.ndarray) -> Tensor:
        """Class token and patch tokens (n, 1 + grid², dim) after the final norm, without register tokens."""
        states = self.run(pixel_values=to_tensor(pixels, self.mean, self.std)).last_hidden_state
        return torch.cat([states[:, :1], states[:, -(self.grid**2) :]], dim=1)
