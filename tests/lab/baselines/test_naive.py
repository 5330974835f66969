"""Naive concatenation of memories: exact alone, and other outputs together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baseline_models import LABELS, build, class_token, families, images, shaken
from dense_oracle import run_dense_oracle
from families import Case

import memoro
from memoro.backbones import Backbone
from memoro.errors import CompositionError
from memoro.lab.baselines import BASELINES, BaselinePlan
from memoro.lab.baselines.dense import NaiveConcatenation


@families
def test_naive_concatenation(case: Case) -> None:
    backbone, pixels = memoro.load_backbone(case.model().double()), images(2, torch.float64)
    plans = [BaselinePlan(f"task {i}", LABELS, cells=i + 1, seed=i) for i in range(3)]
    models = [shaken(BASELINES["memory-full"].build(backbone, plan), seed) for seed, plan in enumerate(plans)]
    with torch.no_grad():
        alone = {model.name: model(pixels) for model in models}
        for model in models:
            assert torch.equal(NaiveConcatenation([model])(pixels)[model.name], alone[model.name])
        together = NaiveConcatenation(models)(pixels)
        classes = [] if backbone.anatomy.class_token is None else [class_token(model) for model in models]
        memory = torch.cat([model.memory for model in models], 1)
        tokens = run_dense_oracle(backbone, pixels, classes, memory)
        for model, token in zip(models, tokens if classes else tokens * 3, strict=True):
            assert torch.allclose(together[model.name], model.head(token), rtol=0, atol=1e-10)
            assert not torch.allclose(together[model.name], alone[model.name], atol=1e-3)  # the paper's point


def test_naive_concatenation_names_its_limits(backbone: Backbone, vit: Any) -> None:
    one = build(backbone, "memory-full")
    with pytest.raises(CompositionError, match="at least one model"):
        NaiveConcatenation([])
    with pytest.raises(CompositionError, match="two tasks are named 'pets'"):
        NaiveConcatenation([one, build(backbone, "memory-full")])
    with pytest.raises(CompositionError, match="'vpt'"):
        NaiveConcatenation([build(backbone, "vpt")])
    with pytest.raises(CompositionError, match="another backbone object"):
        NaiveConcatenation([one, build(memoro.load_backbone(vit), "memory-full")])
