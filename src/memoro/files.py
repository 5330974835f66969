"""Files that appear only once they are whole, and folders that one process writes to."""

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

from filelock import FileLock

from memoro.errors import TaskFileError

LOCK = ".lock"
"""The name of the lock file of a folder: see `hold_folder`."""


def cache_folder() -> Path:
    """Where memoro keeps what can be computed again."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "memoro"


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
    number = 1
    while True:
        name = path.with_name(f"{path.name}.{number}")
        try:
            _link(path, name)
            return name
        except FileExistsError:
            number += 1
        except OSError as error:
            text = f"cannot keep {path} as {name.name} ({error.strerror}), so it is not replaced."
            raise TaskFileError(text) from None


def _link(path: Path, name: Path) -> None:
    """Gives a file a new name too; on a file system without links, a copy gets it. No file is ever replaced."""
    try:
        os.link(path, name)
    except FileExistsError:
        raise
    except OSError:
        with path.open("rb") as old, name.open("xb") as new:
            shutil.copyfileobj(old, new)
        shutil.copystat(path, name)


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    with open_whole(path) as file:
        file.write(data)


@contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """A hidden file beside the path. It gets that name at the end; after an error, it is removed."""
    temporary = _new_name(path)
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
        with suppress(OSError):  # if its folder is not a folder
            temporary.unlink(missing_ok=True)


def _new_name(path: Path) -> Path:
    """A hidden path beside the file that no other process writes to."""
    return path.parent / f".{path.name[:40]}.{uuid.uuid4().hex}.part"


def left_behind(place: Path) -> list[Path]:
    """What a killed process left half-written beside a file, or in a folder."""
    folder, name = (place, "*") if place.is_dir() else (place.parent, glob.escape(place.name[:40]))
    return [part for part in folder.glob(f".{name}.*.part") if re.fullmatch(r".*\.[0-9a-f]{32}\.part", part.name)]


def part_of(path: Path) -> Path:
    """Where `write_gradually` leaves what it wrote before it was interrupted."""
    return path.with_name(f"{path.name}.part")


@contextmanager
def write_gradually(path: Path) -> Iterator[BinaryIO]:
    """A hidden file beside the path, to write to piece by piece. It gets that name at the end; what an interrupted one
    holds is kept as `part_of(path)`."""
    special = path.exists() and not path.is_file()  # such as /dev/stdout, or a pipe
    temporary = path if special else _new_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb" if special else "xb") as file:
            yield file
        if not special:
            os.replace(temporary, path)
            with suppress(OSError):
                part_of(path).unlink()  # of an earlier run
    except OSError as error:
        raise _explain(error, path, temporary) from None
    finally:
        if not special:
            with suppress(OSError):  # it has its final name
                if temporary.stat().st_size:
                    os.replace(temporary, part_of(path))
                else:
                    temporary.unlink()


@contextmanager
def hold_folder(path: Path) -> Iterator[None]:
    """Keeps other processes out of the folder, which is made if needed; raises `filelock.Timeout` if one has it.

    The lock belongs to this process and ends with it, however it ends.
    """
    lock = FileLock(path.absolute() / LOCK, timeout=0)
    path.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    try:
        yield
    finally:
        with suppress(OSError):  # on Windows it cannot be removed while it is held
            Path(lock.lock_file).unlink()
        lock.release()


def _explain(error: OSError, path: Path, temporary: Path) -> Exception:
    """The error to raise: a clear one if it is about this file, and the same one if it comes from what is written to
    it, such as images that are read meanwhile."""
    ours = error.filename is None or Path(error.filename) in {path, temporary, *path.parents}
    if not ours or error.strerror is None or isinstance(error, (ConnectionError, TimeoutError)):
        return error
    return TaskFileError(f"cannot write {path} ({error.strerror}); any existing file is unchanged.")


def sync_folder(folder: Path) -> None:
    """Makes sure that a renamed or removed file stays so after a power failure, if the system allows it."""
    with suppress(OSError):  # Windows does not open folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
