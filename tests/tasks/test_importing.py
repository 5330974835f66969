"""Checkpoints of the paper's public re-implementation."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import memoro
from memoro.backbones import Backbone
from memoro.errors import TaskFileError


@pytest.fixture
def fixtures(shared: Path) -> Path:
    return shared / "fixtures" / "reproduction"


@pytest.mark.parametrize("name", ["first", "second", "concatenated", "extension"])
def test_logits_are_those_of_its_own_code(fixtures: Path, name: str) -> None:
    backbone = memoro.load_backbone(fixtures / "base")
    tasks = memoro.import_tasks(backbone, fixtures / f"{name}_model.pt")
    io = load_file(fixtures / "io.safetensors")
    with torch.no_grad():
        out = memoro.compose(backbone, tasks)(io["pixel_values"])
    # Two implementations in float32 through three layers; another mask or norm is off by whole units.
    assert torch.allclose(out["base"], io[f"{name}.0"], atol=1e-5)
    for number, task in enumerate(tasks, start=1):
        assert torch.allclose(out[task.name], io[f"{name}.{number}"], atol=1e-5)
    assert f"{name}.{len(tasks) + 1}" not in io
    children = [[parent.name for parent in task.extends] for task in tasks]
    assert any(children) == (name == "extension")


def test_the_place_of_the_memory_matters(fixtures: Path) -> None:
    from dataclasses import replace

    backbone = memoro.load_backbone(fixtures / "base")
    (task,) = memoro.import_tasks(backbone, fixtures / "second_model.pt", names=["second"])
    io = load_file(fixtures / "io.safetensors")
    task.spec = replace(task.spec, memory_norm="pre")
    out = memoro.compose(backbone, [task])(io["pixel_values"])
    assert not torch.allclose(out["second"], io["second.1"], atol=1e-3)


def test_the_wrong_backbone(fixtures: Path, backbone: Backbone) -> None:
    with pytest.raises(TaskFileError, match="does not fit"):
        memoro.import_tasks(backbone, fixtures / "first_model.pt")


def test_other_files(tmp_path: Path, backbone: Backbone) -> None:
    path = tmp_path / "model.pt"
    with pytest.raises(TaskFileError, match="no such file"):
        memoro.import_tasks(backbone, path)
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(TaskFileError, match="not a checkpoint of the public reproduction"):
        memoro.import_tasks(backbone, path)
    torch.save([1, 2], path)
    with pytest.raises(TaskFileError, match="not a state dict"):
        memoro.import_tasks(backbone, path)
    path.write_bytes(b"\x00" * 100)
    with pytest.raises(TaskFileError, match="read safely"):
        memoro.import_tasks(backbone, path)


def test_a_pickle_does_not_run(tmp_path: Path, backbone: Backbone) -> None:
    class Evil:
        def __reduce__(self) -> object:
            return (open, (str(tmp_path / "ran"), "w"))

    path = tmp_path / "model.pt"
    torch.save({"x": Evil()}, path)
    with pytest.raises(TaskFileError, match="read safely"):
        memoro.import_tasks(backbone, path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(TaskFileError):
        memoro.import_tasks(backbone, path)
    assert not (tmp_path / "ran").exists()
