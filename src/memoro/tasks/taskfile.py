"""Task files: safetensors with one JSON record. Reading one runs no code and trusts nothing. See docs/format.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from memoro.errors import TaskFileError
from memoro.files import write_whole
from memoro.heads import HeadKind
from memoro.images import Preprocessing
from memoro.tasks.record import (
    read_backbone,
    read_choice,
    read_list,
    read_object,
    read_record,
    read_tensor,
    read_text,
    read_whole,
    reading,
    write_backbone,
    write_record,
    write_tensor,
)
from memoro.tasks.task import MAX_CELLS, MemoryNorm, Parent, Task, TaskSpec, check_labels, check_name, say_apart

MAX_FILE = 2 << 30
MAX_TASKS = 10_000
TENSORS = ("class_token", "head.bias", "head.weight", "memory")


def save_task(task: Task, path: str | Path) -> Path:
    """Writes one task to a file; returns its path. A crash leaves the old file as it was."""
    return save_tasks([task], path)


def save_tasks(tasks: Sequence[Task], path: str | Path) -> Path:
    """Writes tasks, with parents among them or not, to one file: the paper's concatenated model as an artefact."""
    if not tasks:
        raise TaskFileError("there is no task to save.")
    for task in tasks:
        if not isinstance(task, Task):
            raise TaskFileError(f"{task!r} is no task; what regimes that do not compose trained has save_baseline().")
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TaskFileError(f"two tasks are called {twice!r}: rename one, a file holds each name once.")
    tensors: dict[str, Tensor] = {}
    records = []
    for number, task in enumerate(tasks):
        for name, tensor in task.state_dict().items():
            tensors[f"{number}.{name}"] = write_tensor(tensor, f"{task.name!r}: {name}")
        records.append(_write_record(task))
    write_whole(Path(path), save(tensors, metadata=write_record({"tasks": records})))
    return Path(path)


def load_task(path: str | Path) -> Task:
    """The one task of a file."""
    tasks = load_tasks(path)
    if len(tasks) != 1:
        held = ", ".join(task.name for task in tasks)
        raise TaskFileError(f"{path} holds {len(tasks)} tasks ({held}): read it with load_tasks().")
    return tasks[0]


def load_tasks(path: str | Path) -> list[Task]:
    """All tasks of a file, checked to the last value. At most the size of the file is allocated, twice."""
    path = Path(path)
    with reading(path, MAX_FILE), safe_open(path, framework="pt") as file:
        record = read_record(file)
        if "baseline" in record:
            held = read_object(record, "baseline")
            why = say_apart(read_text(held, "name"), read_text(held, "regime"))
            raise TaskFileError(f"{why} Read this file with load_baseline().")
        specs = [_read_record(item) for item in read_list(record, "tasks", 1, MAX_TASKS)]
        tasks = [_read_task(file, number, *spec) for number, spec in enumerate(specs)]
        extra = set(file.keys()) - {f"{number}.{name}" for number in range(len(specs)) for name in TENSORS}
        if extra:
            raise TaskFileError(f"holds tensors that belong to no task ({min(extra)!r}).")
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise TaskFileError(f"{path}: holds two tasks of one name.")
    return tasks


# ------------------------------------------------------------------------------------------------------- writing


def _write_record(task: Task) -> dict[str, Any]:
    spec = task.spec
    return {
        "name": spec.name,
        "labels": spec.labels,
        "kind": spec.kind,
        "from_layer": spec.from_layer,
        "cells": spec.cells,
        "memory_norm": spec.memory_norm,
        "backbone": write_backbone(spec.backbone),
        "parents": [asdict(parent) for parent in task.parents],
        "preprocessing": None if spec.preprocessing is None else spec.preprocessing.to_json(),
        "training": dict(spec.training),
        "metrics": dict(spec.metrics),
        "content": task.content_hash(),
    }


# ------------------------------------------------------------------------------------------------------- reading


def _read_record(item: object) -> tuple[TaskSpec, tuple[Parent, ...], str]:
    if not isinstance(item, Mapping):
        raise TaskFileError("a task's record is not a JSON object.")
    name = check_name(item.get("name"))
    backbone = read_backbone(item)
    preprocessing = item.get("preprocessing")
    spec = TaskSpec(
        name=name,
        labels=check_labels(item.get("labels"), name),
        kind=read_choice(item, "kind", get_args(HeadKind)),
        from_layer=read_whole(item, "from_layer", 0, backbone.depth),
        cells=read_whole(item, "cells", 0, MAX_CELLS),
        memory_norm=read_choice(item, "memory_norm", get_args(MemoryNorm)),
        backbone=backbone,
        preprocessing=None if preprocessing is None else Preprocessing.from_json(preprocessing),
        training=dict(read_object(item, "training")),
        metrics=dict(read_object(item, "metrics")),
    )
    parents = []
    for parent in read_list(item, "parents", 0, MAX_TASKS):
        if not isinstance(parent, Mapping):
            raise TaskFileError("a parent's record is not a JSON object.")
        parents.append(Parent(check_name(parent.get("name")), read_text(parent, "content")))
    return spec, tuple(parents), read_text(item, "content")


def _read_task(file: Any, number: int, spec: TaskSpec, parents: tuple[Parent, ...], content: str) -> Task:
    dim, classes = spec.backbone.dim, len(spec.labels)
    shapes = {
        "class_token": [dim],
        "head.bias": [classes],
        "head.weight": [classes, dim],
        "memory": [spec.backbone.depth - spec.from_layer, spec.cells, dim],
    }
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensors[name] = read_tensor(file, f"{number}.{name}", shape, f"{spec.name!r}: {name}")
    head = nn.Linear(dim, classes, device="meta")
    head.weight, head.bias = nn.Parameter(tensors["head.weight"]), nn.Parameter(tensors["head.bias"])
    task = Task(spec, tensors["class_token"], tensors["memory"], head, parents)
    if task.content_hash() != content:
        raise TaskFileError(f"{spec.name!r}: its weights or record were changed after it was saved: fetch it again.")
    return task
