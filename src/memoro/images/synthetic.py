"""Synthetic images: coloured shapes and strokes, the same for everyone."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SIDE = 160


def synthetic_image(number: int) -> Image.Image:
    """The image of this number: overlapping shapes if it is even, strokes if it is odd."""
    random = np.random.default_rng(number)
    image = Image.new("RGB", (SIDE, SIDE), _colour(random))
    draw: Any = ImageDraw.Draw(image)
    if number % 2:
        for _ in range(int(random.integers(2, 40))):
            # A random walk whose direction changes slowly.
            turns = random.normal(size=(int(random.integers(4, 40)), 2)) * random.uniform(0, 4)
            turns[0] = random.normal(size=2) * random.uniform(2, 12)
            points = random.uniform(0, SIDE, 2) + turns.cumsum(axis=0).cumsum(axis=0)
            draw.line([tuple(point) for point in points.tolist()], _colour(random), int(random.integers(1, 8)))
        return image
    palette = [_colour(random) for _ in range(int(random.integers(2, 12)))]
    smallest = random.uniform(2, 12)
    for _ in range(int(random.integers(30, 600))):
        # Few shapes are large and many are small, as objects in photographs are.
        size = min(SIDE, smallest * random.uniform(0, 1) ** -0.7)
        x, y = random.uniform(0, SIDE, 2)
        width, height = size * random.uniform(0.3, 1, 2)
        kind = (draw.ellipse, draw.rectangle)[int(random.integers(2))]
        kind([x - width, y - height, x + width, y + height], palette[int(random.integers(len(palette)))])
    return image


def _colour(random: np.random.Generator) -> tuple[int, ...]:
    return tuple(random.integers(0, 256, 3).tolist())
