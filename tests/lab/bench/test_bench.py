"""Benchmarks measure what they say: the dense mask computes the same, and the rows are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_task
from rich.text import Text
from squares import save_squares
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone
from memoro.cli import app
from memoro.errors import MemoroError
from memoro.evaluation.logits import CachedBatch
from memoro.lab.baselines import BASELINES
from memoro.lab.bench.engine import DenseMask, bench_engine
from memoro.lab.bench.goal import APPROACHES, Approach, bench_goal, draw_goal
from memoro.lab.bench.models import MODELS, Row, rows_table
from memoro.lab.bench.serve import bench_serve
from memoro.lab.bench.train import bench_train, build_step, draw_growth, list_candidates
from memoro.training.loop import Trainer


def test_the_dense_mask_way_gives_the_same_answers(vit: torch.nn.Module, pixels: torch.Tensor) -> None:
    backbone = memoro.load_backbone(vit.double())
    tasks = [random_task(backbone, f"task {i}", seed=i, cells=i) for i in range(4)]
    with torch.no_grad():
        expected = memoro.compose(backbone, tasks)(pixels.double())
        found = DenseMask(backbone, tasks, (5, 5))(pixels.double())
    for answer, (name, right) in zip(found, expected.items(), strict=True):
        assert (answer - right).abs().max() < 1e-10, name
    assert not torch.allclose(found[1], found[2])


def test_engine_rows(backbone: Backbone) -> None:
    sizes = {"cells": 5, "rank": 0, "batch": 1, "rounds": 2}
    rows = bench_engine(backbone, counts=(1, 3), forks=(0, 2), **sizes)
    assert [(row["fork"], row["tasks"]) for row in rows] == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert rows[1]["limit"] == pytest.approx(1 + 3 / 26)
    assert rows[3]["limit"] == pytest.approx(1 + 3 * 3 / 5 / 26)
    assert all(row["engine"] > 0 and row["familiarity"] > 0 and row["readouts"] > 0 for row in rows)
    assert rows[1]["dense"] is not None
    assert rows[3]["dense"] is None
    [side] = bench_engine(backbone, counts=(3,), forks=(2,), **{**sizes, "cells": 0, "rank": 2, "rounds": 1})
    assert side["engine"] > 0
    [shown] = rows_table("", [side]).columns[:1]
    assert list(shown.cells) == [Text("3")]


def test_every_training_way_can_be_built_and_stepped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import transformers
    from families import SMALL

    def small() -> torch.nn.Module:
        config = transformers.ViTConfig(**{**SMALL, "image_size": 224, "patch_size": 56}, num_labels=10)
        return transformers.ViTForImageClassification(config)

    monkeypatch.setitem(MODELS, "ViT-B/32", (small, 224))
    candidates = list_candidates("ViT-B/32", 2, 1, (1, 2), (0, 3))
    assert len(candidates) == 2 + 16 + len(BASELINES)
    steps: list[str] = []
    optimizers: dict[str, str] = {}
    own = Trainer.step

    def record(trainer: Trainer, taken: Any) -> None:
        [(group, [batch])] = taken
        assert len(batch.targets) == 2
        assert isinstance(batch, CachedBatch) == candidate.cached
        optimizers.setdefault(candidate.regime, group.recipe.optimizer)
        steps.append(candidate.name)
        own(trainer, taken)
        assert not any(run.diverged for run in group.runs)

    monkeypatch.setattr(Trainer, "step", record)
    trained = {}
    for candidate in candidates:
        step, trained[candidate.name] = build_step(candidate, tmp_path)
        step()
        step()
    assert steps == [one.name for one in candidates[1:] for _ in range(2)], "the steps are those of the training loop"
    assert {regime for regime, name in optimizers.items() if name == "adamw"} == {"side", "lora", "lora-all"}
    assert trained["base"] == 0
    assert trained["head"] == 24 * 10 + 10
    assert trained["memory, 1 cells"] == trained["memory, 1 cells, from cache"] == 24 + 5 * 24 + 250
    assert trained["lora"] == 5 * 2 * 2 * 8 * 24 + 250
    assert trained["full"] > 10_000
    rows = bench_train(candidates[:4], rounds=1, memory=False)
    assert [row["name"] for row in rows] == [candidate.name for candidate in candidates[:4]]
    assert draw_growth(tmp_path / "growth.png", {"tiny": rows}).read_bytes().startswith(b"\x89PNG")


def test_time_to_an_accuracy(backbone: Backbone, tmp_path: Path) -> None:
    save_squares(tmp_path / "squares" / "train")
    save_squares(tmp_path / "squares" / "test", first=100)
    names = dict.fromkeys(one.name for one in APPROACHES)
    approaches = [next(one for one in APPROACHES if one.name == name) for name in names]
    approaches.append(Approach("memory, from cache", "memory", "sgd", 1e30, cached=True))

    def measure(goal: float) -> list[Row]:
        return bench_goal(
            backbone, str(tmp_path / "squares"), goal, approaches=approaches, cells=1, epochs=3, batch=8, workers=0
        )

    for row in measure(goal=0.0)[:-1]:  # whatever it answers is enough
        assert len(row["curve"]) == 1, row
        assert row["seconds"] == row["curve"][0][0] > 0
    never = measure(goal=1.1)
    for approach, row in zip(approaches[:-1], never, strict=False):
        seconds = [second for second, _ in row["curve"]]
        assert len(seconds) == approach.most_epochs(3)
        assert seconds == sorted(seconds)
        assert row["seconds"] is None
    assert [row["name"] for row in never] == [one.name for one in approaches]
    assert never[-1]["best"] is None, "a run without finite numbers has no accuracy"
    assert draw_goal(tmp_path / "goal.png", 1.1, never).read_bytes().startswith(b"\x89PNG")


def test_the_server_is_measured(backbone: Backbone) -> None:
    how: dict[str, Any] = {"tasks": 3, "batch": 2, "clients": 3, "requests": 12, "seconds": 1}
    row = bench_serve("tiny", backbone, 20, **how)
    assert 3 <= row["requests"] <= 12  # bounded by seconds as well, but each client is measured
    assert 1 <= row["mean_batch"] <= 2
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert min(row["engine"], row["http"], row["separate"], row["ratio"]) > 0
    names, cells = (list(map(str, column.cells)) for column in rows_table("", [row], sideways=True).columns)
    assert names[:4] == ["tasks", "batch", "clients", "requests"]
    assert cells[:4] == ["3", "2", "3", str(row["requests"])]


def test_a_machine_is_measured_by_backbone_precision_images_and_classes() -> None:
    words = ["lab", "bench", "gpu", "--model", "dinov2-small", "--precision", "bfloat16", "--precision", "float32"]
    words += ["--tasks", "1,3", "--batch", "1", "--rounds", "1", "--images", "60,120", "--classes", "3,5"]
    words += ["--features", "24", "--device", "cpu"]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)
    assert [(row["model"], row["precision"], row["side"]) for row in found["passes"]] == [
        ("dinov2-small", "bfloat16", 112), ("dinov2-small", "float32", 112)
    ]  # fmt: skip
    assert all(row["plain"] > 0 and set(row["tasks"]) == {"1", "3"} for row in found["passes"])
    assert [(row["images"], row["classes"]) for row in found["read-outs"]] == [(60, 3), (120, 3), (60, 5), (120, 5)]
    printed = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "Images per second" in printed
    assert "exponent" in printed
    with pytest.raises(MemoroError, match="unknown model 'resnet'"):
        CliRunner().invoke(app, ["lab", "bench", "gpu", "--model", "resnet"], catch_exceptions=False)
