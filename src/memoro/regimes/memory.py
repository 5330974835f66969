"""`head` and `memory`: the mask keeps base tokens as they are, so what these regimes train composes."""

from __future__ import annotations

from torch import nn

from memoro.backbones import Backbone
from memoro.regimes.regime import Regime, TaskPlan, all_parameters
from memoro.tasks.task import Task, new_task


def _build(backbone: Backbone, plan: TaskPlan, cells: int, from_layer: int) -> Task:
    return new_task(
        backbone,
        plan.name,
        plan.labels,
        cells=cells,
        from_layer=from_layer,
        head=plan.head,
        extends=plan.extends,
        seed=plan.seed,
    )


def _head_parameters(task: Task) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in task.named_parameters() if name.startswith("head.")}


HEAD = Regime(
    "head",
    "a linear head on the backbone's final class token",
    # A fork at the last layer: it composes like any other.
    lambda backbone, plan: _build(backbone, plan, cells=0, from_layer=backbone.depth),
    _head_parameters,
)
MEMORY = Regime(
    "memory",
    "class token, memory cells and head, masked (the paper's)",
    lambda backbone, plan: _build(backbone, plan, plan.cells, plan.from_layer),
    all_parameters,
)
