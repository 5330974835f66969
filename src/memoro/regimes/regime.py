"""A regime: what is trained, and how tokens attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from memoro.backbones import Backbone
from memoro.heads import HeadKind
from memoro.tasks.task import Task


@dataclass(frozen=True)
class TaskPlan:
    """What a user asks for before there is a task."""

    name: str
    labels: Sequence[str]
    head: HeadKind = "softmax"
    cells: int = 5
    from_layer: int = 0
    extends: Sequence[Task] = ()
    seed: int = 0
    width: int = 5
    """Bottleneck of adapters."""
    rank: int = 8
    """Of LoRA's matrices."""


@dataclass(frozen=True)
class Regime:
    """The contract of a regime. One file each; a new one is registered in `REGIMES`."""

    name: str
    summary: str
    build: Callable[[Backbone, TaskPlan], Any]
    """The untrained Task, or Baseline where the regime does not compose."""
    trains: Callable[[Any], dict[str, nn.Parameter]]
    """The parameters that learn, by name. Nothing else may move."""
    composes: bool = True
    """Whether base tokens stay as they are, so that what it trains can stand beside other tasks."""
