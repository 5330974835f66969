"""Files of baselines: what the regime trained, in the format of task files. See docs/format.md."""

from __future__ import annotations

import math
from pathlib import Path

from memoro.backbones import Backbone
from memoro.errors import TaskFileError
from memoro.files import write_whole
from memoro.lab.baselines.baseline import LIMITS, Baseline, BaselineSpec
from memoro.lab.baselines.methods import BASELINES
from memoro.tasks.record import (
    Section,
    check_content,
    file_bytes,
    open_file,
    read_spec,
    read_tensors,
    write_spec,
    write_tensors,
)

MAX_FILE = 64 << 30
"""A copy of a backbone may be larger than any task. What is read of it is no larger than the backbone at hand."""


def save_baseline(model: Baseline, path: str | Path) -> Path:
    """Writes what a baseline trained; returns the path. A crash leaves the old file as it was."""
    if not isinstance(model, Baseline):
        raise TaskFileError(f"{model!r} is not a baseline; save a task with save_task().")
    spec = model.spec
    record = {**write_spec(spec, model.content_hash()), "regime": spec.regime, "sizes": dict(spec.sizes)}
    write_whole(Path(path), file_bytes({"baseline": record}, write_tensors(spec.name, model.stored())))
    return Path(path)


def load_baseline(path: str | Path, backbone: Backbone) -> Baseline:
    """The baseline of a file over its backbone, every value checked before anything is built."""
    with open_file(path, "baseline", MAX_FILE) as (file, record):
        item = record.section("baseline")
        spec = _read_spec(item)
        spec.check_backbone(backbone)
        regime, classes = BASELINES[spec.regime], len(spec.labels)
        head = {"head.weight": (classes, backbone.dim), "head.bias": (classes,)}
        shapes = {**regime.shapes(backbone, spec.sizes), **head}
        extra = set(file.keys()) - set(shapes)
        if extra:
            raise TaskFileError(f"contains tensors that regime {spec.regime!r} does not train ({min(extra)!r}).")
        tensors = read_tensors(file, spec.name, shapes)
        check_content(item, spec.name, spec.hash(tensors))
        model = regime.build(backbone, spec.plan)
        model.spec = spec
        model.fill(tensors)
        return model


def read_baseline(path: str | Path) -> tuple[BaselineSpec, str, int]:
    """The spec of a file's baseline, its content hash, and how many numbers it holds; no weights are read."""
    with open_file(path, "baseline", MAX_FILE) as (file, record):
        item = record.section("baseline")
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
        return _read_spec(item), item.text("content"), sum(sizes)


def read_hashes(path: str | Path) -> list[str]:
    """The content hash of a file's baseline, as training asks for it."""
    return [read_baseline(path)[1]]


def _read_spec(item: Section) -> BaselineSpec:
    common, regime, sizes = read_spec(item), item.text("regime"), item.section("sizes")
    name = common["name"]
    if regime not in BASELINES:
        raise TaskFileError(f"{name!r} has the unknown regime {regime!r}; a newer version of memoro may know it.")
    known = BASELINES[regime].sizes
    if set(sizes.values) != set(known):
        raise TaskFileError(f"{name!r}: the sizes of regime {regime!r} are {', '.join(known) or 'none'}.")
    return BaselineSpec(**common, regime=regime, sizes={size: sizes.whole(size, *LIMITS[size]) for size in known})
