"""Killed or interrupted, the feature cache keeps what is complete, and a resume gives the same weights."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import age, answers, cache, curve, files, fill, images, keeper, small_shards, splits, tasks_of
from conftest import in_fork
from test_train_resume import at_call, often

from memoro.backbones import Backbone
from memoro.data import ImageSet, Splits
from memoro.engine.featurestore import ABANDONED, clear_abandoned
from memoro.engine.streams import Features
from memoro.errors import TrainingError
from memoro.training import Cache, Trainer, cached

__all__ = ["cache", "images", "often", "small_shards", "splits"]  # fixtures


# In place of which call the process dies, and how many records are left.
DEATHS: dict[str, tuple[Any, str, int, int]] = {
    "in a pass": (cached, "keep_features", 2, 4),
    "before a file is on disk": (os, "fsync", 2, 2),
    "before a file has its name": (os, "replace", 2, 2),
}


@pytest.mark.parametrize("death", DEATHS)
def test_killed_while_it_fills(
    backbone: Backbone,
    images: ImageSet,
    cache: Cache,
    small_shards: int,
    monkeypatch: pytest.MonkeyPatch,
    death: str,
) -> None:
    home, name, call, left = DEATHS[death]
    with monkeypatch.context() as patch:
        patch.setattr(home, name, at_call(call, getattr(home, name)))
        process = in_fork(lambda: fill(keeper(backbone, images, cache)))
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    loader = keeper(backbone, images, cache)
    assert fill(loader) == len(images) - left
    for kept, fresh in answers(backbone, loader, tasks_of(backbone, 0)):
        torch.testing.assert_close(kept, fresh, rtol=1e-5, atol=1e-5)


def test_what_a_killed_process_left_is_cleared_later(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int
) -> None:
    fill(keeper(backbone, images, cache))
    folder, good = files(cache)[0].parent, files(cache)
    strays = [folder / "a.features.part", folder / "b.features.part"]
    other = folder / "c.part"  # not memoro's
    for stray in (*strays, other):
        stray.write_bytes(b"x" * 9)
    clear_abandoned(cache.folder)
    assert all(stray.exists() for stray in strays)  # another process may be at it
    age([*strays, other, *good], ABANDONED + 9)
    fill(keeper(backbone, images.subset([0]), cache))
    assert not any(stray.exists() for stray in strays)
    assert all(path.exists() for path in (other, *good))


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
    assert not files(cache, "part")
    assert fill(keeper(backbone, images, cache)) == len(images) - 4


def test_an_interrupt_amid_a_record(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    loader = keeper(backbone, images, cache)
    [batch, *_] = loader.loader.epoch(0)
    features = cached.keep_features(backbone, batch.pixels, loader.store.format)

    def keys() -> Iterator[bytes]:
        yield from loader.keys[0][:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), loader.store.writer() as writer:
        writer.add(keys(), features)  # type: ignore[arg-type]
    assert fill(keeper(backbone, images, cache)) == len(images) - 2


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
