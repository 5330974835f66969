"""A folder of features that others use as well."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import cache, fill, images, keeper, small_files, splits, whole
from conftest import in_fork

from memoro.backbones import Backbone
from memoro.data import ImageSet
from memoro.engine.featurestore import clear
from memoro.errors import CacheError
from memoro.training import Cache

__all__ = ["cache", "images", "small_files", "splits"]  # fixtures


def test_two_processes_fill_at_once(
    backbone: Backbone, images: ImageSet, cache: Cache, small_files: int, tmp_path: Path
) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2)

    def work(number: int) -> None:
        loader = keeper(backbone, images, cache)
        barrier.wait(30)
        count = fill(loader)
        torch.save((count, whole(loader)), tmp_path / f"{number}.pt")

    processes = [in_fork(work, number) for number in range(2)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    found = [torch.load(tmp_path / f"{number}.pt") for number in range(2)]
    assert torch.equal(found[0][1], found[1][1])
    assert sum(count for count, _ in found) > 0
    fresh = keeper(backbone, images, cache)
    assert fill(fresh) == 0
    assert torch.equal(whole(fresh), found[0][1])


def test_processes_compute_their_parts(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    """None computes what is another's, and all is computed, also if one starts when another is done."""
    counts = []
    for number in range(2):
        done: list[int] = []
        keeper(backbone, images, cache).fill(done.append, (number, 2))
        counts.append(sum(done))
    assert sum(counts) == len(images)
    assert min(counts) > 0
    assert fill(keeper(backbone, images, cache)) == 0


def test_files_that_another_process_removes_stay_readable(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    fill(keeper(backbone, images, cache))
    loader = keeper(backbone, images, cache)
    assert fill(loader) == 0
    wanted = whole(keeper(backbone, images, cache))
    clear(cache.folder)
    assert torch.equal(whole(loader), wanted)


def test_a_folder_that_is_only_lent(
    backbone: Backbone, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(keeper(backbone, images, cache))

    def refuse(*given: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:  # root, as tests may run, can write anywhere
        patch.setattr(os, "utime", refuse)
        assert fill(keeper(backbone, images, cache)) == 0
    (cache.folder / "file").write_text("in the way")
    with pytest.raises(CacheError, match=r"cannot cache features in .*`Cache.folder`.*`cache=False`"):
        fill(keeper(backbone, images, Cache(cache.folder / "file" / "below")))
