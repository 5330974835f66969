"""Runs, each the training of one task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memoro.backbones import Backbone
from memoro.engine.forward import Forward, Part, answer_together
from memoro.errors import TrainingError
from memoro.evaluation.logits import Batches
from memoro.heads import Scale
from memoro.tasks.mask import trace_lineage
from memoro.tasks.spec import Model
from memoro.tasks.task import Task
from memoro.training.recipe import Recipe


@dataclass(eq=False)
class Run:
    """One training of one task with one setting, and its state."""

    task: Model
    recipe: Recipe
    trained: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    targets: Tensor | None = None
    """Of the training images, in their order; None: those that its batches carry."""
    sample_weight: Tensor | None = None
    """Weight of each training image (n,); 0 for those that are held out. None: all count alike."""
    scale: Scale | None = None
    """Of a regression's targets: within a training, the head answers in these units."""
    class_weights: Tensor | None = None
    """See `Head.class_weights`."""
    val_loader: Batches | None = None
    """The images that it is scored on after every epoch."""
    val_targets: Tensor | None = None
    """Their targets; None: those that the batches carry."""
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    """The trained parameters at the best validation score so far."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    """The trained parameters of a task before the first step: what it gets back if it diverges before it was scored."""
    best_score: tuple[float, float] | None = None
    best_epoch: int = -1
    stopped: str | None = None
    """Why it was stopped; None while it is active."""
    diverged: bool = False

    @classmethod
    def start(cls, task: Model, recipe: Recipe, trained: dict[str, nn.Parameter], **fields: Any) -> Run:
        """A run before its first step; every parameter that is not in `trained` is frozen."""
        for parameter in task.parameters():
            parameter.requires_grad_(False)
        for parameter in trained.values():
            parameter.requires_grad_(True)
        return cls(task, recipe, trained, recipe.build_optimizer(trained), **fields)

    def diverge(self, what: str, step: int) -> None:
        self.diverged = True
        self.stopped = f"diverged at step {step} ({what}): choose a learning rate below {self.recipe.lr:g}"
        self.optimizer.zero_grad()

    def keep_best(self, score: tuple[float, float], epoch: int) -> None:
        if self.best_score is None or score > self.best_score:
            self.best_score, self.best_epoch = score, epoch
            self.best = {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def keep_initial(self) -> None:
        if isinstance(self.task, Task):  # another model may be as large as the backbone
            self.initial = {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def restore_best(self) -> None:
        with torch.no_grad():
            for name, value in (self.best or (self.initial if self.diverged else {})).items():
                self.trained[name].copy_(value)
        self.task.finish_training()


@contextmanager
def standardised(runs: Sequence[Run]) -> Iterator[None]:
    """Within, the heads of regressions answer in the units of their `scale`; afterwards in the user's.

    A task that was never trained starts in units of its scale; if it is interrupted, it stays in them.
    """
    scaled = [(run.task, run.scale) for run in runs if run.scale is not None]
    trained = [(task, scale) for task, scale in scaled if task.spec.preprocessing is not None]
    for task, scale in trained:
        scale.unfold(task.head)
    try:
        yield
    except BaseException:
        for task, scale in trained:
            scale.fold(task.head)
        raise
    for task, scale in scaled:
        scale.fold(task.head)


def join_tasks(backbone: Backbone, tasks: Sequence[Task]) -> Part:
    """The forward pass of tasks that are trained, with those that they extend. Runs may have tasks of the same name."""
    older = ancestors(tasks)
    together = [*tasks, *older]
    names = {id(task): str(number) for number, task in enumerate(together)}
    parents = [[names[id(parent)] for parent in task.extends] for task in together]
    lineage = trace_lineage(list(names.values()), parents, [task.from_layer for task in together])
    # Copies, so that ancestors get no gradient and keep their own flags; their read-outs are not asked.
    copies = [deepcopy(task).requires_grad_(False).to(backbone.device) for task in older]
    for copy in copies:
        copy.detach_readout()
    return Forward(backbone, [*tasks, *copies], lineage, live=True), tuple(range(len(tasks)))


def build_forward(backbone: Backbone, tasks: Sequence[Model]) -> Callable[[Any], list[Tensor]]:
    """A function from a batch's inputs to each model's logits. Tasks share a base pass, others have their own."""
    composed = [task for task in tasks if isinstance(task, Task)]
    if composed:
        assert len(composed) == len(tasks)
        part = join_tasks(backbone, composed)
        return lambda inputs: answer_together([part], [inputs])[0]
    return lambda pixels: [model(pixels) for model in tasks]


def ancestors(tasks: Sequence[Model]) -> list[Task]:
    """All tasks that these extend, each once; an error where one is not loaded, or is among `tasks` itself."""
    found: dict[int, Task] = {}
    waiting = [(task, parent) for task in tasks for parent in task.extends]
    while waiting:
        child, parent = waiting.pop()
        if not isinstance(parent, Task):
            raise TrainingError(
                f"{child.name!r} was loaded from a file without its parent {parent.name!r}, so it cannot be trained "
                "further: create it again with new_task(…, extends=[…])."
            )
        if any(parent is task for task in tasks):
            raise TrainingError(f"{child.name!r} extends {parent.name!r}: train {parent.name!r} first.")
        if id(parent) not in found:
            found[id(parent)] = parent
            waiting += [(parent, older) for older in parent.extends]
    return list(found.values())
