"""Models with random weights: speed does not depend on the values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

CLASSES = 10


def random_vit(patch: int) -> Any:
    """ViT-B with a classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(patch_size=patch, num_labels=CLASSES)).eval()


def random_dinov2_small() -> Any:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    config = Dinov2WithRegistersConfig(hidden_size=384, num_attention_heads=6, image_size=518)
    return Dinov2WithRegistersModel(config).eval()


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "ViT-B/32": (partial(random_vit, 32), 224),
    "ViT-B/16": (partial(random_vit, 16), 224),
    "dinov2-small": (random_dinov2_small, 112),
}
"""By name: how to build the model, and the image size."""
