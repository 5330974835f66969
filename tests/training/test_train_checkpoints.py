"""What a checkpoint holds, when it is written, and what a run gets back that diverges after it was read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from test_train_resume import (
    EPOCH,
    FRESH,
    LABELS,
    STEPS,
    Trial,
    at_call,
    calm,
    often,
    progress_of,
    trainer,
)

import memoro
from memoro.errors import TrainingError
from memoro.lab.baselines import BASELINES
from memoro.tasks.task import new_task
from memoro.training import Recipe, Trainer, fit

__all__ = ["calm", "often", "trainer"]  # fixtures


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_checkpoints_hold_no_weights_twice(calm: Trial, tmp_path: Path, often: None, optimizer: str) -> None:
    """Those of `full` are as large as the backbone: while it trains they and the optimiser's state, then the best."""
    moments = {"sgd": 1, "adamw": 2}[optimizer]
    weights = sum(tensor.nbytes for tensor in calm.backbone.anatomy.tensors.values())
    checkpoint, sizes = tmp_path / "run" / "checkpoint.safetensors", list[float]()
    real = Trainer.step

    def measured(trainer: Trainer, taken: Any) -> None:
        sizes.append(checkpoint.stat().st_size / weights)
        real(trainer, taken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", measured)
        patch.setattr(Trainer, "checkpoint_quick", math.inf)  # a machine under load may take seconds to write
        options = {
            "regime": BASELINES["full"].regime,
            "lr": 0.001,
            "optimizer": optimizer,
            "folder": tmp_path / "run",
            **FRESH,
        }
        memoro.train(
            calm.data, backbone=calm.backbone, image_size=20, batch_size=9, epochs=2, val_fraction=0, **options
        )
    # A tenth is names. In the second epoch, the weights are no longer the best ones.
    assert sizes == pytest.approx([1, *[1 + moments] * 3, *[2 + moments] * 2], rel=0.15)
    assert checkpoint.stat().st_size / weights == pytest.approx(1, rel=0.15)


def test_checkpoints_that_take_long_are_written_less_often(
    trainer: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None
) -> None:
    monkeypatch.setattr(Trainer, "checkpoint_quick", 0.0)
    monkeypatch.setattr(Trainer, "checkpoint_pause", 1e9)
    with monkeypatch.context() as patch:
        patch.setattr("memoro.training.Trainer.step", at_call(18, Trainer.step))
        trainer.killed("killed")
    assert progress_of(tmp_path / "killed")["step"] == 0
    trainer.finish("killed")
    assert progress_of(tmp_path / "killed")["step"] == STEPS  # the end is always kept


def test_a_run_that_diverges_after_a_resume_gets_its_first_weights_back(
    trainer: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", at_call(4, Trainer.step))
        trainer.killed("hot")
    assert progress_of(tmp_path / "hot")["step"] == 3 < EPOCH
    rate = Recipe.rate
    monkeypatch.setattr(Recipe, "rate", lambda self, step, total: 1e30 if step == 3 else rate(self, step, total))
    task, untrained = (new_task(trainer.backbone, "squares", LABELS, cells=2, seed=1) for _ in range(2))
    with pytest.raises(TrainingError, match=r"'squares': diverged at step 5"):
        fit(trainer.backbone, task, trainer.data, folder=tmp_path / "hot", resume=True, quiet=True, **trainer.options)
    assert task.content_hash() == untrained.content_hash()
