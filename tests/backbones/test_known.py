"""The list of backbones: sizes, families and speeds are real ones."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from shell import Shell
from shell import shell as shell

from memoro.backbones import known, load_backbone
from memoro.backbones.families import FAMILY_SPECS
from memoro.backbones.known import KNOWN, SIZES, Known, measure_speed
from memoro.backbones.load import TIMM, TINY, is_hub_id


def test_every_name_can_be_given_and_every_family_is_supported() -> None:
    assert len(KNOWN) > 15
    assert len({one.name for one in KNOWN}) == len(KNOWN)
    titles = {layout.title for layout in FAMILY_SPECS.values()}
    for one in KNOWN:
        assert one.name == TINY or one.name.startswith(TIMM) or is_hub_id(one.name), one
        assert one.family in titles | {"timm ViT"}, one
        assert one.licence
        assert one.pixels % one.shape[3] == 0


def test_sizes_are_those_of_real_models() -> None:
    """Against the encoders that transformers builds, without memory for their weights."""
    tiny = load_backbone(TINY)
    real = sum(tensor.numel() for tensor in tiny.anatomy.tensors.values())
    assert KNOWN[0].parameters == pytest.approx(real, rel=0.01)
    assert KNOWN[0].pixels == tiny.image_size[0]
    for letter, (dim, depth, heads) in SIZES.items():
        config = transformers.Dinov2Config(hidden_size=dim, num_hidden_layers=depth, num_attention_heads=heads)
        with torch.device("meta"):
            model = transformers.Dinov2Model(config)
        real = sum(parameter.numel() for name, parameter in model.named_parameters() if "position" not in name)
        assert Known("x", "DINOv2", f"{letter}/14", 224, "-").parameters == pytest.approx(real, rel=0.01)


def test_speed_is_measured_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "ROUNDS", 1)
    monkeypatch.setattr(known, "SIZES", {"S": (24, 2, 3), "B": (48, 3, 3)})
    built, build = [], known._random
    monkeypatch.setattr(known, "_random", lambda *shape: built.append(shape) or build(*shape))
    some = [Known("a", "ViT", "S/16", 32, "-"), Known("b", "ViT", "S/16", 32, "-"), Known("c", "ViT", "B/16", 32, "-")]
    rates = measure_speed(some)
    assert list(rates) == ["a", "b", "c"]
    assert rates["a"] == rates["b"] > 0
    assert built == [(24, 2, 3, 16, 32), (48, 3, 3, 16, 32)]


def test_from_the_shell(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    page = shell("backbones").out
    assert all(one.name in page for one in KNOWN)
    assert "images/s" not in page
    monkeypatch.setattr(known, "ROUNDS", 1)
    rows = json.loads(shell("backbones", "tiny", "--speed", "--json").out)
    assert [row["name"] for row in rows] == [TINY]
    assert rows[0]["images_per_second"] > 0
    assert "no listed backbone has resnet in its name" in shell("backbones", "resnet", code=2).err
