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
    """What a user asks for before there is a task. A regime reads those of the sizes that it has."""

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
    """The contract of a regime. A new one is registered in `REGIMES`."""

    name: str
    summary: str
    build: Callable[[Backbone, TaskPlan], Any]
    """The untrained Task, or Baseline where the regime does not compose."""
    trains: Callable[[Any], dict[str, nn.Parameter]]
    """The parameters that are trained, by name. All others stay as they are."""
    composes: bool = True
    """Whether base tokens stay as they are, so that what it trains composes with other tasks."""


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by name, without empty ones."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.numel()}
