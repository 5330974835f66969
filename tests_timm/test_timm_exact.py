"""The base's answer equals the untouched model's own, to the bit, however it was built and whatever mode it is in."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from timm_cases import CASES, Case, make_tasks, set_fused

import memoro

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_there_are_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 30


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@every_case
def test_base_is_the_originals(case: Case, dtype: torch.dtype, fused: bool) -> None:
    model = case.model(fused).to(dtype)
    untouched = copy.deepcopy(model)
    backbone = memoro.load_backbone(model.train())
    tasks = make_tasks(backbone, 100)
    none, one, hundred = (memoro.compose(backbone, tasks[:count]) for count in (0, 1, 100))
    for training, size in itertools.product((True, False), case.sizes):
        model.train(training)
        pixels = case.pixels(size).to(dtype)
        for frozen, grad in itertools.product((False, True), repeat=2):
            untouched.requires_grad_(not frozen)
            with torch.set_grad_enabled(grad):
                expected = case.answer(untouched(pixels))
                assert torch.equal(one(pixels)["base"], expected)
                assert torch.equal(backbone.original(pixels), expected)
        assert torch.equal(none(pixels)["base"], expected)
        answers = hundred(pixels)
        assert torch.equal(answers.pop("base"), expected)
        assert len({answer.numpy(force=True).tobytes() for answer in answers.values()}) == 100
        assert all(torch.isfinite(answer).all() for answer in answers.values())
        assert one.verify(pixels).base_equal


@every_case
def test_base_is_the_originals_for_pixels_in_another_layout(case: Case) -> None:
    model = case.model()
    composition = memoro.compose(memoro.load_backbone(model))
    for size in case.sizes:
        pixels = case.pixels(size).to(memory_format=torch.channels_last)
        assert torch.equal(composition(pixels)["base"], case.answer(model(pixels)))


@every_case
def test_asked_for_dtype_is_that_of_a_converted_copy(case: Case) -> None:
    model = case.model()
    backbone = memoro.load_backbone(model, dtype=torch.bfloat16)
    pixels = case.pixels()
    expected = case.answer(copy.deepcopy(model).to(torch.bfloat16)(pixels.to(torch.bfloat16)))
    assert torch.equal(memoro.compose(backbone)(pixels)["base"], expected)
    assert torch.equal(backbone.original(pixels), expected)
    assert next(model.parameters()).dtype == torch.float32


def test_equality_can_fail() -> None:
    """One weight of one layer, moved by one rounding step, shows; so does the other attention."""
    case = CASES[0]
    model = case.model()
    pixels, changed = case.pixels(), copy.deepcopy(model)
    base = memoro.compose(memoro.load_backbone(model))(pixels)["base"]
    with torch.no_grad():
        changed.blocks[2].attn.qkv.weight.mul_(1 + 2**-20)
    assert not torch.equal(base, changed(pixels))
    set_fused(model, False)
    assert not torch.equal(base, model(pixels))


def test_follows_a_later_change_of_the_attention() -> None:
    case = next(case for case in CASES if case.name == "map")  # its pooling attends too
    model, pixels = case.model(fused=True), case.pixels()
    composition = memoro.compose(memoro.load_backbone(model))
    seen = []
    for fused in (True, False, True):
        set_fused(model, fused)
        for training in (False, True):
            expected = model.eval()(pixels)
            model.train(training)
            assert torch.equal(composition(pixels)["base"], expected)
            assert torch.equal(composition.backbone.original(pixels), expected)
        seen.append(expected)
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


@every_case
def test_model_is_left_alone(case: Case) -> None:
    """Weights, modes, `requires_grad`, hooks and attributes: all as they were; its hooks never ran."""
    model = case.model().train()
    model.blocks[1].eval().requires_grad_(False)

    def fail(*_: object) -> None:
        raise AssertionError("a hook of the user's model ran")

    model.blocks[0].register_forward_hook(fail)
    model.blocks[0].attn.qkv.register_forward_pre_hook(fail)

    def state() -> list[object]:
        modules = [
            (
                name,
                module.training,
                sorted(module.__dict__),
                dict(module._forward_hooks),
                dict(module._forward_pre_hooks),
            )
            for name, module in model.named_modules()
        ]
        weights = [(name, p.requires_grad, p.data_ptr(), p.grad) for name, p in model.named_parameters()]
        return [modules, weights]

    before, weights = state(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    backbone = memoro.load_backbone(model)
    composition = memoro.compose(backbone, make_tasks(backbone, 9))
    composition(case.pixels())
    composition.verify(case.pixels())
    live = memoro.compose(backbone, make_tasks(backbone, 3), live=True)
    sum(answer.sum() for name, answer in live(case.pixels()).items() if name != "base").backward()  # type: ignore[union-attr]
    assert state() == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    # Nothing was copied either: a weight that the user trains on is the backbone's at once.
    assert backbone.anatomy.tensors["patch.weight"].data_ptr() == model.patch_embed.proj.weight.data_ptr()


def test_checkpointing_changes_nothing_and_warns_of_nothing() -> None:
    case = CASES[0]
    model, pixels = case.model(), case.pixels()
    expected = model(pixels)
    model.set_grad_checkpointing()
    model.train()
    backbone = memoro.load_backbone(model)
    assert torch.equal(backbone.original(pixels), expected)
    assert torch.equal(memoro.compose(backbone)(pixels)["base"], expected)
    assert model.grad_checkpointing
