"""Damaged files of the feature cache are passed over."""

from __future__ import annotations

import os

import pytest
from caches import cache, files, fill, images, keeper, small_files, splits, whole

from memoro.backbones import Backbone
from memoro.data import ImageSet
from memoro.training import Cache

__all__ = ["cache", "images", "small_files", "splits"]  # fixtures


@pytest.mark.parametrize("size", [None, 0, 1, -1, -4, 1000])
def test_a_file_of_another_size_is_passed_over(
    backbone: Backbone, images: ImageSet, cache: Cache, small_files: int, size: int | None
) -> None:
    images = images.subset(range(8))
    fill(keeper(backbone, images, cache))
    path = files(cache)[0]
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size if size in (0, 1) else path.stat().st_size + size)
    loader = keeper(backbone, images, cache)
    assert fill(loader) == 4
    assert len(whole(loader)) == len(images)


def test_a_file_of_another_name_is_passed_over(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    fill(keeper(backbone, images, cache))
    [path] = files(cache)
    path.rename(path.with_name("other-name.features"))
    assert fill(keeper(backbone, images, cache)) == len(images)
    assert len(files(cache)) == 2
