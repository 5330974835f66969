"""Loading: folders, model objects, processors, fingerprints."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from families import CASES, SMALL, Case
from PIL import Image
from torch import nn

import memoro
from memoro.backbones.load import supported
from memoro.errors import BackboneError, CompositionError, MemoroError

PROCESSORS = {
    "vit": hf.ViTImageProcessorPil(size={"height": 20, "width": 20}),
    "deit": hf.DeiTImageProcessorPil(size={"height": 23, "width": 23}, crop_size={"height": 20, "width": 20}),
    "dinov2": hf.BitImageProcessorPil(size={"shortest_edge": 23}, crop_size={"height": 20, "width": 20}),
    "clip": hf.CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": 20, "width": 20}),
    "siglip": hf.SiglipImageProcessorPil(size={"height": 20, "width": 20}),
    "beit": hf.BeitImageProcessorPil(
        size={"height": 24, "width": 24}, crop_size={"height": 20, "width": 20}, do_center_crop=True
    ),
    "nothing": hf.ViTImageProcessorPil(do_resize=False, do_normalize=False, do_rescale=False),
}


def picture(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_folder_gives_what_was_saved(case: Case, tmp_path: Path) -> None:
    model = case.model()
    model.save_pretrained(tmp_path)
    loaded = memoro.load_backbone(str(tmp_path))
    direct = memoro.load_backbone(model)
    pixels = torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        base = memoro.compose(loaded)(pixels)["base"]
        assert torch.equal(base, memoro.compose(direct)(pixels)["base"])
        assert torch.equal(base, loaded.original(pixels))
    assert loaded.fingerprint == direct.fingerprint
    assert (loaded.dim, loaded.depth, loaded.heads, loaded.anatomy.patch) == (24, 5, 3, (4, 4))


@pytest.mark.parametrize(
    ("whole", "config", "tower"),
    [
        (hf.CLIPModel, hf.CLIPConfig, "CLIP vision"),
        (hf.SiglipModel, hf.SiglipConfig, "SigLIP vision"),
    ],
)
def test_a_two_tower_checkpoint_gives_its_vision_tower(whole: Any, config: Any, tower: str, tmp_path: Path) -> None:
    text = {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 99,
    }
    model = whole(config(text_config=text, vision_config=SMALL)).eval()
    model.save_pretrained(tmp_path)
    backbone = memoro.load_backbone(tmp_path)
    assert backbone.family == tower
    pixels = torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        expected = model.vision_model(pixels).pooler_output
        assert torch.equal(memoro.compose(backbone)(pixels)["base"], expected)
        assert torch.equal(memoro.compose(memoro.load_backbone(model))(pixels)["base"], expected)


def test_a_head_that_the_checkpoint_lacks_is_left_out(tmp_path: Path) -> None:
    """A classifier or pooler with random weights is no answer of the backbone's."""
    trunk = hf.ViTModel(hf.ViTConfig(**SMALL), add_pooling_layer=False).eval()
    trunk.save_pretrained(tmp_path)
    pixels = torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        expected = trunk(pixels).last_hidden_state[:, 0]
    for architecture in ("ViTModel", "ViTForImageClassification", None):
        config = json.loads((tmp_path / "config.json").read_text())
        config["architectures"] = [architecture] if architecture else None
        (tmp_path / "config.json").write_text(json.dumps(config))
        backbone = memoro.load_backbone(tmp_path)
        with torch.no_grad():
            assert torch.equal(memoro.compose(backbone)(pixels)["base"], expected)
        assert backbone.labels == ()


def test_an_incomplete_encoder_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hf.ViTModel(hf.ViTConfig(**SMALL)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if "q_proj" in name or "query" in name)
    del weights[gone]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackboneError, match="incomplete"):
        memoro.load_backbone(tmp_path)


@pytest.mark.parametrize(
    ("changes", "cut"),
    [
        ({}, True),
        ({"hidden_act": "no such"}, False),
        ({"num_attention_heads": 0}, False),
        ({"architectures": ["Trainer"]}, True),
    ],
    ids=["cut off", "activation", "heads", "no model"],
)
def test_a_damaged_checkpoint_is_refused(changes: dict[str, Any], cut: bool, tmp_path: Path) -> None:
    hf.ViTModel(hf.ViTConfig(**SMALL)).save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    if cut:
        weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BackboneError, match=r"cannot load"):
        memoro.load_backbone(tmp_path)


@pytest.mark.parametrize(
    "build",
    [
        lambda: hf.SwinModel(
            hf.SwinConfig(image_size=32, embed_dim=12, depths=[1, 1], num_heads=[2, 2], window_size=4)
        ),
        lambda: hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])),
        lambda: hf.BertModel(
            hf.BertConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=8)
        ),
        lambda: hf.Dinov2Backbone(
            hf.Dinov2Config(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, image_size=28, patch_size=14)
        ),
        lambda: torch.nn.Linear(3, 3),
    ],
    ids=["swin", "resnet", "bert", "feature maps", "linear"],
)
def test_models_that_are_no_plain_vit(build: Any, tmp_path: Path) -> None:
    model = build()
    with pytest.raises(BackboneError, match=r"Supported: ViT, .*Swin") as error:
        memoro.load_backbone(model)
    assert supported() in str(error.value)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path)
        with pytest.raises(BackboneError, match="Supported"):
            memoro.load_backbone(tmp_path)


def test_places_without_a_backbone(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match=r"no config\.json"):
        memoro.load_backbone(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(BackboneError, match="readable config"):
        memoro.load_backbone(tmp_path)
    with pytest.raises(BackboneError, match="dtype"):
        memoro.load_backbone(CASES[0].model(), dtype="int8")


def test_a_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BackboneError, match=r"offline, download it on another machine and pass the folder"):
        memoro.load_backbone("nobody/nothing-at-all")


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", [(33, 25), (25, 33), (20, 20), (11, 47), (200, 150)])
def test_preprocessing_equals_the_checkpoints_own(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    processor = PROCESSORS[name]
    image = picture(*size)
    expected = processor(image, return_tensors="pt").pixel_values[0]
    model = CASES[0].model()
    assert torch.equal(
        memoro.load_backbone(model, processor=processor).preprocessing.to_tensor(image), expected.float()
    )
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert torch.equal(memoro.load_backbone(tmp_path).preprocessing.to_tensor(image), expected.float())


def test_old_processor_configs(tmp_path: Path) -> None:
    CASES[0].model().save_pretrained(tmp_path)
    record = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 24, "crop_size": 20, "do_center_crop": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(record))
    found = memoro.load_backbone(tmp_path).preprocessing
    assert (found.resize, found.crop) == (24, (20, 20))
    assert found.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))


@pytest.mark.parametrize("std", [0.0, [0.0, 0.0, 0.0], [1e-30, 1.0, 1.0], [0.5, 0.5], "half"])
def test_processor_with_an_unusable_std(std: object, vit: Any) -> None:
    with pytest.raises(MemoroError, match=r"std"):
        memoro.load_backbone(vit, processor={"size": 20, "image_std": std})


@pytest.mark.parametrize(
    "record",
    [
        {"size": {"height": 200_000, "width": 200_000}},
        {"size": {"height": -5, "width": 20}},
        {"size": 20, "resample": 99},
        {"size": 20, "resample": "bicubic"},
    ],
)
def test_processor_with_unusable_sizes(record: dict[str, Any], vit: Any) -> None:
    with pytest.raises(BackboneError, match="image processor of the checkpoint cannot be used"):
        memoro.load_backbone(vit, processor=record)


def test_preprocessing_takes_lists_and_one_side_of_a_square(vit: Any) -> None:
    spec = memoro.Preprocessing(resize=[24, 24], crop=20, mean=[0.1, 0.2, 0.3], std=np.ones(3))  # type: ignore[arg-type]
    assert spec == memoro.Preprocessing((24, 24), (20, 20), mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))
    assert hash(spec) == hash(memoro.Preprocessing.from_json(json.loads(json.dumps(spec.to_json()))))
    with pytest.raises(MemoroError, match="resize is not a whole number from 1 to"):
        memoro.Preprocessing(resize=0)
    backbone = memoro.load_backbone(vit)
    assert memoro.load_backbone(backbone, processor=spec).preprocessing == spec
    assert backbone.preprocessing != spec


def test_a_model_without_a_processor_gets_its_familys_defaults() -> None:
    for case in CASES:
        found = memoro.load_backbone(case.model()).preprocessing
        assert found.size == (20, 20), case.name
    dino = memoro.load_backbone(next(c for c in CASES if c.name == "dinov2").model()).preprocessing
    assert dino.mean == (0.485, 0.456, 0.406)
    assert dino.resize == 23


def test_image_size_scales_resize_and_crop_alike() -> None:
    spec = memoro.Preprocessing(resize=256, crop=(224, 224))
    assert (spec.at(112).resize, spec.at(112).crop) == (128, (112, 112))
    assert memoro.Preprocessing(resize=(224, 224)).at(96).resize == (96, 96)
    assert spec.at(112).to_tensor(picture(300, 200)).shape == (3, 112, 112)


def test_fingerprints_tell_weights_apart() -> None:
    model = CASES[0].model()
    here = memoro.load_backbone(model).fingerprint
    assert memoro.load_backbone(CASES[0].model()).fingerprint == here
    assert here.match(here) == "same"
    with torch.no_grad():
        model.classifier.weight.add_(1)
    assert memoro.load_backbone(model).fingerprint == here, "a head is not the encoder"
    with torch.no_grad():
        model.vit.layers[3].mlp.fc1.bias[0] += 1e-6
    changed = memoro.load_backbone(model).fingerprint
    assert changed.match(here) == "different"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_another_dtype_is_the_same_up_to_rounding(case: Case, dtype: str) -> None:
    model = case.model()
    here = memoro.load_backbone(model).fingerprint
    assert memoro.load_backbone(model, dtype=dtype).fingerprint.match(here) == "same up to rounding"
    other = memoro.load_backbone(case.model(seed=8), dtype=dtype).fingerprint
    assert other.match(here) == "different"


def test_the_sketch_sees_a_real_fine_tuning() -> None:
    """A change of 10 % of each weight's size shows in bfloat16, where rounding alone is below 2 %."""
    model = CASES[0].model()
    here = memoro.load_backbone(model).fingerprint
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    assert memoro.load_backbone(model, dtype="bfloat16").fingerprint.match(here) == "different"


def test_every_encoder_weight_is_in_the_fingerprint() -> None:
    outside = ("classifier", "pooler.dense", "mask_token", "head.", "visual_projection")
    for case in CASES:
        model = case.model()
        named = memoro.load_backbone(model).anatomy.tensors
        places = {tensor.data_ptr() for tensor in named.values()}
        for name, parameter in model.named_parameters():
            if not any(part in name for part in outside) and parameter.numel():
                assert parameter.data_ptr() in places, f"{case.name}: {name}"


def test_weights_are_shared_not_copied() -> None:
    model = CASES[0].model()
    backbone = memoro.load_backbone(model)
    weight = model.vit.embeddings.patch_embeddings.projection.weight
    assert backbone.anatomy.tensors["patch.weight"].data_ptr() == weight.data_ptr()
    half = memoro.load_backbone(model, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert weight.dtype == torch.float32


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_backbone_is_pickled_after_use(case: Case) -> None:
    backbone, pixels = memoro.load_backbone(case.model()), torch.randn(2, 3, 20, 20)
    before = memoro.compose(backbone)(pixels)["base"]
    other = pickle.loads(pickle.dumps(backbone))
    assert torch.equal(memoro.compose(other)(pixels)["base"], before)
    assert torch.equal(other.original(pixels), before)
    assert other.fingerprint == backbone.fingerprint
    size = sum(tensor.nbytes for tensor in backbone.module.state_dict().values())
    assert len(pickle.dumps(backbone)) < 1.5 * size, "each weight once"


class Packed(torch.Tensor):
    """As libraries for quantization keep weights: the dtype that it shows is that of the original."""


@pytest.mark.parametrize(
    ("weight", "found"),
    [
        (nn.Parameter(torch.zeros(8, 24, dtype=torch.uint8), requires_grad=False), "torch.uint8"),
        (nn.Parameter(torch.zeros(24, 24, dtype=torch.int8), requires_grad=False), "torch.int8"),
        (nn.Parameter(torch.zeros(24, 24).to(torch.float8_e4m3fn), requires_grad=False), "torch.float8_e4m3fn"),
        (nn.Parameter(torch.zeros(24, 24).as_subclass(Packed), requires_grad=False), "Packed"),
    ],
    ids=["bitsandbytes 4 bit", "bitsandbytes 8 bit", "float8", "torchao"],
)
def test_quantized_weights_are_refused(vit: Any, weight: nn.Parameter, found: str) -> None:
    vit.vit.layers[1].attention.q_proj.weight = weight
    with pytest.raises(BackboneError, match=rf"quantized or sharded, .* weights \({found}\): load the original model"):
        memoro.load_backbone(vit)


def test_a_compiled_model_is_read_and_a_quantized_one_refused(vit: Any) -> None:
    assert memoro.load_backbone(torch.compile(vit)).fingerprint == memoro.load_backbone(vit).fingerprint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to replace its own
        vit.vit.unused = torch.ao.nn.quantized.dynamic.Linear(24, 24)
    with pytest.raises(BackboneError, match=r"has been quantized.*dtype='bfloat16'"):
        memoro.load_backbone(vit)


def test_weights_that_changed_since_are_noticed(vit: Any, tmp_path: Path) -> None:
    backbone = memoro.load_backbone(vit)
    task = memoro.new_task(backbone, "pets", ["a", "b"])
    memoro.compose(backbone, task)
    with torch.no_grad():
        next(iter(backbone.model.vit.embeddings.parameters())).add_(0.01)  # as a step of an optimiser does
    for use in (
        lambda: memoro.compose(backbone, task),
        lambda: memoro.new_task(backbone, "more", ["a", "b"]),
        lambda: backbone.to(dtype=torch.float32),
    ):
        with pytest.raises(BackboneError, match="have changed since it was loaded: load the backbone again"):
            use()
    with pytest.raises(CompositionError, match="'pets' was trained for"):
        memoro.compose(memoro.load_backbone(vit), task)


def test_repr_is_short() -> None:
    backbone = memoro.load_backbone()
    assert len(backbone.labels) > 100
    assert repr(backbone).startswith("Backbone(name='memoro-tiny', family='ViT'")
    assert len(repr(backbone)) < 300


def test_real_weights(shared: Path) -> None:
    backbone = memoro.load_backbone(shared / "weights" / "dinov2-small-reg")
    assert (backbone.family, backbone.depth, backbone.dim) == ("DINOv2 with registers", 12, 384)
    assert backbone.preprocessing.size == (224, 224)
    model = hf.AutoModel.from_pretrained(shared / "weights" / "dinov2-small-reg").eval()
    pixels = torch.randn(2, 3, 112, 112)
    with torch.no_grad():
        assert torch.equal(memoro.compose(backbone)(pixels)["base"], model(pixels).pooler_output)


@pytest.mark.parametrize(
    "text", ['{"size": {"height": 20', "[]", '{"size": "abc", "image_processor_type": "ViTImageProcessor"}']
)
def test_a_damaged_processor_is_not_replaced_by_a_default(text: str, vit: Any, tmp_path: Path) -> None:
    vit.save_pretrained(tmp_path)
    assert memoro.load_backbone(tmp_path).preprocessing.size == (20, 20)
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(BackboneError, match="image processor"):
        memoro.load_backbone(tmp_path)
