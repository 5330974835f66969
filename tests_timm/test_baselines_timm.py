"""Baseline regimes on timm's VisionTransformer."""

from __future__ import annotations

import pytest
import timm
import torch

from memoro.backbones import load_backbone
from memoro.errors import BackboneError
from memoro.lab.baselines import BASELINES, REGIMES, BaselinePlan


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_trains_and_leaves_the_model_alone(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=5).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    backbone = load_backbone(model)
    plan = BaselinePlan("t", ["a", "b"], cells=2, width=2)
    if name in {"lora", "lora-all"}:
        with pytest.raises(BackboneError, match="in one matrix, but LoRA needs separate ones"):
            REGIMES[name].build(backbone, plan)
        return
    baseline = REGIMES[name].build(backbone, plan)
    pixels = torch.randn(4, 3, 32, 32)
    trained = REGIMES[name].trains(baseline)
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    start = {key: value.detach().clone() for key, value in trained.items()}
    for _ in range(2):  # a zero-started part gets its gradient from the second step on
        torch.nn.functional.cross_entropy(baseline(pixels), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(value, start[key]) for key, value in trained.items() if key.startswith("head."))
    assert any(not torch.equal(value, start[key]) for key, value in trained.items() if not key.startswith("head."))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
