"""timm's `VisionTransformer`, taken apart. The only file that knows its attribute names."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from memoro.backbones.anatomy import Anatomy, Block, Context, MlpParts, name_tensors, split_mlp
from memoro.backbones.backbone import Backbone, frozen_view
from memoro.backbones.fingerprint import name_functions
from memoro.backbones.load import TIMM, is_hub_reachable, unsupported
from memoro.backbones.processor import read_processor
from memoro.errors import BackboneError, first_line, need
from memoro.images import Preprocessing

# These models have arbitrary attributes.
Model = Any


DINOV2_SIDE = 224
"""Pixels at which DINOv2 is used; timm's config has the size that it learned its positions at."""


def load_pretrained(name: str, processor: Any = None) -> Backbone:
    """The backbone of timm's pretrained model of this name, for images of any size that its patches divide.

    Only names that timm lists are loaded, and nothing in a file of weights is run.
    """
    need("timm", extra="timm")
    import timm

    if not re.fullmatch(r"[\w.]+", name, re.ASCII) or not timm.is_model_pretrained(name):
        near = difflib.get_close_matches(name, timm.list_pretrained("*vit*"), 1)
        hint = f"did you mean {TIMM}{near[0]}?" if near else "`timm.list_pretrained()` lists them."
        raise BackboneError(f"timm has no pretrained weights called {name!r}: {hint}")
    if timm.model_entrypoint(name.partition(".")[0]).__module__ not in (
        "timm.models.vision_transformer",
        "timm.models.deit",
    ):
        raise unsupported(f"timm's {name}")  # before it is downloaded
    place = {} if is_hub_reachable() else {"file": _find_download(name)}
    try:
        model = timm.create_model(name, pretrained=True, dynamic_img_size=True, pretrained_cfg_overlay=place)
    except Exception as error:
        raise BackboneError(f"cannot load timm's {name}: {first_line(error)[:200]}") from None
    steps = _preprocessing(model)
    steps = steps.at(DINOV2_SIDE) if "dinov2" in name else steps
    wrapped = wrap_timm(model.eval(), name, processor or steps)
    return replace(wrapped, name=f"{TIMM}{wrapped.name}")


def _find_download(name: str) -> str:
    """The file of weights that was downloaded before: without a network, the hub's client retries for a minute."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    address = timm.get_pretrained_cfg(name).hf_hub_id
    found = try_to_load_from_cache(address, "model.safetensors")
    if not isinstance(found, str):
        raise BackboneError(
            f"{address} was not downloaded yet, and the hub cannot be reached: `hf download {address}` on a machine "
            "with a network, then copy its cache (`hf cache list` shows where)."
        )
    return found


def wrap_timm(model: Model, name: str, processor: Any) -> Backbone:
    """The backbone of timm's VisionTransformer or of its distilled DeiT; raises for any other model."""
    _check(model)
    frozen: Model = frozen_view(model)
    config = getattr(model, "pretrained_cfg", None) or {}
    architecture, tag = config.get("architecture"), config.get("tag")
    labels = tuple(str(label) for label in config.get("label_names") or ())
    return Backbone(
        name=".".join(filter(None, (architecture, tag))) or name,
        family="timm ViT",
        model=model,
        module=frozen,
        take_apart=partial(_take_apart, model),
        run_forward=partial(_run_forward, model),
        preprocessing=read_processor(processor, _preprocessing(model)),
        labels=labels if len(labels) == model.num_classes else (),
        image_size=_image_size(model),
        channels=model.patch_embed.proj.in_channels,
        functions=name_functions(frozen),
    )


# --------------------------------------------------------------------------------------------- what can be read


def _check(model: Model) -> None:
    """Raises for models whose tokens go another way than a task's token could."""
    from timm.layers import PatchEmbed
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    if type(model) not in {VisionTransformer, VisionTransformerDistilled}:
        raise unsupported(f"timm's {type(model).__name__}")
    if type(model.patch_embed) is not PatchEmbed:
        raise _variant(f"embeds images with a {type(model.patch_embed).__name__}", "PatchEmbed")
    for index, layer in enumerate(model.blocks):
        for problem, wanted in _layer_problems(layer):
            raise _variant(f"has {problem} in layer {index}", wanted)


def _layer_problems(layer: Model) -> Iterator[tuple[str, str]]:
    """What memoro cannot follow in a layer, each with what it can."""
    from timm import layers
    from timm.models import vision_transformer

    if type(layer) is not vision_transformer.Block:
        yield f"a {type(layer).__name__}", "Block"
        return
    attention, mlp = layer.attn, layer.mlp
    if type(attention) is not vision_transformer.Attention:
        yield f"a {type(attention).__name__}", "Attention"
    elif getattr(attention, "gate", None) is not None:
        yield "gated attention", "Attention(gated=False)"
    elif type(attention.qkv) is not nn.Linear:
        # An adapter or a quantised layer: slices of its weight are not what it computes.
        yield f"a {type(attention.qkv).__name__} as qkv", "nn.Linear: merge adapters into the weights first"
    if type(mlp) not in {layers.Mlp, layers.GluMlp, layers.SwiGLU}:
        # Others may mix tokens (GlobalResponseNorm): then a task could not stay apart.
        yield f"a {type(mlp).__name__} as mlp", "Mlp, GluMlp (SwiGLUPacked), SwiGLU"


def _variant(problem: str, wanted: str) -> BackboneError:
    return BackboneError(f"this timm VisionTransformer {problem}; memoro supports models with: {wanted}.")


def _check_size(model: Model, pixels: Tensor) -> None:
    height, width = pixels.shape[-2:]
    (rows, columns), size = model.patch_embed.patch_size, _image_size(model)
    if not model.dynamic_img_size and (height, width) != size:
        raise BackboneError(
            f"images of {height}x{width}: this timm model takes {size[0]}x{size[1]} only. Resize them, or build the "
            "model with timm.create_model(..., dynamic_img_size=True), which takes other sizes too."
        )
    # A fixed size may leave a remainder, which the patches leave out (384 pixels in patches of 14).
    if model.dynamic_img_size and not model.patch_embed.dynamic_img_pad and (height % rows or width % columns):
        raise BackboneError(
            f"images of {height}x{width} cannot be divided into {rows}x{columns} patches. Resize them to multiples, "
            "or build the model with timm.create_model(..., dynamic_img_size=True, dynamic_img_pad=True)."
        )


def _image_size(model: Model) -> tuple[int, int]:
    height, width = model.patch_embed.img_size
    return height, width


# --------------------------------------------------------------------------------------------------- dissection


def _follower(model: Model, frozen: Model) -> Callable[[], None]:
    """Brings the frozen_view up to date with the model's choice between fused and plain attention, which may change."""
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(frozen.modules(), model.modules(), strict=True)
        if hasattr(theirs, "fused_attn")
    ]

    def follow() -> None:
        for ours, theirs in pairs:
            ours.fused_attn = theirs.fused_attn

    return follow


def _take_apart(original: Model, model: Model) -> Anatomy:
    follow, dtype, own_position = _follower(original, model), model.patch_embed.proj.weight.dtype, None
    if model.cls_token is not None and model.pos_embed is not None and not model.no_embed_class:
        own_position = model.pos_embed[0, 0]

    def embed(pixels: Tensor) -> tuple[Tensor, Context]:
        follow()
        _check_size(model, pixels)
        tokens = model._pos_embed(model.patch_embed(pixels.to(dtype)))
        height, width = pixels.shape[-2:]
        grid: tuple[int, int] = model.patch_embed.dynamic_feat_size((height, width))
        return model.norm_pre(tokens), Context(grid)

    return Anatomy(
        dim=model.embed_dim,
        heads=model.blocks[0].attn.num_heads,
        patch=model.patch_embed.patch_size,
        prefix=model.num_prefix_tokens,
        blocks=tuple(_block(layer) for layer in model.blocks),
        embed=embed,
        start=lambda token: model.norm_pre(token if own_position is None else token + own_position),
        finish=lambda tokens: _answer(model, model.forward_head(model.norm(tokens))),
        finish_token=_final_norm(model),
        class_token=None if model.cls_token is None else model.cls_token.reshape(-1),
        tensors=_name_tensors(model),
    )


def _run_forward(model: Model, module: Model, pixels: Tensor) -> Tensor:
    _follower(model, module)()
    _check_size(module, pixels)
    return _answer(module, module(pixels.to(module.patch_embed.proj.weight.dtype)))


def _answer(model: Model, out: Tensor) -> Tensor:
    """What the forward returns, or, if that is neither classified nor pooled, its class token or mean."""
    if model.num_classes > 0 or out.ndim == 2:
        return out
    return out.mean(dim=1) if model.cls_token is None else out[:, 0]


def _final_norm(model: Model) -> nn.Sequential:
    """The norm before pooling and the one after it: a model has one of them, the other does nothing.

    With mean pooling a class token passes no norm at all. A task's token passes the pooled one's.
    """
    return nn.Sequential(model.norm, model.fc_norm)


def _block(layer: Model) -> Block:
    attention = layer.attn
    heads, width = attention.num_heads, attention.head_dim
    # Memory asks for no query: the rest of the fused projection is enough.
    weight, bias = attention.qkv.weight[heads * width :], attention.qkv.bias
    bias = None if bias is None else bias[heads * width :]

    def split(tensor: Tensor, parts: int) -> tuple[Tensor, ...]:
        return tensor.reshape(*tensor.shape[:2], parts, heads, width).permute(2, 0, 3, 1, 4).unbind(0)

    def kv(tokens: Tensor) -> tuple[Tensor, Tensor]:
        k, v = split(F.linear(tokens, weight, bias), 2)
        return attention.k_norm(k), v

    def qkv(tokens: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        fused = attention.qkv(tokens)
        q, k, v = split(fused if added is None else fused + added, 3)
        return attention.q_norm(q), attention.k_norm(k), v

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if attention.fused_attn:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = (q * attention.scale) @ k.transpose(-2, -1)
            out = (scores if mask is None else scores + mask).softmax(dim=-1) @ v
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    return Block(
        residual_first=True,
        norm1=layer.norm1,
        qkv=qkv,
        kv=kv,
        attend=attend,
        scaling=attention.scale,
        head_width=width,
        attention_norm=attention.norm,
        project=attention.proj,
        scale1=layer.ls1,
        norm2=layer.norm2,
        mlp=layer.mlp,
        mlp_parts=_mlp_parts(layer.mlp),
        scale2=layer.ls2,
    )


def _mlp_parts(mlp: Model) -> MlpParts:
    """A gate comes first, as in `_mlp_tensors`. Dropout is left out: in eval mode it does nothing."""
    if hasattr(mlp, "fc1_g"):
        return split_mlp([mlp.fc1_g, mlp.fc1_x], mlp.act, mlp.fc2, mlp.norm)
    if not hasattr(mlp, "gate_last"):
        return split_mlp([mlp.fc1], mlp.act, mlp.fc2, mlp.norm)

    def expand(tokens: Tensor) -> Tensor:
        first, second = mlp.fc1(tokens).chunk(2, dim=-1)
        return torch.cat([second, first] if mlp.gate_last else [first, second], dim=-1)

    def activate(expanded: Tensor) -> Tensor:
        gate, value = expanded.chunk(2, dim=-1)
        hidden: Tensor = mlp.norm(mlp.act(gate) * value)
        return hidden

    return MlpParts(expand, activate, mlp.fc2, mlp.fc1.out_features, mlp.fc2.in_features)


def _name_tensors(model: Model) -> dict[str, Tensor]:
    """The names that the same weights have in a model of `transformers`: a task fits both."""
    embed = model.patch_embed
    tokens = {
        "class_token": model.cls_token,
        "distillation_token": getattr(model, "dist_token", None),
        "registers": model.reg_token,
        "position": model.pos_embed,
    }
    parts: dict[str, nn.Module | Tensor | None] = {
        **{name: None if token is None else token.reshape(-1, model.embed_dim) for name, token in tokens.items()},
        "patch.weight": embed.proj.weight,
        "patch.bias": embed.proj.bias,
        "patch_norm": embed.norm,
        "pre_norm": model.norm_pre,
        "norm": _final_norm(model),
    }
    for index, layer in enumerate(model.blocks):
        attention = layer.attn
        own = {
            "norm1": layer.norm1,
            "q_norm": attention.q_norm,
            "k_norm": attention.k_norm,
            "attention_norm": attention.norm,
            "project": attention.proj,
            "norm2": layer.norm2,
            "scale1": getattr(layer.ls1, "gamma", None),
            "scale2": getattr(layer.ls2, "gamma", None),
        }
        for number, tensor in enumerate(attention.qkv.parameters()):
            own |= {f"{name}.{number}": part for name, part in zip("qkv", tensor.chunk(3), strict=True)}
        own |= {f"mlp.{number}": tensor for number, tensor in enumerate(_mlp_tensors(layer.mlp))}
        parts |= {f"blocks.{index}.{name}": part for name, part in own.items()}
    return name_tensors(parts)


def _mlp_tensors(mlp: Model) -> list[Tensor]:
    """The weights in the module's order; a gate that is packed with its input as two layers, the gate first."""
    tensors = list(mlp.parameters())
    if not hasattr(mlp, "gate_last"):
        return tensors
    packed = list(mlp.fc1.parameters())
    halves = [tensor.chunk(2)[:: -1 if mlp.gate_last else 1] for tensor in packed]
    return [half[side] for side in (0, 1) for half in halves] + tensors[len(packed) :]


# ------------------------------------------------------------------------------------------------ preprocessing


def _preprocessing(model: Model) -> Preprocessing:
    """The steps in the model's own config, at the size that the model was built for."""
    from timm.data import resolve_model_data_config

    size = _image_size(model)
    config = resolve_model_data_config(model, args={"input_size": (model.patch_embed.proj.in_channels, *size)})
    filters = Image.Resampling.__members__
    # For a size that is not square timm keeps the aspect ratio; a shortest edge cannot say that, so squash it.
    squash = config["crop_mode"] == "squash" or size[0] != size[1]
    scaled = math.floor(size[0] / config["crop_pct"]), math.floor(size[1] / config["crop_pct"])
    own = Preprocessing(
        resize=scaled if squash else scaled[0],
        crop=None if squash and scaled == size else size,
        resample=filters.get(str(config["interpolation"]).upper(), Image.Resampling.BICUBIC).value,
    )
    if len(config["mean"]) == len(config["std"]) == 3:
        mean, std = ((float(r), float(g), float(b)) for r, g, b in (config["mean"], config["std"]))
        own = replace(own, mean=mean, std=std)
    return own
