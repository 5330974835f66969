"""Small images, and files of them."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(number: int, size: tuple[int, int] = (20, 14)) -> Image.Image:
    """An image unlike that of any other number."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def to_bytes(image: Image.Image, suffix: str = ".png", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, {".png": "PNG", ".jpg": "JPEG", ".gif": "GIF"}[suffix], **options)
    return file.getvalue()


def save_classes(root: Path, counts: dict[str, int], first: int = 0) -> int:
    """Writes `counts[class]` different images into a folder per class; returns the next unused number."""
    for label, count in counts.items():
        (root / label).mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            (root / label / f"{first:04}.png").write_bytes(to_bytes(picture(first)))
            first += 1
    return first


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has next to nothing in it."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def members(*names: str) -> dict[str, bytes]:
    """A different image under each name."""
    return {name: to_bytes(picture(at)) for at, name in enumerate(names)}
