"""Small baselines of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor
from torch.nn import functional as F

from memoro.backbones import Backbone
from memoro.lab.baselines import BASELINES, REGIMES, Baseline, BaselinePlan
from memoro.regimes.regime import all_parameters

LABELS = ["a", "b", "c"]


families = pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)


# SigLIP has no class token that class-full could train; that is an error of its own.
PAIRS = [(case, name) for case in FAMILIES for name in BASELINES if (case.name, name) != ("siglip", "class-full")]


# Of all pairs, every third one: each family and each method several times. `make test-slow` has the others.
pairs = pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, id=f"{case.name}-{name}", marks=[pytest.mark.slow] if number % 3 else [])
        for number, (case, name) in enumerate(PAIRS)
    ],
)


def build(backbone: Backbone, regime: str, **options: Any) -> Baseline:
    plan = BaselinePlan("pets", LABELS, **{"cells": 3, "width": 2, **options})
    model: Baseline = REGIMES[regime].build(backbone, plan)
    return model


def shaken(model: Baseline, seed: int = 5) -> Baseline:
    """The model far from its start, as training would leave it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def images(count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 3, 20, 20, generator=torch.Generator().manual_seed(1)).to(dtype)


def train(model: Baseline, pixels: Tensor, targets: Tensor, steps: int = 100) -> None:
    optimizer = torch.optim.AdamW(all_parameters(model).values(), lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        loss = F.cross_entropy(model(pixels), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def class_token(model: Baseline) -> Tensor:
    own = dict(model.named_parameters()).get("class_token")
    token = model.backbone.anatomy.class_token if own is None else own
    assert token is not None
    return token
