"""A regime: what is trained, and how tokens attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from memoro.backbones import Backbone
from memoro.task import HeadKind, Task


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


@dataclass(frozen=True)
class Regime:
    """The contract of a regime. One file each; a new one is registered in `REGIMES`."""

    name: str
    summary: str
    build: Callable[[Backbone, TaskPlan], Task]
    """The untrained task."""
    trains: Callable[[Task], dict[str, nn.Parameter]]
    """The parameters that learn, by name. Nothing else may move."""
