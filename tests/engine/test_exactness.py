"""The promise: the backbone's own answer does not change by a bit, whatever is attached."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import random_task
from families import CASES, FAMILIES, Case
from trust import add_readout

import memoro
from memoro.backbones import Block, Context
from memoro.backbones.families import FAMILY_SPECS
from memoro.lab.baselines.dense import dense_attention

everywhere = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def reference(case: Case, model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """The untouched model in eval mode: a copy of its own, run by transformers' code alone."""
    copied = copy.deepcopy(model).eval()
    if case.name == "mae":
        copied.config.mask_ratio = 0.0
        patches = (pixels.shape[-1] // copied.config.patch_size) ** 2
        noise = torch.arange(patches).expand(len(pixels), -1)
        out = copied(pixels.to(copied.dtype), noise=noise, interpolate_pos_encoding=pixels.shape[-1] != 20)
        return out.last_hidden_state[:, 0]
    fixed = not case.name.startswith(("dinov2", "dinov3", "beit"))
    extra = {"interpolate_pos_encoding": True} if fixed and pixels.shape[-1] != 20 else {}
    out = copied(pixels.to(copied.dtype), **extra)
    for name in ("logits", "image_embeds", "pooler_output"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    tokens = out.last_hidden_state
    return tokens.mean(dim=1) if case.name.startswith("siglip") else tokens[:, 0]


def test_the_registry_covers_every_family() -> None:
    built = {memoro.load_backbone(case.model()).family for case in CASES}
    assert built == {family.title for family in FAMILY_SPECS.values()}
    assert len(FAMILIES) == len(FAMILY_SPECS) >= 10


@everywhere
@attentions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_base_is_untouched(case: Case, attention: str, dtype: torch.dtype, training: bool) -> None:
    model = case.model(attention).to(dtype).train(training)
    pixels = torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        expected = reference(case, model, pixels)
    backbone = memoro.load_backbone(model)
    most = 100 if dtype == torch.float32 and not training else 12  # a hundred in every mode would take a minute
    tasks = [
        random_task(backbone, f"task {i}", seed=i, cells=i % 3, from_layer=i % 6, rank=2 if 0 < i % 6 < 4 else 0)
        for i in range(most)
    ]
    for i in range(1, most, 3):
        add_readout(backbone, tasks[i], seed=i, from_layer=i % 5)
    for count in (0, 1, most):
        with torch.no_grad():
            out = memoro.compose(backbone, tasks[:count])(pixels)
        assert torch.equal(out["base"], expected)
        assert list(out) == ["base", *(task.name for task in tasks[:count])]
    for first, second in [("task 0", "task 1"), ("task 5", f"task {most - 1}"), ("task 6", "task 0")]:
        assert not torch.allclose(out[first], out[second])
    assert all(answer.isfinite().all() for answer in out.values())


@everywhere
@attentions
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_base_is_untouched_with_gradients_on(case: Case, attention: str, training: bool) -> None:
    """Some kernels are chosen by requires_grad: the bits must follow the original there too."""
    model = case.model(attention).train(training)
    pixels = torch.randn(2, 3, 20, 20)
    expected = reference(case, model, pixels)
    backbone = memoro.load_backbone(model)
    for task in (random_task(backbone, "one"), add_readout(backbone, random_task(backbone, "one"), share=1.0)):
        base = memoro.compose(backbone, task)(pixels)["base"]
        assert torch.equal(base, expected)
        assert not base.requires_grad


@everywhere
def test_other_image_sizes(case: Case) -> None:
    model = case.model()
    pixels = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        expected = reference(case, model, pixels)
        backbone = memoro.load_backbone(model)
        out = memoro.compose(backbone, [random_task(backbone, "one")])(pixels)
    assert torch.equal(out["base"], expected)


@everywhere
def test_the_users_model_is_never_changed(case: Case) -> None:
    model = case.model().train()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    backbone = memoro.load_backbone(model)
    task = random_task(backbone, "one", cells=2)
    answers = memoro.compose(backbone, [task], live=True)(torch.randn(2, 3, 20, 20))
    answers["one"].sum().backward()
    assert task.memory.grad is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    assert calls == []


@everywhere
def test_no_randomness_is_drawn(case: Case) -> None:
    """A model in train mode would drop tokens: the engine computes as in eval and leaves the generator alone."""
    backbone = memoro.load_backbone(case.model().train())
    model = memoro.compose(backbone, [random_task(backbone, "one")])
    pixels = torch.randn(2, 3, 20, 20)
    state = torch.get_rng_state()
    first = model(pixels)["one"]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, model(pixels)["one"])


def test_the_attention_implementation_is_followed_when_it_changes() -> None:
    model = next(case for case in CASES if case.name == "vit").model("eager")
    backbone = memoro.load_backbone(model)
    composed = memoro.compose(backbone)
    pixels = torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        eager = composed(pixels)["base"]
        model.set_attn_implementation("sdpa")
        assert torch.equal(composed(pixels)["base"], model(pixels).logits)
        assert torch.allclose(eager, composed(pixels)["base"], atol=1e-5)


@everywhere
def test_exactness_can_fail(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check notices an engine without the mask, in which base tokens attend to one tiny memory cell."""
    model, pixels = case.model(), torch.randn(2, 3, 20, 20)
    backbone = memoro.load_backbone(model)
    tasks = [random_task(backbone, "one")]
    run = Block.run

    def leak(block: Block, tokens: torch.Tensor, context: Context, layer: int) -> tuple[torch.Tensor, ...]:
        _, keys, values = run(block, tokens, context, layer)
        seen = dense_attention(block, context, layer, tokens, memory=1e-3 * torch.ones(1, tokens.shape[-1]))
        return block.mix(tokens, seen), keys, values

    with torch.no_grad():
        expected = reference(case, model, pixels)
        assert torch.equal(memoro.compose(backbone, tasks)(pixels)["base"], expected)
        monkeypatch.setattr(Block, "run", leak)
        assert not torch.equal(memoro.compose(backbone, tasks)(pixels)["base"], expected)
