"""Where a training writes its task files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from memoro.errors import TaskFileError, TrainingError
from memoro.regimes import Regime
from memoro.tasks.spec import Model

SUFFIX = ".safetensors"


def read_target(out: str | Path) -> Path:
    """The path; a folder is created where it ends with a slash, which a Path does not keep."""
    try:
        if str(out).endswith(("/", os.sep)):
            Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"`out={out}` cannot be written ({error.strerror}): choose another place.") from None
    return Path(out)


def check_target(out: Path, *, several: bool) -> None:
    """Raises before the training where its result could not be written."""
    if several and (out.is_file() or out.suffix == SUFFIX):
        raise TrainingError(f"`out={out}` is a file, but several tasks need a folder, such as `out='tasks/'`.")
    folder = out if several or out.is_dir() else out.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TrainingError(f"`out={out}` cannot be written ({error.strerror}): choose another place.") from None


def has_content(file: Path, task: Model, regime: Regime) -> bool:
    """Whether a file holds this very task, as after a finished training was resumed."""
    try:
        return regime.read_hashes(file) == [task.content_hash()]
    except TaskFileError:
        return False


def file_of(name: str, out: Path, *, several: bool) -> Path:
    return out / (name + SUFFIX) if several or out.is_dir() else out
