"""A folder of class folders: an index of its files, nothing copied."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from memoro.data.imageset import Skipped, unreadable_size
from memoro.data.layout import arrange, is_clutter
from memoro.data.listing import Listing, Part, Role
from memoro.errors import DataError, ImageError


@dataclass(frozen=True)
class Files:
    """Images that are files, by their paths below a folder."""

    root: str
    paths: tuple[str, ...]

    def read(self, row: int) -> bytes:
        path = os.path.join(self.root, self.paths[row])
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise ImageError(f"{self.where(row)}: {error.strerror or error}.") from None

    def where(self, row: int) -> str:
        return os.path.join(self.root, self.paths[row])


def list_folder(folder: Path) -> Listing:
    """What the folder holds, by the names of its sub-folders."""
    files, folders, bad = _walk(folder)
    layout = arrange(files, folders, str(folder))
    source = Files(str(folder), tuple(files))
    parts: dict[Role, Part] = {}
    skipped = []
    for role, found in layout.parts.items():
        good = [(row, label) for row, label in found if row not in bad]
        parts[role] = Part(source, [row for row, _ in good], [label for _, label in good])
        skipped += [Skipped(source.where(row), bad[row]) for row, _ in found if row in bad]
    return Listing("softmax", parts, notes=layout.notes, skipped=tuple(skipped))


def _walk(root: Path) -> tuple[list[str], list[str], dict[int, str]]:
    """(files, folders) below the root in a fixed order, and the positions of files whose size rules them out."""
    files: list[str] = []
    folders: list[str] = []
    bad: dict[int, str] = {}
    seen: set[tuple[int, int]] = set()

    def visit(folder: Path, prefix: str) -> None:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder above would never end
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = prefix + entry.name
                if is_clutter(entry.name):
                    continue
                if entry.is_dir():
                    folders.append(path)
                    visit(folder / entry.name, path + "/")
                elif entry.is_file():
                    reason = unreadable_size(entry.stat().st_size)
                    if reason is not None:
                        bad[len(files)] = reason
                    files.append(path)

    try:
        visit(root, "")
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; the folder must be readable.") from None
    return files, folders, bad
