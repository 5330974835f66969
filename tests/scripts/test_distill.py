"""scripts/distill.py from end to end, with a teacher and a student of next to no size."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from image_files import png_header, save_classes
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

from memoro import load_backbone

SCRIPTS = Path(__file__).parents[2] / "scripts"
SIZES = {"hidden_size": 12, "num_attention_heads": 1, "num_hidden_layers": 2, "intermediate_size": 24}
STEPS = 7

pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="the scripts are only in the repository")


@pytest.fixture
def distill(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a student to match the teacher, that saves every third step."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("distill")
    monkeypatch.setattr(script, "STUDENT", {**script.STUDENT, **SIZES, "image_size": 8, "patch_size": 2})
    monkeypatch.setattr(script, "SAVE_EVERY", 3)
    return script


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Dinov2WithRegistersConfig(
        hidden_size=24, num_attention_heads=2, num_hidden_layers=2, mlp_ratio=2, image_size=12, patch_size=2
    )
    Dinov2WithRegistersModel(config).save_pretrained(tmp_path / "teacher")
    processor = {"image_processor_type": "BitImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "teacher" / "preprocessor_config.json").write_text(json.dumps(processor))
    return tmp_path / "teacher"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two classes to learn, two images that nobody can read, and splits that would be noticed if they were read."""
    save_classes(tmp_path / "data" / "train", {"a": 12, "b": 12})
    (tmp_path / "data" / "train" / "a" / "broken.png").write_bytes(b"no image")
    (tmp_path / "data" / "train" / "b" / "bomb.png").write_bytes(png_header(13_000, 13_900))
    for split in ("test", "val"):
        (tmp_path / "data" / split / "c").mkdir(parents=True)
        (tmp_path / "data" / split / "c" / "unseen.png").write_bytes(b"no image")
    return tmp_path / "data"


def run(script: ModuleType, teacher: Path, data: Path, out: Path, *options: str) -> dict[str, torch.Tensor]:
    """The weights in the end, in full precision."""
    places = {"--teacher": teacher, "--data": f"{data}:3", "--out": out, "--work": f"{out}-work"}
    sizes = {"--steps": STEPS, "--batch": 4}
    given = [str(part) for option in (places | sizes).items() for part in option]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["distill.py", *given, *options])
        script.main()
    state = torch.load(f"{out}-work/checkpoint.pt", weights_only=True)
    assert state["step"] == STEPS
    return dict(state["matcher"])


@pytest.mark.parametrize("start", ["shrink", "random"])
def test_model_loads_and_only_readable_training_images_count(
    distill: ModuleType, teacher: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], start: str
) -> None:
    weights = run(distill, teacher, data, tmp_path / "out", "--start", start)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    lines = capsys.readouterr().out.splitlines()
    skipped = dict(line.split(" (", 1) for line in lines if "skipped" in line)
    assert "pixels" in skipped[f"skipped, not readable: {data}/train/b/bomb.png"]  # by its size, before it is decoded
    assert skipped.keys() == {f"skipped, not readable: {data}/train/{name}" for name in ("a/broken.png", "b/bomb.png")}
    backbone = load_backbone(tmp_path / "out")
    assert (backbone.dim, backbone.depth, backbone.labels) == (12, 2, ("a", "b"))
    assert backbone.preprocessing is not None
    assert backbone.preprocessing.size == (8, 8)


def test_resumed_run_gives_the_same_weights(
    distill: ModuleType, teacher: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(distill, teacher, data, tmp_path / "whole")
    draw, draws = distill.TokenCache.draw, iter(range(5))

    def stop(cache: object, size: int, generator: torch.Generator) -> object:
        if next(draws, None) is None:
            raise KeyboardInterrupt
        return draw(cache, size, generator)

    monkeypatch.setattr(distill.TokenCache, "draw", stop)
    with pytest.raises(KeyboardInterrupt):
        run(distill, teacher, data, tmp_path / "parts")
    monkeypatch.setattr(distill.TokenCache, "draw", draw)
    assert torch.load(tmp_path / "parts-work" / "checkpoint.pt", weights_only=True)["step"] == 3  # of five
    resumed = run(distill, teacher, data, tmp_path / "parts", "--resume")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert written[0] == written[1]


def test_zip_and_folder_give_the_same_views(distill: ModuleType, data: Path, tmp_path: Path) -> None:
    from distillation.views import cut_views, is_mixed, plan_views

    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for path in data.rglob("*.png"):
            archive.write(path, path.relative_to(data))
    cut = []
    for source in (distill.Source(data), distill.Source(tmp_path / "data.zip")):
        plan = plan_views([source], 0)
        assert len(plan) == 4 * 26
        assert not any("unseen" in view.name for view in plan)
        cut.append(cut_views([source], plan, range(len(plan)), 8, 0))
        mixed = [is_mixed(view, row, 0) for row, view in enumerate(plan)]
        assert any(mixed)
        assert not any(shown for shown, view in zip(mixed, plan, strict=True) if view.number == 0)  # whole images
        assert (distill.Labels([source], plan, 0).of_row == -1).tolist() == mixed
    for one, other in zip(*cut, strict=True):
        assert np.array_equal(one, other)


def test_whitened_output_has_the_same_layers_in_other_coordinates(distill: ModuleType) -> None:
    from distillation.whitening import POWER, whiten_output

    torch.manual_seed(0)
    student = distill.ViTForImageClassification(distill.ViTConfig(**distill.STUDENT)).eval().requires_grad_(False)
    for norm in (module for module in student.modules() if isinstance(module, torch.nn.LayerNorm)):
        norm.weight.uniform_(0.5, 2.0)
        norm.bias.uniform_(-1.0, 1.0)
    student.double()
    pixels = torch.randn(200, 3, 8, 8, dtype=torch.double)

    def states() -> list[torch.Tensor]:
        return list(student.vit(pixels, output_hidden_states=True).hidden_states)

    before = states()
    whiten_output(student, pixels)
    after = states()
    products = [[state[0] @ state[0].T for state in found] for found in (before, after)]
    assert all(torch.allclose(old, new, atol=1e-10) for old, new in zip(*products, strict=True))  # a rotation only
    assert not torch.allclose(before[-1], after[-1], atol=0.1)
    tokens = student.vit(pixels).last_hidden_state[:, 0]
    assert tokens.mean(0).abs().max() < 1e-8  # rounding, of which weak directions are scaled up
    assert tokens.square().mean().item() == pytest.approx(1)
    # No direction is weaker than the variances that were there, to the power that is left of them.
    normed = torch.nn.functional.layer_norm(before[-1][:, 0], (12,))
    old, new = (torch.linalg.eigvalsh(torch.cov(x.T))[1:] for x in (normed, tokens))
    assert new.max() / new.min() < 2 * (old.max() / old.min()) ** (1 - POWER)


def test_source_without_training_images_is_refused(distill: ModuleType, tmp_path: Path) -> None:
    save_classes(tmp_path / "data" / "test", {"a": 2})
    with pytest.raises(SystemExit, match="no training images"):
        distill.Source(tmp_path / "data")
