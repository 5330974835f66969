"""Killed or interrupted, the feature cache keeps what is complete, and a resume gives the same weights."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import answers, cache, curve, files, fill, images, keeper, splits, tasks_of
from conftest import in_fork
from test_train_resume import at_call, often

from memoro.backbones import Backbone
from memoro.data import ImageSet, Splits
from memoro.engine.featurestore import ENTRY_BYTES, total_bytes
from memoro.engine.streams import Features
from memoro.errors import TrainingError
from memoro.training import Cache, Trainer, cached

__all__ = ["cache", "images", "often", "splits"]  # fixtures


def test_killed_while_it_fills(
    backbone: Backbone, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cached, "keep_features", at_call(2, cached.keep_features))
        process = in_fork(lambda: fill(keeper(backbone, images, cache)))
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert total_bytes(cache.folder) < 5 * keeper(backbone, images, cache).store.format.size
    loader = keeper(backbone, images, cache)
    assert fill(loader) == len(images) - 4
    for kept, fresh in answers(backbone, loader, tasks_of(backbone, 0)):
        torch.testing.assert_close(kept, fresh, rtol=1e-5, atol=1e-5)


def test_a_record_without_an_entry_is_computed_again(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    """As when a process is killed between the two."""
    fill(keeper(backbone, images, cache))
    [path] = files(cache)
    with path.open("r+b") as file:
        file.write(bytes(2 * ENTRY_BYTES))
    assert fill(keeper(backbone, images, cache)) == 2


def test_an_interrupt_keeps_what_is_complete(
    backbone: Backbone, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = iter(range(9)), cached.keep_features

    def stop(*given: Any) -> Features:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(cached, "keep_features", stop)
        with pytest.raises(KeyboardInterrupt):
            fill(keeper(backbone, images, cache))
    assert fill(keeper(backbone, images, cache)) == len(images) - 4


def test_a_resume_from_the_cache_gives_the_same_weights(
    backbone: Backbone, splits: Splits, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None
) -> None:
    half = replace(cache, dtype="float16")
    calm, losses = curve(backbone, splits, half, folder=tmp_path / "calm")
    shutil.rmtree(half.folder)  # killed in a step, and the features gone as well
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", at_call(5, Trainer.step))
        process = in_fork(lambda: curve(backbone, splits, half, folder=tmp_path / "killed"))
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    shutil.rmtree(half.folder)
    mine, again = curve(backbone, splits, half, folder=tmp_path / "killed", resume=True)
    for name, value in calm.state_dict().items():
        assert torch.equal(value, mine.state_dict()[name])
    assert torch.equal(losses, again)
    with pytest.raises(TrainingError, match="cannot resume: features differ"):
        curve(backbone, splits, cache, folder=tmp_path / "killed", resume=True)


def test_a_training_that_had_no_room_goes_on_without(
    backbone: Backbone, splits: Splits, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None
) -> None:
    calm, _ = curve(backbone, splits, False, views=2)
    roomy = replace(cache, required=False)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", at_call(5, Trainer.step))
        process = in_fork(
            lambda: curve(backbone, splits, replace(roomy, budget=0.0), views=2, folder=tmp_path / "killed")
        )
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    mine, _ = curve(backbone, splits, roomy, views=2, folder=tmp_path / "killed", resume=True)
    for name, value in calm.state_dict().items():
        assert torch.equal(value, mine.state_dict()[name])
