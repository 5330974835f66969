"""Task files: safetensors with one JSON record. Reading one runs no code and trusts nothing. See docs/format.md."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from memoro.backbones import Fingerprint
from memoro.errors import MemoroError, TaskFileError
from memoro.preprocessing import Preprocessing
from memoro.task import (
    MAX_CELLS,
    BackboneRecord,
    HeadKind,
    MemoryNorm,
    Parent,
    Task,
    TaskSpec,
    check_labels,
    check_name,
)

FORMAT = 1
KEY = "memoro"
MAX_FILE = 2 << 30
MAX_HEADER = 64 << 20
MAX_TASKS = 10_000
MAX_DIM = 16_384
MAX_DEPTH = 512
TENSORS = ("class_token", "head.bias", "head.weight", "memory")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def save_task(task: Task, path: str | Path) -> Path:
    """Writes one task to a file; returns its path. A crash leaves the old file as it was."""
    return save_tasks([task], path)


def save_tasks(tasks: Sequence[Task], path: str | Path) -> Path:
    """Writes tasks, with parents among them or not, to one file: the paper's concatenated model as an artefact."""
    if not tasks:
        raise TaskFileError("there is no task to save.")
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TaskFileError(f"two tasks are called {twice!r}: rename one, a file holds each name once.")
    tensors: dict[str, Tensor] = {}
    records = []
    for number, task in enumerate(tasks):
        for name, tensor in task.state_dict().items():
            if not torch.isfinite(tensor).all():
                raise TaskFileError(f"{task.name!r}: {name} holds NaN or infinity; it is not saved.")
            # clone: parts of one storage would be refused
            tensors[f"{number}.{name}"] = tensor.detach().cpu().contiguous().clone()
        records.append(_write_record(task))
    record = {"format": FORMAT, "tasks": records}
    try:
        text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TaskFileError(f"training facts and metrics must be plain JSON with finite numbers: {error}.") from None
    write_whole(Path(path), save(tensors, metadata={KEY: text}))
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
    _check_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            record = _parse((file.metadata() or {}).get(KEY), path)
            specs = [_read_record(item) for item in _list(record, "tasks", 1, MAX_TASKS)]
            tasks = [_read_task(file, number, *spec) for number, spec in enumerate(specs)]
            extra = set(file.keys()) - {f"{number}.{name}" for number in range(len(specs)) for name in TENSORS}
            if extra:
                raise TaskFileError(f"holds tensors that belong to no task ({min(extra)!r}).")
    except TaskFileError as error:
        raise TaskFileError(f"{path}: {error}") from None
    except (SafetensorError, OSError, ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise TaskFileError(
            f"{path} is no task file that can be read ({_brief(error)}). It may be cut off or from another program: "
            "fetch it again, or import it with `memoro import`."
        ) from None
    except MemoroError as error:
        raise TaskFileError(f"{path}: {error}") from None
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
        "backbone": {
            "name": spec.backbone.name,
            "family": spec.backbone.family,
            "dim": spec.backbone.dim,
            "depth": spec.backbone.depth,
            "fingerprint": asdict(spec.backbone.fingerprint),
        },
        "parents": [asdict(parent) for parent in task.parents],
        "preprocessing": None if spec.preprocessing is None else spec.preprocessing.to_json(),
        "training": dict(spec.training),
        "metrics": dict(spec.metrics),
        "content": task.content_hash(),
    }


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside the file and renames, so that a reader never meets half of it."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes private files
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise TaskFileError(f"cannot write {path} ({error.strerror}); what stood there before is untouched.") from None


# ------------------------------------------------------------------------------------------------------- reading


def _check_header(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise TaskFileError(f"cannot read {path} ({error.strerror}).") from None
    if size > MAX_FILE:
        raise TaskFileError(f"{path} has {size >> 20} MiB; task files may have at most {MAX_FILE >> 20}.")
    if size < 8 or first > min(size - 8, MAX_HEADER):
        raise TaskFileError(f"{path} is no safetensors file, or it is cut off: fetch it again.")


def _parse(text: str | None, path: Path) -> Mapping[str, Any]:
    if text is None:
        raise TaskFileError(
            "a safetensors file, but not one of memoro's (it has no 'memoro' record). A backbone is loaded with "
            "load_backbone(), a checkpoint of the public reproduction with import_tasks()."
        )
    record = json.loads(text, parse_constant=_no_constant)
    if not isinstance(record, Mapping):
        raise TaskFileError("its record is not a JSON object.")
    version = record.get("format")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise TaskFileError(f"its format {version!r} is not a version number.")
    if version > FORMAT:
        raise TaskFileError(f"has format {version}, this memoro reads up to {FORMAT}: pip install --upgrade memoro.")
    return record


def _no_constant(name: str) -> float:
    raise TaskFileError(f"its record holds {name}, which is no JSON number.")


def _read_record(item: object) -> tuple[TaskSpec, tuple[Parent, ...], str]:
    if not isinstance(item, Mapping):
        raise TaskFileError("a task's record is not a JSON object.")
    name = check_name(item.get("name"))
    backbone = _object(item, "backbone")
    fingerprint = _object(backbone, "fingerprint")
    depth = _whole(backbone, "depth", 1, MAX_DEPTH)
    preprocessing = item.get("preprocessing")
    spec = TaskSpec(
        name=name,
        labels=check_labels(item.get("labels"), name),
        kind=_choice(item, "kind", get_args(HeadKind)),
        from_layer=_whole(item, "from_layer", 0, depth),
        cells=_whole(item, "cells", 0, MAX_CELLS),
        memory_norm=_choice(item, "memory_norm", get_args(MemoryNorm)),
        backbone=BackboneRecord(
            name=_text(backbone, "name"),
            family=_text(backbone, "family"),
            dim=_whole(backbone, "dim", 1, MAX_DIM),
            depth=depth,
            fingerprint=Fingerprint(
                digest=_text(fingerprint, "digest"),
                sketch=tuple(_number(value) for value in _list(fingerprint, "sketch", 0, MAX_DEPTH + 2)),
                dtype=_text(fingerprint, "dtype"),
            ),
        ),
        preprocessing=None if preprocessing is None else Preprocessing.from_json(preprocessing),
        training=dict(_object(item, "training")),
        metrics=dict(_object(item, "metrics")),
    )
    parents = []
    for parent in _list(item, "parents", 0, MAX_TASKS):
        if not isinstance(parent, Mapping):
            raise TaskFileError("a parent's record is not a JSON object.")
        parents.append(Parent(check_name(parent.get("name")), _text(parent, "content")))
    return spec, tuple(parents), _text(item, "content")


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
        part = file.get_slice(f"{number}.{name}")  # raises where it is missing, loads nothing yet
        if part.get_shape() != shape:
            raise TaskFileError(f"{spec.name!r}: {name} has shape {part.get_shape()} instead of {shape}.")
        if part.get_dtype() not in DTYPES:
            raise TaskFileError(f"{spec.name!r}: {name} is {part.get_dtype()}; weights are {', '.join(DTYPES)}.")
        tensors[name] = file.get_tensor(f"{number}.{name}")
        if not torch.isfinite(tensors[name]).all():
            raise TaskFileError(f"{spec.name!r}: {name} holds NaN or infinity.")
    head = nn.Linear(dim, classes, device="meta")
    head.weight, head.bias = nn.Parameter(tensors["head.weight"]), nn.Parameter(tensors["head.bias"])
    task = Task(spec, tensors["class_token"], tensors["memory"], head, parents)
    if task.content_hash() != content:
        raise TaskFileError(f"{spec.name!r}: its weights or record were changed after it was saved: fetch it again.")
    return task


def _field(record: Mapping[str, Any], name: str, right: Callable[[Any], bool], what: str) -> Any:
    value = record.get(name)
    if isinstance(value, bool) or not right(value):
        raise TaskFileError(f"{name} in its record is not {what}.")
    return value


def _text(record: Mapping[str, Any], name: str) -> str:
    value: str = _field(record, name, lambda v: isinstance(v, str) and len(v) <= 4096, "a short text")
    return value


def _whole(record: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value: int = _field(
        record, name, lambda v: isinstance(v, int) and low <= v <= high, f"a whole number from {low} to {high}"
    )
    return value


def _choice(record: Mapping[str, Any], name: str, choices: Sequence[str]) -> Any:
    return _field(record, name, lambda v: v in choices, f"one of {', '.join(choices)}")


def _object(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value: Mapping[str, Any] = _field(record, name, lambda v: isinstance(v, Mapping), "a JSON object")
    return value


def _list(record: Mapping[str, Any], name: str, low: int, high: int) -> list[Any]:
    value: list[Any] = _field(
        record, name, lambda v: isinstance(v, list) and low <= len(v) <= high, f"a list of {low} to {high} entries"
    )
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e6:
        raise TaskFileError("the sketch in its record is not a list of numbers.")
    return float(value)


def _brief(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160] or type(error).__name__
