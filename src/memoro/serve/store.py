"""The attached tasks: a composition that requests read, and the files that keep them."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from memoro.backbones import Backbone, BackboneRecord
from memoro.engine.composition import Composition
from memoro.errors import CompositionError, MemoroError, ServeError, TaskFileError, first_line
from memoro.evaluation.inspect import describe_task
from memoro.files import left_behind, sync_folder
from memoro.serve.batching import run_pass
from memoro.serve.options import MAX_INPUT_SIDE, MAX_TASKS
from memoro.tasks.task import Task
from memoro.tasks.taskfile import expand_task_arguments, load_named, load_tasks, save_tasks, task_bytes, write_sections

STALE_SECONDS = 3600


def open_store(places: Sequence[str | Path], load: Callable[[BackboneRecord | None], Backbone]) -> TaskStore:
    """The tasks of one folder, which is created if it ends with a slash, or of anything else that `-t` takes, on the
    backbone that `load` gives for the one that most of them were trained on."""
    folder = Path(places[0]) if len(places) == 1 and _is_folder(places[0]) else None
    tasks, unreadable = (_read_files(places), {}) if folder is None else _read_folder(folder)
    records = [task.spec.backbone for some in tasks.values() for task in some]
    count = Counter(record.fingerprint.digest for record in records)
    most = max(records, key=lambda record: count[record.fingerprint.digest], default=None)
    return TaskStore(load(most), tasks, folder, unreadable)


def _read_files(places: Sequence[str | Path]) -> dict[Path, list[Task]]:
    """The tasks by their file."""
    try:
        given = list(expand_task_arguments(places))
        for place, file, _ in given:
            if not file.exists():
                raise TaskFileError(f"{place}: no such file or folder.")
    except TaskFileError as error:
        new = len(places) == 1 and not glob.has_magic(str(places[0])) and "=" not in str(places[0])
        raise ServeError(f"{error}{f' For a new folder, write {places[0]}/.' if new else ''}") from None
    tasks: dict[Path, list[Task]] = {}
    for _, file, name in given:
        tasks.setdefault(file, []).extend(load_named(file, name))
    return tasks


def _read_folder(folder: Path) -> tuple[dict[Path, list[Task]], dict[str, str]]:
    """The tasks by their file, and why other files cannot be read."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in left_behind(folder):
            if part.stat().st_mtime < time.time() - STALE_SECONDS:
                part.unlink()
        files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    except OSError as error:
        raise ServeError(f"cannot use the folder {folder} ({error.strerror}).") from None
    tasks: dict[Path, list[Task]] = {}
    unreadable = {}
    for file in files:
        try:
            tasks[file] = load_named(file, "")
        except Exception as error:
            unreadable[file.name] = explain(error, file)
    return tasks, unreadable


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


ALL = "all"
"""The model of the Open Inference Protocol that stands for all tasks."""
OFF = "attaching is off: start the server with --tasks FOLDER, which keeps what is attached."


@dataclass(frozen=True)
class Attached:
    """The tasks at one moment. A request takes it once, and never sees a change."""

    model: Composition
    info: Mapping[str, dict[str, Any]]
    """What `describe_task` says of each, and the `bytes` of its file; `content` is the version."""

    def version(self, name: str) -> str:
        """The first digits of a task's content hash, or of all of them together."""
        if name != ALL:
            return str(self.info[name]["content"])[:12]
        return hashlib.sha256("".join(sorted(info["content"] for info in self.info.values())).encode()).hexdigest()[:12]


class TaskStore:
    """Attach and detach write to the folder first, then swap the whole composition at once.

    Every change of the folder is one rename or removal: a crash leaves a task there whole or not at all.
    """

    def __init__(
        self,
        backbone: Backbone,
        tasks: Mapping[Path, Sequence[Task]],
        folder: Path | None = None,
        unreadable: Mapping[str, str] | None = None,
    ) -> None:
        """`tasks` by their file. If these are all files of a `folder`, one that cannot be read or served does not stop
        the others."""
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[str, Path] = {}
        self.current = Attached(_compose(backbone, []), {})
        self.skipped = dict(unreadable or {})
        """The names of the folder's files that are not served, and why."""
        if folder is None:
            self._start(tasks, list(tasks))
            return
        left, failed = list(tasks), self._start_halves(tasks, list(tasks))
        while failed and len(failed) < len(left):  # a parent may have come after its child
            left, failed = list(failed), self._start_halves(tasks, list(failed))
        self.skipped |= {file.name: explain(error, file) for file, error in failed.items()}

    @property
    def writable(self) -> bool:
        return self._folder is not None

    def _start(self, given: Mapping[Path, Sequence[Task]], files: Sequence[Path]) -> None:
        """Attaches the tasks of these files, all or none."""
        places = dict(self._files)
        for file in files:
            for task in given[file]:
                if (other := places.setdefault(task.name, file)) != file:
                    raise CompositionError(
                        f"two tasks are called {task.name!r}, in {other} and in {file}: remove one of them, or give it "
                        f"another name: `tasks=OTHER={file}`."
                    )
        tasks = [task for file in files for task in given[file]]
        model = _compose(self.current.model.backbone, [*self.current.model.tasks.values(), *tasks])
        self.current, self._files = _attach(model, self.current.info, tasks), places

    def _start_halves(self, given: Mapping[Path, Sequence[Task]], files: Sequence[Path]) -> dict[Path, Exception]:
        """Attaches the tasks of all of these files that can be served, and returns why the others cannot. All at once
        is fastest, and halves find the few that are the reason."""
        try:
            self._start(given, files)
            return {}
        except Exception as error:
            half = len(files) // 2
            if half == 0:
                return {files[0]: error}
        return self._start_halves(given, files[:half]) | self._start_halves(given, files[half:])

    def attach(self, data: bytes, name: str | None = None) -> dict[str, dict[str, Any]]:
        """Attaches the tasks of an uploaded file. By name: its `version`, and whether it is new or `changed`.

        Raises, and changes nothing, if the file cannot be trusted or its tasks cannot be composed with the others.
        """
        tasks = read_upload(data)
        if name is not None and [task.name for task in tasks] != [name]:
            names = ", ".join(repr(task.name) for task in tasks)
            raise ServeError(f"the file contains {names}, not {name!r} alone; upload it to /v1/tasks instead.", 422)
        with self._changing() as old:
            changed = {}
            for task in tasks:
                if old.info.get(task.name, {}).get("content") != task.content_hash():
                    if task.name in old.info:
                        _check_childless(old.model, task.name, "replace")
                # A task that is calibrated again keeps its content hash, and so its children.
                elif _sections(task) == _sections(old.model.tasks[task.name]):
                    continue
                changed[task.name] = task
            model = _compose(old.model.backbone, list({**old.model.tasks, **changed}.values()))
            current = _attach(model, old.info, list(changed.values()))
            parents = {task.name: [parent.name for parent in task.extends] for task in changed.values()}
            order = [each for each in TopologicalSorter(parents).static_order() if each in changed]
            files = dict(self._files)
            for each in order:
                files[each] = self._files.get(each) or self._new_file(each, files.values())
            self._store(current, files, order)  # parents first: after a crash, no child is without its parent
        return {task.name: {"version": current.version(task.name), "changed": task.name in changed} for task in tasks}

    def detach(self, name: str) -> None:
        """Detaches a task. One that others extend cannot be detached before them."""
        with self._changing() as old:
            if name not in old.info:
                raise ServeError(f"there is no task {name!r}.", 404)
            _check_childless(old.model, name, "detach")
            self._store(_attach(old.model.detach(name), old.info, []), self._files, [name])
            del self._files[name]

    @contextmanager
    def _changing(self) -> Iterator[Attached]:
        """Changes wait for each other. Gives what is attached now."""
        with self._lock:
            if self._folder is None:
                raise ServeError(OFF, 403)
            yield self.current

    def _store(self, new: Attached, files: dict[str, Path], changed: Sequence[str]) -> None:
        """Writes the files of the changed tasks. If one cannot be written, those before it are taken back."""
        written: list[Path] = []
        try:
            for file in dict.fromkeys(files[name] for name in changed):
                _write(file, new.model, files)
                written.append(file)
        except (MemoroError, OSError) as error:
            for file in reversed(written):
                with suppress(MemoroError, OSError):
                    _write(file, self.current.model, self._files)
            raise ServeError(
                "the change could not be stored, so nothing was changed; is the disk full?", 507
            ) from error
        self.current, self._files = new, files

    def _new_file(self, name: str, others: Iterable[Path]) -> Path:
        assert self._folder is not None
        # A name may be longer in bytes than a file's may be, or reserved on some system: then its hash is used.
        stem = name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 _.+-]{0,79}", name) else f"task-{_digest(name)}"
        file = self._folder / f"{stem}.safetensors"
        known = {*(file.name.lower() for file in others), *map(str.lower, self.skipped)}
        if file.name.lower() in known:
            file = self._folder / f"{stem}-{_digest(name)}.safetensors"
        if file.exists():
            raise ServeError(
                f"{file.name} appeared in the server's folder after it started: restart the server, or remove it.", 409
            )
        return file


def _write(file: Path, model: Composition, files: Mapping[str, Path]) -> None:
    """Writes the tasks that are in this file; removes it if there are none."""
    if inside := [task for name, task in model.tasks.items() if files.get(name) == file]:
        save_tasks(inside, file)
    else:
        file.unlink(missing_ok=True)
        sync_folder(file.parent)


def read_upload(data: bytes) -> list[Task]:
    """The tasks of an uploaded file, which nobody trusts."""
    handle, name = tempfile.mkstemp(".safetensors", "memoro-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        return load_tasks(Path(name))
    except TaskFileError as error:
        raise ServeError(str(error).replace(name, "the task file"), 422) from None
    finally:
        os.unlink(name)


def _compose(backbone: Backbone, tasks: Sequence[Task]) -> Composition:
    if len(tasks) > MAX_TASKS:
        raise ServeError(f"at most {MAX_TASKS} tasks can be attached.", 422)
    return Composition(backbone, tasks)


def _attach(model: Composition, info: Mapping[str, dict[str, Any]], changed: Sequence[Task]) -> Attached:
    """The composition with what is known of its tasks, if the changed ones can be served."""
    _check(model, [task.name for task in changed])
    try:
        new = {task.name: {**describe_task(task), "bytes": len(task_bytes([task]))} for task in changed}
        json.dumps(new, allow_nan=False)
    except (RecursionError, ValueError):
        raise ServeError("the record of the task is nested too deeply.", 422) from None
    known = {**info, **new}
    return Attached(model, {name: known[name] for name in model.names})


def _check(model: Composition, names: Sequence[str]) -> None:
    """Raises if the name, the input size or the answer to a plain image of a task would be a problem later."""
    if ALL in names:
        raise ServeError(f"the name {ALL!r} stands for all tasks here: train the task again with another name.", 422)
    for steps, members in model.passes(names).items():
        resize = steps.resize if isinstance(steps.resize, tuple) else (steps.resize or 0,)
        if max((*resize, *(steps.crop or ()))) > MAX_INPUT_SIDE:
            raise ServeError(
                f"{_listed(members)}: the server takes inputs of at most {MAX_INPUT_SIDE} pixels a side. Train with a "
                "smaller image size.",
                422,
            )
        pixels = steps.to_tensor(Image.new("RGB", (64, 64), (128, 96, 64)))
        logits = run_pass(model, pixels.unsqueeze(0), members)[0].logits
        if broken := [name for name in members if not torch.isfinite(logits[name]).all()]:
            raise ServeError(f"{_listed(broken)}: the answer to a test image is NaN or infinite. Train it again.", 422)


def _check_childless(model: Composition, name: str, action: str) -> None:
    """Raises a conflict if other tasks extend this one."""
    try:
        model.check_childless(name, action)
    except CompositionError as error:
        raise ServeError(str(error), 409) from None


def _sections(task: Task) -> dict[str, Any]:
    """The records of a task's calibration and familiarity, with checksums that cover their tensors."""
    return write_sections(task.spec, "")[0]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
