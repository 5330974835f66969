"""What each regime that changes base tokens computes, against the base, the slow way and by hand."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import pytest
import torch
from baseline_models import build, class_token, families, images, pairs, shaken
from dense_oracle import run_dense_oracle
from families import CASES, Case
from torch import Tensor
from torch.nn import functional as F

import memoro
from memoro.backbones.families import FAMILY_SPECS
from memoro.backbones.huggingface import find_trunk
from memoro.regimes.regime import all_parameters

everywhere = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def last_tokens(case: Case, model: Any, pixels: Tensor) -> Tensor:
    """What leaves the last layer of the original model, by its own forward."""
    model, seen = copy.deepcopy(model).eval(), []
    trunk = find_trunk(model)
    layers = attrgetter(FAMILY_SPECS[trunk.config.model_type].layers)(trunk)
    layers[-1].register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
    extra = {}
    if case.name == "mae":
        model.config.mask_ratio = 0.0
        extra = {"noise": torch.arange(25).expand(len(pixels), -1)}
    model(pixels, **extra)
    # SigLIP's come transposed in memory, which decides the order in which a mean over them is added up.
    return seen[0].contiguous()


@everywhere
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_without_cells_and_with_a_frozen_class_token_it_is_the_base(case: Case, grad: bool) -> None:
    model, pixels = case.model(), images(2)
    backbone = memoro.load_backbone(model)
    baseline = build(backbone, "memory-full", cells=0)
    with torch.set_grad_enabled(grad):
        tokens = last_tokens(case, model, pixels)
        expected = backbone.anatomy.finish_token(backbone.anatomy.base_token(tokens))
        assert torch.equal(baseline.features(pixels), expected)
        assert torch.equal(build(backbone, "vpt", cells=0).features(pixels), expected)
        for regime in ("memory-full", "vpt"):
            assert not torch.allclose(shaken(build(backbone, regime)).features(pixels), expected, atol=1e-3)


@everywhere
@pytest.mark.parametrize("name", ["full", "lora"])
def test_copies_start_as_the_base(case: Case, name: str) -> None:
    backbone, pixels = memoro.load_backbone(case.model().double()), images(2, torch.float64)
    base = build(backbone, "memory-full", cells=0)
    with torch.no_grad():
        expected = base.features(pixels)
        assert torch.allclose(build(backbone, name).features(pixels), expected, atol=1e-10)
        assert not torch.allclose(shaken(build(backbone, name)).features(pixels), expected, atol=1e-3)


@everywhere
@pytest.mark.parametrize("name", ["memory-full", "vpt"])
def test_dense_attention_over_tokens_and_memory(case: Case, name: str) -> None:
    backbone, pixels = memoro.load_backbone(case.model().double()), images(2, torch.float64)
    model = shaken(build(backbone, name))
    with torch.no_grad():
        classes = [] if backbone.anatomy.class_token is None else [class_token(model)]
        (expected,) = run_dense_oracle(backbone, pixels, classes, model.memory)
        assert torch.allclose(model.features(pixels), expected, rtol=0, atol=1e-10)
        assert torch.allclose(model(pixels), model.head(expected), rtol=0, atol=1e-10)
        (other,) = run_dense_oracle(backbone, pixels, classes, torch.zeros_like(model.memory))
        assert not torch.allclose(expected, other, atol=1e-3)


@families
@pytest.mark.parametrize("name", ["propagated", "propagated-additive"])
def test_propagated_memory(case: Case, name: str) -> None:
    backbone, pixels = memoro.load_backbone(case.model().double()), images(2, torch.float64)
    model = shaken(build(backbone, name))
    with torch.no_grad():
        memory = torch.zeros(5, 3, 24, dtype=torch.float64)
        memory[: len(model.memory)] = model.memory
        classes = [] if backbone.anatomy.class_token is None else [class_token(model)]
        (expected,) = run_dense_oracle(backbone, pixels, classes, memory, carry=True)
        assert torch.allclose(model.features(pixels), expected, rtol=0, atol=1e-10)
        (other,) = run_dense_oracle(backbone, pixels, classes, memory)
        assert not torch.allclose(expected, other, atol=1e-3)


@families
@pytest.mark.parametrize("name", ["adapter", "adapter+memory-full"])
def test_adapters_by_hand(case: Case, name: str) -> None:
    """A residual layer's change passes the bottleneck; read off the original's own sum at layer 0, then to the end."""
    backbone, pixels = memoro.load_backbone(case.model().double()), images(2, torch.float64)
    model, anatomy = shaken(build(backbone, name)), backbone.anatomy
    with torch.no_grad():
        tokens, context = anatomy.embed(pixels)
        if "memory" in name and anatomy.class_token is not None:
            tokens = torch.cat([anatomy.start(class_token(model)).expand(2, 1, -1), tokens[:, 1:]], 1)
        for layer, block in enumerate(anatomy.blocks):
            down, up = model.down[layer], model.up[layer]
            cells = model.memory[layer].expand(2, -1, -1) if "memory" in name else tokens[:, :0]
            q, k, v = block.qkv(block.norm1(torch.cat([tokens, cells], 1)))
            n = tokens.shape[1]
            if context.rotate is not None:
                turned_q, turned_k = context.rotate(q[:, :, :n], k[:, :, :n])
                q, k = turned_q, torch.cat([turned_k, k[:, :, n:]], 2)
            scores = q[:, :, :n] @ k.transpose(-1, -2) * block.scaling
            if context.biases is not None:
                scores[..., :n] += context.biases[layer].detach()
            change = block.scale1(block.project((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
            tokens = tokens + change + F.gelu(change @ down[0].T) @ up[0].T
            change = block.scale2(block.mlp(block.norm2(tokens)))
            tokens = tokens + change + F.gelu(change @ down[1].T) @ up[1].T
        expected = anatomy.finish_token(anatomy.base_token(tokens))
        assert torch.allclose(model.features(pixels), expected, rtol=0, atol=1e-10)
        model.up.zero_()
        assert not torch.allclose(model.features(pixels), expected, atol=1e-3)


@pairs
def test_other_sizes_and_half_precision(case: Case, name: str) -> None:
    whole, half = (memoro.load_backbone(case.model(), dtype=kind) for kind in (torch.float32, torch.bfloat16))
    pixels = torch.randn(2, 3, 32, 24, generator=torch.Generator().manual_seed(3))
    model, rough = build(whole, name), build(half, name)
    exact = model(pixels).detach()
    assert {parameter.dtype for parameter in rough.parameters()} == {torch.float32}
    logits = rough(pixels)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    # bfloat16 keeps eight bits, a rounding of 0.4 %; five layers of random weights make that a few per cent.
    assert (logits.detach() - exact).norm() < 0.1 * exact.norm()
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in all_parameters(rough).values())
