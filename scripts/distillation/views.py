"""Views: crops of images, sometimes filtered or mixed, planned ahead, cut as bytes, normalised for a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor

from distillation.sources import Source

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the student's: ImageNet's
MIXED, FILTERED, QUARTERS = 0.3, 0.3, 0.4
"""Probability that a crop is mixed with other images, that it goes through a filter, and that a mixed view is four
images side by side: small images are then as sharp as photographs."""
FINEST = 0.5
"""The smallest crop has this share of a view's pixels: smaller ones would be blurred."""


@dataclass(frozen=True)
class View:
    """View 0 of an image is the whole image, untouched; the others are random crops."""

    source: int
    name: str
    number: int


def plan_views(sources: list[Source], seed: int) -> list[View]:
    """Everything the teacher will see: as many views of each image as its source asks for, whole images first.

    Sources are interleaved in proportion, so that any prefix of the plan is a fair sample.
    """
    rng, keyed = np.random.default_rng(seed), []
    for index, source in enumerate(sources):
        order = [(name, view) for view in range(source.views) for name in rng.permutation(source.names).tolist()]
        keyed += [
            ((rank + 0.5) / len(order), index, View(index, name, view)) for rank, (name, view) in enumerate(order)
        ]
    return [view for _, _, view in sorted(keyed, key=lambda item: item[:2])]


def random_box(size: tuple[int, int], side: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """The box of a random crop, sides between 3:4 and 4:3: small in photographs, at least 30 % of small images."""
    width, height = size
    smallest = min(0.3, FINEST * side**2 / (width * height))
    for _ in range(10):
        area, ratio = width * height * smallest ** rng.uniform(0, 1), (4 / 3) ** rng.uniform(-1, 1)
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return x, y, x + w, y + h
    return 0, 0, width, height


def random_filter(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """The image in another style, so that the student also learns what the teacher makes of drawings and greys."""
    kind = rng.integers(6)
    if kind == 0:
        return ImageOps.grayscale(image).convert("RGB")
    if kind == 1:  # dark lines on white, like a sketch
        smooth = ImageOps.grayscale(image).filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.2)))
        return ImageOps.autocontrast(smooth.filter(ImageFilter.CONTOUR)).convert("RGB")
    if kind == 2:
        return ImageOps.invert(image)
    if kind == 3:
        return ImageOps.posterize(image, int(rng.integers(1, 4)))
    if kind == 4:
        return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, 2.0)))
    channels = np.asarray(image, np.float32) / 255
    gain, gamma = rng.uniform(0.6, 1.4, 3), rng.uniform(0.6, 1.6)
    return Image.fromarray((np.clip(channels**gamma * gain, 0, 1) * 255).astype(np.uint8))


def is_mixed(view: View, row: int, seed: int) -> bool:
    """Whether this row of the plan shows two images: then it has no label."""
    return view.number > 0 and np.random.default_rng((seed, row)).random() < MIXED


def cut_one(sources: list[Source], plan: list[View], row: int, side: int, seed: int) -> Image.Image | None:
    """One view as a square image, or None where a file cannot be read."""
    view, rng = plan[row], np.random.default_rng((seed, row))
    if (image := sources[view.source].read(view.name)) is None:
        return None
    square, bicubic = (side, side), Image.Resampling.BICUBIC
    if view.number == 0:
        return image.resize(square, bicubic)
    mixed = rng.random() < MIXED
    cut = image.resize(square, bicubic, random_box(image.size, side, rng))
    if rng.random() < FILTERED:
        cut = random_filter(cut, rng)
    return mix(cut, sources, plan, rng) if mixed else cut


def mix(cut: Image.Image, sources: list[Source], plan: list[View], rng: np.random.Generator) -> Image.Image | None:
    """A view together with others of the plan: four side by side, one over the other, or one pasted into the other."""
    square, bicubic = cut.size, Image.Resampling.BICUBIC
    quarters = rng.random() < QUARTERS
    others = []
    for row in rng.integers(len(plan), size=3 if quarters else 1):
        if (image := sources[plan[row].source].read(plan[row].name)) is None:
            return None
        others.append(image.resize(square, bicubic, random_box(image.size, square[0], rng)))
    if quarters:
        x, y = (int(edge * rng.uniform(0.35, 0.65)) for edge in square)
        boxes = (0, 0, x, y), (x, 0, square[0], y), (0, y, x, square[1]), (x, y, *square)
        for box, image in zip(boxes, [cut.copy(), *others], strict=True):
            cut.paste(image.resize((box[2] - box[0], box[3] - box[1]), bicubic), box)
        return cut
    if rng.random() < 0.5:
        return Image.blend(cut, others[0], rng.uniform(0.2, 0.5))
    box = tuple(round(edge) for edge in random_box(square, square[0], rng))
    cut.paste(others[0].crop(box), box)
    return cut


def cut_views(
    sources: list[Source], plan: list[View], rows: range, side: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of the plan are readable, and their bytes.

    A view depends on seed and row alone, so that a resumed run cuts what the first one would have cut.
    """
    pixels, readable = np.zeros((len(rows), side, side, 3), np.uint8), np.zeros(len(rows), bool)
    for at, row in enumerate(rows):
        if (image := cut_one(sources, plan, row, side, seed)) is not None:
            readable[at], pixels[at] = True, np.asarray(image)
    return readable, pixels


def to_tensor(pixels: np.ndarray | Tensor, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """Bytes (n, h, w, 3) as a normalised float tensor (n, 3, h, w)."""
    scaled = torch.as_tensor(pixels).float() / 255
    return ((scaled - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2).contiguous()
