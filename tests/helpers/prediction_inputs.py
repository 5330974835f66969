"""A folder of images as people have them, and a task of each kind to predict with."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image
from random_tasks import random_task

import memoro
from memoro.backbones import Backbone


def picture(seed: int, width: int = 36, height: int = 24) -> Image.Image:
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    if form == "HEIF":
        pillow_heif.register_heif_opener()  # to save: memoro opens these without
    image.save(file, form, **options)
    return file.getvalue()


READABLE = ["a.avif", "b.heic", "c.png", "deep/photo", "deep/wrong.txt"]


UNREADABLE = {"empty.png": "the file is empty", "junk.jpg": "not a readable image"}


@pytest.fixture
def mess(tmp_path: Path) -> Path:
    """A folder as people have them: images of all suffixes and none, damaged ones, and other files."""
    folder = tmp_path / "mess"
    (folder / "deep").mkdir(parents=True)
    (folder / ".trash").mkdir()
    for number, (name, form) in enumerate(zip(READABLE, ["AVIF", "HEIF", "PNG", "JPEG", "WEBP"], strict=True)):
        (folder / name).write_bytes(encoded(picture(number), form))
    (folder / "empty.png").write_bytes(b"")
    (folder / "junk.jpg").write_bytes(b"no image at all")
    for name in ("notes.txt", "._c.png", ".trash/c.png", "Thumbs.db", "raw.cr2", "BMW.md"):
        (folder / name).write_bytes({"raw.cr2": b"II*\0" + bytes(60), "BMW.md": b"BMW builds cars."}.get(name, b"P1 x"))
    return folder


@pytest.fixture
def tasks(backbone: Backbone, tmp_path: Path) -> list[str]:
    """The -t options of a task of each kind."""
    kinds = {"pets": "softmax", "tags": "multilabel", "age": "regression"}
    labels = {"pets": ["cat", "dog", "fish"], "tags": ["red", "old", "wide"], "age": ["years"]}
    options: list[str] = []
    for seed, (name, kind) in enumerate(kinds.items()):
        task = random_task(backbone, name, seed=seed, labels=labels[name], head=kind)
        options += ["-t", str(memoro.save_task(task, tmp_path / f"{name}.safetensors"))]
    return options


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))
