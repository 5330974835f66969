"""Tiny random models of every family that memoro reads: the registry that drives the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

# dim, heads, depth, patch and image size are all different, so that swapped axes cannot pass.
SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 5,
    "intermediate_size": 40,
    "patch_size": 4,
    "image_size": 20,
}
DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[..., nn.Module]

    def model(self, attention: str = "sdpa", seed: int = 7, **config: Any) -> Any:
        """The tiny model with every weight random: zero-initialised ones would hide mistakes."""
        torch.manual_seed(seed)
        model = self.build(attention, **config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
        return model.eval()


def _of(model: Any, config: Any, **extra: Any) -> Callable[..., nn.Module]:
    def build(attention: str, **changes: Any) -> Any:
        own = copy.deepcopy(config)
        for name, value in changes.items():
            setattr(own, name, value)
        return model._from_config(own, attn_implementation=attention, **extra)

    return build


def _swiglu(config: Any) -> Any:
    return config(**{**SMALL, "mlp_ratio": 2}, use_swiglu_ffn=True, drop_path_rate=0.3)


CASES = [
    Case("vit", _of(hf.ViTForImageClassification, hf.ViTConfig(**SMALL, **DROPOUT, num_labels=7))),
    Case("vit-pooler", _of(hf.ViTModel, hf.ViTConfig(**SMALL, **DROPOUT))),
    Case("vit-plain", _of(hf.ViTModel, hf.ViTConfig(**SMALL), add_pooling_layer=False)),
    Case("deit", _of(hf.DeiTForImageClassificationWithTeacher, hf.DeiTConfig(**SMALL, **DROPOUT, num_labels=7))),
    Case("deit-plain", _of(hf.DeiTForImageClassification, hf.DeiTConfig(**SMALL, num_labels=7))),
    Case("dinov2", _of(hf.Dinov2Model, hf.Dinov2Config(**SMALL, **DROPOUT, mlp_ratio=2, drop_path_rate=0.3))),
    Case(
        "dinov2-classifier", _of(hf.Dinov2ForImageClassification, hf.Dinov2Config(**SMALL, mlp_ratio=2, num_labels=7))
    ),
    Case("dinov2-swiglu", _of(hf.Dinov2Model, _swiglu(hf.Dinov2Config))),
    Case(
        "dinov2-registers",
        _of(hf.Dinov2WithRegistersModel, hf.Dinov2WithRegistersConfig(**SMALL, **DROPOUT, mlp_ratio=2)),
    ),
    Case(
        "dinov3",
        _of(
            hf.DINOv3ViTModel,
            hf.DINOv3ViTConfig(**SMALL, num_register_tokens=2, drop_path_rate=0.3, pos_embed_rescale=2.0),
        ),
    ),
    Case(
        "dinov3-gated",
        _of(hf.DINOv3ViTModel, hf.DINOv3ViTConfig(**SMALL, num_register_tokens=0, use_gated_mlp=True)),
    ),
    Case("clip", _of(hf.CLIPVisionModel, hf.CLIPVisionConfig(**SMALL, attention_dropout=0.3))),
    Case("clip-projection", _of(hf.CLIPVisionModelWithProjection, hf.CLIPVisionConfig(**SMALL, projection_dim=11))),
    Case("siglip", _of(hf.SiglipVisionModel, hf.SiglipVisionConfig(**SMALL, attention_dropout=0.3))),
    Case("siglip-headless", _of(hf.SiglipVisionModel, hf.SiglipVisionConfig(**SMALL, vision_use_head=False))),
    Case("msn", _of(hf.ViTMSNModel, hf.ViTMSNConfig(**SMALL, **DROPOUT))),
    Case("mae", _of(hf.ViTMAEModel, hf.ViTMAEConfig(**SMALL, **DROPOUT, mask_ratio=0.75))),
    Case(
        "beit",
        _of(
            hf.BeitForImageClassification,
            hf.BeitConfig(**SMALL, **DROPOUT, use_relative_position_bias=True, drop_path_rate=0.3, num_labels=7),
        ),
    ),
    Case(
        "beit-shared",
        _of(
            hf.BeitModel,
            hf.BeitConfig(
                **SMALL,
                use_shared_relative_position_bias=True,
                use_absolute_position_embeddings=True,
                use_mean_pooling=False,
            ),
        ),
    ),
]
FAMILIES = [
    case
    for case in CASES
    if case.name in {"vit", "deit", "dinov2", "dinov2-registers", "dinov3", "clip", "siglip", "msn", "mae", "beit"}
]
