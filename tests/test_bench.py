"""Benchmarks measure what they say: the dense-mask way computes the same, and the rows are complete."""

from __future__ import annotations

import pytest
import torch
from conftest import random_task

import memoro
from memoro.backbones import Backbone
from memoro.bench.dense import DenseMask
from memoro.bench.engine import bench_engine, candidate_count
from memoro.bench.train import bench_loader, build_step, candidates


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
    ticks: list[None] = []
    rows = bench_engine(backbone, counts=(1, 3), forks=(0, 2), batch=1, rounds=2, tick=lambda: ticks.append(None))
    assert [(row.fork, row.tasks) for row in rows] == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert len(ticks) == 2 * candidate_count((1, 3), (0, 2))
    assert rows[1].limit == pytest.approx(1 + 3 / 26)
    assert rows[3].limit == pytest.approx(1 + 3 * 3 / 5 / 26)
    assert all(row.engine > 0 for row in rows)
    assert rows[1].dense is not None
    assert rows[3].dense is None


def test_every_training_way_can_be_built_and_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from families import SMALL

    def small(patch: int) -> torch.nn.Module:
        config = transformers.ViTConfig(**{**SMALL, "image_size": 224, "patch_size": 56}, num_labels=10)
        return transformers.ViTForImageClassification(config).eval()

    monkeypatch.setattr("memoro.bench.train._classifier", small)
    ways = candidates(1, (1, 2), (0, 3))
    assert len(ways) == 8
    trained = {}
    for name, way in ways.items():
        step, trained[name] = build_step(way, 32, 2)
        step()
        step()
    assert trained["base"] == 0
    assert trained["head"] == 24 * 10 + 10
    assert trained["memory, 1 cells"] == 24 + 5 * 24 + 250
    assert trained["LoRA (PEFT), rank 8 on q and v"] == 5 * 2 * 2 * 8 * 24 + 250
    assert trained["full fine-tuning"] > 10_000


def test_the_loader_is_measured() -> None:
    assert bench_loader(workers=(0,), count=40, side=32)["0 workers"] > 0
