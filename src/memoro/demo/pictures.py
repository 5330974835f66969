"""The demo's images: letters drawn in matplotlib's fonts, and scikit-learn's handwritten digits."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 64
LETTERS = "abdefghmqr"  # those whose capitals look different
FONTS = {
    "sans": ("DejaVuSans", "DejaVuSans-Bold", "cmss10"),
    "serif": ("DejaVuSerif", "DejaVuSerif-Bold", "STIXGeneral", "cmr10"),
    "mono": ("DejaVuSansMono", "DejaVuSansMono-Bold", "cmtt10"),
}
COLUMNS = ("letter", "style", "case")
TEST_SHARE = 0.25


def draw_letters(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes images and a table that says of each which letter it shows, in what style and case; returns the table."""
    import matplotlib

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "letters.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", *COLUMNS, "split"])
        for number in range(count):
            letter = LETTERS[number % len(LETTERS)]
            style = generator.choice(list(FONTS))
            case = generator.choice(["upper", "lower"])
            text = letter.upper() if case == "upper" else letter
            image = _letter(text, fonts / f"{generator.choice(FONTS[style])}.ttf", generator)
            image.save(folder / f"{number:04}.png")
            split = "test" if generator.random() < TEST_SHARE else "train"
            writer.writerow([f"{number:04}.png", letter, style, case, split])
    return table


def _letter(text: str, font: Path, generator: np.random.Generator) -> Image.Image:
    """A letter somewhere on a plain ground, a little turned, dark on light or light on dark."""
    ground, ink = generator.integers(150, 256, 3), generator.integers(0, 90, 3)
    if generator.random() < 0.5:
        ground, ink = ink, ground
    image = Image.new("RGB", (SIDE, SIDE), tuple(int(value) for value in ground))
    size = int(generator.integers(40, 54))
    place = (SIDE / 2 + generator.uniform(-4, 4), SIDE / 2 + generator.uniform(-4, 4))
    drawing = ImageDraw.Draw(image)
    shape = ImageFont.truetype(str(font), size)
    drawing.text(place, text, fill=tuple(int(value) for value in ink), font=shape, anchor="mm")
    fill = tuple(int(value) for value in ground)
    return image.rotate(generator.uniform(-6, 6), Image.Resampling.BICUBIC, fillcolor=fill)


def write_digits(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes handwritten digits as class folders, for training and testing; returns the folder."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.images))[:count]
    for number, at in enumerate(order):
        split = "test" if number < count * TEST_SHARE else "train"
        place = folder / split / str(found.target[at])
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(found.images[at] * 16, 0, 255).astype(np.uint8)
        image = Image.fromarray(pixels).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        image.save(place / f"{number:04}.png")
    return folder


def table_of_parity(digits: Path) -> Path:
    """A table over the same digits that says odd or even; returns it."""
    table = digits / "parity.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        for image in sorted(digits.glob("*/*/*.png")):
            kind = ("even", "odd")[int(image.parent.name) % 2]
            writer.writerow([image.relative_to(digits), kind, image.parent.parent.name])
    return table
