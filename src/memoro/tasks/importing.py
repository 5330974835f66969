"""Tasks from checkpoints of the paper's public re-implementation."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Backbone, BackboneRecord
from memoro.errors import TaskFileError, first_line
from memoro.tasks.spec import TaskSpec, check_name
from memoro.tasks.task import Task

_MEMORY = re.compile(r"(?:.*\.)?layer\.(\d+)\.attention\.attention\.memory_tokens\.(\d+)$")
_TOKEN = re.compile(r"(?:.*\.)?embeddings\.cls_tokens\.(\d+)$")
_HEAD = re.compile(r"classifiers\.(\d+)\.(weight|bias)$")
_MASK = re.compile(r"(?:.*\.)?layer\.0\.attention\.attention\.attention_mask$")
MAX_FILE = 8 << 30


def import_tasks(backbone: Backbone, path: str | Path, *, names: list[str] | None = None) -> list[Task]:
    """The tasks in a state dict of the public reproduction, parents before children, on the backbone's device.

    Its memory bypasses the LayerNorm, so the tasks get `memory_norm="post"`. Its class token 0 and classifier 0
    are the backbone's own and are left out. The stored mask says which tasks extend which.
    """
    state = _read_state(Path(path))
    tokens = {int(m[1]): tensor for key, tensor in state.items() if (m := _TOKEN.fullmatch(key))}
    memory = {(int(m[2]), int(m[1])): tensor for key, tensor in state.items() if (m := _MEMORY.fullmatch(key))}
    heads = {(int(m[1]), m[2]): tensor for key, tensor in state.items() if (m := _HEAD.fullmatch(key))}
    mask = next((tensor for key, tensor in state.items() if _MASK.fullmatch(key)), None)
    count = len(tokens) - 1
    if count < 1 or mask is None:
        raise TaskFileError(
            f"{path} is not a checkpoint of the public reproduction: it needs cls_tokens, memory_tokens, classifiers "
            "and an attention_mask. To read memoro's own files, use load_task()."
        )
    if names is not None and len(names) != count:
        raise TaskFileError(f"{path} contains {count} tasks, but {len(names)} names were given.")
    used = [*tokens.values(), *memory.values(), *heads.values(), mask]
    if not all(one.is_floating_point() and one.layout == torch.strided and one.device.type == "cpu" for one in used):
        raise TaskFileError(f"{path}: its tensors are not dense floating-point numbers.")
    if any(one.nbytes > one.untyped_storage().nbytes() for one in used):  # expanded from fewer values
        raise TaskFileError(f"{path}: its tensors are larger than what the file stores for them.")
    try:
        cells = [memory[task, 0].shape[-2] if (task, 0) in memory else 0 for task in range(count)]
        parents = _read_mask(mask, cells, path)
    except (IndexError, RuntimeError, ValueError):
        raise TaskFileError(f"{path}: its memory tokens or its attention mask have the wrong shape.") from None
    tasks: list[Task] = []
    for number in range(count):
        try:
            weight = heads[number + 1, "weight"]
            if weight.shape[1:] != (backbone.dim,):  # before there are labels: rows without columns take no bytes
                raise ValueError
            spec = TaskSpec(
                name=check_name(names[number] if names else f"{Path(path).stem}-{number + 1}"),
                labels=tuple(f"class {i}" for i in range(len(weight))),
                kind="softmax",
                backbone=BackboneRecord.of(backbone),
                training={"imported_from": Path(path).name},
                from_layer=0,
                cells=cells[number],
                memory_norm="post",
            )
            layers = [memory[number, layer] for layer in range(backbone.depth) if cells[number]]
            found = {
                "class_token": tokens[number + 1],
                "memory": torch.stack(layers) if layers else weight.new_zeros(0),
                "head.weight": weight,
                "head.bias": heads[number + 1, "bias"],
            }
            tensors = {name: found[name].reshape(shape) for name, shape in spec.shapes.items()}
        except (IndexError, KeyError, RuntimeError, ValueError, TypeError):
            raise TaskFileError(
                f"{path}: task {number} does not fit {backbone.name} ({backbone.depth} layers of {backbone.dim}). "
                "Load the backbone that it was trained on."
            ) from None
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise TaskFileError(f"{path}: task {number} contains NaN or infinity.")
        tensors = {name: tensor.to(backbone.device, copy=True) for name, tensor in tensors.items()}
        tasks.append(Task.from_tensors(spec, tensors, [tasks[parent] for parent in parents[number]]))
    return tasks


def _read_state(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise TaskFileError(f"cannot read {path}: no such file.")
    if path.stat().st_size > MAX_FILE or _unpacked(path) > MAX_FILE:
        raise TaskFileError(f"{path} is larger than {MAX_FILE >> 30} GiB.")
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises nearly every type on foreign input
        reason = first_line(error)[:160]
        raise TaskFileError(f"{path} cannot be read safely as a state dict ({reason}).") from None
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise TaskFileError(f"{path} is not a state dict: save model.state_dict(), not the model.")
    return state


def _unpacked(path: Path) -> int:
    """The bytes of a zip archive's files; 0 for a file of torch's older format."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return 0


def _read_mask(mask: Tensor, cells: list[int], path: str | Path) -> list[list[int]]:
    """For each task the earlier ones that its class token may attend to, direct parents and others alike."""
    mask = mask.reshape(mask.shape[-2:])
    count = len(cells)
    rows, columns = mask.shape
    base = rows - count
    if columns != rows + sum(cells) or base < 1:
        raise TaskFileError(f"{path}: its attention mask {tuple(mask.shape)} does not fit its {count} tasks.")
    parents = []
    for task in range(count):
        row = mask[base + task] > -1
        others = [other for other in range(count) if other != task and bool(row[base + other])]
        if any(other > task for other in others) or not bool(row[:base].all()) or not bool(row[base + task]):
            raise TaskFileError(f"{path}: its attention mask is neither a concatenation nor an extension.")
        parents.append(others)
    return parents
