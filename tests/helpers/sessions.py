"""Drawn images whose colours are their classes, and sessions over them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from families import CASES
from PIL import Image

import memoro
from memoro.backbones import Backbone

COLOURS = {"red": (200, 40, 40), "green": (40, 190, 60), "blue": (40, 60, 200)}


def draw(colour: str, seed: int) -> Image.Image:
    """A noisy image of a colour, another one for each seed."""
    noise = np.random.default_rng(seed).normal(0, 12, (28, 28, 3))
    return Image.fromarray(np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8))


def fill(folder: Path, count: int = 8) -> dict[str, str]:
    """Writes so many images of each colour without class folders; the colour of each by its path."""
    folder.mkdir(parents=True)
    truth = {}
    for at in range(count):
        for number, colour in enumerate(COLOURS):
            name = f"{at:02}-{number}.png"
            draw(colour, 10 * at + number).save(folder / name)
            truth[name] = colour
    return truth


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return memoro.load_backbone(CASES[0].model())


@pytest.fixture(autouse=True)
def kept_elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
