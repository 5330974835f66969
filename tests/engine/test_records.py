"""How many files of kept features are mapped at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from caches import cache, files, fill, images, keeper, small_shards, splits, whole

from memoro.backbones import Backbone
from memoro.data import ImageSet
from memoro.engine import records
from memoro.training import Cache

__all__ = ["cache", "images", "small_shards", "splits"]  # fixtures


def mapped(cache: Cache) -> int:
    """Files of features in this process's memory."""
    text = Path("/proc/self/maps").read_text()
    return sum(text.count(str(file)) > 0 for file in files(cache))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts the mappings that Linux lists")
def test_few_files_are_mapped_at_a_time(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = keeper(backbone, images, cache)
    fill(loader)
    wanted, every = whole(loader), len(files(cache))
    assert mapped(cache) == every > 3
    del loader
    monkeypatch.setattr(records, "MOST_MAPPED", 2)
    again = keeper(backbone, images, cache)
    assert fill(again) == 0
    assert mapped(cache) <= 2
    for _ in range(2):
        assert torch.equal(whole(again), wanted)
        assert mapped(cache) <= 2
    everything = range(len(images))
    assert torch.equal(again.statistics(everything), keeper(backbone, images, cache).statistics(everything))


def test_a_file_that_went_while_it_was_not_mapped_is_computed_again(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = keeper(backbone, images, cache)
    fill(loader)
    wanted = whole(loader)
    monkeypatch.setattr(records, "MOST_MAPPED", 1)
    again = keeper(backbone, images, cache)
    [*gone, _] = files(cache)
    for file in gone[:2]:
        file.unlink()
    assert torch.equal(whole(again), wanted)
    assert len(files(cache)) > len(gone) - 2
