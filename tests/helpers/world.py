"""The files that the documentation speaks of, drawn: `photos/pets`, `rooms.zip`, `houses.csv`, `pets.safetensors`, …"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

import numpy as np
import pandas
import transformers as hf
from blocks import ROOT, blocks_of
from PIL import Image, ImageDraw

import memoro

CORNERS = {"cat": 3, "dog": 60}


def draw(label: str, generator: np.random.Generator, radius: int | None = None) -> Image.Image:
    """A triangle is a cat, a circle a dog; upright stripes are a kitchen, others a bedroom."""
    ground, ink = (tuple(generator.integers(low, high, 3).tolist()) for low, high in ((140, 256), (0, 90)))
    image = Image.new("RGB", (72, 64), ground)
    pen, radius = ImageDraw.Draw(image), radius or int(generator.integers(12, 22))
    if label in CORNERS:
        x, y, turn = (
            generator.integers(24, 40).item(),
            generator.integers(24, 40).item(),
            generator.integers(0, 90).item(),
        )
        pen.regular_polygon((x, y, radius), CORNERS[label], turn, fill=ink)
    for at in range(0, 72, 6) if label not in CORNERS else ():
        pen.line((at, 0, at, 64) if label == "kitchen" else (0, at, 72, at), fill=ink, width=3)
    return image


def draw_folder(folder: Path, labels: Sequence[str], number: int, generator: np.random.Generator) -> None:
    for label in labels:
        (folder / label).mkdir(parents=True)
        for index in range(number):
            draw(label, generator).save(folder / label / f"{index}.jpg", quality=95)


def write_table(path: Path, names: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def make_world(root: Path) -> None:
    """Draws the images, writes the tables, and trains the tasks that pages take as given."""
    generator = np.random.default_rng(0)
    for split, number in (("train", 24), ("test", 8)):
        draw_folder(root / "photos" / "pets" / split, ("cat", "dog"), number, generator)
    draw_folder(root / "photos" / "rooms", ("kitchen", "bedroom"), 16, generator)
    shutil.make_archive(str(root / "rooms"), "zip", root / "photos" / "rooms")
    for name in ("pets-test", "new-pets"):
        draw_folder(root / "photos" / name, ("cat", "dog"), 16, generator)
    for folder, number in (("new", 6), ("others", 50)):
        (root / folder).mkdir()
        for index in range(number):
            label = ("cat", "dog")[index % 2] if folder == "new" else ("kitchen", "bedroom")[index % 2]
            draw(label, generator).save(root / folder / f"{index}.jpg", quality=95)
    draw("cat", generator, 21).save(root / "photo.jpg", quality=95)
    (root / "table").mkdir()
    rows = []
    for index in range(32):
        label, radius = ("cat", "dog")[index % 2], (10, 11, 12, 13, 20, 21, 22, 23)[index // 2 % 8]
        draw(label, generator, radius).save(root / "table" / f"{index}.jpg", quality=95)
        size = "large" if radius > 15 else "small"
        rows.append((f"table/{index}.jpg", label, size, radius * 10, f"{label}|{size}"))
    write_table(root / "photos.csv", ("path", "species", "size"), [row[:3] for row in rows])
    pandas.read_csv(root / "photos.csv").to_parquet(root / "photos.parquet")
    write_table(root / "houses.csv", ("path", "price"), [(row[0], row[3]) for row in rows])
    write_table(root / "tags.csv", ("path", "labels"), [(row[0], row[4]) for row in rows])
    [block] = [
        block for block in blocks_of((ROOT / "docs" / "start.md").read_text(), "start.md") if "SIDES" in block.code
    ]
    with chdir(root):
        exec(block.code, {})
    tiny = hf.Dinov2Config(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=12, mlp_ratio=2, patch_size=14, image_size=56
    )
    hf.Dinov2Model(tiny).save_pretrained(root / "facebook" / "dinov2-small")  # a folder wins over a hub id
    for name, data in (("pets", "photos/pets"), ("rooms", "rooms.zip")):
        memoro.train(str(root / data), task=name, regime="side", epochs=8, out=root / f"{name}.safetensors", quiet=True)
    (root / "tasks").mkdir()
    for name in ("pets", "rooms"):
        shutil.copy(root / f"{name}.safetensors", root / "tasks")
    for repository in ("pets", "rooms"):
        (root / "me" / repository).mkdir(parents=True)
        shutil.copy(root / f"{repository}.safetensors", root / "me" / repository / "task.safetensors")
