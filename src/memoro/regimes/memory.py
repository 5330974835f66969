"""`head`, `memory` (class token, memory cells and head, masked: the paper's), `side` (class token, low-rank weights and
head; memory cells if asked for), `readout` (a linear layer on statistics of all tokens, in closed form) and `joint`
(a weighted mean of `side` and `readout`): base tokens stay as they are, so what these regimes train composes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memoro.backbones import Backbone
from memoro.errors import TrainingError
from memoro.regimes.regime import RATES, Regime, TaskPlan
from memoro.tasks.task import Task, new_task


def _make(backbone: Backbone, plan: TaskPlan) -> Task:
    return new_task(
        backbone,
        plan.name,
        plan.labels,
        cells=plan.cells or 0,
        rank=plan.rank or 0,
        from_layer=plan.from_layer or 0,
        head=plan.head,
        extends=plan.extends,
        seed=plan.seed,
    )


def _plain(regime: str, *, linear: bool = False) -> Callable[[Backbone, TaskPlan], Task]:
    """Makes tasks without low-rank weights. A linear one is a fork at the last layer: it composes like any other."""

    def make(backbone: Backbone, plan: TaskPlan) -> Task:
        if plan.rank:
            raise TrainingError(
                f"{plan.name!r}: regime {regime!r} has no low-rank weights, so rank {plan.rank} does not apply. Use "
                "regime 'side', which has them, or leave rank out."
            )
        return _make(backbone, replace(plan, cells=0, from_layer=backbone.depth) if linear else plan)

    return make


HEAD = Regime(
    "head",
    _plain("head", linear=True),
    lambda depth: {"cells": 0, "from_layer": depth, "rank": 0},
    lambda task: {name: parameter for name, parameter in task.named_parameters() if name.startswith("head.")},
    rates={**RATES, "adamw": (0.003, 0.01, 0.03)},
    recipe="paper",
)
MEMORY = Regime(
    "memory",
    _plain("memory"),
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
    make=_plain("readout", linear=True),
    trains=lambda task: {},
    recipe="default",
    readout=1.0,
)
