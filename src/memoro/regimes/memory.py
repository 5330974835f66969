"""`head`, `memory` (class token, memory cells and head, masked: the paper's), `side` (class token, low-rank weights and
head; memory cells if asked for), `readout` (a linear layer on statistics of all tokens, in closed form) and `joint`
(a weighted mean of `side` and `readout`): base tokens stay as they are, so what these regimes train composes."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from memoro.backbones import Backbone
from memoro.errors import TrainingError
from memoro.regimes.regime import RATES, Regime, TaskPlan
from memoro.tasks.task import Task, new_task


def _make(backbone: Backbone, plan: TaskPlan) -> Task:
    assert plan.cells is not None
    assert plan.rank is not None
    assert plan.from_layer is not None
    return new_task(
        backbone,
        plan.name,
        plan.labels,
        cells=plan.cells,
        rank=plan.rank,
        from_layer=plan.from_layer,
        head=plan.head,
        extends=plan.extends,
        seed=plan.seed,
    )


def _make_plain(backbone: Backbone, plan: TaskPlan, regime: str) -> Task:
    """A task without low-rank weights."""
    if plan.rank:
        raise TrainingError(
            f"{plan.name!r}: regime {regime!r} has no low-rank weights, so rank {plan.rank} does not apply. Use regime "
            "'side', which has them, or leave rank out."
        )
    return _make(backbone, plan)


def _make_head(backbone: Backbone, plan: TaskPlan, regime: str) -> Task:
    """A fork at the last layer: it composes like any other."""
    return _make_plain(backbone, replace(plan, cells=0, from_layer=backbone.depth), regime)


def _head_parameters(task: Task) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in task.named_parameters() if name.startswith("head.")}


HEAD = Regime(
    "head",
    lambda backbone, plan: _make_head(backbone, plan, "head"),
    lambda depth: {"cells": 0, "from_layer": depth, "rank": 0},
    _head_parameters,
    rates={**RATES, "adamw": (0.003, 0.01, 0.03)},
    recipe="paper",
)
MEMORY = Regime(
    "memory",
    lambda backbone, plan: _make_plain(backbone, plan, "memory"),
    lambda depth: {"cells": 5, "from_layer": 0, "rank": 0},
    recipe="paper",
)
SIDE = Regime(
    "side",
    _make,
    lambda depth: {"cells": 0, "from_layer": depth * 2 // 3, "rank": 4},
    rates={**RATES, "adamw": (0.001,)},
)
JOINT = replace(SIDE, name="joint", readout=0.6)
READOUT = replace(
    HEAD,
    name="readout",
    make=lambda backbone, plan: _make_head(backbone, plan, "readout"),
    trains=lambda task: {},
    recipe="default",
    readout=1.0,
)
