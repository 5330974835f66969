"""scripts/probe.py from end to end, on backbones and sets of next to no size."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from squares import save_squares
from transformers import ViTConfig, ViTForImageClassification

SCRIPTS = Path(__file__).parents[2] / "scripts"
SIZES = {"hidden_size": 12, "num_attention_heads": 1, "num_hidden_layers": 2, "intermediate_size": 24, "patch_size": 4}

pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="the scripts are only in the repository")


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module("probe")
    monkeypatch.setattr(script, "RATES", (1.0,))
    monkeypatch.setattr(script, "FOLDS", 2)
    monkeypatch.setattr(script, "speeds", lambda loaded: dict.fromkeys(loaded, 1.0))  # tests do not time anything
    return script


def save_backbone(folder: Path, seed: int, labels: list[str]) -> None:
    torch.manual_seed(seed)
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: at for at, label in enumerate(labels)}}
    ViTForImageClassification(ViTConfig(**SIZES, image_size=12, **names)).save_pretrained(folder)


def save_set(folder: Path, first: int) -> None:
    save_squares(folder / "train", first=first)
    save_squares(folder / "test", {"red": 3, "green": 3, "blue": 4}, first=first + 500)


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]


def test_seen_and_unseen_sets_and_classifiers(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["green", "red", "blue"]  # not in the order of the folders
    save_backbone(tmp_path / "student", 0, labels)
    save_backbone(tmp_path / "teacher", 1, labels)
    for number, name in enumerate(("one", "other")):
        save_set(tmp_path / name, 1000 * number)
    backbones = ["--backbone", "student", "random", "teacher@16", "--epochs", "4", "--out", "tiny.md"]

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["probe.py", *backbones, *arguments])
        probe.main()
        return Path("tiny.md").read_text()

    def refuse(*arguments: object) -> None:
        raise AssertionError("what was measured is not measured again")

    text = run("--", "one")
    share = "share of teacher@16"
    assert first_cells(text) == ["set", "---", "one", "**mean of 1**", share]
    assert list(json.loads(Path("tiny.json").read_text())["backbones"]) == ["student", "random", "teacher@16"]
    text = run("--unseen", "other.zip", "--classifier", "one", "--", "one", "other")
    assert first_cells(text)[2:6] == ["*seen in distillation*", "one", "**mean of 1**", share]
    assert first_cells(text)[6:] == ["*unseen*", "other", "**mean of 1**", share]
    assert [line.split("|")[-2].strip() for line in text.splitlines() if share in line] == ["100%", "100%"]
    results = json.loads(Path("tiny.json").read_text())
    classifier = results["classifier"]["one"]
    assert (classifier["classes"], classifier["train"], classifier["test"]) == (3, 24, 10)
    assert classifier["backbones"] == ["student", "teacher@16"]
    assert classifier["teacher"] > 0.8, "colours are easy"
    assert f"student's own {classifier['student']:.3f}" in text
    with monkeypatch.context() as patch:
        patch.setattr(probe, "probe", refuse)
        patch.setattr(probe, "compare_classifiers", refuse)
        assert run("--classifier", "one", "--", "one", "other") == text
    with pytest.raises(SystemExit):
        run("--unseen", "nowhere", "--", "one")
    assert "--unseen nowhere: that is none of the sets" in capsys.readouterr().err


def test_the_classifier_is_measured_by_class_names(probe: ModuleType, tmp_path: Path) -> None:
    """A student that always answers its second class has the accuracy of that class, whatever the folders' order."""
    labels = ["green", "blue", "red"]
    save_backbone(tmp_path / "student", 0, labels)
    save_set(tmp_path / "one", 0)
    model = ViTForImageClassification.from_pretrained(tmp_path / "student")
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
    model.save_pretrained(tmp_path / "student")
    student = probe.load(str(tmp_path / "student"))
    cache = probe.Cache(tmp_path / "features")
    found = probe.compare_classifiers(student, student, str(tmp_path / "one"), cache)
    assert found["student"] == pytest.approx(0.4), "4 of 10 test images are blue"


def test_an_edited_report_is_not_overwritten(probe: ModuleType, tmp_path: Path) -> None:
    reports = importlib.import_module("reports")
    out = tmp_path / "found.md"
    for figure in (1, 2):
        assert reports.write_report(out, {"figure": figure}, [f"figure {figure}"]) == out
    assert out.read_text().startswith("figure 2")
    out.write_text("my words about figure 2\n")
    beside = reports.write_report(out, {"figure": 3}, ["figure 3"])
    assert beside == tmp_path / "found.new.md"
    assert out.read_text() == "my words about figure 2\n"
    assert json.loads((tmp_path / "found.json").read_text()) == {"figure": 3}
