"""Runs: trainings of one task each that share every pass of the backbone, or of one baseline each, that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memoro.backbones import Backbone
from memoro.engine.bank import build_bank
from memoro.engine.plan import build_plan
from memoro.engine.streams import BasePass, Features, TaskStream
from memoro.errors import TrainingError
from memoro.regimes import Baseline
from memoro.tasks.lineage import trace_lineage
from memoro.tasks.task import Task
from memoro.training.recipe import Recipe


@dataclass(frozen=True)
class Goal:
    """What a run is to learn of its images, where that is not simply what the set says of them."""

    targets: Tensor | None = None
    """Of the training images, in their order."""
    val_targets: Tensor | None = None
    sample_weight: Tensor | None = None
    """How much each training image counts (n,); those with 0 are held out."""
    class_weights: Tensor | None = None
    """See `objective.class_weights`."""


@dataclass
class Run:
    """One training of one task with one setting, and where it stands."""

    task: Task | Baseline
    recipe: Recipe
    trained: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    goal: Goal = Goal()
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    """The trained parameters at the best validation score so far."""
    best_score: tuple[float, float] | None = None
    best_epoch: int = -1
    stopped: str | None = None
    """Why it no longer takes part, None while it does."""
    diverged: bool = False
    """Whether that is because its numbers diverged."""

    @classmethod
    def start(
        cls, task: Task | Baseline, recipe: Recipe, trained: dict[str, nn.Parameter], goal: Goal | None = None
    ) -> Run:
        """A run at its beginning; what is not in `trained` is frozen."""
        for parameter in task.parameters():
            parameter.requires_grad_(False)
        for parameter in trained.values():
            parameter.requires_grad_(True)
        return cls(task, recipe, trained, recipe.build_optimizer(trained), goal or Goal())

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
    """Several live tasks over the same images; what they extend comes along, frozen."""

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

    def __call__(self, inputs: Tensor | Features) -> list[Tensor]:
        """Each task's logits on a batch of pixels, or of features, with gradients to its parameters."""
        return answer_together([self], [inputs])[0]

    def stream(self) -> TaskStream:
        return TaskStream(self.backbone.anatomy, self.plan, build_bank(self.backbone.anatomy, self.tasks))

    def heads(self, rows: Tensor) -> list[Tensor]:
        """The logits of a finished stream."""
        heads = [task.head for task in self.tasks]
        return [heads[n](rows[:, row].to(heads[n].weight.dtype)) for n, row in enumerate(self.rows)]


class OwnPass:
    """Several baselines over the same images. They change base tokens: each has a pass of its own."""

    def __init__(self, models: Sequence[Baseline]) -> None:
        self.models = models
        self.rows = range(len(models))

    def __call__(self, pixels: Tensor) -> list[Tensor]:
        """Each model's logits, with gradients to its parameters."""
        return [model(pixels) for model in self.models]


def pass_for(backbone: Backbone, tasks: Sequence[Task | Baseline]) -> SharedPass | OwnPass:
    """The pass of tasks, or of baselines."""
    models = [task for task in tasks if isinstance(task, Baseline)]
    if not models:
        return SharedPass(backbone, [task for task in tasks if isinstance(task, Task)])
    assert len(models) == len(tasks)
    return OwnPass(models)


def answer_together(passes: Sequence[SharedPass], inputs: Sequence[Tensor | Features]) -> list[list[Tensor]]:
    """The logits of several sets of tasks, each on its own images: pixels of one size share one base pass."""
    streams = [shared.stream() for shared in passes]
    finals: dict[int, Tensor] = {}
    sizes: dict[torch.Size, list[int]] = {}
    for number, given in enumerate(inputs):
        if isinstance(given, Tensor):
            sizes.setdefault(given.shape[1:], []).append(number)
            continue
        for layer, found in enumerate(given.layers, start=given.first):
            streams[number].read(layer, found)
        finals[number] = given.token
    for numbers in sizes.values():
        pixels = [given for number in numbers if isinstance(given := inputs[number], Tensor)]
        ends = torch.tensor([len(part) for part in pixels]).cumsum(0).tolist()
        own = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        base = BasePass(passes[0].backbone.anatomy, pixels[0] if len(pixels) == 1 else torch.cat(pixels))
        for layer, found in enumerate(base):
            for number, rows in zip(numbers, own, strict=True):
                streams[number].read(layer, found if len(own) == 1 else found.part(rows))
        finals |= {number: base.token[rows] for number, rows in zip(numbers, own, strict=True)}
    answers = []
    for number, (shared, stream) in enumerate(zip(passes, streams, strict=True)):
        tokens = stream.finish(finals[number])
        assert tokens is not None
        answers.append(shared.heads(tokens))
    return answers


def ancestors(tasks: Sequence[Task | Baseline]) -> list[Task]:
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
