"""Drawn images whose colour is their class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"red": (210, 40, 40), "green": (40, 200, 60), "blue": (50, 60, 210), "grey": (128, 128, 128)}


def save_square(path: Path, colour: str, number: int) -> None:
    """A noisy square of a colour, unlike that of any other number."""
    noise = np.random.default_rng(number).integers(-30, 31, (24, 24, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)).save(path)


def save_squares(root: Path, counts: dict[str, int] | None = None, first: int = 0) -> Path:
    """A folder of class folders of coloured squares."""
    for colour, count in (counts or {"red": 8, "green": 8, "blue": 8}).items():
        for _ in range(count):
            save_square(root / colour / f"{first:03}.png", colour, first)
            first += 1
    return root
