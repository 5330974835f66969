"""Damaged checkpoints of the public reproduction: an error of memoro's own, or tasks that can be used."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from reproduction_checkpoint import save_checkpoint
from torch import Tensor

import memoro
from memoro.backbones import Backbone
from memoro.errors import MemoroError, TaskFileError

MASK = "layer.0.attention.attention.attention_mask"
MEMORY = "layer.0.attention.attention.memory_tokens.0"


def test_shapes_that_no_checkpoint_has(backbone: Backbone, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model.pt", backbone, tasks=2)
    whole = torch.load(path, weights_only=True)
    assert len(memoro.import_tasks(backbone, path)) == 2
    for key in (MASK, MEMORY):
        for odd in (torch.zeros(5), torch.zeros(()), torch.zeros(2, 3, 4, 5), torch.zeros(0, 0), torch.zeros(3, 0)):
            torch.save({**whole, key: odd}, path)
            with pytest.raises(TaskFileError, match=r"model\.pt: "):
                memoro.import_tasks(backbone, path)


def damage(state: dict[str, Tensor], source: random.Random) -> dict[str, Tensor]:
    """One to three tensors removed, renamed or replaced."""
    state = dict(state)
    for key in source.sample(sorted(state), source.randint(1, 3)):
        tensor = state.pop(key)
        shape = [source.randrange(4) for _ in range(source.randrange(5))]
        kind = source.choice([torch.float32, torch.int64, torch.bool, torch.complex64, torch.float16])
        choices = [
            {},
            {f"{key}.{source.randrange(10**6)}": tensor},
            {key[:-1] + str(source.randrange(10**6)): tensor},
            {key: torch.ones(shape).to(kind)},
            {key: tensor.flatten()},
            {key: tensor.to(kind)},
            {key: tensor * float("nan")},
            {key: tensor.to_sparse()},
            {key: tensor.to("meta")},
        ]
        state |= source.choice(choices)
    return state


def test_damaged_checkpoint_is_refused_or_usable(backbone: Backbone, tmp_path: Path, pixels: Tensor) -> None:
    path = save_checkpoint(tmp_path / "model.pt", backbone, tasks=2, extend=True)
    whole = torch.load(path, weights_only=True)
    outcomes = set()
    for seed in range(150):
        torch.save(damage(whole, random.Random(seed)), path)
        try:
            tasks = memoro.import_tasks(backbone, path)
            memoro.compose(backbone, tasks)(pixels)
            outcomes.add("used")
        except MemoroError:
            outcomes.add("refused")
    assert outcomes == {"used", "refused"}


def test_tensors_larger_than_the_file_are_refused(backbone: Backbone, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model.pt", backbone, tasks=2)
    whole = torch.load(path, weights_only=True)
    for key in (MASK, MEMORY):
        torch.save({**whole, key: torch.zeros(1).expand(30_000, 30_000)}, path)
        with pytest.raises(TaskFileError, match="larger than what the file stores"):
            memoro.import_tasks(backbone, path)


def test_rows_without_columns_make_no_labels(backbone: Backbone, tmp_path: Path) -> None:
    """Such a tensor takes no bytes, whatever its length."""
    path = save_checkpoint(tmp_path / "model.pt", backbone, tasks=1)
    whole = torch.load(path, weights_only=True)
    odd = {f"classifiers.1.{name}": torch.zeros(10**12, 0) for name in ("weight", "bias")}
    torch.save({**whole, **odd}, path)
    with pytest.raises(TaskFileError, match=r"task 0 does not fit"):
        memoro.import_tasks(backbone, path)
