"""Files that appear only once they are whole."""

from __future__ import annotations

import glob
import itertools
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from memoro.errors import TaskFileError


def free_names(files: Sequence[Path]) -> list[Path]:
    """A name beside each file: all get the same number, the first that none of them has."""
    for number in itertools.count(1):
        names = [file.with_name(f"{file.stem}-{number}{file.suffix}") for file in files]
        if not any(name.exists() for name in names):
            break
    return names


def keep_copy(path: Path) -> Path:
    """Gives a file a second name, under which it stays when the first is overwritten.

    The name has another suffix, so that a folder of task files does not have two of one task.
    """
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    name = next(name for name in numbered if not name.exists())
    try:
        try:
            os.link(path, name)
        except OSError:  # a file system without links
            shutil.copy2(path, name)
    except OSError as error:
        raise TaskFileError(f"cannot keep {path} as {name.name} ({error.strerror}), so it is not replaced.") from None
    return name


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    with open_whole(path) as file:
        file.write(data)


@contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """A hidden file beside the path. It gets that name at the end; after an error, it is removed."""
    temporary = path.parent / f".{path.name[:40]}.{uuid.uuid4().hex}.part"
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TaskFileError(f"{path} is not a regular file, so it is not replaced: choose another name.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise _explain(error, path, temporary) from None
    finally:
        with suppress(OSError):  # where its folder is not a folder
            temporary.unlink(missing_ok=True)


def left_behind(place: Path) -> list[Path]:
    """What `open_whole` left beside a file, or in a folder, where its process was killed."""
    folder, name = (place, "*") if place.is_dir() else (place.parent, glob.escape(place.name[:40]))
    return [part for part in folder.glob(f".{name}.*.part") if re.fullmatch(r".*\.[0-9a-f]{32}\.part", part.name)]


def part_of(path: Path) -> Path:
    """Where `write_gradually` writes until the file is whole."""
    return path.with_name(f"{path.name}.part")


@contextmanager
def write_gradually(path: Path) -> Iterator[BinaryIO]:
    """A file to write to piece by piece. It replaces `path` at the end; an interrupted one stays beside it."""
    special = path.exists() and not path.is_file()  # such as /dev/stdout, or a pipe
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path if special else part_of(path)).open("wb") as file:
            yield file
        if not special:
            os.replace(part_of(path), path)
    except OSError as error:
        raise _explain(error, path, part_of(path)) from None


def _explain(error: OSError, path: Path, temporary: Path) -> Exception:
    """The error to raise: a clear one if it is about this file, and the same one if it comes from what is written to
    it, such as images that are read meanwhile."""
    ours = error.filename is None or Path(error.filename) in {path, temporary, *path.parents}
    if not ours or error.strerror is None or isinstance(error, (ConnectionError, TimeoutError)):
        return error
    return TaskFileError(f"cannot write {path} ({error.strerror}); any existing file is unchanged.")


def sync_folder(folder: Path) -> None:
    """Makes sure that a renamed or removed file stays so after a power failure, where the system allows it."""
    with suppress(OSError):  # Windows does not open folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
