"""Drawn images: the letters of the demo, and the samples of the server's page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SIDE = 64
DIGIT_SIDE = 8
"""Pixels of a scanned digit, before it is enlarged."""
_FINE = 4
"""Shapes are drawn this many times larger, and scaled down, for smooth edges."""

FontOfSize = Callable[[int], Any]


def draw_letter(text: str, font: FontOfSize, generator: np.random.Generator) -> Image.Image:
    """A letter at a random position and small rotation, dark on light or light on dark."""
    light, dark = (tuple(generator.integers(low, high, 3).tolist()) for low, high in ((150, 256), (0, 90)))
    ground, ink = (dark, light) if generator.random() < 0.5 else (light, dark)
    image = Image.new("RGB", (SIDE, SIDE), ground)
    shape = font(int(generator.integers(40, 54)))
    place = (SIDE / 2 + generator.uniform(-4, 4), SIDE / 2 + generator.uniform(-4, 4))
    ImageDraw.Draw(image).text(place, text, fill=ink, font=shape, anchor="mm")
    return image.rotate(generator.uniform(-6, 6), Image.Resampling.BICUBIC, fillcolor=ground)


def enlarge_digit(pixels: np.ndarray[Any, Any]) -> Image.Image:
    """A scan of 8 x 8 bytes as an image of the usual size."""
    return Image.fromarray(pixels).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def draw_digit(text: str) -> Image.Image:
    """A digit as the scanned ones are: white on black, as high as the image, a few pixels enlarged."""
    font = ImageFont.load_default(200)
    box = font.getbbox(text, stroke_width=3)
    ink = Image.new("L", (int(box[2] - box[0]), int(box[3] - box[1])))
    ImageDraw.Draw(ink).text((-box[0], -box[1]), text, fill=255, font=font, stroke_width=3)
    ink = ink.resize((6, DIGIT_SIDE), Image.Resampling.BOX)
    pixels = np.zeros((DIGIT_SIDE, DIGIT_SIDE), dtype=np.uint8)
    pixels[:, 1 : 1 + ink.width] = np.asarray(ink)
    return enlarge_digit(pixels)


def draw_landscape() -> Image.Image:
    """Hills under an evening sky."""
    side, generator = SIDE * 2 * _FINE, np.random.default_rng(3)
    height = np.linspace(0, 1, side)[:, None, None]
    sky = (1 - height) * np.array([70, 120, 200]) + height * np.array([255, 190, 120])
    image = Image.fromarray(np.broadcast_to(sky, (side, side, 3)).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    pen.ellipse((side * 0.62, side * 0.2, side * 0.8, side * 0.38), fill=(255, 240, 170))
    across = np.linspace(0, 1, 65)
    for level, color in ((0.55, (60, 110, 110)), (0.68, (45, 95, 70)), (0.82, (30, 70, 40))):
        waves = np.sum([np.sin(across * k * 6 + generator.uniform(0, 6)) / k for k in (1, 2, 3)], axis=0)
        edge = [(x * side, (level - 0.06 * y) * side) for x, y in zip(across, waves, strict=True)]
        pen.polygon([*edge, (side, side), (0, side)], fill=color)
    return _smooth(image)


def draw_apple() -> Image.Image:
    """A red apple on a table."""
    side = SIDE * 2 * _FINE
    image = Image.new("RGB", (side, side), (226, 214, 196))
    pen = ImageDraw.Draw(image)

    def spot(x: float, y: float, width: float, height: float, color: tuple[int, int, int]) -> None:
        pen.ellipse(tuple(side * v for v in (x - width, y - height, x + width, y + height)), fill=color)

    pen.rectangle((0, side * 0.72, side, side), fill=(150, 105, 70))
    spot(0.52, 0.82, 0.3, 0.06, (95, 62, 40))
    for x in (0.41, 0.59):
        spot(x, 0.56, 0.22, 0.26, (190, 35, 40))
    spot(0.5, 0.33, 0.07, 0.03, (130, 20, 28))
    spot(0.34, 0.46, 0.05, 0.07, (235, 120, 110))
    pen.line((side * 0.5, side * 0.34, side * 0.53, side * 0.18), fill=(85, 55, 30), width=side // 32)
    spot(0.63, 0.21, 0.1, 0.04, (80, 140, 55))
    return _smooth(image.filter(ImageFilter.GaussianBlur(_FINE)))


def _smooth(image: Image.Image) -> Image.Image:
    return image.resize((SIDE * 2, SIDE * 2), Image.Resampling.LANCZOS)
