"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

from memoro.errors import TaskFileError


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    temporary = path.parent / f".{path.name[:40]}.{uuid.uuid4().hex}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise TaskFileError(f"cannot write {path} ({error.strerror}); any existing file is unchanged.") from None
    finally:
        with suppress(OSError):  # where its folder is not a folder
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes sure that a renamed or removed file stays so after a power failure, where the system allows it."""
    with suppress(OSError):  # Windows does not open folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
