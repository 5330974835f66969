"""A user's own regime, from outside of the package: all that training asks of it is in memoro.regimes.regime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_training import LABELS, PLAIN, QUICK, squares
from torch import Tensor, nn

import memoro
from memoro.backbones import Backbone, BackboneRecord
from memoro.errors import CompositionError, TaskFileError, TrainingError
from memoro.regimes import Regime, TaskPlan
from memoro.tasks.spec import ModelSpec, TaskModule

__all__ = ["squares"]  # a fixture


class Pooled(TaskModule[ModelSpec]):
    """A linear head on the mean of the embedded patches, and a learned shift of the pixels before them."""

    def __init__(self, backbone: Backbone, plan: TaskPlan) -> None:
        super().__init__(
            ModelSpec(name=plan.name, labels=tuple(plan.labels), kind=plan.head, backbone=BackboneRecord.of(backbone))
        )
        torch.manual_seed(plan.seed)
        self.embed = backbone.anatomy.embed
        self.shift = nn.Parameter(torch.zeros(3, 1, 1))
        self.head = nn.Linear(backbone.dim, len(plan.labels))

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(pixels + self.shift)[0].mean(1))
        return logits


def save_pooled(model: Pooled, file: Path) -> None:
    save_file(dict(model.state_dict()), file, metadata={"content": model.content_hash()})


def read_hashes(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        if "content" not in (opened.metadata() or {}):
            raise TaskFileError(f"{file} was not written by save_pooled.")
        return [opened.metadata()["content"]]


POOLED = Regime("pooled", Pooled, composes=False, save=save_pooled, read_hashes=read_hashes)


def train(backbone: Backbone, data: Path, out: Path, **options: Any) -> Any:
    settings = {"epochs": 3, "batch_size": 9, "lr": 0.01, "augment": PLAIN, "regime": POOLED, **QUICK, **options}
    return memoro.train(data, backbone=backbone, task="mine", out=out, **settings)


def test_a_regime_of_ones_own_is_trained_measured_and_saved(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    start = Pooled(backbone, TaskPlan("mine", LABELS))
    result = train(backbone, squares, tmp_path / "mine.bin", folder=tmp_path / "run")
    model = result.task
    assert isinstance(model, Pooled)
    assert (model.spec.training["regime"], model.spec.training["optimizer"]) == ("pooled", "adamw")
    for name, value in load_file(tmp_path / "mine.bin").items():
        assert torch.equal(value, model.state_dict()[name])
        assert not torch.equal(value, start.state_dict()[name])
    assert model.spec.training["trained_parameters"] == sum(one.numel() for one in start.parameters())
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    assert result.metrics["split"] == "val"
    assert (tmp_path / "run" / "report.html").is_file()
    with pytest.raises(CompositionError, match="is not a task"):
        memoro.compose(backbone, [model])


def test_its_rates_and_seeds_are_compared_and_a_file_is_kept(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    file, told = tmp_path / "mine.bin", list[str]()
    first = train(backbone, squares, file, lr=[0.001, 0.1], seeds=2, log=told.append)
    assert [row.lr for row in first.rows] == [0.001, 0.1]
    assert any("regime 'pooled' has a pass of its own, so its 4 runs need separate passes" in text for text in told)
    again = train(backbone, squares, file, lr=[0.001, 0.1], seeds=2)
    assert again.previous is None
    assert again.task.content_hash() == first.task.content_hash()
    other = train(backbone, squares, file, lr=0.5)
    assert other.previous is not None
    assert read_hashes(other.previous) == [first.task.content_hash()] != read_hashes(file)


def test_what_it_does_not_have_is_refused(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    for option, message in (
        ({"cells": 3}, "regime 'pooled' has no cells"),
        ({"cache": True}, "regime 'pooled' has a pass of its own, so its features cannot be cached"),
    ):
        with pytest.raises(TrainingError, match=message):
            train(backbone, squares, tmp_path / "x", **option)
    with pytest.raises(TrainingError, match="pass the regime that built it"):
        memoro.fit(backbone, Pooled(backbone, TaskPlan("mine", LABELS)), squares, **QUICK)
    fitted = memoro.fit(backbone, Pooled(backbone, TaskPlan("mine", LABELS)), squares, regime=POOLED, epochs=1, **QUICK)
    assert fitted.metrics["split"] == "val"
    with pytest.raises(TrainingError, match="'pets' is a task; regime 'pooled' only trains"):
        memoro.fit(backbone, memoro.new_task(backbone, "pets", LABELS), squares, regime=POOLED, **QUICK)
