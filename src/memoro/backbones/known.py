"""Backbones to choose from: what they are, how large, and how fast here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memoro.backbones.backbone import Backbone
from memoro.backbones.load import TINY, load_backbone
from memoro.clock import best_times

SIZES = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16)}
"""Width, layers and heads of the usual Vision Transformers."""
BATCH = 8
ROUNDS, SECONDS = 5, 3.0


@dataclass(frozen=True)
class Known:
    """A backbone that users load by name."""

    name: str
    family: str
    size: str
    """S, B or L, and the pixels of a patch; `tiny` for the shipped one."""
    pixels: int
    """The image size that it is best used at; more pixels cost more and often help."""
    licence: str
    """Of the weights, as the publisher's page states it. It may change: read it there."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Width, layers, heads, and the pixels of a patch."""
        if self.name == TINY:
            backbone = load_backbone(TINY)
            return backbone.dim, backbone.depth, backbone.heads, backbone.anatomy.patch[0]
        letter, patch = self.size.split("/")
        return *SIZES[letter], int(patch)

    @property
    def parameters(self) -> int:
        """Of patches and layers: matrices, biases and norms; families differ in little more."""
        dim, depth, _, patch = self.shape
        return depth * (12 * dim**2 + 13 * dim) + 3 * patch**2 * dim


_APACHE, _DINOV3 = "Apache-2.0", "DINOv3 License, on request"
KNOWN = (
    Known(TINY, "ViT", "tiny", 112, "Apache-2.0, comes with memoro"),
    Known("facebook/dinov2-small", "DINOv2", "S/14", 224, _APACHE),
    Known("facebook/dinov2-with-registers-small", "DINOv2 with registers", "S/14", 224, _APACHE),
    Known("facebook/dinov2-base", "DINOv2", "B/14", 224, _APACHE),
    Known("facebook/dinov2-large", "DINOv2", "L/14", 224, _APACHE),
    Known("facebook/dinov3-vits16-pretrain-lvd1689m", "DINOv3 ViT", "S/16", 224, _DINOV3),
    Known("facebook/dinov3-vitb16-pretrain-lvd1689m", "DINOv3 ViT", "B/16", 224, _DINOV3),
    Known("google/vit-base-patch16-224", "ViT", "B/16", 224, _APACHE),
    Known("google/vit-base-patch32-224-in21k", "ViT", "B/32", 224, _APACHE),
    Known("facebook/deit-small-patch16-224", "ViT", "S/16", 224, _APACHE),
    Known("microsoft/beit-base-patch16-224", "BEiT", "B/16", 224, _APACHE),
    Known("google/siglip-base-patch16-224", "SigLIP vision", "B/16", 224, _APACHE),
    Known("google/siglip2-base-patch16-224", "SigLIP vision", "B/16", 224, _APACHE),
    Known("openai/clip-vit-base-patch32", "CLIP vision", "B/32", 224, "MIT (code); none stated for the weights"),
    Known("openai/clip-vit-large-patch14", "CLIP vision", "L/14", 224, "MIT (code); none stated for the weights"),
    Known("facebook/vit-mae-base", "ViT-MAE", "B/16", 224, "Apache-2.0 (card), CC BY-NC 4.0 (code)"),
    Known("facebook/vit-msn-small", "ViT-MSN", "S/16", 224, "Apache-2.0 (card), CC BY-NC 4.0 (code)"),
    Known("timm:vit_small_patch14_dinov2.lvd142m", "timm ViT", "S/14", 224, _APACHE),
    Known("timm:vit_base_patch16_224.augreg2_in21k_ft_in1k", "timm ViT", "B/16", 224, _APACHE),
)
"""By family, small ones first. Any other model of a family that `load_backbone` reads works the same."""


def measure_speed(chosen: Sequence[Known], device: str | None = None) -> dict[str, float]:
    """Images a second of each one's size, by name. Weights are drawn at random, which makes no difference: nothing is
    downloaded, and backbones of one size are measured once."""
    found: dict[tuple[int, ...], float] = {}
    for one in chosen:
        key = *one.shape, one.pixels
        if key not in found:
            found[key] = _measure(_random(*key), one.pixels, device)
    return {one.name: found[*one.shape, one.pixels] for one in chosen}


def _random(dim: int, depth: int, heads: int, patch: int, pixels: int) -> Backbone:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=dim, num_hidden_layers=depth, num_attention_heads=heads, intermediate_size=4 * dim,
        patch_size=patch, image_size=pixels,
    )  # fmt: skip
    return load_backbone(ViTModel(config, add_pooling_layer=False).eval())


def _measure(backbone: Backbone, pixels: int, device: str | None) -> float:
    backbone = backbone.to(device)
    batch = torch.zeros(BATCH, 3, pixels, pixels, device=backbone.device, dtype=backbone.dtype)
    with torch.no_grad():
        times = best_times({"pass": lambda: backbone.original(batch)}, ROUNDS, seconds=SECONDS)
    return BATCH / times["pass"]
