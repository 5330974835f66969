"""Comparing tasks, and editing their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from memoro.tasks.task import Task


def assert_same(first: Task, second: Task) -> None:
    assert first.spec == second.spec
    assert first.parents == second.parents
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])


def rewrite(path: Path, change: Any) -> Path:
    """The file with its record and tensors passed through `change`, in a valid safetensors shell."""
    with safe_open(path, "pt") as file:
        record = json.loads(file.metadata()["memoro"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(record, tensors)
    save_file(tensors, path, metadata={"memoro": json.dumps(record)})
    return path
