"""Models of `transformers`, taken apart. This file and families.py alone know their attribute names."""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import Tensor, nn

from memoro.backbones.anatomy import Anatomy, Block, Map, MlpParts, identity, name_tensors, split_mlp
from memoro.backbones.backbone import Backbone, frozen_view
from memoro.backbones.families import FAMILY_SPECS, FamilySpec, Model, as_pair, embed, extra_inputs, is_a
from memoro.backbones.fingerprint import name_functions
from memoro.backbones.processor import read_processor


def find_trunk(model: Model) -> Model | None:
    """The encoder inside a model with heads around it, None if there is none that memoro knows."""
    for name in ("", "vision_model", getattr(model, "base_model_prefix", "")):
        trunk: Model = getattr(model, name, None) if name else model
        # A backbone class of transformers (out_features) answers with feature maps, not with tokens.
        if (
            hasattr(trunk, "embeddings")
            and not hasattr(trunk, "out_features")
            and getattr(trunk.config, "model_type", "") in FAMILY_SPECS
        ):
            return trunk
    return None


def _known(model: Model) -> tuple[Model, FamilySpec]:
    trunk = find_trunk(model)
    assert trunk is not None, "load_backbone has checked the family"
    return trunk, FAMILY_SPECS[trunk.config.model_type]


def picks_kernel(module: nn.Module) -> bool:
    """Whether torch chooses a kernel by `requires_grad` here: SigLIP's pooling attention, BEiT's score bias."""
    return isinstance(module, nn.MultiheadAttention) or type(module).__name__.endswith("RelativePositionBias")


def take_apart(model: Model) -> Anatomy:
    """The anatomy of a supported model."""
    trunk, family = _known(model)
    tensors = _name_tensors(trunk, family)
    dtype = tensors["patch.weight"].dtype
    position = tensors["position"][0] if family.classes and "position" in tensors else None
    pre_norm = identity if family.pre_norm is None else getattr(trunk, family.pre_norm)
    return Anatomy(
        dim=trunk.config.hidden_size,
        heads=trunk.config.num_attention_heads,
        patch=as_pair(trunk.config.patch_size),
        prefix=family.prefix + getattr(trunk.config, "num_register_tokens", 0),
        blocks=tuple(_block(layer, family) for layer in _layers(trunk, family)),
        embed=lambda pixels: embed(trunk, family, pixels.to(dtype)),
        start=lambda token: pre_norm(token if position is None else token + position),
        finish=lambda tokens: family.pool(model, trunk, tokens),
        finish_token=_final_norm(trunk, family),
        class_token=tensors["class_token"][0] if family.classes else None,
        tensors=tensors,
    )


def run_forward(model: Model, pixels: Tensor) -> Tensor:
    """What the model's own forward returns for `"base"`: logits, else the pooled output, else a token or the mean."""
    trunk, family = _known(model)
    whole = any(hasattr(model, name) for name in ("classifier", "cls_classifier"))
    whole = whole or is_a(model, "CLIPVisionModelWithProjection")
    pixels = pixels.to(_patch_projection(trunk).weight.dtype)
    out = (model if whole else trunk)(pixels, **extra_inputs(trunk, family, pixels))
    for name in ("logits", "image_embeds", "pooler_output"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    tokens = out.last_hidden_state
    return tokens[:, 0] if family.classes else tokens.mean(dim=1)


def _block(layer: Model, family: FamilySpec) -> Block:
    attention = getattr(layer, family.attention)
    scaling: float = attention.scaling if hasattr(attention, "scaling") else attention.scale
    width = attention.head_dim
    module = sys.modules[type(attention).__module__]

    def split(tensor: Tensor) -> Tensor:
        return tensor.view(*tensor.shape[:-1], -1, width).transpose(1, 2)

    def kv(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return split(attention.k_proj(tokens)), split(attention.v_proj(tokens))

    def qkv(tokens: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = attention.q_proj(tokens), attention.k_proj(tokens), attention.v_proj(tokens)
        if added is not None:
            q, k, v = (own + part for own, part in zip((q, k, v), added.chunk(3, dim=-1), strict=True))
        return split(q), split(k), split(v)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        # Looked up at each call: a model may be switched between eager and sdpa at any time.
        function = ALL_ATTENTION_FUNCTIONS.get_interface(
            attention.config._attn_implementation, module.eager_attention_forward
        )
        out, _ = function(attention, q, k, v, bias, dropout=0.0, scaling=scaling)
        return out.reshape(*out.shape[:2], -1).contiguous()

    scale1, scale2 = (
        (identity, identity) if family.scales is None else (_scale(getattr(layer, name)) for name in family.scales)
    )
    return Block(
        norm1=getattr(layer, family.norm1),
        qkv=qkv,
        kv=kv,
        attend=attend,
        scaling=scaling,
        head_width=width,
        project=getattr(attention, family.project),
        scale1=scale1,
        norm2=getattr(layer, family.norm2),
        mlp=layer.mlp,
        mlp_parts=_mlp_parts(layer.mlp),
        scale2=scale2,
    )


def _mlp_parts(mlp: Model) -> MlpParts:
    if hasattr(mlp, "gate_proj"):
        return split_mlp([mlp.gate_proj, mlp.up_proj], mlp.act_fn, mlp.down_proj)
    if hasattr(mlp, "up_proj"):
        return split_mlp([mlp.up_proj], mlp.act_fn, mlp.down_proj)
    return split_mlp([mlp.fc1], mlp.activation_fn, mlp.fc2)


def _scale(scale: nn.Module | Tensor | float) -> Map:
    if isinstance(scale, nn.Module):
        return scale
    return identity if isinstance(scale, float) else lambda tokens: scale * tokens


def _final_norm(trunk: Model, family: FamilySpec) -> nn.Module:
    # BEiT with mean pooling keeps its only final norm in the pooler.
    inner = getattr(getattr(trunk, "pooler", None), "layernorm", None)
    return getattr(trunk, family.norm) if inner is None else inner


def _name_tensors(trunk: Model, family: FamilySpec) -> dict[str, Tensor]:
    def table(*names: str) -> Tensor | None:
        """Tokens or positions (n, dim), whatever the family calls them."""
        found = next((value for name in names if (value := getattr(trunk.embeddings, name, None)) is not None), None)
        found = getattr(found, "weight", found)
        return found.reshape(-1, trunk.config.hidden_size) if found is not None and found.numel() else None

    projection = _patch_projection(trunk)
    parts: dict[str, nn.Module | Tensor | None] = {
        "class_token": table("cls_token", "class_embedding"),
        "distillation_token": table("distillation_token"),
        "registers": table("register_tokens"),
        "position": table("position_embeddings", "position_embedding"),
        "patch.weight": projection.weight,
        "patch.bias": projection.bias,
        "pre_norm": None if family.pre_norm is None else getattr(trunk, family.pre_norm),
        "norm": _final_norm(trunk, family),
        "shared_bias": getattr(trunk, "shared_position_bias", None),
    }
    for index, layer in enumerate(_layers(trunk, family)):
        attention = getattr(layer, family.attention)
        own = {
            "norm1": getattr(layer, family.norm1),
            "q": attention.q_proj,
            "k": attention.k_proj,
            "v": attention.v_proj,
            "project": getattr(attention, family.project),
            "norm2": getattr(layer, family.norm2),
            "mlp": layer.mlp,
            "bias": getattr(layer, "relative_position_bias", None),
        }
        for number, name in enumerate(family.scales or (), start=1):
            scale = getattr(layer, name)
            scale = getattr(scale, "lambda1", scale)
            own[f"scale{number}"] = scale if isinstance(scale, (Tensor, nn.Module)) else None
        parts |= {f"blocks.{index}.{name}": part for name, part in own.items()}
    return name_tensors(parts)


def _layers(trunk: Model, family: FamilySpec) -> Any:
    for name in family.layers.split("."):
        trunk = getattr(trunk, name)
    return trunk


def _patch_projection(trunk: Model) -> Model:
    embeddings = trunk.embeddings
    patch = embeddings.patch_embedding if hasattr(embeddings, "patch_embedding") else embeddings.patch_embeddings
    return getattr(patch, "projection", patch)


def wrap_huggingface(model: Model, name: str, processor: Any) -> Backbone | None:
    """The backbone of a `transformers` model, None if the family is not supported."""
    if find_trunk(model) is None:
        return None
    frozen = frozen_view(model, keeps_grad=picks_kernel)
    trunk, family = _known(frozen)
    masks = hasattr(trunk.embeddings, "random_masking")
    if masks:
        # MAE drops three patches of four; a task, like MAE's own fine-tuning, sees all of them.
        trunk.embeddings.config = copy.copy(trunk.embeddings.config)
        trunk.embeddings.config.mask_ratio = 0.0
    size = as_pair(trunk.config.image_size)
    labels: tuple[str, ...] = ()
    if hasattr(model, "classifier") or hasattr(model, "cls_classifier"):
        labels = tuple(str(label) for _, label in sorted(model.config.id2label.items()))
    return Backbone(
        name=name,
        family=family.title,
        model=frozen if masks else model,
        module=frozen,
        take_apart=take_apart,
        run_forward=run_forward,
        preprocessing=read_processor(processor, family.preprocessing(min(size))),
        labels=labels,
        image_size=size,
        channels=trunk.config.num_channels,
        functions=name_functions(trunk),
    )
