"""Regime `joint`: a token that is trained, and a read-out that is solved, as one task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_task
from families import CASES
from random_tasks import join_members, members_of
from safetensors import safe_open
from small_training import LABELS, QUICK, double
from solved import SHARE, SOLVED, logits, pixels_of, read
from squares import save_squares
from torch import Tensor
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone
from memoro.cli import app
from memoro.data import ImageSet, Splits, load_data
from memoro.demo.drawings import draw_letters
from memoro.errors import TrainingError
from memoro.regimes.start import regime_of
from memoro.tasks.task import Task, new_task, split_members
from memoro.training import fit

__all__ = ["double"]  # a fixture

SHORT: dict[str, Any] = {"epochs": 2, "batch_size": 8, "lr": 0.003, **QUICK}
SIZES: dict[str, Any] = {"cells": 1, "rank": 2, "from_layer": 3}


@pytest.fixture
def splits(tmp_path: Path) -> Splits:
    root = save_squares(tmp_path / "squares")
    return load_data(root, labels=LABELS, val_fraction=0, workers=0, quiet=True)


@pytest.fixture
def pixels(backbone: Backbone, splits: Splits) -> Tensor:
    assert isinstance(splits.train, ImageSet)
    return pixels_of(backbone, splits.train)


def trained(backbone: Backbone, splits: Splits, regime: str, *, name: str = "t", **options: Any) -> Task:
    task = new_task(backbone, name, splits.labels, seed=1, **{**SIZES, **options})
    fit(backbone, task, splits, regime=regime, **SHORT)
    return task


def test_a_joint_task_answers_the_mean_of_both(backbone: Backbone, splits: Splits, pixels: Tensor) -> None:
    side, readout, joint = (trained(backbone, splits, regime) for regime in ("side", "readout", "joint"))
    assert (side.spec.readout, readout.spec.readout.share, joint.spec.readout.share) == (None, 1, SHARE)  # type: ignore[union-attr]
    assert 0 < SHARE < 1
    own, solved, both = (logits(backbone, task, pixels=pixels)["t"] for task in (side, readout, joint))
    torch.testing.assert_close(solved, read(backbone, readout, pixels), rtol=0, atol=1e-5)
    torch.testing.assert_close(both - read(backbone, joint, pixels), (1 - SHARE) * own, rtol=0, atol=1e-4)
    # Weights of both are rounded to float16, each in its own share.
    scale = float(solved.abs().max())
    torch.testing.assert_close(both, torch.lerp(own, solved, SHARE), rtol=0, atol=2e-3 * scale)
    assert (both - own).abs().max() > 0.1
    assert (both - solved).abs().max() > 0.1
    facts = [task.spec.training for task in (side, readout, joint)]
    assert [one["regime"] for one in facts] == ["side", "readout", "joint"]
    assert facts[2]["trained_parameters"] == facts[0]["trained_parameters"] + facts[1]["trained_parameters"]


def test_composed_with_others_it_answers_as_alone(double: Backbone, splits: Splits) -> None:
    assert isinstance(splits.train, ImageSet)
    pixels = pixels_of(double, splits.train)
    parent = random_task(double, "parent", cells=2, from_layer=1)
    child = trained(double, splits, "joint", name="child", extends=[parent])
    alone = trained(double, splits, "joint", name="alone")
    readout = trained(double, splits, "readout", name="readout", cells=0, rank=0, from_layer=double.depth)
    together = logits(double, random_task(double, "other"), readout, child, parent, alone, pixels=pixels)
    assert torch.equal(together["base"], double.original(pixels))
    for task in (alone, readout):
        assert (together[task.name] - logits(double, task, pixels=pixels)[task.name]).abs().max() < 1e-10
    assert (together["child"] - logits(double, parent, child, pixels=pixels)["child"]).abs().max() < 1e-10
    assert (together["child"] - together["alone"]).abs().max() > 1e-3, "it reads its parent"
    model = memoro.compose(double, [readout, child, parent, alone])
    with torch.no_grad():
        assert (model(pixels, ["alone"])["alone"] - together["alone"]).abs().max() < 1e-10
        assert (model.alone("child")(pixels)["child"] - together["child"]).abs().max() < 1e-10


def test_files_keep_both(backbone: Backbone, splits: Splits, pixels: Tensor, tmp_path: Path) -> None:
    task = trained(backbone, splits, "joint")
    first = memoro.save_task(task, tmp_path / "first.safetensors")
    loaded = memoro.load_task(first)
    second = memoro.save_task(loaded, tmp_path / "second.safetensors")
    assert first.read_bytes() == second.read_bytes()
    assert loaded.spec.readout == task.spec.readout
    assert loaded.content_hash() == task.content_hash()
    said, again = (logits(backbone, one, pixels=pixels)["t"] for one in (task, loaded))
    torch.testing.assert_close(said, again, rtol=0, atol=1e-5)  # sums are taken in another order in mapped memory
    with safe_open(first, "pt") as file:
        assert json.loads(file.metadata()["memoro"])["format"] == 4
        assert file.get_tensor("0.readout.weight").dtype == torch.float16
    loaded.detach_readout()
    assert loaded.content_hash() != task.content_hash()
    parent = memoro.save_task(task, tmp_path / "parent.safetensors")
    child = memoro.train(splits, backbone=backbone, task="child", extends=parent, **{**SHORT, "epochs": 1}).task
    assert child.parents[0].content == task.content_hash()


def test_without_its_read_out_the_head_is_what_it_was(backbone: Backbone, splits: Splits, pixels: Tensor) -> None:
    side, joint = trained(backbone, splits, "side"), trained(backbone, splits, "joint")
    assert not torch.allclose(joint.head.weight, side.head.weight, rtol=1e-2)
    joint.detach_readout()
    torch.testing.assert_close(joint.head.weight, side.head.weight, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        logits(backbone, joint, pixels=pixels)["t"], logits(backbone, side, pixels=pixels)["t"], rtol=0, atol=1e-4
    )


def test_one_task_is_fitted_in_one_regime_after_another(backbone: Backbone, splits: Splits, pixels: Tensor) -> None:
    task = trained(backbone, splits, "joint")
    head = task.head.weight.detach() / (1 - SHARE)
    assert regime_of(task, None).name == "joint"
    still = {**SHORT, "lr": 1e-9}
    fit(backbone, task, splits, regime="side", **still)
    assert (task.spec.readout, task.readout, regime_of(task, None).name) == (None, None, "side")
    torch.testing.assert_close(task.head.weight, head, rtol=1e-4, atol=1e-6)
    fit(backbone, task, splits, regime="joint", **still)
    fit(backbone, task, splits, **still)  # a second time: the shares are not multiplied
    torch.testing.assert_close(task.head.weight / (1 - SHARE), head, rtol=1e-4, atol=1e-6)
    assert task.spec.training["regime"] == "joint"
    fit(backbone, task, splits, regime="readout", image_size=20, workers=0, quiet=True)
    assert (regime_of(task, None).name, bool(task.head.weight.any())) == ("readout", False)
    solved = logits(backbone, task, pixels=pixels)["t"]
    torch.testing.assert_close(solved, read(backbone, task, pixels), rtol=0, atol=1e-5)
    fit(backbone, task, splits, regime="side", **SHORT)
    assert task.spec.readout is None
    assert task.head.weight.any()


def test_folds_score_both_without_the_images_that_they_hold_out(backbone: Backbone, splits: Splits) -> None:
    result = memoro.train(splits, backbone=backbone, **SHORT)
    task = result.task
    assert (result.metrics["split"], result.metrics["images"]) == ("4 folds", 24)
    assert task.spec.calibration is not None
    assert (task.spec.calibration.source, task.spec.calibration.images) == ("4 folds", 24)
    assert any("the task is measured by 4-fold cross-validation" in note for note in result.notes)
    assert result.targets is not None
    assert result.logits is not None
    assert isinstance(result.images, ImageSet)
    seen = logits(backbone, task, pixels=pixels_of(backbone, result.images))[task.name]
    assert not torch.allclose(seen, result.logits, atol=1e-2)
    cut = memoro.train(splits, backbone=backbone, folds=0, val_fraction=0.25, **SHORT)
    assert (cut.metrics["split"], cut.metrics["images"]) == ("val", 6)
    assert isinstance(cut.images, ImageSet)
    said = logits(backbone, cut.task, pixels=pixels_of(backbone, cut.images))[cut.task.name]
    torch.testing.assert_close(said, cut.logits, rtol=0, atol=2e-2)  # features are read in float16


# ------------------------------------------------------------------------------------------------------ starting from


def test_a_joint_task_gains_a_class(backbone: Backbone, splits: Splits, tmp_path: Path) -> None:
    old = trained(backbone, splits, "joint", name="old")
    more = save_squares(tmp_path / "more", {"blue": 6, "green": 6, "grey": 6, "red": 6}, first=300)
    start: dict[str, Any] = {"backbone": backbone, "start_from": old, **SHORT}
    new = memoro.train(more, **{**start, "lr": 1e-9}).task
    assert (new.labels, new.spec.training["regime"]) == (["blue", "green", "grey", "red"], "joint")
    assert new.spec.readout == old.spec.readout
    known = [new.labels.index(label) for label in old.labels]
    torch.testing.assert_close(new.head.weight[known], old.head.weight, rtol=1e-4, atol=1e-6)
    assert new.head.weight[2].abs().max() <= (1 - SHARE) / 24**0.5 + 1e-6, "new rows start as in a new task"
    with pytest.raises(TrainingError, match="regime 'readout' has no low-rank weights, so rank 2 does not apply"):
        memoro.train(more, backbone=backbone, start_from=old, **SOLVED)


def test_a_read_out_gains_images_and_a_class(backbone: Backbone, splits: Splits, tmp_path: Path) -> None:
    old = memoro.train(splits, backbone=backbone, **SOLVED).task
    more = save_squares(tmp_path / "more", {"blue": 6, "green": 6, "grey": 6, "red": 6}, first=300)
    how: dict[str, Any] = {name: value for name, value in SOLVED.items() if name != "regime"}
    new = memoro.train(more, backbone=backbone, start_from=old, **how)
    assert (new.task.labels, new.task.spec.training["regime"]) == (["blue", "green", "grey", "red"], "readout")
    assert new.metrics["accuracy"] > 0.9
    assert new.task.spec.training["history"][0]["content"] == old.content_hash()
    assert new.task.spec.calibration is None, "some of its images may be those that the old task was made from"
    fresh = memoro.train(more, backbone=backbone, task=old.name, **SOLVED).task
    assert fresh.content_hash() == new.task.content_hash(), "nothing of the old one is left"
    assert fresh.spec.calibration is not None


@pytest.mark.parametrize("regime", [None, "joint"])
def test_an_ensemble_without_a_read_out_is_trained_further(
    backbone: Backbone, splits: Splits, pixels: Tensor, regime: str | None
) -> None:
    old = join_members(members_of(backbone, labels=LABELS))
    how = {**SHORT, "epochs": 1, "lr": 1e-9}
    new = memoro.train(splits, backbone=backbone, start_from=old, regime=regime, **how).task
    assert (new.members, new.spec.training["regime"]) == (1, regime or "side")
    [before], after = split_members(old)[:1], logits(backbone, new, pixels=pixels)["three"]
    alone = 3 * logits(backbone, before, pixels=pixels)["three"]  # the head of an ensemble is divided by its members
    expected = alone if regime is None else (1 - SHARE) * alone + read(backbone, new, pixels)
    torch.testing.assert_close(after, expected, rtol=0, atol=2e-3)
    assert new.spec.training["trained_parameters"] > 0


# --------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    CASES[0].model().save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [str(one) for one in arguments])
        assert done.exit_code == code, (done.output, done.exception)
        return done if code else json.loads(done.stdout)

    return run


def test_the_default_from_drawn_images_to_a_file(shell: Callable[..., Any], tmp_path: Path) -> None:
    table = draw_letters(tmp_path / "letters", 60, seed=1)
    common = ("-b", "vit", "--image-size", 20, "--set", "workers=0", "--json")
    record = shell("train", table, "--label-column", "case", "--task", "case", *common, "--epochs", 2)
    assert (record["training"]["regime"], record["metrics"]["split"]) == ("joint", "test")
    task = memoro.load_task(record["file"])
    assert (task.labels, task.members, task.rank) == (["lower", "upper"], 1, 4)
    assert task.spec.readout is not None
    assert task.spec.readout.share == SHARE
    assert task.spec.calibration is not None
    assert task.spec.familiarity is not None
    assert Path(record["folder"], "report.html").is_file()
    said = shell("predict", tmp_path / "letters" / "0000.png", "-b", "vit", "-t", record["file"], "--format", "json")
    assert next(iter(said.values()))["case"]["label"] in task.labels
    figures = shell(
        "eval", table, "--label-column", "case", "-b", "vit", "-t", record["file"], "--set", "workers=0", "--json"
    )
    assert figures["case"]["accuracy"] == record["metrics"]["accuracy"]


def test_a_read_out_from_the_shell(shell: Callable[..., Any], tmp_path: Path, own_cache: Path) -> None:
    save_squares(tmp_path / "set", {"blue": 9, "green": 6, "red": 9})
    solved = ("train", "set", "--regime", "readout", "-b", "vit", "--image-size", 20, "--set", "workers=0", "--json")
    record = shell(*solved, "--set", "cache=false")
    assert not own_cache.exists()
    assert (record["metrics"]["split"], record["metrics"]["accuracy"]) == ("leave-one-out", 1.0)
    assert memoro.load_task(record["file"]).spec.readout is not None
    assert "penalty" in record["training"]
    for options, named in (
        (("--lr", 0.1, "--epochs", 3), "--lr, --epochs"),
        (("--rank", 4, "--from-layer", 2, "--set", "views=4"), "--rank, --from-layer, --set views"),
        (("--set", "flip=0.5", "--set", "crop_scale=0.5,1"), "--set flip, --set crop_scale"),
    ):
        said = str(shell(*solved, *options, code=1).exception)
        assert "is solved in closed form" in said
        assert sorted(said.partition("leave out ")[2].rstrip(".").split(", ")) == sorted(named.split(", "))
    kept = shell(*solved, "--set", "balance=true", "--set", "cache=true")
    assert list(own_cache.glob("*/*.features"))
    assert kept["training"]["balance"] is True
    assert kept["previous"] == "set.safetensors.1"
