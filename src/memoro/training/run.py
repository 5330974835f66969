"""Runs, each the training of one task, and the forward pass that tasks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from memoro.backbones import Backbone
from memoro.engine.bank import build_bank
from memoro.engine.plan import build_plan
from memoro.engine.readouts import ReadOutBank
from memoro.engine.streams import BasePass, Features, TaskStream, read_head
from memoro.errors import TrainingError
from memoro.evaluation.logits import Batches
from memoro.heads import Scale
from memoro.tasks.ensemble import split_members
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


class SharedForward:
    """The forward pass of several tasks over the same images: one base pass for all, and for the tasks they extend."""

    def __init__(self, backbone: Backbone, tasks: Sequence[Task]) -> None:
        self.backbone = backbone
        older = ancestors(tasks)
        names = {id(task): str(number) for number, task in enumerate([*tasks, *older])}
        lineage, members = trace_lineage(
            list(names.values()),
            [[names[id(parent)] for parent in task.extends] for task in [*tasks, *older]],
            [task.from_layer for task in [*tasks, *older]],
        ).split([task.members for task in [*tasks, *older]])
        # Copies, so that ancestors get no gradient and keep their own flags.
        copies = [deepcopy(task).requires_grad_(False).to(backbone.device) for task in older]
        self.tasks = list(tasks)
        self.streams = [member for task in [*tasks, *copies] for member in split_members(task)]
        own = members[: len(tasks)]
        self.plan = build_plan(lineage, self.streams, [*chain(*own)], backbone.depth, backbone.device)
        self.rows = [[self.plan.order.index(member) for member in one] for one in own]
        self._readouts = ReadOutBank(self.tasks)
        self.pool_from = self._readouts.first_layer(range(len(self.tasks)), backbone.depth)
        """The first layer whose tokens the tasks' read-outs read."""

    def __call__(self, inputs: Tensor | Features) -> list[Tensor]:
        """Each task's logits for a batch of pixels or features, with gradients to its parameters."""
        return forward_together([self], [inputs])[0]

    def stream(self) -> TaskStream:
        return TaskStream(self.backbone.anatomy, self.plan, build_bank(self.backbone.anatomy, self.streams))

    def heads(self, tokens: Tensor, pooled: Tensor | None) -> list[Tensor]:
        """The logits of each task from the final tokens of its stream, and the statistics that read-outs read."""
        logits = [read_head(task.head, tokens, rows)[1] for task, rows in zip(self.tasks, self.rows, strict=True)]
        if pooled is not None:
            for number, added in self._readouts.answer(pooled, range(len(logits))).items():
                logits[number] = logits[number] + added
        return logits


def build_forward(backbone: Backbone, tasks: Sequence[Model]) -> Callable[[Any], list[Tensor]]:
    """A function from a batch's inputs to each model's logits. Tasks share a base pass, others have their own."""
    composed = [task for task in tasks if isinstance(task, Task)]
    if composed:
        assert len(composed) == len(tasks)
        return SharedForward(backbone, composed)
    return lambda pixels: [model(pixels) for model in tasks]


def forward_together(forwards: Sequence[SharedForward], inputs: Sequence[Tensor | Features]) -> list[list[Tensor]]:
    """The logits of several sets of tasks, each on its own images; pixels of one size share a base pass."""
    streams = [forward.stream() for forward in forwards]
    finals: dict[int, tuple[Tensor, Tensor | None]] = {}
    sizes: dict[torch.Size, list[int]] = {}
    for number, given in enumerate(inputs):
        if isinstance(given, Tensor):
            sizes.setdefault(given.shape[1:], []).append(number)
            continue
        for layer, found in enumerate(given.layers, start=given.first):
            streams[number].read(layer, found)
        finals[number] = given.token, given.pooled
    for numbers in sizes.values():
        pixels = [given for number in numbers if isinstance(given := inputs[number], Tensor)]
        ends = torch.tensor([len(part) for part in pixels], device="cpu").cumsum(0).tolist()
        own = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        together, pool_from = pixels[0] if len(pixels) == 1 else torch.cat(pixels), min(f.pool_from for f in forwards)
        base = BasePass(forwards[0].backbone.anatomy, together, pool_from)
        for layer, found in enumerate(base):
            for number, rows in zip(numbers, own, strict=True):
                streams[number].read(layer, found if len(own) == 1 else found.part(rows))
        for number, rows in zip(numbers, own, strict=True):
            finals[number] = base.token[rows], None if base.pooled is None else base.pooled[rows]
    logits = []
    for number, (forward, stream) in enumerate(zip(forwards, streams, strict=True)):
        token, pooled = finals[number]
        tokens = stream.finish(token)
        assert tokens is not None
        logits.append(forward.heads(tokens, pooled))
    return logits


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
