"""`full`: a copy of the whole encoder is trained, and a head."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from memoro.backbones import Backbone
from memoro.regimes.baseline import Method, Parts, Shapes, Weights
from memoro.regimes.dense import run_dense
from memoro.regimes.regime import TaskPlan
from memoro.tasks.task import Task


def _shapes(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in backbone.anatomy.tensors.items()}


def _parts(backbone: Backbone, plan: TaskPlan, start: Task) -> Parts:
    """The copy is in float32 or better. It stays in eval mode: dropout would make it another comparison."""
    trainable_copy = backbone.trainable_copy(start.head.weight.dtype)
    parameters = trainable_copy.weights
    for parameter in parameters.values():
        parameter.requires_grad_(True)

    def encode(weights: Weights, pixels: Tensor) -> Tensor:
        return run_dense(trainable_copy.anatomy, pixels)

    return Parts(parameters, encode, stored=trainable_copy.anatomy.tensors)


FULL = Method("full", "all weights of a copy of the encoder, and head", (), _shapes, _parts)
