"""The families of `transformers` that memoro reads: where each one keeps its parts. A new family is one more row."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memoro.backbones.anatomy import Context
from memoro.images import Preprocessing

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
OPENAI: dict[str, Any] = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}

# These models have arbitrary attributes.
Model = Any


# ---------------------------------------------------------------------------------------------- pixels to tokens


def grid_of(trunk: Model, pixels: Tensor) -> tuple[int, int]:
    rows, columns = as_pair(trunk.config.patch_size)
    return pixels.shape[-2] // rows, pixels.shape[-1] // columns


def _resized(pixels: Tensor, trunk: Model) -> dict[str, Any]:
    """Families with a fixed grid interpolate their positions only when asked to."""
    return {"interpolate_pos_encoding": tuple(pixels.shape[-2:]) != as_pair(trunk.config.image_size)}


def _in_order(pixels: Tensor, trunk: Model) -> dict[str, Any]:
    """MAE shuffles its patches by noise: ascending noise keeps them in order."""
    rows, columns = grid_of(trunk, pixels)
    noise = torch.arange(rows * columns, device=pixels.device).expand(pixels.shape[0], -1)
    return {"noise": noise, **_resized(pixels, trunk)}


def extra_inputs(trunk: Model, family: FamilySpec, pixels: Tensor) -> dict[str, Any]:
    """What the embeddings, and the original's forward, need besides the pixels."""
    return {} if family.extra is None else family.extra(pixels, trunk)


def embed(trunk: Model, family: FamilySpec, pixels: Tensor) -> tuple[Tensor, Context]:
    """The tokens that enter the first layer."""
    tokens = trunk.embeddings(pixels, **extra_inputs(trunk, family, pixels))
    tokens = tokens[0] if isinstance(tokens, tuple) else tokens  # MAE's embeddings also say what they masked
    if family.pre_norm is not None:
        tokens = getattr(trunk, family.pre_norm)(tokens)
    return tokens, family.context(trunk, pixels, tokens)


def _plain_context(trunk: Model, pixels: Tensor, tokens: Tensor) -> Context:
    return Context(grid_of(trunk, pixels))


def _rotary_context(trunk: Model, pixels: Tensor, tokens: Tensor) -> Context:
    rotary = sys.modules[type(trunk).__module__].apply_rotary_pos_emb
    cos, sin = trunk.rope_embeddings(pixels)
    return Context(grid_of(trunk, pixels), rotate=lambda q, k: rotary(q, k, cos, sin))


def _biased_context(trunk: Model, pixels: Tensor, tokens: Tensor) -> Context:
    window, shared = grid_of(trunk, pixels), trunk.shared_position_bias

    def bias(module: Model) -> Tensor:
        table: Tensor = module(window, interpolate_pos_encoding=False, dim_size=tokens.shape[1])
        return table

    # A copy that is trained passes gradients on to its tables, a frozen model does not.
    trained = trunk.embeddings.patch_embeddings.projection.weight.requires_grad
    common = None if shared is None else bias(shared)
    biases = []
    for layer in trunk.layers:
        own = layer.relative_position_bias
        here = common if own is None else bias(own) if common is None else bias(own) + common
        if here is not None:
            # A leaf that keeps the flag: by it sdpa picks its kernel, and so the last bits.
            biases.append(here if trained else here.detach().requires_grad_(here.requires_grad))
    return Context(window, biases=tuple(biases) or None)


# ---------------------------------------------------------------------------- tokens to the original's own answer


def _pool_class(model: Model, trunk: Model, tokens: Tensor) -> Tensor:
    tokens = trunk.layernorm(tokens)
    if hasattr(model, "distillation_classifier"):
        classes = model.cls_classifier(tokens[:, 0, :]), model.distillation_classifier(tokens[:, 1, :])
        return (classes[0] + classes[1]) / 2
    if hasattr(model, "classifier"):
        return model.classifier(tokens[:, 0, :])
    pooler = getattr(trunk, "pooler", None)
    return tokens[:, 0] if pooler is None else pooler(tokens)


def _pool_dinov2(model: Model, trunk: Model, tokens: Tensor) -> Tensor:
    tokens = trunk.layernorm(tokens)
    if hasattr(model, "classifier"):
        patches = tokens[:, 1 + getattr(trunk.config, "num_register_tokens", 0) :]
        return model.classifier(torch.cat([tokens[:, 0], patches.mean(dim=1)], dim=1))
    return tokens[:, 0, :]


def _pool_dinov3(model: Model, trunk: Model, tokens: Tensor) -> Tensor:
    return trunk.norm(tokens)[:, 0, :]


def _pool_clip(model: Model, trunk: Model, tokens: Tensor) -> Tensor:
    if hasattr(model, "classifier"):
        return model.classifier(torch.mean(tokens[:, 1:, :], dim=1))
    pooled = trunk.post_layernorm(tokens[:, 0, :])
    # CLIPModel has a visual projection too, but there the vision tower is what is meant.
    return model.visual_projection(pooled) if is_a(model, "CLIPVisionModelWithProjection") else pooled


def _pool_siglip(model: Model, trunk: Model, tokens: Tensor) -> Tensor:
    tokens = trunk.post_layernorm(tokens)
    if hasattr(model, "classifier"):
        return model.classifier(torch.mean(tokens, dim=1))
    return trunk.head(tokens) if trunk.use_head else tokens.mean(dim=1)


def _pool_beit(model: Model, trunk: Model, tokens: Tensor) -> Tensor:
    tokens = trunk.layernorm(tokens)
    if trunk.pooler is None:
        return tokens[:, 0]
    pooled = trunk.pooler(tokens)
    return model.classifier(pooled) if hasattr(model, "classifier") else pooled


# ------------------------------------------------------------------------------------------------- the families


def _squash(resample: int, **colours: Any) -> Callable[[int], Preprocessing]:
    """Resized to a square, whatever the aspect ratio."""
    return lambda side: Preprocessing(resize=(side, side), resample=resample, **colours)


def _resize_and_crop(side: int) -> Preprocessing:
    side = min(side, 224)  # DINOv2 learned its positions at 518, but its checkpoints are used at 224
    return Preprocessing(resize=round(side * 256 / 224), crop=(side, side), **IMAGENET)


@dataclass(frozen=True)
class FamilySpec:
    """Where a family keeps its parts."""

    title: str
    context: Callable[[Model, Tensor, Tensor], Context] = _plain_context
    """Trunk, pixels and the tokens that enter the first layer to what a pass carries besides these."""
    pool: Callable[[Model, Model, Tensor], Tensor] = _pool_class
    """Model, trunk and tokens after the last layer to the original's own answer."""
    extra: Callable[[Tensor, Model], dict[str, Any]] | None = _resized
    """See `extra_inputs`."""
    preprocessing: Callable[[int], Preprocessing] = lambda side: Preprocessing(resize=(side, side), resample=2)
    """The family's own defaults, for models that come without a processor."""
    layers: str = "layers"
    norm1: str = "layernorm_before"
    attention: str = "attention"
    project: str = "o_proj"
    scales: tuple[str, str] | None = None
    norm2: str = "layernorm_after"
    norm: str = "layernorm"
    pre_norm: str | None = None
    prefix: int = 1
    classes: int = 1
    """How many class tokens there are: 0 in SigLIP."""


_ENCODER: dict[str, Any] = {
    "layers": "encoder.layers",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "norm": "post_layernorm",
    "attention": "self_attn",
    "project": "out_proj",
}
_DINO: dict[str, Any] = {
    "extra": None,
    "norm1": "norm1",
    "norm2": "norm2",
    "scales": ("layer_scale1", "layer_scale2"),
}
_DINOV2: dict[str, Any] = {
    **_DINO,
    "layers": "encoder.layer",
    "pool": _pool_dinov2,
    "preprocessing": _resize_and_crop,
}

FAMILY_SPECS: dict[str, FamilySpec] = {
    "vit": FamilySpec("ViT"),
    "vit_msn": FamilySpec("ViT-MSN", preprocessing=_squash(2, **IMAGENET)),
    "vit_mae": FamilySpec("ViT-MAE", extra=_in_order, preprocessing=_squash(3, **IMAGENET)),
    "deit": FamilySpec(
        "DeiT",
        prefix=2,
        preprocessing=lambda side: Preprocessing(resize=(round(side * 256 / 224),) * 2, crop=(side, side), **IMAGENET),
    ),
    "dinov2": FamilySpec("DINOv2", **_DINOV2),
    "dinov2_with_registers": FamilySpec("DINOv2 with registers", **_DINOV2),
    "dinov3_vit": FamilySpec(
        "DINOv3 ViT",
        layers="model.layer",
        norm="norm",
        context=_rotary_context,
        pool=_pool_dinov3,
        preprocessing=_squash(2, **IMAGENET),
        **_DINO,
    ),
    "clip_vision_model": FamilySpec(
        "CLIP vision",
        pre_norm="pre_layrnorm",
        pool=_pool_clip,
        preprocessing=lambda side: Preprocessing(resize=side, crop=(side, side), **OPENAI),
        **_ENCODER,
    ),
    "siglip_vision_model": FamilySpec(
        "SigLIP vision", prefix=0, classes=0, pool=_pool_siglip, preprocessing=_squash(3), **_ENCODER
    ),
    "beit": FamilySpec(
        "BEiT",
        scales=("lambda_1", "lambda_2"),
        context=_biased_context,
        pool=_pool_beit,
        extra=None,
        preprocessing=_squash(3),
    ),
}
"""By `config.model_type`. A new family is one more row."""


def as_pair(size: Any) -> tuple[int, int]:
    """(height, width) of a config's size, which may be one number."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def is_a(model: Model, name: str) -> bool:
    """Whether the model is of the class of this name; asked by name, so that nothing has to be imported."""
    return type(model).__name__ == name
