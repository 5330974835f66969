"""The same weights in a model of `transformers` and in one of timm are one backbone: a task fits both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from timm.layers import SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from timm_cases import SMALL, make_tasks, randomise

import memoro

THEIRS: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 5,
    "intermediate_size": 48,
    "patch_size": 4,
    "image_size": 20,
    "layer_norm_eps": 1e-6,  # timm's
}

Pair = tuple[Callable[[], Any], Callable[[], Any]]
PAIRS: dict[str, Pair] = {
    "vit": (
        lambda: hf.ViTModel(hf.ViTConfig(**THEIRS), add_pooling_layer=False),
        lambda: VisionTransformer(**SMALL),
    ),
    "deit": (
        lambda: hf.DeiTModel(hf.DeiTConfig(**THEIRS), add_pooling_layer=False),
        lambda: VisionTransformerDistilled(**SMALL),
    ),
    "dinov2": (
        lambda: hf.Dinov2Model(hf.Dinov2Config(**THEIRS, mlp_ratio=2)),
        lambda: VisionTransformer(**SMALL, init_values=0.1),
    ),
    "dinov2-swiglu": (
        # (int(24 * 2 * 2 / 3) + 7) // 8 * 8 = 32 hidden units, packed in one layer of 64
        lambda: hf.Dinov2Model(hf.Dinov2Config(**THEIRS, mlp_ratio=2, use_swiglu_ffn=True)),
        lambda: VisionTransformer(
            **{**SMALL, "mlp_ratio": 64.01 / 24}, init_values=0.1, mlp_layer=SwiGLUPacked, act_layer="silu"
        ),
    ),
    "clip": (
        lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**THEIRS)),
        lambda: VisionTransformer(**SMALL, pre_norm=True, act_layer="quick_gelu"),
    ),
    "siglip": (
        lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**THEIRS, vision_use_head=False)),
        lambda: VisionTransformer(**SMALL, class_token=False, global_pool="map", act_layer="gelu_tanh"),
    ),
}


def load_pair(name: str) -> tuple[memoro.Backbone, memoro.Backbone]:
    """Both in float64, with the weights of the first copied into the second, name by name."""
    theirs, ours = (memoro.load_backbone(randomise(build()).double()) for build in PAIRS[name])
    assert theirs.anatomy.tensors.keys() == ours.anatomy.tensors.keys()
    with torch.no_grad():
        for key, tensor in ours.anatomy.tensors.items():
            tensor.copy_(theirs.anatomy.tensors[key])
    return theirs, ours


@pytest.mark.parametrize("name", PAIRS)
def test_same_weights_are_one_backbone(name: str) -> None:
    theirs, ours = load_pair(name)
    assert ours.fingerprint == theirs.fingerprint
    tasks, pixels = make_tasks(theirs, 14), torch.randn(2, 3, 20, 20, dtype=torch.float64)
    first, second = memoro.compose(theirs, tasks)(pixels), memoro.compose(ours, tasks)(pixels)
    for task in tasks:
        # Two libraries, one function: float64.
        assert (first[task.name] - second[task.name]).abs().max() < 1e-10
    assert (first["task 0"] - second["task 6"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", PAIRS)
def test_other_weights_are_another_backbone(name: str) -> None:
    theirs, ours = load_pair(name)
    task = memoro.new_task(theirs, "birds", ["a", "b"])
    with torch.no_grad():
        ours.anatomy.tensors["blocks.3.k.0"][0, 0] += 1e-9
    assert ours.fingerprint.match(theirs.fingerprint) == "different"
    with pytest.raises(memoro.CompositionError, match="other weights"):
        memoro.compose(ours, [task])


def test_names_do_not_depend_on_the_copying() -> None:
    """The weights of a plain ViT carried over by the libraries' own names, as a conversion script would."""
    theirs = randomise(hf.ViTModel(hf.ViTConfig(**THEIRS), add_pooling_layer=False))
    source, ours = theirs.state_dict(), randomise(VisionTransformer(**SMALL), seed=8)
    before = memoro.load_backbone(ours).fingerprint
    state = {
        "cls_token": source["embeddings.cls_token"],
        "pos_embed": source["embeddings.position_embeddings"],
        "patch_embed.proj.weight": source["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": source["embeddings.patch_embeddings.projection.bias"],
        "norm.weight": source["layernorm.weight"],
        "norm.bias": source["layernorm.bias"],
    }
    for layer in range(5):
        old, new = f"layers.{layer}", f"blocks.{layer}"
        for kind in ("weight", "bias"):
            attention = [source[f"{old}.attention.{part}_proj.{kind}"] for part in "qkv"]
            state[f"{new}.attn.qkv.{kind}"] = torch.cat(attention)
            state[f"{new}.attn.proj.{kind}"] = source[f"{old}.attention.o_proj.{kind}"]
            state[f"{new}.norm1.{kind}"] = source[f"{old}.layernorm_before.{kind}"]
            state[f"{new}.norm2.{kind}"] = source[f"{old}.layernorm_after.{kind}"]
            for part in ("fc1", "fc2"):
                state[f"{new}.mlp.{part}.{kind}"] = source[f"{old}.mlp.{part}.{kind}"]
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert (set(missing), unexpected) == ({"head.weight", "head.bias"}, [])
    after = memoro.load_backbone(ours).fingerprint
    assert after == memoro.load_backbone(theirs).fingerprint
    assert after.match(before) == "different"
    assert memoro.load_backbone(ours, dtype="bfloat16").fingerprint.match(after) == "same up to rounding"


def test_a_task_file_goes_from_one_to_the_other(tmp_path: Any) -> None:
    theirs, ours = load_pair("vit")
    task = memoro.new_task(theirs, "birds", ["a", "b"], seed=1)
    memoro.save_task(task, tmp_path / "birds.safetensors")
    pixels = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    first = memoro.compose(theirs, [task])(pixels)["birds"]
    second = memoro.compose(ours, [memoro.load_task(tmp_path / "birds.safetensors")])(pixels)["birds"]
    assert (first - second).abs().max() < 1e-10
