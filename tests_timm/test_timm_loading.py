"""What load_backbone makes of timm's models: the whole registry, refusals, sizes, preprocessing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.layers import Attention, GlobalResponseNormMlp
from timm.models import vision_transformer as vit
from timm.models.resnet import BasicBlock, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm_cases import CASES, SMALL, randomise
from torch import nn

import memoro

NAMES = [name for module in ("vision_transformer", "deit") for name in timm.list_models(module=module)]
SLIM: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def case(name: str) -> Any:
    return next(case for case in CASES if case.name == name)


# ------------------------------------------------------------------------------------------------- the registry


def test_the_registry_is_there() -> None:
    assert len(NAMES) > 150


@pytest.mark.parametrize("name", NAMES)
def test_every_registered_model_is_exact_or_refused_for_its_blocks(name: str) -> None:
    """timm's own configurations, narrow and shallow, at their own image sizes."""
    model = randomise(timm.create_model(name, **SLIM))
    block = model.blocks[0]
    if type(block) is not vit.Block or type(block.attn) is not Attention:
        with pytest.raises(memoro.BackboneError, match="memoro supports models with"):
            memoro.load_backbone(model)
        return
    backbone = memoro.load_backbone(model)
    assert backbone.name.split(".")[0] == name
    task = memoro.new_task(backbone, "birds", ["a", "b"], cells=1)
    pixels = torch.randn(1, backbone.channels, *backbone.image_size)
    with torch.no_grad():
        answers = memoro.compose(backbone, [task])(pixels)
        assert torch.equal(answers["base"], model(pixels))
    assert answers["birds"].shape == (1, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_backbone_is_pickled_after_use(case: Any) -> None:
    backbone = memoro.load_backbone(case.model())
    pixels = torch.randn(2, backbone.channels, *backbone.image_size)
    before = memoro.compose(backbone)(pixels)["base"]
    other = pickle.loads(pickle.dumps(backbone))
    assert torch.equal(memoro.compose(other)(pixels)["base"], before)
    assert torch.equal(other.original(pixels), before)


# ------------------------------------------------------------------------------------------------------ refusals


def with_part(change: Callable[[Any], None]) -> Any:
    model = vit.VisionTransformer(**SMALL)
    change(model.blocks[3])
    return model


class Adapted(nn.Linear):
    """Stands for an adapter or a quantised layer."""


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "swin": (
        lambda: SwinTransformer(img_size=32, patch_size=4, embed_dim=8, depths=(1, 1), num_heads=(2, 2), window_size=4),
        "SwinTransformer: it is not a supported Vision Transformer. Supported: ViT",
    ),
    "resnet": (lambda: ResNet(BasicBlock, [1, 1, 1, 1], channels=(8, 8, 8, 8)), "ResNet: it is not a supported Vision"),
    "eva": (lambda: timm.create_model("eva02_tiny_patch14_224", depth=1), "Eva: it is not a supported Vision"),
    "hybrid": (
        lambda: timm.create_model("vit_tiny_r_s16_p8_224", **SLIM),
        "embeds images with a HybridEmbed; memoro supports models with: PatchEmbed",
    ),
    "post-norm": (lambda: vit.VisionTransformer(**SMALL, block_fn=vit.ResPostBlock), "ResPostBlock in layer 0"),
    "parallel": (lambda: vit.VisionTransformer(**SMALL, block_fn=vit.ParallelScalingBlock), "ParallelScalingBlock"),
    "parallel-things": (
        lambda: vit.VisionTransformer(**SMALL, block_fn=vit.ParallelThingsBlock),
        "ParallelThingsBlock",
    ),
    "differential": (
        lambda: vit.VisionTransformer(**{**SMALL, "num_heads": 2}, attn_layer="diff"),
        "DiffAttention in layer 0; memoro supports models with: Attention",
    ),
    "gated": (
        lambda: with_part(lambda layer: setattr(layer.attn, "gate", nn.Linear(24, 24))),
        "gated attention in layer 3",
    ),
    "adapter": (
        lambda: with_part(lambda layer: setattr(layer.attn, "qkv", Adapted(24, 72))),
        "Adapted as qkv in layer 3; memoro supports models with: nn.Linear: merge adapters",
    ),
    "mixing-mlp": (
        lambda: with_part(lambda layer: setattr(layer, "mlp", GlobalResponseNormMlp(24))),
        "GlobalResponseNormMlp as mlp in layer 3; memoro supports models with: Mlp",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_by_name(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(memoro.BackboneError, match=message):
        memoro.load_backbone(build())


# --------------------------------------------------------------------------------------------------- image sizes


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("plain", (24, 20), r"24x20: this timm model takes 20x20 only.*dynamic_img_size=True"),
        ("plain", (20, 19), r"20x19: this timm model takes 20x20 only.*dynamic_img_size=True"),
        ("dynamic", (24, 22), r"24x22 cannot be divided into 4x4 patches.*dynamic_img_pad=True"),
    ],
)
def test_sizes_that_do_not_fit_name_the_option(name: str, size: tuple[int, int], message: str) -> None:
    backbone = memoro.load_backbone(case(name).model())
    for run in (memoro.compose(backbone), backbone.original):
        with pytest.raises(memoro.BackboneError, match=message):
            run(torch.randn(1, 3, *size))


def test_a_remainder_is_left_out() -> None:
    backbone = memoro.load_backbone(case("remainder").model())
    pixels = case("remainder").pixels()
    changed = pixels.clone()
    changed[..., 20:, :] += 1
    composition = memoro.compose(backbone)
    assert torch.equal(composition(pixels)["base"], composition(changed)["base"])
    changed[..., :20, :] += 1
    assert not torch.equal(composition(pixels)["base"], composition(changed)["base"])


# ------------------------------------------------------------------------------------------------- preprocessing

# Squashed and centred crops, ImageNet's, OpenAI's and plain means, three sizes.
PREPARED = [
    "vit_tiny_patch16_224",
    "vit_base_patch16_clip_224.openai",
    "vit_base_patch16_clip_384.openai_ft_in1k",
    "vit_medium_patch16_gap_384.sw_in12k_ft_in1k",
    "vit_base_patch16_384",
    "vit_small_patch14_dinov2",
    "deit3_small_patch16_224",
]


@pytest.mark.parametrize("name", PREPARED)
def test_preprocessing_is_timms_own(name: str) -> None:
    model = timm.create_model(name, **SLIM)
    preprocessing = memoro.load_backbone(model).preprocessing
    transform = create_transform(**resolve_model_data_config(model))
    # Twice as wide as high, so that sides stay even: timm rounds half a pixel at the crop's corner, memoro drops it.
    noise = np.random.default_rng(5).integers(0, 256, (300, 600, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    # The same bytes; normalised in float32 in another order of operations.
    torch.testing.assert_close(preprocessing.to_tensor(image), transform(image), rtol=0, atol=1e-6)
    other = Image.fromarray(noise[::-1].copy())
    assert (preprocessing.to_tensor(other) - transform(image)).abs().max() > 0.1


def test_preprocessings_differ() -> None:
    found = {memoro.load_backbone(timm.create_model(name, **SLIM)).preprocessing for name in PREPARED}
    assert len(found) == len(PREPARED)


def test_preprocessing_has_the_size_that_the_model_was_built_for() -> None:
    backbone = memoro.load_backbone(timm.create_model("vit_tiny_patch16_224", img_size=96, **SLIM))
    assert backbone.image_size == backbone.preprocessing.size == (96, 96)
    oblong = memoro.load_backbone(case("oblong").model())
    assert oblong.preprocessing.size == (20, 12)


def test_a_given_processor_wins() -> None:
    model = case("plain").model()
    own = memoro.Preprocessing(resize=(20, 20), mean=(0.1, 0.2, 0.3))
    assert memoro.load_backbone(model, processor=own).preprocessing == own
    processor = transformers.ViTImageProcessorPil(size={"height": 20, "width": 20}, image_mean=[0.4, 0.5, 0.6])
    read = memoro.load_backbone(model, processor=processor).preprocessing
    assert (read.resize, read.mean) == ((20, 20), (0.4, 0.5, 0.6))
    assert memoro.load_backbone(model).preprocessing not in {own, read}


def test_predict_on_a_picture() -> None:
    backbone = memoro.load_backbone(case("plain").model())
    task = memoro.new_task(backbone, "birds", ["wren", "owl"])
    (answer,) = memoro.compose(backbone, [task]).predict(Image.new("RGB", (50, 40), "teal"))
    assert set(answer) == {"birds"}


def test_labels_come_from_the_config_where_they_fit() -> None:
    model = case("plain").model()
    assert memoro.load_backbone(model).labels == ()
    model.pretrained_cfg = {"label_names": [f"class {i}" for i in range(7)]}
    assert memoro.load_backbone(model).labels[6] == "class 6"
    model.pretrained_cfg = {"label_names": ["too", "few"]}
    assert memoro.load_backbone(model).labels == ()
