"""`full`: a copy of the whole encoder is trained, and a head."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memoro.backbones import Backbone
from memoro.lab.baselines.baseline import BaselineRegime, Parts, Shapes
from memoro.lab.baselines.dense import run_copy
from memoro.regimes.regime import RATES, TaskPlan


def _shapes(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in backbone.anatomy.tensors.items()}


def _copy(backbone: Backbone, plan: TaskPlan, dtype: torch.dtype) -> Parts:
    """The copy stays in eval mode: with dropout it would be another comparison."""
    made = backbone.trainable_copy(dtype)
    for parameter in made.weights.values():
        parameter.requires_grad_(True)
    return Parts(made.anatomy, made.weights, stored=made.anatomy.tensors)


FULL = BaselineRegime("full", (), _shapes, run_copy, _copy, rates={**RATES, "adamw": (0.00001, 0.00003, 0.0001)})
