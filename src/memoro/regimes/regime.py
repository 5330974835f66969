"""A regime: what is trained, and how tokens attend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from memoro.backbones import Backbone
from memoro.heads import HeadKind
from memoro.tasks.task import Task

RATES: Mapping[str, tuple[float, ...]] = {"sgd": (0.03, 0.1, 0.3), "adamw": (0.0003, 0.001, 0.003)}
"""Learning rates that are tried where none is given, by optimiser."""


@dataclass(frozen=True)
class TaskPlan:
    """What a user asks for before there is a task. A regime reads those of the sizes that it has; None: its default."""

    name: str
    labels: Sequence[str]
    head: HeadKind = "softmax"
    cells: int | None = None
    from_layer: int | None = None
    extends: Sequence[Task] = ()
    seed: int = 0
    width: int = 5
    """Bottleneck of adapters."""
    rank: int | None = None
    """Of a task's low-rank weights (regime `side`), or of the matrices that LoRA adds to a copy of the backbone."""


@dataclass(frozen=True)
class Regime:
    """The contract of a regime. A new one is registered in `REGIMES`."""

    name: str
    make: Callable[[Backbone, TaskPlan], Any]
    """The untrained Task, or Baseline where the regime does not compose, from a plan with all sizes."""
    sizes: Callable[[int], Mapping[str, int]]
    """The default sizes on a backbone of this depth."""
    trains: Callable[[Any], dict[str, nn.Parameter]]
    """The parameters that are trained, by name. All others stay as they are."""
    composes: bool = True
    """Whether base tokens stay as they are, so that what it trains composes with other tasks."""
    rates: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: RATES)
    readout: float = 0.0
    """The share of a read-out in the task's logits; 1: nothing is trained by gradients."""

    def build(self, backbone: Backbone, plan: TaskPlan) -> Any:
        """The untrained Task or Baseline. Sizes that the plan leaves open are the regime's own."""
        open_sizes: dict[str, Any] = {
            name: size for name, size in self.sizes(backbone.depth).items() if getattr(plan, name) is None
        }
        return self.make(backbone, replace(plan, **open_sizes))


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by name, without empty ones."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.numel()}
