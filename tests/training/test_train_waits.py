"""What a training step waits for: one read from the device for all runs. And losses that are scaled in float16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_groups import root, run_spec, sets
from torch import Tensor

from memoro.backbones import Backbone, load_backbone
from memoro.tasks.task import new_task
from memoro.training import TrainOptions, fit
from memoro.training import run as state
from memoro.training.checkpoint import load_checkpoint, save_checkpoint
from memoro.training.loop import Trainer
from memoro.training.run import Run

__all__ = ["root"]  # fixture
READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu")
"""Methods that wait until a device has done all that it was given."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reads of tensors, as they happen."""
    found: list[str] = []

    def watch(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Tensor, *given: Any, **how: Any) -> Any:
            found.append(name)
            return method(self, *given, **how)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watch(name, getattr(torch.Tensor, name)))
    return found


def start(backbone: Backbone, runs: list[Run], **options: Any) -> Trainer:
    return Trainer(backbone, runs, TrainOptions(workers=0, quiet=True, cache=False, **options))


@pytest.mark.parametrize("count", [1, 5])
def test_a_step_reads_the_device_once_for_all_runs(
    backbone: Backbone, root: Path, reads: list[str], count: int
) -> None:
    """Of two groups, one with classes and one with several labels; runs with folds, and all kinds of optimisers."""
    classes, _, labels, numbers = sets(root)
    runs = [run_spec(backbone, f"t{at}", classes, seed=at, held_out=np.arange(at, 9, 3)) for at in range(count)]
    runs += [run_spec(backbone, "l", labels, optimizer="adamw"), run_spec(backbone, "n", numbers, balance=False)]
    trainer = start(backbone, runs)
    for group in trainer.groups:
        group.forward(backbone)
    runs[0].preprocessing.normalise(torch.zeros(20, 20, 3, dtype=torch.uint8))  # asks once how the device divides
    for _ in range(2):
        taken = [(group, group.next_batches()) for group in trainer.groups]
        before = [parameter.detach().clone() for parameter in runs[0].trained.values()]
        del reads[:]
        trainer.step(taken)
        assert reads == ["tolist"]
        assert any(not torch.equal(now, old) for now, old in zip(runs[0].trained.values(), before, strict=True)), (
            "it did learn"
        )


# ------------------------------------------------------------------------------------------------------------- float16


def test_float16_learns(vit: Any, root: Path) -> None:
    classes = sets(root)[0]
    losses = {}
    for precision in ("float32", "float16"):
        backbone = load_backbone(vit, precision=precision)
        task = new_task(backbone, "t", classes.labels, cells=2, seed=1)
        result = fit(backbone, task, classes, epochs=12, batch_size=6, lr=0.05, image_size=20, workers=0, quiet=True)
        losses[precision] = [entry["train_loss"] for entry in result.history]
    assert losses["float16"] != losses["float32"]
    assert losses["float16"][-1] < 0.7 * losses["float16"][0]


def test_a_scale_that_is_too_large_is_halved_and_one_that_was_halved_grows(
    vit: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "HALF_SCALE", 2.0**30)
    monkeypatch.setattr(state, "GROWTH", 3)
    backbone = load_backbone(vit, precision="float16")
    run = run_spec(backbone, "t", sets(root)[0], steps=100)
    trainer = start(backbone, [run])
    group, scales = trainer.groups[0], []
    before = [parameter.detach().clone() for parameter in run.trained.values()]
    for epoch in range(40):
        [*batches] = group.loader.epoch(epoch)
        trainer.step([(group, batches[:1])])
        scales.append(run.loss_scale.value)
        same = all(torch.equal(now, old) for now, old in zip(run.trained.values(), before, strict=True))
        assert not same or epoch == 0 or scales[-1] < scales[-2]
        assert run.stopped is None
    assert scales[0] == 2.0**29, "the first step was too large, and is not taken"
    assert min(scales) < scales[-1], "it grows again"
    save_checkpoint(tmp_path / "checkpoint", trainer.groups, {}, 0.0)
    resumed = run_spec(backbone, "t", sets(root)[0], steps=100)
    fresh = start(backbone, [resumed])
    assert resumed.loss_scale != run.loss_scale
    load_checkpoint(tmp_path / "checkpoint", fresh.groups, {})
    assert resumed.loss_scale == run.loss_scale


def test_float32_is_not_scaled(backbone: Backbone, root: Path) -> None:
    run = run_spec(backbone, "t", sets(root)[0])
    start(backbone, [run])
    for _ in range(2 * state.GROWTH):
        run.loss_scale.count()
    assert not run.loss_scale.shrink()
    assert run.loss_scale.value == 1.0
