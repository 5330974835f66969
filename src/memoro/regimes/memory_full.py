"""`memory-full`: patches and class token attend to memory too, as in the paper before it masks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from memoro.backbones import Backbone
from memoro.regimes.baseline import Method, Parts, Shapes, Weights
from memoro.regimes.dense import run_dense
from memoro.regimes.regime import TaskPlan
from memoro.task import Task


def shape_memory(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    """Class token (not where the family has none, as SigLIP) and memory: dim + depth * cells * dim, Table 5."""
    memory: Shapes = {"memory": (backbone.depth, sizes["cells"], backbone.dim)}
    return memory if backbone.anatomy.class_token is None else {"class_token": (backbone.dim,), **memory}


def start_memory(backbone: Backbone, start: Task) -> dict[str, nn.Parameter]:
    """What `shape_memory` names, from a fresh task."""
    memory = {"memory": start.memory}
    return memory if backbone.anatomy.class_token is None else {"class_token": start.class_token, **memory}


def _parts(backbone: Backbone, plan: TaskPlan, start: Task) -> Parts:
    def encode(weights: Weights, pixels: Tensor) -> Tensor:
        return run_dense(backbone.anatomy, pixels, class_token=weights.get("class_token"), memory=weights["memory"])

    return Parts(start_memory(backbone, start), encode)


MEMORY_FULL = Method(
    "memory-full", "class token, memory cells and head; all tokens attend to memory", ("cells",), shape_memory, _parts
)
