"""`head`: a linear head on the base's final class token."""

from __future__ import annotations

from torch import nn

from memoro.backbones import Backbone
from memoro.regimes.regime import Regime, TaskPlan
from memoro.tasks.task import Task, new_task


def _build_head(backbone: Backbone, plan: TaskPlan) -> Task:
    # A task forked at the last layer: it composes like any other.
    return new_task(
        backbone,
        plan.name,
        plan.labels,
        cells=0,
        from_layer=backbone.depth,
        head=plan.head,
        extends=plan.extends,
        seed=plan.seed,
    )


def _head_parameters(task: Task) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in task.named_parameters() if name.startswith("head.")}


HEAD = Regime("head", "a linear head on the backbone's final class token", _build_head, _head_parameters)


def _build_memory(backbone: Backbone, plan: TaskPlan) -> Task:
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


def _all_parameters(task: Task) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in task.named_parameters() if parameter.numel()}


MEMORY = Regime("memory", "class token, memory cells and head, masked (the paper's)", _build_memory, _all_parameters)
