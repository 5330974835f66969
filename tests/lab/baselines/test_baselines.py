"""The regimes that change base tokens: what each trains, that it touches nothing else, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers as hf
from baseline_models import LABELS, build, images, pairs, train
from families import CASES, Case
from torch import Tensor

import memoro
from memoro.backbones import Backbone
from memoro.backbones.huggingface import picks_kernel
from memoro.errors import BackboneError, CompositionError, MemoroError, TaskError, TaskFileError, TrainingError
from memoro.lab.baselines import BASELINES, REGIMES, BaselinePlan
from memoro.regimes.regime import all_parameters

baselines = pytest.mark.parametrize("name", list(BASELINES))


def state_of(model: torch.nn.Module) -> dict[str, tuple[Tensor, bool, bool]]:
    return {
        name: (parameter.detach().clone(), parameter.requires_grad, parameter.grad is None)
        for name, parameter in model.named_parameters()
    }


TASKS = {"head", "readout", "memory", "side", "joint"}


def test_the_registry() -> None:
    assert set(BASELINES) == {
        "memory-full", "class-full", "vpt", "adapter", "adapter+memory-full", "propagated", "propagated-additive",
        "full", "lora", "lora-all",
    }  # fmt: skip
    assert {name for name, regime in REGIMES.items() if regime.composes} == TASKS
    assert set(REGIMES) == TASKS | set(BASELINES)


# ------------------------------------------------------------------------------------------------ what is trained


@pairs
def test_trained_parameters_and_only_they_move(case: Case, name: str) -> None:
    user = case.model()
    before = state_of(user)
    backbone = memoro.load_backbone(user)
    inside = {key: tensor.clone() for key, tensor in backbone.anatomy.tensors.items()}
    model = build(backbone, name)
    trained = REGIMES[name].trains(model)
    assert trained.keys() == dict(model.named_parameters()).keys() == model.state_dict().keys()
    start = {key: parameter.detach().clone() for key, parameter in trained.items()}
    pixels, targets = images(), torch.arange(6) % 3
    train(model, pixels, targets, steps=1)
    for parameter in trained.values():
        assert parameter.grad is not None
    # LoRA's A gets its first gradient once B has left zero.
    train(model, pixels, targets, steps=2)
    for key, parameter in trained.items():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0, key
        assert not torch.equal(parameter, start[key]), key
    for key, tensor in backbone.anatomy.tensors.items():
        assert torch.equal(tensor, inside[key])
        assert tensor.grad is None
        assert not tensor.requires_grad or picks_kernel_tensor(user, tensor)
    for key, (value, flag, clean) in state_of(user).items():
        assert torch.equal(value, before[key][0])
        assert (flag, clean) == before[key][1:]


def picks_kernel_tensor(model: torch.nn.Module, tensor: Tensor) -> bool:
    """Whether it is one of the few whose flag the frozen view keeps, see `frozen_view`."""
    pointers = {p.data_ptr() for module in model.modules() if picks_kernel(module) for p in module.parameters()}
    return tensor.data_ptr() in pointers


def test_nothing_else_is_reachable_for_an_optimiser(backbone: Backbone) -> None:
    model = build(backbone, "memory-full", cells=2)
    assert [type(module).__name__ for module in model.modules()] == ["Baseline", "Linear"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 24 + 5 * 2 * 24 + 3 * 24 + 3


def sizes(backbone: Backbone, regime: str, **options: int) -> int:
    """Trained parameters beside the head."""
    return sum(torch.Size(shape).numel() for shape in BASELINES[regime].shapes(backbone, options).values())


def test_parameter_counts_of_the_paper() -> None:
    """Tables 4 and 5, ViT-B/32, without the head."""
    with torch.device("meta"):
        backbone = memoro.load_backbone(hf.ViTModel(hf.ViTConfig(patch_size=32), add_pooling_layer=False))
    assert sizes(backbone, "class-full") == 768
    assert sizes(backbone, "vpt", cells=5) == 768 * 12 * 5 == 46_080
    assert sizes(backbone, "memory-full", cells=5) == 46_080 + 768
    assert sizes(backbone, "propagated", cells=5) == 768 * 5 + 768
    assert sizes(backbone, "propagated-additive", cells=5) == 46_080 + 768
    assert sizes(backbone, "adapter", width=5) == 12 * 2 * 2 * 768 * 5 == 184_320
    assert sizes(backbone, "adapter", width=20) == 737_280  # the paper's figure: see baselines/methods.py
    assert sizes(backbone, "adapter+memory-full", width=20, cells=5) == 737_280 + 46_080 + 768
    assert sizes(backbone, "lora", rank=8) == 12 * 2 * 2 * 768 * 8
    assert sizes(backbone, "lora-all", rank=8) == 12 * 8 * (4 * 2 * 768 + 2 * (768 + 3072))
    assert 80e6 < sizes(backbone, "full") < 90e6


@pairs
def test_shapes_say_what_is_stored(case: Case, name: str) -> None:
    model = build(memoro.load_backbone(case.model()), name)
    shapes = BASELINES[name].shapes(model.backbone, model.spec.sizes)
    stored = {key: tuple(tensor.shape) for key, tensor in model.stored().items()}
    assert stored == {**shapes, "head.weight": (3, 24), "head.bias": (3,)}
    count = sum(parameter.numel() for parameter in all_parameters(model).values())
    assert count == sum(torch.Size(shape).numel() for shape in stored.values())


def test_full_leaves_poolers_classifiers_and_mask_tokens_out() -> None:
    case = next(case for case in CASES if case.name == "dinov2")
    model = build(memoro.load_backbone(case.model()), "full")
    everything = dict(case.model().named_parameters())
    unused = everything.pop("embeddings.mask_token")
    assert unused.numel()
    assert sum(parameter.numel() for parameter in everything.values()) + 24 * 3 + 3 == sum(
        parameter.numel() for parameter in model.parameters()
    )


@baselines
def test_a_tiny_set_is_learned_by_heart(backbone: Backbone, name: str) -> None:
    model = build(backbone, name)
    pixels, targets = images(9), torch.tensor([0, 1, 2, 2, 0, 1, 1, 2, 0])
    train(model, pixels, targets, steps=50)
    assert torch.equal(model(pixels).argmax(1), targets)


@baselines
def test_a_seed_decides_the_start(backbone: Backbone, name: str) -> None:
    first, again, other = (build(backbone, name, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_memory_starts_as_in_the_masked_regime(backbone: Backbone) -> None:
    plan = BaselinePlan("pets", LABELS, cells=3, seed=4)
    masked, full = (REGIMES[name].build(backbone, plan).state_dict() for name in ("memory", "memory-full"))
    assert masked.keys() == full.keys()
    assert all(torch.equal(masked[key], full[key]) for key in masked)


@baselines
def test_it_is_not_copied_or_moved_without_its_backbone(backbone: Backbone, name: str) -> None:
    model = build(backbone, name)
    for change in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TrainingError, match="cannot be copied or pickled: save it with save_baseline"):
            change(model)
    with pytest.raises(TrainingError, match="cannot be moved alone: save it with save_baseline"):
        model.double()


# ---------------------------------------------------------------------------------------------------------- errors


@baselines
def test_a_baseline_cannot_be_composed(backbone: Backbone, name: str, tmp_path: Any) -> None:
    model = build(backbone, name)
    for tasks in ([model], [memoro.new_task(backbone, "one", LABELS), model]):
        with pytest.raises(CompositionError, match=r"changes the backbone's own tokens.*cannot be composed"):
            memoro.compose(backbone, tasks)
    with pytest.raises(TaskFileError, match="is not a task"):
        memoro.save_task(model, tmp_path / "x.safetensors")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="not Baseline"):
        memoro.new_task(backbone, "child", LABELS, extends=[model])  # type: ignore[list-item]


@baselines
def test_forks_and_parents_are_refused(backbone: Backbone, name: str) -> None:
    with pytest.raises(TrainingError, match="from_layer and extends do not apply"):
        build(backbone, name, from_layer=2)
    with pytest.raises(TrainingError, match="from_layer and extends do not apply"):
        build(backbone, name, extends=[memoro.new_task(backbone, "one", LABELS)])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("memory-full", {"cells": -1}),
        ("vpt", {"cells": 10**6}),
        ("adapter", {"width": 0}),
        ("adapter", {"width": 2.5}),
        ("lora", {"rank": 0}),
    ],
)
def test_bad_sizes(backbone: Backbone, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(MemoroError, match=f"{next(iter(options))} must be between"):
        build(backbone, name, **options)


def test_bad_labels_are_those_of_a_task(backbone: Backbone) -> None:
    with pytest.raises(TaskError, match="at least two labels"):
        BASELINES["full"].build(backbone, BaselinePlan("pets", ["a"]))
    assert BASELINES["full"].build(backbone, BaselinePlan("pets", ["a"], head="multilabel")).kind == "multilabel"


def test_no_class_token_to_train() -> None:
    case = next(case for case in CASES if case.name == "siglip")
    with pytest.raises(BackboneError, match=r"SigLIP vision.* has no class token.*Use 'head'"):
        build(memoro.load_backbone(case.model()), "class-full")


def test_without_peft_the_extra_is_named(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memoro.errors.find_spec", lambda module: None)
    with pytest.raises(MemoroError, match=r"pip install 'memoro\[lora\]'"):
        build(backbone, "lora")


def test_importing_the_regimes_is_light() -> None:
    code = (
        "import sys, memoro.regimes, memoro.lab.baselines.file, memoro.lab.baselines.dense\n"
        "print([m for m in ('peft', 'accelerate', 'datasets', 'torchvision', 'transformers') if m in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"
