"""A regime: what is trained. This is all that training knows of a method, memoro's own and anyone's.

What a regime trains is a `Task`, or any other model of one set of labels (`memoro.tasks.spec.TaskModule`):

- A Task reads the base pass, which all tasks of a training share, and composes with other tasks.
- Any other model has a pass of its own. It is a module with a `head` (an `nn.Linear`, whose output are its logits) and
  a `forward` from normalised images (n, 3, height, width) on the backbone's device to logits (n, labels).

A regime of one's own is an instance of `Regime`, given to `memoro.train` or `memoro.fit` as `regime`:

    class Pooled(TaskModule[ModelSpec]):
        def __init__(self, backbone, spec):
            super().__init__(spec)
            self.embed = backbone.anatomy.embed
            self.head = nn.Linear(backbone.dim, len(spec.labels))

        def forward(self, pixels):
            return self.head(self.embed(pixels)[0].mean(1))

    def make(backbone, plan):
        record = BackboneRecord.of(backbone)
        return Pooled(backbone, ModelSpec(name=plan.name, labels=tuple(plan.labels), kind=plan.head, backbone=record))

    memoro.train("photos", regime=Regime("pooled", make, composes=False, save=save_it, read_hashes=read_them))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from memoro.backbones import Backbone
from memoro.heads import HeadKind
from memoro.tasks.task import Task
from memoro.tasks.taskfile import load_tasks, save_task

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
    rank: int | None = None


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by name, without empty ones."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.numel()}


def _task_hashes(file: Path) -> list[str]:
    return [task.content_hash() for task in load_tasks(file)]


@dataclass(frozen=True)
class Regime:
    """The contract of a regime."""

    name: str
    make: Callable[[Backbone, TaskPlan], Any]
    """The untrained model from a plan with all sizes: a Task if the regime composes."""
    sizes: Callable[[int], Mapping[str, int]] = lambda depth: {}
    """The sizes of a plan that it reads, with their defaults on a backbone of this depth."""
    trains: Callable[[Any], dict[str, nn.Parameter]] = all_parameters
    """The parameters that are trained, by name. All others stay as they are."""
    composes: bool = True
    """Whether it trains Tasks, which share the base pass; the features of that pass may be read from the cache. Other
    models have a pass each and see only the images that they learn from."""
    rates: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: RATES)
    recipe: str = "default"
    """The recipe that it is trained with unless another is given, by its name in `RECIPES`."""
    readout: float = 0.0
    """The share of a read-out in a Task's logits; 1: nothing is trained by gradients."""
    save: Callable[[Any, Path], object] = save_task
    """Writes a trained model to a file."""
    read_hashes: Callable[[Path], list[str]] = _task_hashes
    """The content hashes of the models in a file; a TaskFileError if `save` did not write it. By these, training knows
    whether it would replace another model."""

    def build(self, backbone: Backbone, plan: TaskPlan) -> Any:
        """The untrained model. Sizes that the plan leaves open are the regime's own."""
        open_sizes: dict[str, Any] = {
            name: size for name, size in self.sizes(backbone.depth).items() if getattr(plan, name) is None
        }
        return self.make(backbone, replace(plan, **open_sizes))
