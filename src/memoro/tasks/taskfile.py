"""Task files: safetensors with one JSON record. Reading one runs no code and trusts nothing. See docs/format.md."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from memoro.backbones.load import is_hub_id
from memoro.errors import TaskFileError
from memoro.files import write_whole
from memoro.options import several
from memoro.tasks.calibration import Calibration
from memoro.tasks.familiarity import LARGEST, SMALLEST, Familiarity, tensor_shapes
from memoro.tasks.record import (
    ENSEMBLE_FORMAT,
    PLAIN_FORMAT,
    READ_OUT_FORMAT,
    Section,
    check_content,
    file_bytes,
    open_file,
    read_spec,
    read_tensors,
    write_spec,
    write_tensors,
)
from memoro.tasks.spec import (
    MAX_CELLS,
    MAX_MEMBERS,
    MAX_RANK,
    MAX_STATISTICS,
    MemoryNorm,
    ReadOut,
    TaskSpec,
    Widths,
    by_name,
    check_name,
    hash_record,
    is_halved,
)
from memoro.tasks.task import Parent, Task, content_hashes

FILE = "task.safetensors"
"""The task file, or bundle, of a folder or repository."""
MAX_FILE = 2 << 30
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
        item, own = _write_task(task, hashes, f"{number}.")
        records.append(item)
        tensors |= own
    return file_bytes({"tasks": records, "format": max(map(_oldest_format, tasks))}, tensors)


def _oldest_format(task: Task) -> int:
    """The oldest format that can hold a task, so that older versions can read it."""
    preprocessing = task.spec.preprocessing
    scaled = preprocessing is not None and preprocessing.white is not None
    if task.spec.readout is not None or task.spec.familiarity is not None or scaled:
        return READ_OUT_FORMAT
    return ENSEMBLE_FORMAT if task.members > 1 else PLAIN_FORMAT


def is_task_id(source: str) -> bool:
    """Whether it could be a task of the hub: owner/name, with a branch, tag or commit behind an @."""
    return is_hub_id(source, r"@[\w./-]+") and not source.endswith(".safetensors")


def find_task_file(source: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The task file that is meant by a path, by a folder with a card, or by a hub id such as `owner/name@revision`.

    A local path wins over a hub id of the same spelling, and a Path is always local. From the hub only the task file
    is downloaded, into the hub's own cache, and only if it has at most `MAX_FILE` bytes. Reading the file checks it.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / FILE).is_file():
            if (first := find_task_files(str(path))[0]) != str(path):
                raise TaskFileError(f"{path} is a folder: give a task file in it, such as {first}.")
            raise TaskFileError(f"{path} contains no task files (.safetensors).")
        return path / FILE
    if isinstance(source, Path) or path.exists() or not is_task_id(source):
        return path
    if (meant := Path(f"{path}.safetensors")).is_file():
        raise TaskFileError(f"{path}: no such file. Did you mean {meant}?")
    name, _, own = source.partition("@")
    from memoro.tasks.hub import download_task

    return download_task(name, revision or own or None, token)


def find_task_files(source: str) -> list[str]:
    """The task files that are meant on a command line: a folder of them or a glob stands for all of its files."""
    path = Path(source)
    if path.is_dir():
        inside = sorted(str(file) for file in path.glob("*.safetensors") if not file.name.startswith("."))
        return inside or [source]
    return sorted(glob.glob(source)) or [source] if not path.exists() and glob.has_magic(source) else [source]


def expand_task_arguments(places: Iterable[str | Path]) -> Iterator[tuple[str, Path, str]]:
    """The task files of what `-t` takes: files, folders, globs and hub ids, also as `NAME=FILE`. For each, the file as
    it was given, its path, and the name that its task is to have (empty: its own)."""
    for place in places:
        if isinstance(place, Path):  # always local
            yield str(place), find_task_file(place), ""
            continue
        name, _, named = place.partition("=")
        if not named or Path(place).exists():
            name, named = "", place
        yield from ((file, find_task_file(file), name) for file in find_task_files(named))


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
        items = record.sections("tasks", 1, MAX_TASKS)
        specs = [_read_spec(item) for item in items]
        described = [_familiarity_shapes(item, spec) for item, spec in zip(items, specs, strict=True)]
        parts = [(*spec.shapes, *shapes) for spec, shapes in zip(specs, described, strict=True)]
        if extra := set(file.keys()) - {f"{number}.{part}" for number, own in enumerate(parts) for part in own}:
            raise TaskFileError(f"the file contains tensors that belong to none of its tasks ({min(extra)!r}).")
        tasks: list[Task] = []
        hashes: dict[int, str] = {}
        for number, (item, spec, shapes) in enumerate(zip(items, specs, described, strict=True)):
            task = _read_task(file, item, spec, f"{number}.")
            hashes[id(task)] = task.content_hash()
            check_content(item, task.name, hashes[id(task)])
            if "calibration" in item:
                task.update_spec(calibration=_read_calibration(item.section("calibration"), spec))
            if shapes and not _is_outdated(section := item.section("familiarity")):
                stored = read_tensors(file, task.name, shapes, f"{number}.")
                task.update_spec(familiarity=_read_familiarity(section, stored, task.name))
            tasks.append(task)
        if len({task.name for task in tasks}) < len(tasks):
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


def _write_task(task: Task, hashes: Mapping[int, str], prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A task's record and its tensors."""
    spec = task.spec
    sections, described = write_sections(spec, prefix)
    record = {
        **write_spec(spec, hashes[id(task)]),
        "from_layer": task.from_layer,
        "cells": task.cells,
        "memory_norm": spec.memory_norm,
        **({} if spec.widths is None else {"rank": task.rank, "widths": asdict(spec.widths)}),
        **({} if task.members == 1 else {"members": task.members}),
        **({} if spec.readout is None else {"readout": asdict(spec.readout)}),
        "parents": [asdict(parent) for parent in task.parents_among(hashes)],
        **sections,
    }
    return record, {**write_tensors(task.name, task.stored_tensors(), prefix), **described}


def _read_task(file: Any, item: Section, spec: TaskSpec, prefix: str) -> Task:
    tensors = read_tensors(file, spec.name, spec.shapes, prefix)
    dtype = tensors["class_token"].dtype
    for part, tensor in tensors.items():
        if not is_halved(part):
            continue
        if dtype.itemsize > 2 * tensor.element_size():  # would take more memory than the file's size allows
            raise TaskFileError(f"{spec.name!r}: {part} is {tensor.dtype} in a task of {dtype}.")
        tensors[part] = tensor.to(dtype)
        if not torch.isfinite(tensors[part]).all():
            raise TaskFileError(f"{spec.name!r}: {part} has values beyond {dtype}, which the task is in.")
    return Task.from_tensors(spec, tensors, _read_parents(item))


def _read_spec(item: Section) -> TaskSpec:
    common = read_spec(item)
    depth = common["backbone"].depth
    rank, widths = 0, None
    if "rank" in item:
        rank, found = item.whole("rank", 1, MAX_RANK), item.section("widths")
        widths = Widths(**{field.name: found.whole(field.name, 1, MAX_WIDTH) for field in fields(Widths)})
    reads = None
    if "readout" in item:
        found = item.section("readout")
        first = found.whole("from_layer", 0, depth - 1)
        share = found.number("share", 1e-3, 1.0)
        reads = ReadOut(first, found.whole("statistics", 2, MAX_STATISTICS), share)
    return TaskSpec(
        **common,
        # A head has no layer for low-rank weights.
        from_layer=item.whole("from_layer", 0, depth - 1 if rank else depth),
        rank=rank,
        widths=widths,
        cells=item.whole("cells", 0, MAX_CELLS),
        members=item.whole("members", 2, MAX_MEMBERS) if "members" in item else 1,
        readout=reads,
        memory_norm=item.choice("memory_norm", get_args(MemoryNorm)),
    )


def _read_parents(item: Section) -> list[Parent]:
    parents = []
    for parent in item.sections("parents", 0, MAX_TASKS):
        name, content = check_name(parent.values.get("name")), parent.text("content")
        if not re.fullmatch(r"[0-9a-f]{64}", content):
            raise TaskFileError(f"the content of the parent {name!r} in the record is not a SHA-256.")
        parents.append(Parent(name, content))
    return parents


PREFIX = "familiarity."
NUMBERS = {
    "residual": (SMALLEST, LARGEST),
    "slope": (0.0, LARGEST),
    "offset": (-LARGEST, LARGEST),
    "noticed": (0.0, 1.0),
}
"""The fields of a familiarity that are numbers, and their bounds."""
MAX_DIRECTIONS = 1024
MAX_SCORES = 4096
MAX_IMAGES = 10**12


def write_sections(spec: TaskSpec, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file holds of a task's calibration and familiarity: entries of its record, and tensors."""
    record: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if spec.calibration is not None:
        section = asdict(spec.calibration)
        record["calibration"] = {**section, "checksum": hash_record(section, {})}
    if spec.familiarity is not None:
        own = _check_values(spec.familiarity, spec.name)
        section = {
            "directions": len(own.directions),
            "classes": len(own.means),
            "features": len(own.reader),
            "scores": len(own.held_out),
            **{name: getattr(own, name) for name in NUMBERS},
            "images": own.images,
        }
        record["familiarity"] = {**section, "checksum": hash_record(section, own.tensors)}
        tensors = write_tensors(spec.name, own.tensors, prefix + PREFIX)
    return record, tensors


def _read_calibration(section: Section, spec: TaskSpec) -> Calibration:
    labels = len(spec.labels)
    counts = {"softmax": (1, 0, 0), "multilabel": (labels, labels, 0), "regression": (0, 0, labels)}
    temperatures, thresholds, spreads = counts[spec.kind]
    calibration = Calibration(
        temperature=section.numbers("temperature", temperatures, temperatures, 1e-3, 1e3),
        thresholds=section.numbers("thresholds", thresholds, thresholds, 1e-6, 1 - 1e-6),
        spread=section.numbers("spread", spreads, spreads, 0.0, 1e300),
        images=section.whole("images", 1, MAX_IMAGES),
        source=section.text("source"),
    )
    _check_sum(section, {}, spec.name, "calibration")
    return calibration


def _familiarity_shapes(item: Section, spec: TaskSpec) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors of a task's familiarity, none if it has none."""
    if "familiarity" not in item:
        return {}
    section, dim = item.section("familiarity"), spec.backbone.dim
    outdated = _is_outdated(section)
    sizes = {
        "directions": section.whole("directions", 1, min(dim, MAX_DIRECTIONS)),
        "classes": section.whole("classes", 1, len(spec.labels)),
        "features": 0 if outdated else section.whole("features", 0, spec.backbone.depth * MAX_STATISTICS * dim),
        "scores": section.whole("scores", 1, MAX_SCORES),
    }
    shapes = tensor_shapes(sizes, dim)
    if outdated:
        del shapes["reader"]
        shapes |= {"background": (dim,), "distances": shapes.pop("held_out")}
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _is_outdated(section: Section) -> bool:
    """Whether a familiarity was written by a version that measured it in another way. It is not read."""
    return "slope" not in section


def _read_familiarity(section: Section, stored: Mapping[str, Tensor], name: str) -> Familiarity:
    tensors = {part.removeprefix(PREFIX): tensor for part, tensor in stored.items()}
    numbers = {number: section.number(number, *bounds) for number, bounds in NUMBERS.items()}
    images = section.whole("images", 1, MAX_IMAGES)
    _check_sum(section, tensors, name, "familiarity")
    own: dict[str, Any] = {**tensors, **numbers, "images": images}
    return _check_values(Familiarity(**own), name)


def _check_values(familiarity: Familiarity, name: str) -> Familiarity:
    if not familiarity.valid:
        raise TaskFileError(f"{name!r}: its familiarity has invalid values: compute it again with `memoro calibrate`.")
    return familiarity


def _check_sum(section: Section, tensors: Mapping[str, Tensor], name: str, what: str) -> None:
    own = {key: value for key, value in section.values.items() if key != "checksum"}
    if section.text("checksum") != hash_record(own, tensors):
        raise TaskFileError(f"{name!r}: its {what} was changed after saving: compute it again with `memoro calibrate`.")


def link_parents(tasks: Sequence[Task], hashes: Mapping[int, str]) -> None:
    """Gives each task its parents, where those are among the tasks and are the versions that it was trained with."""
    present = {task.name: task for task in tasks}

    def find(parent: Task | Parent) -> Task | Parent:
        found = present.get(parent.name)
        if found is None or isinstance(parent, Task) or hashes[id(found)] != parent.content:
            return parent
        return found

    for task in tasks:
        task.extends = tuple(find(parent) for parent in task.extends)
