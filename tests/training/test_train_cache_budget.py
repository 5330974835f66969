"""The space of the feature cache: its budget, eviction, and a full disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from caches import age, cache, curve, files, fill, images, keeper, small_files, splits, whole
from families import CASES

from memoro.backbones import Backbone, load_backbone
from memoro.data import ImageSet, Splits
from memoro.engine.featurestore import evict, total_bytes
from memoro.errors import CacheError
from memoro.training import Cache, cached

__all__ = ["cache", "images", "small_files", "splits"]  # fixtures


PAGE = 4096
"""Of the file system: files take whole pages."""


def gigabytes(number: float) -> float:
    return number / 1e9


def test_what_does_not_fit_names_the_choices(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    loader = keeper(backbone, images, cache, views=2)
    size = 2 * len(images) * loader.store.format.size
    assert fill(loader, budget=gigabytes(size)) == 2 * len(images)
    with pytest.raises(CacheError) as told:
        fill(loader, budget=gigabytes(size - 1))
    for choice in ("a later fork", "fewer views (`views=1`", "more space (`Cache.budget`)", "`cache=False`"):
        assert choice in str(told.value)
    with pytest.raises(CacheError) as told:
        fill(keeper(backbone, images, cache, first=3), budget=0)
    assert "fewer views" not in str(told.value)
    assert "a later fork" not in str(told.value)
    assert "`cache=False`" in str(told.value)


def test_a_disk_that_is_nearly_full(
    backbone: Backbone, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(cache.folder.parent)
    monkeypatch.setattr(cached.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CacheError, match=r"the disk has 1.0 kB left.*`Cache.folder`"):
        fill(keeper(backbone, images, cache))
    assert not files(cache)


def test_the_longest_unused_is_evicted(
    backbone: Backbone, images: ImageSet, cache: Cache, small_files: int, tmp_path: Path
) -> None:
    other = load_backbone(CASES[0].model(seed=8))
    fill(keeper(backbone, images.subset(range(4)), cache))
    mine = files(cache)
    fill(keeper(other, images, cache))
    theirs = [path for path in files(cache) if path not in mine]
    assert (len(mine), len(theirs)) == (1, 3)
    for seconds, path in enumerate(theirs, start=1):
        age([path], 100 * seconds)
    age(mine, 1e6)  # oldest of all, but used now
    # Four more records beside the four: space for twelve in all, so that one file of the others stays.
    loader = keeper(backbone, images.subset(range(8)), cache)
    assert fill(loader, budget=gigabytes(12 * small_files + 4 * PAGE)) == 4
    assert all(path.exists() for path in mine)
    assert [path.exists() for path in theirs] == [True, False, False]
    assert len(files(cache)) == 3
    assert len(whole(loader)) == 8

    assert evict(cache.folder, 0, 10**9) == total_bytes(cache.folder)
    assert evict(cache.folder, 0, 0, set(mine)) == total_bytes(cache.folder)
    assert files(cache) == mine


def test_what_another_loader_needs_is_never_evicted(
    backbone: Backbone, images: ImageSet, cache: Cache, small_files: int
) -> None:
    parts = [images.subset(range(4)), images.subset(range(4, 8)), images.subset(range(8, 9))]
    for part in parts[:2]:
        fill(keeper(backbone, part, cache))
    fill(keeper(load_backbone(CASES[0].model(seed=8)), images.subset(range(2)), cache))
    # The loaders' own files are the oldest.
    loaders = [keeper(backbone, part, cache) for part in parts]
    mine = loaders[0].store.mark_used(loaders[0].keys[0]) | loaders[1].store.mark_used(loaders[1].keys[0])
    age(sorted(mine), 1e6)
    assert fill(*loaders, budget=gigabytes(9 * small_files + 4 * PAGE)) == 1
    assert [len(whole(loader)) for loader in loaders] == [4, 4, 1]
    assert all(path.exists() for path in mine)
    assert total_bytes(cache.folder) <= 9 * small_files + 4 * PAGE


def test_only_what_is_read_counts_as_used(backbone: Backbone, images: ImageSet, cache: Cache, small_files: int) -> None:
    parts = images.subset(range(4)), images.subset(range(4, 8))
    fill(keeper(backbone, parts[0], cache))
    idle = files(cache)
    age(idle, 1e6)
    fill(keeper(backbone, parts[1], cache))  # the same backbone, other images
    assert all(time.time() - path.stat().st_mtime > 1e5 for path in idle)
    fill(keeper(backbone, parts[0], cache))
    assert all(time.time() - path.stat().st_mtime < 1e5 for path in idle)


def test_the_budget_holds_where_old_records_are_larger(
    backbone: Backbone, images: ImageSet, cache: Cache, small_files: int
) -> None:
    fill(keeper(backbone, images, cache))  # from layer 0 on
    before = total_bytes(cache.folder)
    loader = keeper(backbone, images, cache, first=4, views=3)
    assert 3 * len(images) * loader.store.format.size < before
    fill(loader, budget=gigabytes(before))
    assert total_bytes(cache.folder) <= before
    assert not any(loader.missing())


def test_where_it_need_not_fit_it_is_computed_anew(
    backbone: Backbone, splits: Splits, cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    fresh, _ = curve(backbone, splits, False, views=2)
    for tight in (replace(cache, budget=0.0), replace(cache, folder=tmp_path / "file" / "below")):
        with pytest.raises(CacheError):
            curve(backbone, splits, tight, views=2)
        mine, _ = curve(backbone, splits, replace(tight, required=False), views=2, quiet=False)
        assert all(torch.equal(value, mine.state_dict()[name]) for name, value in fresh.state_dict().items())
        told = " ".join(capsys.readouterr().err.split())
        assert "note: training without the cache" in told
    assert not files(cache)


def test_a_full_disk(
    backbone: Backbone, splits: Splits, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(keeper(backbone, images.subset(range(2)), cache))
    size, real = total_bytes(cache.folder), Path.open

    def full(data: bytes) -> int:
        raise OSError(28, "No space left on device")

    @contextmanager
    def opened(path: Path, *given: Any, **options: Any) -> Iterator[Any]:
        with real(path, *given, **options) as file:
            kept = path.suffix == ".features"
            yield SimpleNamespace(truncate=file.truncate, seek=file.seek, write=full) if kept else file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(
            CacheError, match=r"No space left on device.*`cache=False`. Features cached so far are still valid"
        ):
            fill(keeper(backbone, images, cache))
        assert total_bytes(cache.folder) == size
        curve(backbone, splits, replace(cache, required=False), views=1, epochs=1)
    assert fill(keeper(backbone, images, cache)) == len(images) - 2
