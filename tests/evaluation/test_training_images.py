"""Scores on images that were learned from: by the task itself, or by a task that it extends."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from squares import save_squares

import memoro
from memoro.backbones import Backbone
from memoro.evaluation.calibrate import calibrate
from memoro.tasks.task import Task

QUICK: dict[str, Any] = {"lr": 0.01, "epochs": 1, "image_size": 20, "batch_size": 8, "workers": 0, "quiet": True}


@pytest.fixture
def leaky(tmp_path: Path) -> Path:
    """Half of the test images are in train too."""
    root = save_squares(tmp_path / "leaky" / "train", {"red": 10, "blue": 10}).parent
    save_squares(root / "test", {"red": 4, "blue": 4}, first=500)
    for colour in ("red", "blue"):
        for path in sorted((root / "train" / colour).iterdir())[:4]:
            shutil.copy(path, root / "test" / colour / f"copy-{path.name}")
    return root


def train(data: Path, backbone: Backbone, **more: Any) -> Any:
    return memoro.train(data, backbone=backbone, **{**QUICK, **more})


@pytest.mark.parametrize("rates", [0.01, (0.01, 0.02)])
def test_a_training_is_scored_without_its_own_images(leaky: Path, backbone: Backbone, rates: Any) -> None:
    result = train(leaky, backbone, regime="head", lr=rates)
    assert (result.metrics["split"], result.metrics["images"]) == ("test", 8)
    assert any("8 images of test are in train too" in note and "scored without these" in note for note in result.notes)
    assert result.task.spec.metrics["images"] == 8
    clean = leaky.with_name("clean")
    shutil.copytree(leaky, clean)
    for path in clean.rglob("copy-*"):
        path.unlink()
    again = train(clean, backbone, regime="head", lr=rates)
    assert again.metrics == result.metrics


def test_a_test_split_of_training_images_only_is_none(leaky: Path, backbone: Backbone) -> None:
    for path in (leaky / "test").rglob("5*.png"):
        path.unlink()
    assert train(leaky, backbone).metrics["split"] == "4 folds"
    solved = memoro.train(leaky, backbone=backbone, regime="readout", image_size=20, workers=0, quiet=True)
    assert solved.metrics["split"] == "leave-one-out"
    assert train(leaky, backbone, regime="side").metrics["split"] == "val"
    told: list[str] = []
    train(leaky, backbone, regime="side", val_fraction=0, log=told.append)
    assert any("there is no estimate of its accuracy" in text for text in told)


def test_an_evaluation_leaves_out_what_was_learned(leaky: Path, backbone: Backbone, tmp_path: Path) -> None:
    task, told = train(leaky, backbone, regime="head").task, list[str]()
    found = memoro.evaluate(backbone, task, leaky, workers=0, log=told.append)["leaky"]
    assert (found["images"], found["learned_images"]) == (8, 8)
    assert any("8 images of leaky:test, such as" in text and "were trained on" in text for text in told)
    page = memoro.evaluate(backbone, task, leaky, workers=0, report=tmp_path / "report.html")["leaky"]
    assert page == found
    for path in leaky.rglob("copy-*"):
        path.unlink()
    clean = memoro.evaluate(backbone, task, leaky, workers=0)["leaky"]
    assert clean == {name: value for name, value in found.items() if name != "learned_images"}


def test_an_evaluation_leaves_out_copies_of_more_images_than_a_file_records(
    leaky: Path, backbone: Backbone, tmp_path: Path
) -> None:
    save_squares(leaky / "train", {"red": 140, "blue": 140}, first=1000)
    task, told = train(leaky, backbone, regime="head", val_fraction=0).task, list[str]()
    assert task.spec.training["images"] == 300
    for more in ({}, {"report": tmp_path / "report.html"}):
        found = memoro.evaluate(backbone, task, leaky, workers=0, log=told.append, **more)["leaky"]
        assert (found["images"], found["learned_images"]) == (8, 8)
        assert any("8 images of leaky:test, such as" in text and "were trained on" in text for text in told)
        assert not any("overestimates" in text for text in told)
    # Copies of images that are not in train of this set: which ones is not known.
    told.clear()
    for colour in ("red", "blue"):
        shutil.rmtree(leaky / "train" / colour)
    save_squares(leaky / "train", {"red": 4, "blue": 4}, first=2000)
    found = memoro.evaluate(backbone, task, leaky, workers=0, log=told.append)["leaky"]
    assert found["images"] == 16
    assert any("overestimates accuracy on new images" in text for text in told)


@pytest.fixture
def family(tmp_path: Path, backbone: Backbone) -> dict[str, Task]:
    """A grandparent that learned from images which the others never saw."""
    tasks: dict[str, Task] = {}
    save_squares(tmp_path / "old", {"red": 12, "blue": 12}, first=100)
    save_squares(tmp_path / "middle", {"red": 12, "blue": 12}, first=300)
    save_squares(tmp_path / "new", {"red": 12, "blue": 12}, first=600)
    for name, parents in (("old", []), ("middle", ["old"]), ("new", ["middle"])):
        made = train(tmp_path / name, backbone, regime="memory", cells=1, extends=[tasks[one] for one in parents])
        tasks[name] = made.task
    return tasks


def test_a_child_is_evaluated_with_what_its_ancestors_learned(
    family: dict[str, Task], backbone: Backbone, tmp_path: Path
) -> None:
    told: list[str] = []
    linked = list(family.values())
    for task in linked:
        memoro.save_task(task, tmp_path / f"{task.name}.safetensors")
    loaded = [memoro.load_task(tmp_path / f"{name}.safetensors") for name in family]
    for tasks in (linked, loaded):
        told.clear()
        memoro.evaluate(backbone, tasks, {"new": tmp_path / "old"}, workers=0, log=told.append)
        [warning] = [text for text in told if text.startswith("warning: old has no test split")]
        assert "new extends old, and old was trained on some of these images, so this overestimates" in warning
    save_squares(tmp_path / "other" / "test", {"red": 4, "blue": 4}, first=900)
    told.clear()
    found = memoro.evaluate(backbone, loaded, {"new": tmp_path / "other"}, workers=0, log=told.append)["new"]
    assert not any("trained on" in text for text in told)
    assert "learned_images" not in found
    for path in sorted((tmp_path / "old" / "red").iterdir()):
        shutil.copy(path, tmp_path / "other" / "test" / "red")
    mixed = memoro.evaluate(backbone, loaded, {"new": tmp_path / "other"}, workers=0)["new"]
    assert mixed["learned_images"] + mixed["images"] == 20
    assert mixed["learned_images"] >= 8  # the others of the twelve were held out


def test_a_child_is_not_calibrated_on_what_its_ancestors_learned(
    family: dict[str, Task], backbone: Backbone, tmp_path: Path
) -> None:
    told: list[str] = []
    before = family["new"].spec.calibration
    older = [family["middle"], family["old"]]
    calibrate(backbone, family["new"], tmp_path / "old", parents=older, workers=0, log=told.append)
    assert any("new extends old, and old was trained on some of these images" in text for text in told)
    assert family["new"].spec.calibration == before


def test_a_training_says_that_ancestors_saw_its_held_out_images(backbone: Backbone, tmp_path: Path) -> None:
    save_squares(tmp_path / "set", {"red": 40, "blue": 40})
    parent = train(tmp_path / "set", backbone, task="parent", regime="memory", cells=1, val_fraction=0).task
    for more in ({}, {"lr": (0.01, 0.02)}):  # a validation split, folds
        told: list[str] = []
        how: dict[str, Any] = {"regime": "memory", "cells": 1, "task": "child", "extends": [parent], **more}
        child = train(tmp_path / "set", backbone, log=told.append, **how)
        assert any("child extends parent, and parent was trained on some of these images" in text for text in told)
        assert child.task.spec.calibration is None
        assert "an earlier training may have seen these images" in child.task.spec.training["calibration"]
    told.clear()
    how["lr"] = (0.01, 0.02)
    child = train(
        save_squares(tmp_path / "fresh", {"red": 40, "blue": 40}, first=700), backbone, log=told.append, **how
    )
    assert not any("extends parent" in text for text in told)
    assert child.task.spec.calibration is not None
