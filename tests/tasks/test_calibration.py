"""Calibration: temperatures, thresholds and intervals, what they are measured on, and `memoro calibrate`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_task
from PIL import Image
from trust import colours, run
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone
from memoro.cli import app
from memoro.evaluation.calibrate import calibrate
from memoro.evaluation.metrics import measure, measure_task
from memoro.heads import HeadKind
from memoro.tasks.calibration import fit_calibration
from memoro.training.finish import add_calibration

__all__ = ["colours"]  # fixtures


def test_a_temperature_corrects_overconfidence() -> None:
    generator = torch.Generator().manual_seed(0)
    true = 2 * torch.randn(2000, 4, generator=generator)
    targets = torch.multinomial(true.softmax(dim=-1), 1, generator=generator)[:, 0]
    logits, labels = 3 * true, list("abcd")
    found = fit_calibration("softmax", logits[:1000], targets[:1000], "validation")
    assert found is not None
    assert found.temperature[0] == pytest.approx(3, rel=0.15)
    before, after = (
        measure("softmax", labels, out, targets[1000:]) for out in (logits[1000:], found.apply(logits[1000:]))
    )
    assert after["calibration_error"] < before["calibration_error"] / 2
    assert after["accuracy"] == before["accuracy"]
    assert fit_calibration("softmax", logits[:19], targets[:19], "validation") is None


def test_a_set_without_mistakes_gives_a_bounded_temperature() -> None:
    targets = torch.arange(40) % 2
    found = fit_calibration("softmax", 4 * torch.eye(2)[targets], targets, "validation")
    assert found is not None
    assert 0.2 < found.temperature[0] < 1


def test_each_label_has_a_temperature_and_a_threshold() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(3000, 3, generator=generator) * 2 - torch.tensor([3.0, 0.0, 0.0])
    targets = (torch.rand(3000, 3, generator=generator) < true.sigmoid()).float()
    targets[:, 2] = 0  # never seen: nothing can be fitted for it
    found = fit_calibration("multilabel", true * torch.tensor([2.0, 0.5, 1.0]), targets, "validation")
    assert found is not None
    assert found.temperature[:2] == pytest.approx((2.0, 0.5), rel=0.2)
    assert found.thresholds[0] < 0.45, "a rare label is worth giving at a lower probability"
    assert found.thresholds[2] == 0.5
    chosen = found.decide(true * torch.tensor([2.0, 0.5, 1.0])) >= 0
    by_hand = found.apply(true * torch.tensor([2.0, 0.5, 1.0])).sigmoid() >= torch.tensor(found.thresholds)
    assert float((chosen == by_hand).double().mean()) > 0.999


def test_an_interval_covers_new_images() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = 10 * torch.randn(4000, 2, generator=generator)
    values = targets + torch.randn(4000, 2, generator=generator) * torch.tensor([1.0, 5.0])
    found = fit_calibration("regression", values[:2000], targets[:2000], "4 folds")
    assert found is not None
    covered = ((values - targets)[2000:].abs() <= torch.tensor(found.spread)).double().mean(dim=0)
    assert covered.tolist() == pytest.approx([0.9, 0.9], abs=0.02)


def test_the_record_says_why_there_is_no_calibration(backbone: Backbone) -> None:
    task = random_task(backbone, "pets")
    targets = torch.arange(30) % 3
    for held_out, words in (
        (None, "none: fewer than 20 images were held out"),
        ((torch.zeros(19, 3), targets[:19]), "none: fewer than 20 images were held out"),
        ((torch.full((30, 3), torch.inf), targets), "none: not all logits are finite"),
        ((torch.zeros(30, 3), targets), "30 held-out images (validation)"),
    ):
        add_calibration(task, held_out, "validation")
        assert task.spec.training["calibration"] == words


@pytest.mark.parametrize("kind", ["softmax", "multilabel"])
def test_a_calibration_is_not_judged_by_what_it_was_fitted_on(backbone: Backbone, kind: HeadKind) -> None:
    """Labels that have nothing to do with the answers: thresholds that suit them find nothing in new images."""
    generator, labels = torch.Generator().manual_seed(0), list("abcdef")
    logits = 3 * torch.randn(60, 6, generator=generator)
    yes = (torch.rand(60, 6, generator=generator) < 0.5).float()
    targets = yes if kind == "multilabel" else torch.arange(60) % 6
    task = random_task(backbone, "noise", labels=labels, head=kind)
    add_calibration(task, (logits, targets), "validation")
    assert task.spec.calibration is not None
    seen, unseen = (measure_task(task, logits, targets, fitted_on=fitted_on) for fitted_on in (False, True))
    changed = {name for name in seen if seen[name] != unseen[name]}
    if kind == "multilabel":
        assert changed <= {"f1", "exact_match", "label_accuracy"}
        assert unseen["f1"] < seen["f1"] - 0.02
    else:
        assert changed == {"calibration_error"}
    few = measure_task(task, logits[:24], targets[:24], fitted_on=True)
    assert few == measure(kind, labels, logits[:24], targets[:24]), "too few remain: not calibrated"


def test_without_a_test_split_a_calibration_is_judged_on_other_images(colours: Path, tmp_path: Path) -> None:
    quick: dict[str, Any] = {"epochs": 2, "workers": 0, "quiet": True, "image_size": 20, "backbone": colours / "vit"}
    shutil.copytree(colours / "own" / "train", tmp_path / "folds" / "train")
    shutil.copytree(tmp_path / "folds", tmp_path / "val")
    shutil.copytree(colours / "own" / "train", tmp_path / "val" / "val")
    for data, rates in ((tmp_path / "val", 0.1), (tmp_path / "folds", [0.05, 0.1])):
        done = memoro.train(data, task="own", lr=rates, **quick)
        assert done.logits is not None
        assert done.targets is not None
        found = measure_task(done.task, done.logits, done.targets, fitted_on=True)
        assert {name: done.metrics[name] for name in found} == found
        seen = measure_task(done.task, done.logits, done.targets)
        assert {name for name in found if seen[name] != found[name]} == {"calibration_error"}


def test_metrics_after_training_are_those_of_eval(colours: Path, tmp_path: Path) -> None:
    """After a training, in its record and in its report: all calibrated."""
    quick: dict[str, Any] = {"epochs": 2, "workers": 0, "quiet": True, "image_size": 20, "folder": tmp_path / "run"}
    backbone = memoro.load_backbone(str(colours / "vit"))
    shutil.copytree(colours / "own" / "train", tmp_path / "set" / "train")
    shutil.copytree(colours / "own" / "test", tmp_path / "set" / "test")
    whole, few = colours / "own", tmp_path / "set"
    solved = {name: value for name, value in quick.items() if name != "epochs"}
    for data, source, how in (
        (whole, "validation", {"lr": 0.1, **quick}),
        (few, "4 folds", {"lr": 0.1, **quick}),
        (few, "4 folds", {"lr": [0.05, 0.1], "regime": "side", **quick}),
        (few, "leave-one-out", {"regime": "readout", **solved}),
        (whole, "leave-one-out", {"regime": "readout", **solved}),
    ):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        done = memoro.train(data, backbone=backbone, task="own", **how)
        assert done.task.spec.calibration is not None
        assert done.task.spec.calibration.source == source
        found = memoro.evaluate(backbone, [done.task], data, workers=0)["own"]
        assert found["calibration_error"] != found["calibration_error_before"]
        for key in ("accuracy", "calibration_error", "calibration_error_before", "loss"):
            assert done.metrics[key] == pytest.approx(found[key], abs=1e-5), "float32, in company"
            assert done.task.spec.metrics[key] == done.metrics[key]


def test_calibrate_adds_what_an_old_file_lacks(colours: Path, tmp_path: Path) -> None:
    backbone = memoro.load_backbone(str(colours / "vit"))
    task = random_task(backbone, "own", labels=["blue", "red"])
    task.update_spec(preprocessing=backbone.preprocessing, training={"data": "own"})
    path = memoro.save_task(task, tmp_path / "own.safetensors")
    assert "memoro calibrate" in run("inspect", path)
    said = run("calibrate", path, colours / "own", "-b", colours / "vit")
    assert "they are the test split: from now on, the calibration error measured on it is too low" in said
    found = memoro.load_task(path)
    assert found.content_hash() == task.content_hash()
    assert found.spec.calibration is not None
    test = len(list((colours / "own" / "test").rglob("*.png")))  # as `eval` uses
    assert (found.spec.calibration.images, found.spec.calibration.source) == (test, "own")
    assert found.spec.familiarity is not None
    assert found.spec.familiarity.images == 64 + test
    assert found.spec.training["calibration"] == f"{test} held-out images (own)"
    assert found.spec.training["familiarity"] == f"{64 + test} images of own, out of fold"
    assert "memoro calibrate" not in run("inspect", path)
    shutil.move(colours / "own" / "test", tmp_path / "test")
    try:
        said = run("calibrate", path, colours / "own", "-b", colours / "vit")
    finally:
        shutil.move(tmp_path / "test", colours / "own" / "test")
    assert "test split" not in said
    again = memoro.load_task(path).spec.calibration
    assert again is not None
    assert again.images == 24  # the validation split


def test_calibrate_recognises_the_images_of_the_training(colours: Path, tmp_path: Path) -> None:
    """By their content: names say nothing."""
    quick: dict[str, Any] = {"epochs": 1, "workers": 0, "quiet": True, "lr": 0.1, "image_size": 20}
    backbone = memoro.load_backbone(str(colours / "vit"))
    shutil.copytree(colours / "own" / "train", tmp_path / "2024" / "pets")
    task = memoro.train(tmp_path / "2024" / "pets", backbone=backbone, val_fraction=0, regime="side", **quick).task
    assert task.spec.calibration is None
    assert (task.spec.training["data"], len(task.spec.training["image_sketch"])) == ("pets", 40)

    def told(data: Path) -> str:
        task.update_spec(calibration=None)
        said, before = list[str](), task.spec
        calibrate(backbone, task, data, workers=0, log=said.append)
        assert (task.spec.calibration is None) == any("nothing is changed" in text for text in said)
        assert (task.spec is before) == (task.spec.calibration is None), "the familiarity stays, too"
        return " ".join(said)

    assert "trained on some of these images" in told(shutil.copytree(tmp_path / "2024" / "pets", tmp_path / "copy"))
    new = shutil.copytree(colours / "own" / "val", tmp_path / "2025" / "pets")
    said = told(new)
    assert "calibration: from 24 images" in said
    # Of 24 images, 18 are left to judge the others by: too few to fit a calibration, so nothing is claimed.
    assert "calibration error" not in said
    assert task.spec.training["calibration"] == "24 held-out images (pets)"
    shutil.copy(tmp_path / "2024" / "pets" / "red" / "0.png", new / "red" / "seen.png")
    assert "trained on some of these images" in told(new)
    task.update_spec(training={"data": "pets"})  # as of an older version
    assert "rename the folder or file" in told(new)
    newer = new.rename(tmp_path / "2025" / "newer")
    assert "calibration: from 25 images" in told(newer)
    for seed, label in enumerate(("red", "blue")):
        for number in range(8):
            pixels = np.random.default_rng((seed, number)).integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(newer / label / f"new-{number}.png")
    assert re.search(r"calibration error: 0\.\d+ before, 0\.\d+ after \(each quarter", told(newer))


def test_calibrate_that_changes_nothing_writes_nothing(colours: Path, tmp_path: Path) -> None:
    backbone = memoro.load_backbone(str(colours / "vit"))
    path = memoro.save_task(random_task(backbone, "own", labels=["blue", "red"]), tmp_path / "own.safetensors")
    for label in ("blue", "red"):
        (tmp_path / "few" / label).mkdir(parents=True)
        for number in range(3):
            pixels = np.random.default_rng((len(label), number)).integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "few" / label / f"{number}.png")
    done = CliRunner().invoke(app, ["calibrate", str(path), str(tmp_path / "few"), "-b", str(colours / "vit")])
    assert done.exit_code == 1
    assert "written to" not in done.output
    assert not (tmp_path / "own.safetensors.1").exists()
