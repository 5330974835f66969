"""Baselines through the whole of it: trained, saved, loaded, measured and asked, beside tasks and alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import CASES
from small_training import FRESH, LABELS, PLAIN, QUICK, distance, double, same, squares, state
from test_train_cli import make_root
from torch import Tensor
from typer.testing import CliRunner

import memoro
from memoro import lab
from memoro.backbones import Backbone
from memoro.cli import app
from memoro.data import ImageSet, Splits, load_data
from memoro.errors import CompositionError, TrainingError
from memoro.lab.baselines import BASELINES, REGIMES, Baseline, BaselinePlan
from memoro.regimes.regime import all_parameters
from memoro.training import Cache, Recipe, Run, Trainer, TrainResult, train_runs
from memoro.training.result import has_content

__all__ = ["double", "squares"]  # fixtures
PLAN = BaselinePlan("model", LABELS, cells=2, width=3, rank=2, seed=1)


def build(regime: str, backbone: Backbone, **changes: Any) -> Any:
    plan = {**vars(PLAN), "name": regime, **changes}
    if regime in {"head", "memory"}:  # which have no rank
        plan["rank"] = None
    return REGIMES[regime].build(backbone, BaselinePlan(**plan))


@pytest.mark.parametrize("regime", BASELINES)
def test_what_was_trained_is_what_a_file_answers(
    regime: str, backbone: Backbone, vit: Any, squares: Path, tmp_path: Path
) -> None:
    weights, flags = state(vit), [parameter.requires_grad for parameter in vit.parameters()]
    model = build(regime, backbone)
    start = state(model)
    result = lab.fit_baseline(backbone, model, squares, epochs=2, batch_size=9, lr=0.03, augment=PLAIN, **QUICK)
    assert result.task is model
    assert model.spec.training["regime"] == regime
    trained = all_parameters(model)
    assert model.spec.training["trained_parameters"] == sum(value.numel() for value in trained.values())
    still = {name for name in trained if torch.equal(start[name], state(model)[name])}
    assert all(name.endswith("/k/1") for name in still)  # a bias of all keys alike: softmax does not see it
    assert same(weights, state(vit))
    assert [parameter.requires_grad for parameter in vit.parameters()] == flags
    assert all(parameter.grad is None for parameter in vit.parameters())

    loaded = lab.load_baseline(lab.save_baseline(model, tmp_path / "m.safetensors"), backbone)
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True)
    assert lab.evaluate_baseline(loaded, splits, workers=0) == result.metrics
    files = sorted(squares.rglob("*.png"))[::5]
    assert loaded.predict(files, batch_size=2) == model.predict(files, batch_size=2)
    preprocessing = backbone.preprocessing.at(20)
    with torch.no_grad():
        logits = loaded(torch.stack([preprocessing.to_tensor(memoro.images.open_image(file)) for file in files]))
    said = [answer[regime]["probabilities"] for answer in loaded.predict(files)]
    for row, probabilities in zip(logits.softmax(-1), said, strict=True):
        assert [probabilities[label] for label in LABELS] == pytest.approx(row.tolist(), abs=1e-6)


# ------------------------------------------------------------------------------------------------------- company


def specs_of(names: list[str], backbone: Backbone, splits: Splits, **changes: Any) -> list[Run]:
    recipe = Recipe(**{"epochs": 2, "batch_size": 8, "lr": 0.03, "warmup": 1, **changes})
    size = backbone.preprocessing.at(20)
    return [Run(build(name, backbone), recipe, REGIMES[name], splits, size) for name in names]


def learn(names: list[str], backbone: Backbone, splits: Splits, **options: Any) -> dict[str, TrainResult]:
    results = train_runs(backbone, specs_of(names, backbone, splits), **FRESH, **options)
    return dict(zip(names, results, strict=True))


def test_tasks_and_baselines_side_by_side_equal_each_alone(double: Backbone, squares: Path) -> None:
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True)
    names = ["memory", "full", "head", "adapter"]
    together = learn(names, double, splits)
    for name in names:
        alone = learn([name], double, splits)[name]
        assert distance(together[name].task, alone.task) < 1e-10
        assert together[name].metrics["loss"] == pytest.approx(alone.metrics["loss"], abs=1e-6)
        assert distance(together[name].task, build(name, double)) > 1e-4
    assert len({result.metrics["loss"] for result in together.values()}) == 4
    with pytest.raises(CompositionError, match="'full' was trained with regime 'full', which changes"):
        memoro.evaluate(double, [together["full"].task], splits, workers=0)


def test_a_baseline_computes_only_images_that_it_learns_from(
    double: Backbone, squares: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True, val_fraction=0)
    assert isinstance(splits.train, ImageSet)
    held_out = np.arange(len(splits.train) // 3)
    seen: list[int] = []
    features = Baseline.features

    def count(model: Baseline, pixels: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(len(pixels))
        return features(model, pixels)

    monkeypatch.setattr(Baseline, "features", count)

    def learn(targets: Tensor, held_out: Any) -> Any:
        assert isinstance(splits.train, ImageSet)
        own = replace(splits, train=replace(splits.train, targets=targets))
        [spec] = specs_of(["adapter"], double, own)
        train_runs(double, [replace(spec, held_out=held_out)], **FRESH)
        return spec.task

    targets = splits.train.targets
    left_out = learn(targets, held_out)
    assert sum(seen) == 2 * (len(targets) - len(held_out))
    changed = targets.clone()
    changed[: len(held_out)] = (changed[: len(held_out)] + 1) % len(LABELS)
    assert distance(left_out, learn(changed, held_out)) == 0
    assert distance(left_out, learn(targets, None)) > 1e-4


def test_features_are_kept_for_tasks_only(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True)
    wanted = Cache(tmp_path / "kept", dtype="float32", required=False)
    specs = specs_of(["memory", "full"], backbone, splits, views=1)
    results = train_runs(backbone, specs, cache=wanted, workers=0, quiet=True)
    assert list((tmp_path / "kept").rglob("*.features"))
    again = train_runs(backbone, specs_of(["memory", "full"], backbone, splits, views=1), **FRESH)
    for left, right in zip(results, again, strict=True):
        assert left.metrics["loss"] == pytest.approx(right.metrics["loss"], abs=1e-5)  # float32
    unused = {**QUICK, "cache": Cache(tmp_path / "no", required=False)}
    lab.fit_baseline(backbone, build("full", backbone), splits, epochs=1, **unused)
    assert not (tmp_path / "no").exists()
    with pytest.raises(TrainingError, match=r"regime 'full' has a pass of its own, so its features cannot be cached"):
        lab.fit_baseline(backbone, build("full", backbone), splits, **{**QUICK, "cache": True})


def test_a_regime_trains_what_it_builds(backbone: Backbone, squares: Path) -> None:
    task = memoro.new_task(backbone, "t", LABELS)
    for model, regime in ((task, "full"), (build("full", backbone), "memory"), (build("vpt", backbone), "full")):
        with pytest.raises(TrainingError, match=f"regime '{regime}' only trains models that it built itself"):
            memoro.fit(backbone, model, squares, regime=REGIMES[regime], **QUICK)
    with pytest.raises(TrainingError, match="'full' is not a task: pass the regime that built it"):
        memoro.fit(backbone, build("full", backbone), squares, **QUICK)
    other = memoro.load_backbone(CASES[0].model(seed=8))
    with pytest.raises(CompositionError, match="other weights"):
        lab.fit_baseline(backbone, build("full", other), squares, **QUICK)


@pytest.mark.parametrize(
    ("regime", "size"), [("full", "cells"), ("lora", "cells"), ("vpt", "rank"), ("adapter", "rank")]
)
def test_sizes_that_a_baseline_does_not_have_are_refused(
    regime: str, size: str, backbone: Backbone, squares: Path
) -> None:
    with pytest.raises(TrainingError, match=f"regime '{regime}' has no {size}: leave out `{size}`"):
        lab.train_baseline(squares, regime, backbone=backbone, **{size: 4})


def test_whether_a_file_holds_a_baseline(backbone: Backbone, tmp_path: Path) -> None:
    model, other = build("adapter", backbone), build("adapter", backbone, seed=2)
    file = lab.save_baseline(model, tmp_path / "a.safetensors")
    regime = BASELINES["adapter"].regime
    assert has_content(file, model, regime)
    assert not has_content(file, other, regime)
    task = memoro.new_task(backbone, "t", LABELS)
    assert not has_content(file, task, REGIMES["memory"])
    assert not has_content(memoro.save_task(task, tmp_path / "t.safetensors"), model, regime)


@pytest.mark.parametrize("regime", ["full", "lora"])
def test_a_resumed_baseline_is_the_same(
    regime: str, backbone: Backbone, squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(folder: str, **options: Any) -> Any:
        model = build(regime, backbone)
        options = {"epochs": 2, "batch_size": 5, "optimizer": "adamw", "lr": 1e-3, **QUICK, **options}
        lab.fit_baseline(backbone, model, squares, folder=tmp_path / folder, **options)
        return model

    calm, step, calls = train("calm"), Trainer.step, iter(range(100))

    def stop(*given: Any) -> None:
        if next(calls) == 5:
            raise RuntimeError("pulled the plug")
        step(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "checkpoint_seconds", 0.0)
        patch.setattr(Trainer, "step", stop)
        with pytest.raises(RuntimeError, match="pulled the plug"):
            train("stopped")
    resumed = train("stopped", resume=True)
    assert resumed.content_hash() == calm.content_hash()
    assert same(state(resumed), state(calm))
    with pytest.raises(TrainingError, match="cannot resume: recipe differ"):
        train("stopped", resume=True, epochs=3)


# ------------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder with a backbone and a set, and a function that runs a command in it."""
    make_root(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if code:
            return done.exception
        assert done.exit_code == 0, (done.output, done.exception)
        return done

    return run


SOLVED = ("-b", "vit", "--image-size", 20, "--workers", 0, "--json")
COMMON = (*SOLVED, "--batch-size", 8, "--epochs", 1)


def test_every_baseline_from_the_shell(shell: Any, tmp_path: Path) -> None:
    images = [str(path) for path in sorted(Path("set/test").rglob("*.png"))[:2]]
    backbone = memoro.load_backbone("vit")
    for method in BASELINES:
        given = {"cells": ("--cells", 1), "rank": ("--rank", 3), "width": ("--width", 2)}
        sizes = [word for name in BASELINES[method].sizes for word in given[name]]
        done = shell("lab", "train-baseline", method, "set", "-t", method, *COMMON, "--lr", 0.03, *sizes)
        trained, file = json.loads(done.stdout), f"{method}.safetensors"
        found = shell("lab", "eval-baseline", file, "set", "-b", "vit", "--workers", 0, "--json").stdout
        assert json.loads(found)[method]["loss"] == pytest.approx(trained["metrics"]["loss"], abs=1e-5)
        answers = json.loads(shell("lab", "predict-baseline", file, *images, "-b", "vit").stdout)
        said = lab.load_baseline(file, backbone).predict(images)
        assert [answer["label"] for answer in answers.values()] == [one[method]["label"] for one in said]
        record = json.loads(shell("lab", "inspect-baseline", file, "-b", "vit", "--json").stdout)
        assert (record["regime"], record["backbone"]["match"]) == (method, "same")
        assert record["parameters"] == trained["training"]["trained_parameters"]
    assert record["sizes"] == {"rank": 3}
    assert "lora" in shell("lab", "inspect-baseline", "lora.safetensors").stdout


def test_the_product_refuses_the_file_of_a_baseline(shell: Any) -> None:
    lab.save_baseline(build("full", memoro.load_backbone("vit")), "full.safetensors")
    image = next(Path("set/test").rglob("*.png"))
    file = ("-b", "vit", "-t", "full.safetensors")
    for command in (
        ("eval", "set", *file), ("predict", image, *file), ("inspect", "full.safetensors"), ("verify", *file),
        ("compose", "full.safetensors", "-o", "x"), ("train", "set", "--start-from", "full.safetensors", "-b", "vit"),
    ):  # fmt: skip
        error = shell(*command, code=1)
        assert isinstance(error, memoro.TaskFileError)
        assert "full.safetensors: contains a baseline" in str(error)
        assert "use memoro lab eval-baseline, predict-baseline or inspect-baseline" in str(error)
    assert "trained with memoro lab train-baseline" in str(shell("train", "set", "--regime", "full", code=1))


def test_rates_of_a_baseline_are_tried_in_passes_of_their_own(shell: Any) -> None:
    done = shell("lab", "train-baseline", "full", "set", "-t", "m", *COMMON)
    assert "regime 'full' has a pass of its own, so its 3 runs need separate passes" in done.stderr
    record = json.loads(done.stdout)
    assert [row["lr"] for row in record["runs"]] == [0.03, 0.1, 0.3]
    assert record["chosen"]["lr"] == record["training"]["lr"]
    sweep = ("lab", "train-baseline", "adapter", "set", "-t", "m", *COMMON, "--lr", 0.01, "--lr", 0.1)
    assert [row["lr"] for row in json.loads(shell(*sweep).stdout)["runs"]] == [0.01, 0.1]
    assert "regime 'adapter' has no cells" in str(shell(*sweep, "--cells", "5", code=1))
    help = CliRunner().invoke(app, ["lab", "train-baseline", "--help"], env={"COLUMNS": "400"}).output
    assert all(name in " ".join(help.split()) for name in BASELINES)
