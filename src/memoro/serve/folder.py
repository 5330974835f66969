"""The task files that a server starts with: those of a folder, or of anything else that `-t` takes."""

from __future__ import annotations

import glob
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memoro.backbones import BackboneRecord
from memoro.errors import CompositionError, MemoroError, ServeError, TaskFileError, first_line
from memoro.files import left_behind
from memoro.tasks.hub import expand_task_arguments
from memoro.tasks.task import Task
from memoro.tasks.taskfile import load_named

STALE_SECONDS = 3600


@dataclass(frozen=True)
class TaskFiles:
    """The tasks by their file, in the order of the files."""

    tasks: Mapping[Path, Sequence[Task]]
    folder: Path | None = None
    """Set if the files are all those of a folder. Then one that cannot be read or served does not stop the others."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """The names of the folder's files that cannot be read, and why."""

    @property
    def backbone(self) -> BackboneRecord | None:
        """The backbone that most of the tasks were trained on."""
        records = [task.spec.backbone for tasks in self.tasks.values() for task in tasks]
        count = Counter(record.fingerprint.digest for record in records)
        return max(records, key=lambda record: count[record.fingerprint.digest], default=None)

    def with_parents(self, files: Iterable[Path]) -> list[Path]:
        """These files, and those of all tasks that theirs extend."""
        file_of = {task.name: file for file, tasks in reversed([*self.tasks.items()]) for task in tasks}
        found = list(files)
        for file in found:  # it grows meanwhile
            parents = {file_of.get(parent.name) for task in self.tasks[file] for parent in task.extends}
            found += [parent for parent in parents if parent is not None and parent not in found]
        return found


def read_task_files(places: Sequence[str | Path]) -> TaskFiles:
    """The files of one folder, which is created if it ends with a slash, or of anything else that `-t` takes."""
    if len(places) == 1 and _is_folder(places[0]):
        return _read_folder(Path(places[0]))
    found: dict[Path, list[Task]] = {}
    try:
        given = list(expand_task_arguments(places))
    except TaskFileError as error:
        raise ServeError(f"{error}{_advise_folder(places)}") from None
    files: dict[str, Path] = {}
    for place, file, name in given:
        if not file.exists():
            raise ServeError(f"{place}: no such file or folder.{_advise_folder(places)}")
        for task in load_named(file, name):
            if task.name in files:
                raise CompositionError(
                    f"two tasks are called {task.name!r}, in {files[task.name]} and in {file}: "
                    f"give one of them another name: -t OTHER={place}."
                )
            files[task.name] = file
            found.setdefault(file, []).append(task)
    return TaskFiles(found)


def _read_folder(folder: Path) -> TaskFiles:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in left_behind(folder):
            if part.stat().st_mtime < time.time() - STALE_SECONDS:
                part.unlink()
        files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    except OSError as error:
        raise ServeError(f"cannot use the folder {folder} ({error.strerror}).") from None
    found: dict[Path, list[Task]] = {}
    unreadable = {}
    for file in files:
        try:
            found[file] = load_named(file, "")
        except Exception as error:
            unreadable[file.name] = explain(error, file)
    return TaskFiles(found, folder, unreadable)


def explain(error: Exception, file: Path) -> str:
    """Why a file of the folder is not served, without the folder's path. Anyone may have put the file there, so errors
    that nobody thought of are included."""
    text = str(error) if isinstance(error, MemoroError) else f"{type(error).__name__}: {first_line(error)}"
    return text.replace(f"{file.parent}{os.sep}", "").removeprefix(f"{file.name}: ")


def _is_folder(place: str | Path) -> bool:
    """Whether a place is a folder that is there, or one to create: as text, that ends with a slash."""
    path = Path(place)
    new = place.endswith(("/", os.sep)) if isinstance(place, str) else not (path.exists() or path.suffix)
    return path.is_dir() or new


def _advise_folder(places: Sequence[str | Path]) -> str:
    plain = len(places) == 1 and not glob.has_magic(str(places[0])) and "=" not in str(places[0])
    return f" For a new folder, write {places[0]}/." if plain else ""
