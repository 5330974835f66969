"""Task files: safetensors with one JSON record. Reading one runs no code and trusts nothing. See docs/format.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from memoro.arguments import several
from memoro.errors import TaskFileError
from memoro.files import write_whole
from memoro.tasks.card import write_card
from memoro.tasks.hub import FILE, MAX_FILE, find_task_file
from memoro.tasks.record import (
    ENSEMBLE_FORMAT,
    PLAIN_FORMAT,
    READ_OUT_FORMAT,
    check_content,
    file_bytes,
    open_file,
    read_choice,
    read_list,
    read_number,
    read_object,
    read_spec,
    read_tensors,
    read_text,
    read_whole,
    write_spec,
    write_tensors,
)
from memoro.tasks.sections import read_sections, section_tensors, write_sections
from memoro.tasks.spec import MAX_CELLS, MAX_MEMBERS, MAX_RANK, by_name, check_name
from memoro.tasks.task import Parent, Task, content_hashes, is_halved, link_parents
from memoro.tasks.taskspec import MAX_STATISTICS, MemoryNorm, ReadOut, TaskSpec, Widths

MAX_TASKS = 10_000
MAX_WIDTH = 1 << 20


def save_task(task: Task, path: str | Path) -> Path:
    """Writes one task to a file; returns its path. A crash leaves the old file as it was."""
    return save_tasks([task], path)


def save_tasks(tasks: Task | Iterable[Task], path: str | Path) -> Path:
    """Writes tasks, with or without their parents, to one file: the paper's concatenated model as an artefact."""
    write_whole(Path(path), task_bytes(tasks))
    return Path(path)


def task_bytes(tasks: Task | Iterable[Task]) -> bytes:
    """What `save_tasks` writes."""
    tasks = several(tasks)
    if not tasks:
        raise TaskFileError("there is no task to save.")
    for task in tasks:
        if not isinstance(task, Task):
            raise TaskFileError(f"{task!r} is not a task: it cannot be saved as one.")
    by_name(tasks)
    tensors: dict[str, Tensor] = {}
    records, hashes = [], content_hashes(tasks)
    for number, task in enumerate(tasks):
        sections, own = write_sections(task.spec, f"{number}.")
        tensors |= {**write_tensors(task.name, task.stored_tensors(), f"{number}."), **own}
        records.append({**_write_task(task, hashes), **sections})
    return file_bytes({"tasks": records, "format": max(map(_oldest_format, tasks))}, tensors)


def _oldest_format(task: Task) -> int:
    """The oldest format that can hold a task, so that older versions can read it."""
    preprocessing = task.spec.preprocessing
    scaled = preprocessing is not None and preprocessing.white is not None
    if task.spec.readout is not None or task.spec.familiarity is not None or scaled:
        return READ_OUT_FORMAT
    return ENSEMBLE_FORMAT if task.members > 1 else PLAIN_FORMAT


def load_task(
    path: str | Path,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    token: str | None = None,
) -> Task:
    """The one task of a file, of a folder that `save_pretrained` wrote, or of a hub id (`owner/name`).

    A local path wins over a hub id of the same spelling. `revision` is a branch, tag or commit of the hub; `token` is
    for a private repository, that of `hf auth login` by default. The task is on the CPU unless another device is given.
    """
    tasks = load_tasks(path, revision=revision, device=device, token=token)
    if len(tasks) != 1:
        held = ", ".join(task.name for task in tasks)
        raise TaskFileError(f"{path} contains {len(tasks)} tasks ({held}): read it with load_tasks().")
    return tasks[0]


def load_tasks(
    path: str | Path,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    token: str | None = None,
) -> list[Task]:
    """All tasks of a file, a folder or a hub id (see `load_task`), every value checked.

    At most twice the size of the tensors is allocated, and about 20 times that of the header.
    """
    with open_file(find_task_file(path, revision, token), "tasks", MAX_FILE) as (file, record):
        items = read_list(record, "tasks", 1, MAX_TASKS)
        specs = [_read_spec(item) for item in items]
        sections = [
            section_tensors(item, spec.backbone.dim, spec.backbone.depth)
            for item, spec in zip(items, specs, strict=True)
        ]
        known = {
            f"{number}.{part}"
            for number, (spec, own) in enumerate(zip(specs, sections, strict=True))
            for part in (*spec.shapes, *own)
        }
        extra = set(file.keys()) - known
        if extra:
            raise TaskFileError(f"the file contains tensors that belong to none of its tasks ({min(extra)!r}).")
        tasks, hashes = [], {}
        for number, (item, spec) in enumerate(zip(items, specs, strict=True)):
            tensors = read_tensors(file, spec.name, spec.shapes, f"{number}.")
            dtype = tensors["class_token"].dtype
            for part, tensor in tensors.items():
                if not is_halved(part):
                    continue
                if dtype.itemsize > 2 * tensor.element_size():  # would take more memory than the file's size allows
                    raise TaskFileError(f"{spec.name!r}: {part} is {tensor.dtype} in a task of {dtype}.")
                tensors[part] = tensor.to(dtype)
                if not torch.isfinite(tensors[part]).all():
                    raise TaskFileError(f"{spec.name!r}: {part} has values beyond {dtype}, which the task is in.")
            tasks.append(Task.from_tensors(spec, tensors, _read_parents(item)))
            hashes[id(tasks[-1])] = tasks[-1].content_hash()
            check_content(item, spec.name, hashes[id(tasks[-1])])
            tasks[-1].update_spec(**read_sections(item, spec, file, f"{number}."))
        if len({spec.name for spec in specs}) < len(specs):
            raise TaskFileError("the file contains two tasks of one name.")
    link_parents(tasks, hashes)
    return [task.to(device) for task in tasks]


def load_named(path: Path, name: str) -> list[Task]:
    """The tasks of a file, of which the only one gets another name if one is given."""
    tasks = load_tasks(path)
    if name and len(tasks) > 1:
        raise TaskFileError(f"{path} contains {len(tasks)} tasks: only a file with one can be given as {name}={path}.")
    if name:
        tasks[0].rename(name)
    return tasks


def save_pretrained(tasks: Sequence[Task], folder: str | Path, **card: Any) -> Path:
    """Writes a folder as the hub keeps it: tasks in one file, and their card (options: `write_card`)."""
    save_tasks(tasks, Path(folder) / FILE)
    write_card(tasks, folder, **card)
    return Path(folder)


def _write_task(task: Task, hashes: Mapping[int, str]) -> dict[str, Any]:
    return {
        **write_spec(task.spec, hashes[id(task)]),
        "from_layer": task.from_layer,
        "cells": task.cells,
        "memory_norm": task.spec.memory_norm,
        **({} if task.spec.widths is None else {"rank": task.rank, "widths": asdict(task.spec.widths)}),
        **({} if task.members == 1 else {"members": task.members}),
        **({} if task.spec.readout is None else {"readout": asdict(task.spec.readout)}),
        "parents": [asdict(parent) for parent in task.parents_among(hashes)],
    }


def _read_spec(item: object) -> TaskSpec:
    if not isinstance(item, Mapping):
        raise TaskFileError("a task's record is not a JSON object.")
    common = read_spec(item)
    depth = common["backbone"].depth
    rank, widths = 0, None
    if "rank" in item:
        rank, found = read_whole(item, "rank", 1, MAX_RANK), read_object(item, "widths")
        widths = Widths(**{field.name: read_whole(found, field.name, 1, MAX_WIDTH) for field in fields(Widths)})
    reads = None
    if "readout" in item:
        found = read_object(item, "readout")
        first = read_whole(found, "from_layer", 0, depth - 1)
        share = read_number(found, "share", 1e-3, 1.0)
        reads = ReadOut(first, read_whole(found, "statistics", 2, MAX_STATISTICS), share)
    return TaskSpec(
        **common,
        # A head has no layer for low-rank weights.
        from_layer=read_whole(item, "from_layer", 0, depth - 1 if rank else depth),
        rank=rank,
        widths=widths,
        cells=read_whole(item, "cells", 0, MAX_CELLS),
        members=read_whole(item, "members", 2, MAX_MEMBERS) if "members" in item else 1,
        readout=reads,
        memory_norm=read_choice(item, "memory_norm", get_args(MemoryNorm)),
    )


def _read_parents(item: Mapping[str, Any]) -> list[Parent]:
    parents = []
    for parent in read_list(item, "parents", 0, MAX_TASKS):
        if not isinstance(parent, Mapping):
            raise TaskFileError("a parent's record is not a JSON object.")
        name, content = check_name(parent.get("name")), read_text(parent, "content")
        if not re.fullmatch(r"[0-9a-f]{64}", content):
            raise TaskFileError(f"the content of the parent {name!r} in the record is not a SHA-256.")
        parents.append(Parent(name, content))
    return parents
