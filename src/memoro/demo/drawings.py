"""The demo's images: letters drawn in matplotlib's fonts, and scikit-learn's handwritten digits."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ImageFont

from memoro.pages.drawing import draw_letter, enlarge_digit

LETTERS = "abdefghmqr"  # upper and lower case have different shapes
FONTS = {
    "sans": ("DejaVuSans", "DejaVuSans-Bold", "cmss10"),
    "serif": ("DejaVuSerif", "DejaVuSerif-Bold", "STIXGeneral", "cmr10"),
    "mono": ("DejaVuSansMono", "DejaVuSansMono-Bold", "cmtt10"),
}
COLUMNS = ("letter", "style", "case")
TEST_FRACTION = 0.25


def draw_letters(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes images and a table with the letter, style and case of each; returns the table's path."""
    import matplotlib

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        letter = LETTERS[number % len(LETTERS)]
        style = generator.choice(list(FONTS))
        case = generator.choice(["upper", "lower"])
        text = letter.upper() if case == "upper" else letter
        font = fonts / f"{generator.choice(FONTS[style])}.ttf"
        image = draw_letter(text, partial(ImageFont.truetype, str(font)), generator)
        image.save(folder / f"{number:04}.png")
        split = "test" if generator.random() < TEST_FRACTION else "train"
        rows.append((f"{number:04}.png", letter, style, case, split))
    return _write_table(folder / "letters.csv", ("path", *COLUMNS, "split"), rows)


def write_digits(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes handwritten digits as class folders, for training and testing; returns the folder."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.images))[:count]
    for number, at in enumerate(order):
        split = "test" if number < count * TEST_FRACTION else "train"
        place = folder / split / str(found.target[at])
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(found.images[at] * 16, 0, 255).astype(np.uint8)
        enlarge_digit(pixels).save(place / f"{number:04}.png")
    return folder


def write_parity_table(digits: Path) -> Path:
    """Writes a table that labels the same digits odd or even; returns its path."""
    rows = [
        (path.relative_to(digits), ("even", "odd")[int(path.parent.name) % 2], path.parent.parent.name)
        for path in sorted(digits.glob("*/*/*.png"))
    ]
    return _write_table(digits / "parity.csv", ("path", "label", "split"), rows)


def _write_table(path: Path, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    return path
