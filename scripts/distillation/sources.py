"""Where the images come from: zip files and folders, none of them trusted."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from PIL import Image

from memoro.data.source import unreadable_size
from memoro.errors import ImageError
from memoro.images import open_image

IMAGE_TYPES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
SPLITS = {"train", "test", "val", "valid", "validation"}


class Source:
    """The training images of one zip file or folder. Zip members are decoded in memory, never unpacked."""

    def __init__(self, path: Path, views: int = 4) -> None:
        self.path, self.views = path, views
        self.archive = None if path.is_dir() else zipfile.ZipFile(path)
        found = self.archive.namelist() if self.archive else [str(p.relative_to(path)) for p in path.rglob("*")]
        images = sorted(name for name in found if Path(name).suffix.lower() in IMAGE_TYPES)
        splits = {name: split_of(name) for name in images}
        self.names = [n for n in images if splits[n] == "train"] or [n for n in images if splits[n] is None]
        if not self.names:
            raise SystemExit(f"{path}: no training images found")

    @classmethod
    def parse(cls, text: str) -> Source:
        """`PATH`, or `PATH:20` for twenty views of each image."""
        path, _, views = text.rpartition(":")
        return cls(Path(path), int(views)) if path and views.isdigit() else cls(Path(text))

    def class_of(self, name: str) -> str | None:
        """The folder that an image lies in, where the source has `train/CLASS/` folders."""
        return Path(name).parent.name if split_of(name) is not None else None

    def read(self, name: str) -> Image.Image | None:
        """The image, upright and in RGB, or None where it cannot be read: one broken file must not end a long run."""
        try:
            size = self.archive.getinfo(name).file_size if self.archive else (self.path / name).stat().st_size
            if (reason := unreadable_size(size)) is not None:
                raise ImageError(reason)
            return open_image(self.archive.read(name) if self.archive else (self.path / name).read_bytes())
        except (ImageError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            print(f"skipped, not readable: {self.path}/{name} ({error})", flush=True)
            return None


def split_of(name: str) -> str | None:
    """The outermost folder that names a split: further in, "train" may be a class (as in CIFAR-100)."""
    return next((part for part in Path(name).parts[:-1] if part in SPLITS), None)
