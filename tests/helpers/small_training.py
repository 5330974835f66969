"""Options of short trainings, and comparisons of what they trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from squares import save_squares
from torch import Tensor

from memoro.backbones import Backbone, load_backbone
from memoro.data import Augment
from memoro.tasks.task import Task

PLAIN = Augment(crop="none", flip=0.0)


FRESH: dict[str, Any] = {"workers": 0, "cache": False, "quiet": True}


QUICK: dict[str, Any] = {"image_size": 20, **FRESH}


LABELS = ["red", "green", "blue"]


@pytest.fixture
def squares(tmp_path: Path) -> Path:
    return save_squares(tmp_path / "squares")


@pytest.fixture
def double(vit: Any) -> Backbone:
    return load_backbone(vit, dtype=torch.float64)


def state(module: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def distance(left: Task, right: Task) -> float:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())
