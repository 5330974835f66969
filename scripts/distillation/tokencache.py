"""The teacher, and the token cache: views and the teacher's tokens for them, on disk."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel

from distillation.sources import Source
from distillation.views import View, cut_views, to_tensor
from memoro.files import write_whole


def write_json(path: Path, content: Any) -> None:
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


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


@dataclass
class TokenCache:
    """The first `done` views of a plan (bytes) and the teacher's tokens for them (float16), memory-mapped."""

    folder: Path
    pixels: np.memmap
    tokens: np.memmap
    done: int

    @classmethod
    def open(cls, folder: Path, views: int, side: int, tokens: int, dim: int) -> TokenCache:
        folder.mkdir(parents=True, exist_ok=True)
        progress = folder / "done.json"
        done = json.loads(progress.read_text())["done"] if progress.exists() else 0
        mode: Any = "r+" if progress.exists() else "w+"
        pixels = np.lib.format.open_memmap(folder / "pixels.npy", mode, np.uint8, (views, side, side, 3))
        states = np.lib.format.open_memmap(folder / "tokens.npy", mode, np.float16, (views, tokens, dim))
        return cls(folder, pixels, states, done)

    def fill(self, sources: list[Source], plan: list[View], teacher: Teacher, seed: int, end: int) -> None:
        """Let the teacher see what it has not seen yet, up to the view `end`."""
        begun, first = time.monotonic(), self.done
        while (low := self.done) < end:
            high = min(low + 64, end)
            readable, pixels = cut_views(sources, plan, range(low, high), teacher.side, seed)
            if readable.any():  # a neighbour takes the place of what cannot be read
                pixels[~readable] = pixels[readable][0]
            self.pixels[low:high], self.tokens[low:high] = pixels, teacher.tokens(pixels).half().numpy()
            self.done = high
            if high == end or high // 64 % 20 == 0:
                self.pixels.flush()
                self.tokens.flush()
                write_json(self.folder / "done.json", {"done": high})
                rate = (high - first) / (time.monotonic() - begun)
                left = (end - high) / rate / 60
                print(f"teacher: {high}/{end} views, {rate:.0f}/s, {left:.0f} min left", flush=True)

    def _refresh(self) -> None:
        """Takes in what another process (`--teacher-only`) has added since."""
        progress = self.folder / "done.json"
        if progress.exists():
            self.done = max(self.done, json.loads(progress.read_text())["done"])

    def draw(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the plan, pixels and tokens: mirrored at random (the teacher's grid as well), brightness jittered."""
        self._refresh()
        rows = torch.randint(self.done, (size,), generator=generator)
        pixels, tokens = (
            torch.from_numpy(self.pixels[rows.numpy()]),
            torch.from_numpy(self.tokens[rows.numpy()]).float(),
        )
        grid = math.isqrt(tokens.shape[1] - 1)
        mirrored = (torch.rand(size, generator=generator) < 0.5)[:, None, None, None]
        patches = tokens[:, 1:].unflatten(1, (grid, grid))
        patches = torch.where(mirrored, patches.flip(2), patches).flatten(1, 2)
        contrast, brightness = (torch.rand(2, size, 1, 1, 1, generator=generator) - 0.5) * 0.2
        images = to_tensor(torch.where(mirrored, pixels.flip(2), pixels)) * (1 + contrast) + brightness
        return rows, images, torch.cat([tokens[:, :1], patches], dim=1)
