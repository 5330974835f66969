"""`timm:NAME` loads timm's pretrained models, from the shell too, and task files find them again."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import memoro
from memoro.backbones.load import find_backbone

NAME = "test_vit.r160_in1k"
"""The smallest of timm's pretrained models, made by timm for tests."""


@pytest.fixture
def hub(tmp_path: Path) -> dict[str, str]:
    """A hub cache with weights drawn at random, for a machine that is offline."""
    torch.manual_seed(0)
    keep(tmp_path, NAME)
    Image.new("RGB", (200, 180), (200, 90, 30)).save(tmp_path / "photo.png")
    return {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}


def keep(folder: Path, name: str) -> None:
    snapshot = folder / "hub" / f"models--timm--{name}" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    save_file(timm.create_model(name).state_dict(), snapshot / "model.safetensors")


def run(folder: Path, hub: dict[str, str], *command: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, env=hub, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_a_task_on_timms_weights_from_the_shell(tmp_path: Path, hub: dict[str, str]) -> None:
    program = f"""
import memoro, timm, torch
for name in ({NAME!r}, {NAME.partition(".")[0]!r}):
    backbone = memoro.load_backbone("timm:" + name)
    assert backbone.name == "timm:{NAME}", backbone.name
pixels = torch.randn(1, 3, 160, 160)
model = timm.create_model({NAME!r}, pretrained=True).eval()
with torch.no_grad():
    assert torch.equal(memoro.compose(backbone)(pixels)["base"], model(pixels))
    assert memoro.compose(backbone)(pixels[..., :96])["base"].shape == (1, 1000)  # other sizes too
task = memoro.new_task(backbone, "colours", ["red", "blue"], seed=0)
memoro.save_task(task, "colours.safetensors")
"""
    run(tmp_path, hub, "-c", program)
    found = run(tmp_path, hub, "-m", "memoro", "predict", "photo.png", "-t", "colours.safetensors", "--format", "csv")
    assert f"backbone: timm:{NAME}" in found
    named = ["-b", f"timm:{NAME}", "--format", "csv"]
    again = run(tmp_path, hub, "-m", "memoro", "predict", "photo.png", "-t", "colours.safetensors", *named)
    assert again.splitlines()[-1] in found


def test_dinov2_is_used_at_224_pixels(tmp_path: Path, hub: dict[str, str]) -> None:
    keep(tmp_path, "vit_small_patch14_dinov2.lvd142m")
    program = f"""
import memoro
for name in ("vit_small_patch14_dinov2", {NAME!r}):
    backbone = memoro.load_backbone("timm:" + name)
    print(backbone.preprocessing.size, backbone.image_size)
"""
    assert run(tmp_path, hub, "-c", program).splitlines()[-2:] == ["(224, 224) (518, 518)", "(160, 160) (160, 160)"]


def test_names_that_timm_does_not_list() -> None:
    with pytest.raises(memoro.BackboneError, match=r"did you mean timm:vit_small_patch14_dinov2\.lvd142m"):
        memoro.load_backbone("timm:vit_smal_patch14_dinov2.lvd142m")
    for name in ("hf-hub:someone/model", "hf-hub:someone/vit_small_patch14_dinov2", "local-dir:/tmp", "../vit", ""):
        with pytest.raises(memoro.BackboneError, match="no pretrained weights"):
            memoro.load_backbone(f"timm:{name}")
    with pytest.raises(memoro.BackboneError, match="cannot read timm's swin_tiny"):
        memoro.load_backbone("timm:swin_tiny_patch4_window7_224")


def test_a_strangers_file_names_no_other_place() -> None:
    backbone = memoro.load_backbone(timm.create_model("test_vit"))
    record = memoro.new_task(backbone, "t", ["a", "b"]).spec.backbone
    with pytest.raises(memoro.BackboneError, match="no pretrained weights"):
        find_backbone(replace(record, name="timm:hf-hub:someone/model"))


def test_offline_without_the_weights(tmp_path: Path, hub: dict[str, str]) -> None:
    photo = ["photo.png", "-o", "o.png"]
    memoro.save_task(memoro.new_task(memoro.load_backbone(), "t", ["a", "b"]), tmp_path / "t.safetensors")
    command = ["-m", "memoro", "explain", *photo, "-t", "t.safetensors", "-b", "timm:vit_tiny_patch16_224"]
    assert "hf download timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k" in run(tmp_path, hub, *command, code=1)
