"""Gradient checkpointing of baselines that train a copy of the backbone."""

from __future__ import annotations

import pytest
import torch
from baseline_models import build
from torch import Tensor

from memoro.backbones import Backbone
from memoro.errors import TrainingError


def run(backbone: Backbone, name: str, pixels: Tensor, checkpointing: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    """Logits, gradients, and how many numbers were kept for them."""
    model, kept = build(backbone, name, checkpointing=checkpointing), 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(pixels)
    logits.square().sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return logits.detach(), gradients, kept


@pytest.mark.parametrize("name", ["full", "lora"])
def test_the_same_gradients_with_less_memory(backbone: Backbone, pixels: Tensor, name: str) -> None:
    plain, usual, much = run(backbone, name, pixels, False)
    same, gradients, little = run(backbone, name, pixels, True)
    assert torch.equal(same, plain)
    assert gradients.keys() == usual.keys()
    assert all(torch.equal(one, usual[name]) for name, one in gradients.items())
    assert any(one.any() for one in gradients.values())
    assert little < much / 3


def test_others_have_nothing_to_save(backbone: Backbone) -> None:
    with pytest.raises(TrainingError, match="leave out `checkpointing`"):
        build(backbone, "vpt", checkpointing=True)
