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
from test_train_cli import make_root
from test_train_fit import FRESH, LABELS, PLAIN, QUICK, distance, double, same, squares, state
from torch import Tensor
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone
from memoro.cli import app
from memoro.data import ImageSet, Splits, load_data
from memoro.errors import CompositionError, TrainingError
from memoro.regimes import BASELINES, REGIMES, Baseline, TaskPlan, find_regime
from memoro.regimes.baselinefile import is_baseline
from memoro.regimes.regime import all_parameters
from memoro.training import Cache, FitResult, Recipe, RunSpec, Trainer, fit, train_runs
from memoro.training.target import has_content

__all__ = ["double", "squares"]  # fixtures
PLAN = TaskPlan("model", LABELS, cells=2, width=3, rank=2, seed=1)


def build(regime: str, backbone: Backbone, **changes: Any) -> Any:
    plan = {**vars(PLAN), "name": regime, **changes}
    if regime in {"head", "memory"}:  # which have no rank
        plan["rank"] = None
    return find_regime(regime).build(backbone, TaskPlan(**plan))


@pytest.mark.parametrize("regime", BASELINES)
def test_what_was_trained_is_what_a_file_answers(
    regime: str, backbone: Backbone, vit: Any, squares: Path, tmp_path: Path
) -> None:
    weights, flags = state(vit), [parameter.requires_grad for parameter in vit.parameters()]
    model = build(regime, backbone)
    start = state(model)
    result = fit(backbone, model, squares, epochs=2, batch_size=9, lr=0.03, augment=PLAIN, **QUICK)
    assert result.task is model
    assert model.spec.training["regime"] == regime
    trained = all_parameters(model)
    assert model.spec.training["trained_parameters"] == sum(value.numel() for value in trained.values())
    still = {name for name in trained if torch.equal(start[name], state(model)[name])}
    assert all(name.endswith(".k.1") for name in still)  # a bias of all keys alike: softmax does not see it
    assert same(weights, state(vit))
    assert [parameter.requires_grad for parameter in vit.parameters()] == flags
    assert all(parameter.grad is None for parameter in vit.parameters())

    loaded = memoro.load_baseline(memoro.save_baseline(model, tmp_path / "m.safetensors"), backbone)
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True)
    [found] = memoro.evaluate(backbone, [loaded], splits, workers=0).values()
    assert found == result.metrics
    files = sorted(squares.rglob("*.png"))[::5]
    assert loaded.predict(files, batch_size=2) == model.predict(files, batch_size=2)
    preprocessing = backbone.preprocessing.at(20)
    with torch.no_grad():
        logits = loaded(torch.stack([preprocessing.to_tensor(memoro.images.open_image(file)) for file in files]))
    said = [answer[regime]["probabilities"] for answer in loaded.predict(files)]
    for row, probabilities in zip(logits.softmax(-1), said, strict=True):
        assert [probabilities[label] for label in LABELS] == pytest.approx(row.tolist(), abs=1e-6)


# ------------------------------------------------------------------------------------------------------- company


def specs_of(names: list[str], backbone: Backbone, splits: Splits, **changes: Any) -> list[RunSpec]:
    recipe = Recipe(**{"epochs": 2, "batch_size": 8, "lr": 0.03, "warmup": 1, **changes})
    size = backbone.preprocessing.at(20)
    return [RunSpec(build(name, backbone), recipe, find_regime(name), splits, size) for name in names]


def learn(names: list[str], backbone: Backbone, splits: Splits, **options: Any) -> dict[str, FitResult]:
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
    figures = memoro.evaluate(double, [together[name].task for name in names], splits, workers=0)
    assert list(figures) == names
    for name in names:
        assert figures[name]["loss"] == pytest.approx(together[name].metrics["loss"], abs=1e-6)
    assert len({figure["loss"] for figure in figures.values()}) == 4
    twins = [build("full", double), build("adapter", double, name="full")]
    with pytest.raises(CompositionError, match="two tasks are named 'full'"):
        memoro.evaluate(double, twins, splits, workers=0)


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
    fit(backbone, build("full", backbone), splits, epochs=1, **unused)
    assert not (tmp_path / "no").exists()
    with pytest.raises(TrainingError, match=r"regime 'full' changes .* so its features cannot be cached"):
        fit(backbone, build("full", backbone), splits, **{**QUICK, "cache": True})


def test_a_regime_trains_what_it_builds(backbone: Backbone, squares: Path) -> None:
    task = memoro.new_task(backbone, "t", LABELS)
    for model, regime in ((task, "full"), (build("full", backbone), "memory"), (build("vpt", backbone), "full")):
        with pytest.raises(TrainingError, match=f"regime '{regime}' only trains models that it built itself"):
            fit(backbone, model, squares, regime=regime, **QUICK)
    other = memoro.load_backbone(CASES[0].model(seed=8))
    with pytest.raises(CompositionError, match="other weights"):
        fit(backbone, build("full", other), squares, **QUICK)


@pytest.mark.parametrize(
    ("regime", "size"), [("full", "cells"), ("lora", "cells"), ("vpt", "rank"), ("adapter", "rank")]
)
def test_sizes_that_a_baseline_does_not_have_are_refused(
    regime: str, size: str, backbone: Backbone, squares: Path
) -> None:
    with pytest.raises(TrainingError, match=f"regime '{regime}' has no {size}: leave out --{size}"):
        memoro.train(squares, backbone=backbone, regime=regime, **{size: 4})


def test_whether_a_file_holds_a_baseline(backbone: Backbone, tmp_path: Path) -> None:
    model, other = build("adapter", backbone), build("adapter", backbone, seed=2)
    file = memoro.save_baseline(model, tmp_path / "a.safetensors")
    assert has_content(file, model)
    assert not has_content(file, other)
    task = memoro.new_task(backbone, "t", LABELS)
    assert not has_content(file, task)
    assert not has_content(memoro.save_task(task, tmp_path / "t.safetensors"), model)


@pytest.mark.parametrize("regime", ["full", "lora"])
def test_a_resumed_baseline_is_the_same(
    regime: str, backbone: Backbone, squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(folder: str, **options: Any) -> Any:
        model = build(regime, backbone)
        options = {"epochs": 2, "batch_size": 5, "optimizer": "adamw", "lr": 1e-3, **QUICK, **options}
        fit(backbone, model, squares, folder=tmp_path / folder, **options)
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


def test_every_regime_from_the_shell(shell: Any, tmp_path: Path) -> None:
    records = {}
    for regime in REGIMES:
        known = {"head": (), "readout": (), "memory": ("cells",), "side": ("cells", "rank"), "joint": ("cells", "rank")}
        own = known[regime] if regime in known else BASELINES[regime].sizes
        given = {"cells": ("--cells", 1), "rank": ("--rank", 3)}
        sizes = ("--width", 2, *(word for name in own for word in given.get(name, ())))
        how = SOLVED if regime == "readout" else (*COMMON, "--lr", 0.03)
        done = shell("train", "set", "--task", regime, "--regime", regime, *how, *sizes)
        records[regime] = json.loads(done.stdout)
        assert is_baseline(records[regime]["file"]) == (not REGIMES[regime].composes)
    files = [part for regime in REGIMES for part in ("--tasks", f"{regime}.safetensors")]
    figures = json.loads(shell("eval", "set", "-b", "vit", *files, "--workers", 0, "--json").stdout)
    assert list(figures) == list(REGIMES)
    for regime, found in figures.items():
        assert found["loss"] == pytest.approx(records[regime]["metrics"]["loss"], abs=1e-5)  # float32, in company
    images = [str(path) for path in sorted(Path("set/test").rglob("*.png"))[:2]]
    done = shell("predict", *images, "-b", "vit", *files, "--json")
    answers = json.loads(done.stdout)
    assert [set(said) for said in answers.values()] == [set(REGIMES)] * 2
    assert "memory-full, class-full" in done.stderr
    assert "baselines, which need a separate pass each" in done.stderr
    backbone = memoro.load_backbone("vit")
    full = memoro.load_baseline("full.safetensors", backbone).predict(images)
    assert [said["full"]["label"] for said in answers.values()] == [said["full"]["label"] for said in full]

    record = json.loads(shell("inspect", "adapter.safetensors", "-b", "vit", "--json").stdout)["baseline"]
    assert (record["regime"], record["sizes"], record["backbone"]["match"]) == ("adapter", {"width": 2}, "same")
    assert record["parameters"] == records["adapter"]["training"]["trained_parameters"]
    assert "cannot be composed" in shell("inspect", "lora.safetensors").stdout
    for command in (("compose", "full.safetensors", "-o", "x"), ("verify", "-b", "vit", "-t", "full.safetensors")):
        assert "needs a separate pass and cannot be composed" in str(shell(*command, code=1))
    assert "its features cannot be cached" in str(shell("train", "set", "--regime", "full", *COMMON, "--cache", code=1))


def test_rates_of_a_baseline_are_tried_in_passes_of_their_own(shell: Any) -> None:
    done = shell("train", "set", "--task", "m", "--regime", "full", *COMMON)
    assert "regime 'full' changes base tokens, so its 3 runs need separate passes" in done.stderr
    record = json.loads(done.stdout)
    assert [row["lr"] for row in record["runs"]] == [0.03, 0.1, 0.3]
    assert record["chosen"]["lr"] == record["training"]["lr"]
    sweep = ("sweep", "set", "-t", "m", "--regime", "adapter", *COMMON, "--lr", "0.01,0.1")
    assert [row["lr"] for row in json.loads(shell(*sweep).stdout)["runs"]] == [0.01, 0.1]
    assert "regime 'adapter' has no cells" in str(shell(*sweep, "--cells", "0,5", code=1))
    text = " ".join(CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "400"}).output.split())
    assert all(name in text for name in REGIMES)
