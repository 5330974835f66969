"""Runs: trainings of one task each that share every pass of the backbone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memoro.backbones import Backbone
from memoro.engine import build_bank, build_plan, run_streams
from memoro.errors import TrainingError
from memoro.lineage import trace_lineage
from memoro.task import Task
from memoro.train.recipe import Recipe


@dataclass
class Run:
    """One training of one task with one setting, and where it stands."""

    task: Task
    recipe: Recipe
    trained: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    """The trained parameters at the best validation score so far."""
    best_score: tuple[float, float] | None = None
    best_epoch: int = -1
    stopped: str | None = None
    """Why it no longer takes part, None while it does."""
    diverged: bool = False
    """Whether that is because its numbers went beyond all bounds."""

    @classmethod
    def start(cls, task: Task, recipe: Recipe, trained: dict[str, nn.Parameter]) -> Run:
        """A run at its beginning; what is not in `trained` is frozen."""
        for parameter in task.parameters():
            parameter.requires_grad_(False)
        for parameter in trained.values():
            parameter.requires_grad_(True)
        return cls(task, recipe, trained, recipe.build_optimizer(trained))

    def diverge(self, what: str, step: int) -> None:
        self.diverged = True
        self.stopped = f"{what} at step {step}: choose a smaller learning rate than {self.recipe.lr:g}"
        self.optimizer.zero_grad()

    def keep_best(self, score: tuple[float, float], epoch: int) -> None:
        if self.best_score is None or score > self.best_score:
            self.best_score, self.best_epoch = score, epoch
            self.best = {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def restore_best(self) -> None:
        with torch.no_grad():
            for name, value in self.best.items():
                self.trained[name].copy_(value)


class SharedPass:
    """One pass of the backbone for several live tasks; what they extend comes along, frozen."""

    def __init__(self, backbone: Backbone, tasks: Sequence[Task]) -> None:
        self.backbone = backbone
        older = ancestors(tasks)
        place = {id(task): str(number) for number, task in enumerate([*tasks, *older])}
        lineage = trace_lineage(
            list(place.values()),
            [[place[id(parent)] for parent in task.extends] for task in [*tasks, *older]],
            [task.from_layer for task in [*tasks, *older]],
        )
        # Copies, so that what is extended gets no gradient and keeps its own flags.
        self.tasks = [*tasks, *(deepcopy(task).requires_grad_(False) for task in older)]
        self.plan = build_plan(lineage, self.tasks, range(len(tasks)), backbone.depth, backbone.device)
        self.rows = [self.plan.order.index(number) for number in range(len(tasks))]

    def __call__(self, pixels: Tensor) -> list[Tensor]:
        """Each task's logits, with gradients to its parameters."""
        bank = build_bank(self.backbone.anatomy, self.tasks)
        _, stream = run_streams(self.backbone.anatomy, pixels, self.plan, bank)
        assert stream is not None
        heads = [task.head for task in self.tasks]
        return [heads[n](stream[:, row].to(heads[n].weight.dtype)) for n, row in enumerate(self.rows)]


def ancestors(tasks: Sequence[Task]) -> list[Task]:
    """All that the tasks extend, each once; an error where it is not at hand or is to be trained at the same time."""
    found: dict[int, Task] = {}
    waiting = [(task, parent) for task in tasks for parent in task.extends]
    while waiting:
        child, parent = waiting.pop()
        if not isinstance(parent, Task):
            raise TrainingError(
                f"{child.name!r} was loaded from a file and extends {parent.name!r}: to train it further, make it "
                f"anew with extends=[load_task(…)] of {parent.name!r}."
            )
        if any(parent is task for task in tasks):
            raise TrainingError(f"{child.name!r} extends {parent.name!r}: train that first, then this one.")
        if id(parent) not in found:
            found[id(parent)] = parent
            waiting += [(parent, older) for older in parent.extends]
    return list(found.values())
