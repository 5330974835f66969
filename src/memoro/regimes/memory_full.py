"""`memory-full`: patches and class token attend to memory too, as in the paper before it masks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from memoro.backbones import Backbone
from memoro.errors import BackboneError
from memoro.regimes.baseline import Method, Parts, Shapes, Weights
from memoro.regimes.dense import run_dense
from memoro.regimes.regime import TaskPlan
from memoro.tasks.task import Task


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


def _shape_class(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    if backbone.anatomy.class_token is None:
        raise BackboneError(
            f"{backbone.name} ({backbone.family}) has no class token that regime 'class-full' could train: take "
            "'head', 'vpt', or 'memory' with 0 cells, which brings a class token."
        )
    return {"class_token": (backbone.dim,)}


def _class_parts(backbone: Backbone, plan: TaskPlan, start: Task) -> Parts:
    def encode(weights: Weights, pixels: Tensor) -> Tensor:
        return run_dense(backbone.anatomy, pixels, class_token=weights["class_token"])

    _shape_class(backbone, {})
    return Parts({"class_token": start.class_token}, encode)


def _shape_prompts(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    return {"memory": (backbone.depth, sizes["cells"], backbone.dim)}


def _prompt_parts(backbone: Backbone, plan: TaskPlan, start: Task) -> Parts:
    # VPT-deep drops what becomes of a layer's prompts, so only their keys and values count: they are memory.
    def encode(weights: Weights, pixels: Tensor) -> Tensor:
        return run_dense(backbone.anatomy, pixels, memory=weights["memory"])

    return Parts({"memory": start.memory}, encode)


CLASS_FULL = Method("class-full", "the model's own class token and head, no mask", (), _shape_class, _class_parts)
VPT = Method("vpt", "VPT-deep: prompts (cells) for each layer and head", ("cells",), _shape_prompts, _prompt_parts)
