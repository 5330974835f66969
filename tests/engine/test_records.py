"""How many files there are of kept features: the kernel lets a process map some 65,000."""

from __future__ import annotations

import torch
from caches import cache, files, fill, images, keeper, small_files, splits, whole

from memoro.backbones import Backbone
from memoro.data import ImageSet
from memoro.training import Cache

__all__ = ["cache", "images", "small_files", "splits"]  # fixtures


def test_one_file_for_many_images(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    fill(keeper(backbone, images, cache))
    assert len(files(cache)) == 1
    fill(keeper(backbone, images, cache, views=2))
    assert len(files(cache)) == 2


def test_a_file_that_would_be_too_large_is_followed_by_another(
    backbone: Backbone, images: ImageSet, cache: Cache, small_files: int
) -> None:
    loader = keeper(backbone, images, cache)
    fill(loader)
    assert len(files(cache)) == 3  # batches of four
    assert max(path.stat().st_size for path in files(cache)) == 4 * small_files
    again = keeper(backbone, images, cache)
    assert fill(again) == 0
    assert torch.equal(whole(again), whole(loader))
