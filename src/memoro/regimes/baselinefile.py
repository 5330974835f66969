"""Files of baselines: what the regime trained, in the format of task files. See docs/format.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from safetensors import safe_open
from safetensors.torch import save

from memoro.backbones import Backbone
from memoro.engine.composition import check_made_for
from memoro.errors import TaskFileError
from memoro.files import write_whole
from memoro.heads import HeadKind
from memoro.images import Preprocessing
from memoro.regimes import METHODS
from memoro.regimes.baseline import LIMITS, Baseline, BaselineSpec, by_name, hash_baseline
from memoro.tasks.record import (
    read_backbone,
    read_choice,
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
from memoro.tasks.task import Task, check_labels, check_name
from memoro.tasks.taskfile import load_tasks

MAX_FILE = 64 << 30
"""A copy of a backbone may be larger than any task. What is read of it is no larger than the backbone at hand."""


def save_baseline(model: Baseline, path: str | Path) -> Path:
    """Writes what a baseline trained; returns the path. A crash leaves the old file as it was."""
    if not isinstance(model, Baseline):
        raise TaskFileError(f"{model!r} is no baseline; a task has save_task().")
    tensors = {name: write_tensor(tensor, f"{model.name!r}: {name}") for name, tensor in model.stored().items()}
    spec = model.spec
    record = {
        "name": spec.name,
        "labels": spec.labels,
        "kind": spec.kind,
        "regime": spec.regime,
        "sizes": dict(spec.sizes),
        "backbone": write_backbone(spec.backbone),
        "preprocessing": None if spec.preprocessing is None else spec.preprocessing.to_json(),
        "training": dict(spec.training),
        "metrics": dict(spec.metrics),
        "content": model.content_hash(),
    }
    write_whole(Path(path), save(tensors, metadata=write_record({"baseline": record})))
    return Path(path)


def load_baseline(path: str | Path, backbone: Backbone) -> Baseline:
    """The baseline of a file over its backbone, checked to the last value before anything is built."""
    path = Path(path)
    with reading(path, MAX_FILE), safe_open(path, framework="pt") as file:
        record = read_record(file)
        if "tasks" in record:
            raise TaskFileError("holds tasks: read it with load_task() or load_tasks().")
        item = read_object(record, "baseline")
        spec = _read_spec(item)
        check_made_for(spec.name, spec.backbone, backbone)
        method, classes = METHODS[spec.regime], len(spec.labels)
        shapes = {
            **method.shapes(backbone, spec.sizes),
            "head.weight": (classes, backbone.dim),
            "head.bias": (classes,),
        }
        extra = set(file.keys()) - set(shapes)
        if extra:
            raise TaskFileError(f"holds tensors that regime {spec.regime!r} does not train ({min(extra)!r}).")
        tensors = {name: read_tensor(file, name, shape, f"{spec.name!r}: {name}") for name, shape in shapes.items()}
        if hash_baseline(spec, tensors) != read_text(item, "content"):
            raise TaskFileError(f"{spec.name!r}: its weights or record were changed after it was saved: fetch it anew.")
        model = method.build(backbone, spec.plan)
        model.spec = spec
        model.fill(tensors)
        return model


def read_baseline(path: str | Path) -> tuple[BaselineSpec, str, int]:
    """What a file says of its baseline, the hash of its content, and how many numbers it holds; no weights are read."""
    path = Path(path)
    with reading(path, MAX_FILE), safe_open(path, framework="pt") as file:
        item = read_object(read_record(file), "baseline")
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
        return _read_spec(item), read_text(item, "content"), sum(sizes)


def load_models(paths: Iterable[str | Path], backbone: Backbone) -> list[Task | Baseline]:
    """All that some files hold: tasks, and baselines over the backbone. No two have one name."""
    found: list[Task | Baseline] = []
    for path in paths:
        found += [load_baseline(path, backbone)] if is_baseline(path) else load_tasks(path)
    return list(by_name(found).values())


def is_baseline(path: str | Path) -> bool:
    """Whether a file says that it holds a baseline. False for all others, readable or not."""
    try:
        with reading(Path(path), MAX_FILE), safe_open(path, framework="pt") as file:
            return "baseline" in read_record(file)
    except TaskFileError:
        return False


def _read_spec(item: Mapping[str, Any]) -> BaselineSpec:
    name, regime, sizes = check_name(item.get("name")), read_text(item, "regime"), read_object(item, "sizes")
    if regime not in METHODS:
        raise TaskFileError(f"{name!r} has regime {regime!r}, unknown to this memoro: pip install --upgrade memoro.")
    method, preprocessing = METHODS[regime], item.get("preprocessing")
    if set(sizes) != set(method.sizes):
        raise TaskFileError(f"{name!r}: the sizes of regime {regime!r} are {', '.join(method.sizes) or 'none'}.")
    return BaselineSpec(
        name=name,
        labels=check_labels(item.get("labels"), name),
        kind=read_choice(item, "kind", get_args(HeadKind)),
        regime=regime,
        sizes={size: read_whole(sizes, size, *LIMITS[size]) for size in method.sizes},
        backbone=read_backbone(item),
        preprocessing=None if preprocessing is None else Preprocessing.from_json(preprocessing),
        training=dict(read_object(item, "training")),
        metrics=dict(read_object(item, "metrics")),
    )
