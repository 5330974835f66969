"""Which files are images: by their suffix, or by their first bytes."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path, PurePosixPath

from memoro.errors import DataError

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".heic", ".heif", ".hif", ".bmp", ".gif", ".tif", ".tiff"}
    | {".ppm", ".pgm"}
)

HEAD_BYTES = 64
"""How many of a file's first bytes `is_image` and `is_heif` need."""

_HEIF = rb".{4}ftyp(?:he(?:i[cxms]|v[cxms])|m(?:if|sf)1(?!.*avi[fs]))"  # mif1 and msf1 are containers of both
# TIFF is not among them: the raw files of cameras begin with the same bytes.
_SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF.{4}WEBP|BM.{4}\0{4}|P[1-6]\s+[\d#]|.{4}ftyp(?:avi[fs]|mif1|msf1)|"
    + _HEIF,
    re.DOTALL,
)
_CLUTTER = frozenset({"__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin"})


def is_heif(head: bytes) -> bool:
    """Whether a file that begins with these bytes is HEIF, as phones write it: Pillow needs a plugin to read it."""
    return re.match(_HEIF, head, re.DOTALL) is not None


def is_image(path: str, read_head: Callable[[], bytes]) -> bool:
    """Whether the file is an image, by its suffix or, if that is unknown, by its first bytes."""
    return PurePosixPath(path).suffix.lower() in IMAGE_SUFFIXES or _SIGNATURE.match(read_head()) is not None


def is_clutter(path: str) -> bool:
    """Whether a file system or an archiver left it behind: hidden files, resource forks, thumbnails."""
    return any(part.startswith(".") or part.lower() in _CLUTTER for part in path.split("/"))


def read_head(path: str | Path) -> bytes:
    """The first bytes of a regular file; nothing of a file that cannot be read."""
    try:
        if not os.path.isfile(path):  # opening a FIFO would block
            return b""
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def find_images(places: Iterable[str | Path]) -> Iterator[Path]:
    """The image files of paths, folders (recursively), globs and lists (see `read_lines`), in order, each of them once.

    Names are read folder by folder. A place without images is an error.
    """
    places = list(places)
    for place in places:
        if str(place).endswith(".safetensors"):  # as of a glob that the shell expanded after -t
            raise DataError(f"{place} is a task file, not an image: pass each task file with `tasks`.")
    last = {_root(place): at for at, place in enumerate(places)}
    seen: set[Path] = set()  # only what a later place may name again: there may be millions of images
    for at, place in enumerate(places):
        empty, folder, again = True, None, False
        for path in _find(place):
            empty = False
            if path in seen:
                continue
            if path.parent != folder:
                folder = path.parent
                again = any(last.get(one, at) > at for one in (folder, *folder.parents))
            if again or last.get(path, at) > at:
                seen.add(path)
            yield path
        if empty and not glob.has_magic(str(place)) and not Path(place).exists():
            raise DataError(f"{place}: no such file or folder.")
        if empty:
            raise DataError(f"{place}: no images there. Give files, folders or globs such as 'photos/**/*.jpg'.")


def walk_images(folder: str | Path) -> Iterator[Path]:
    """The image files of a folder and of those inside it, by name. Links to other folders are followed, once each."""
    root, followed = Path(folder).resolve(), set[Path]()

    def leads_on(path: str) -> bool:
        if not os.path.islink(path):
            return True
        target = Path(path).resolve()
        if target in followed or target.is_relative_to(root) or root.is_relative_to(target):
            return False
        followed.add(target)
        return True

    for here, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in sorted(folders) if not is_clutter(name) and leads_on(os.path.join(here, name))]
        for name in sorted(files):
            path = os.path.join(here, name)
            if not is_clutter(name) and is_image(name, partial(read_head, path)) and os.path.isfile(path):
                yield Path(path)


def _root(place: str | Path) -> Path:
    """What the paths of a place begin with: for a glob, the part before its first wildcard."""
    if os.path.exists(place):
        return Path(place)
    return Path(*takewhile(lambda part: not glob.has_magic(part), Path(place).parts))


def is_list(place: str | Path) -> bool:
    """Whether it is not a file, but `@list.txt` or `-`."""
    return (str(place) == "-" or str(place).startswith("@")) and not os.path.exists(place)


def read_lines(place: str | Path) -> Iterator[str]:
    """The paths in the lines of a file, `@list.txt`, or of the standard input, `-`."""
    try:
        with (
            sys.stdin if str(place) == "-" else open(str(place)[1:], encoding="utf-8", errors="surrogateescape") as file
        ):
            yield from (line.rstrip("\r\n") for line in file if line.strip())
    except OSError as error:
        raise DataError(f"{place}: {error.strerror}; after @, name a file with a path on each line.") from None


def _find(place: str | Path) -> Iterator[Path]:
    if is_list(place):
        yield from map(Path, read_lines(place))
    elif os.path.isfile(place):
        yield Path(place)
    elif os.path.isdir(place):
        yield from walk_images(place)
    else:
        for match in sorted(set(glob.glob(str(place), recursive=True))):
            if os.path.isfile(match) and is_image(match, partial(read_head, match)):
                yield Path(match)
