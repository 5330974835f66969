"""Views: crops of images, planned ahead, cut as bytes, normalised for a model."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from distillation.sources import Source

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the student's: ImageNet's
View = tuple[int, str, int]  # number of the source, name of the image, number of the view: 0 is the whole image


def plan_views(sources: list[Source], target: int, low: int, high: int, seed: int) -> list[View]:
    """Everything the teacher is to see.

    A source of n images gets about `target` views, but at least `low` and at most `high` per image; its whole
    images come first. Sources are interleaved in proportion: any beginning of the plan is a fair sample.
    """
    rng, keyed = np.random.default_rng(seed), []
    for index, source in enumerate(sources):
        views = min(high, max(low, round(target / len(source.names))))
        order = [(name, view) for view in range(views) for name in rng.permutation(source.names).tolist()]
        keyed += [((rank + 0.5) / len(order), (index, name, view)) for rank, (name, view) in enumerate(order)]
    return [item for _, item in sorted(keyed)]


def random_box(size: tuple[int, int], rng: np.random.Generator) -> tuple[float, float, float, float]:
    """The box of a random crop: 30 to 100 % of the area, sides between 3:4 and 4:3."""
    width, height = size
    for _ in range(10):
        area, ratio = width * height * rng.uniform(0.3, 1.0), (4 / 3) ** rng.uniform(-1, 1)
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return x, y, x + w, y + h
    return 0, 0, width, height


def cut_views(
    sources: list[Source], plan: list[View], rows: range, sides: tuple[int, ...], seed: int
) -> tuple[np.ndarray, ...]:
    """Which rows of the plan are readable, then their bytes, once per side length.

    A crop depends on seed and row alone, so that a resumed run cuts what the first one would have cut.
    """
    views = [np.zeros((len(rows), side, side, 3), np.uint8) for side in sides]
    readable = np.zeros(len(rows), bool)
    for at, row in enumerate(rows):
        index, name, view = plan[row]
        if (image := sources[index].read(name)) is None:
            continue
        readable[at] = True
        box = random_box(image.size, np.random.default_rng((seed, row))) if view else None
        for side, pixels in zip(sides, views, strict=True):
            pixels[at] = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC, box))
    return readable, *views


def to_tensor(pixels: np.ndarray | Tensor, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """Bytes (n, h, w, 3) as a normalised float tensor (n, 3, h, w)."""
    scaled = torch.as_tensor(pixels).float() / 255
    return ((scaled - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2).contiguous()
