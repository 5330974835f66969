"""`memory`: class token, memory cells and head behind the paper's mask."""

from __future__ import annotations

from torch import nn

from memoro.backbones import Backbone
from memoro.regimes.regime import Regime, TaskPlan
from memoro.task import Task, new_task


def _build(backbone: Backbone, plan: TaskPlan) -> Task:
    return new_task(
        backbone,
        plan.name,
        plan.labels,
        cells=plan.cells,
        from_layer=plan.from_layer,
        head=plan.head,
        extends=plan.extends,
        seed=plan.seed,
    )


def _trains(task: Task) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in task.named_parameters() if parameter.numel()}


MEMORY = Regime("memory", "class token, memory cells and head, masked (the paper's)", _build, _trains)
