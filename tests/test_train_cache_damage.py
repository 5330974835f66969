"""Damaged files of the feature cache are passed over."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from caches import cache, files, fill, images, keeper, small_shards, splits, whole

from memoro.backbones import Backbone
from memoro.data import ImageSet
from memoro.training import Cache

__all__ = ["cache", "images", "small_shards", "splits"]  # fixtures


def lie(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: {**record, "layout": {**record["layout"], **changes}}


def deep(record: dict[str, Any]) -> bytes:
    return b"[" * 200_000


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda record: b"",
    "half": lambda record: json.dumps(record)[:-40].encode(),
    "no text": lambda record: b"\xff\xfe\x00junk",
    "deep": deep,
    "a list": lambda record: [record],
    "no layout": lambda record: {"keys": record["keys"]},
    "layout of another kind": lambda record: {**record, "layout": 5},
    "more in the layout": lie(more=1),
    "one key less": lambda record: {**record, "keys": record["keys"][1:]},
    "a key too many": lambda record: {**record, "keys": [*record["keys"], "00" * 32]},
    "no keys": lambda record: {**record, "keys": []},
    "keys that are none": lambda record: {**record, "keys": [None, 7]},
    "keys that are no hex": lambda record: {**record, "keys": ["zz", "yy"]},
    "keys as a number": lambda record: {**record, "keys": 10**9},
    "first below 0": lie(first=-1),
    "first as text": lie(first="0"),
    "first as a float": lie(first=0.0),
    "first as a truth": lie(first=False),
    "no heads": lie(heads=0),
    "huge": lie(tokens=10**30),
    "infinite": lie(depth=math.inf),
    "no number": lie(dim=math.nan),
    "a dtype that torch has not": lie(dtype="float17"),
    "a dtype that is something else": lie(dtype="nn"),
    "a dtype of the same size": lie(dtype="int32"),
}


@pytest.mark.parametrize("how", LIES)
def test_a_damaged_index_is_passed_over(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int, how: str
) -> None:
    images = images.subset(range(8))
    fill(keeper(backbone, images, cache))
    path = files(cache, "json")[0]
    told = LIES[how](json.loads(path.read_text()))
    path.write_bytes(told if isinstance(told, bytes) else json.dumps(told).encode())
    loader = keeper(backbone, images, cache)
    assert fill(loader) == 2
    assert fill(keeper(backbone, images, cache)) == 0
    assert torch.equal(whole(loader), whole(keeper(backbone, images, cache)))


@pytest.mark.parametrize("size", [None, 0, 1, -1, -4, 1000])
def test_a_file_of_another_size_is_passed_over(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int, size: int | None
) -> None:
    images = images.subset(range(8))
    fill(keeper(backbone, images, cache))
    path = files(cache)[0]
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size if size in (0, 1) else path.stat().st_size + size)
    loader = keeper(backbone, images, cache)
    assert fill(loader) == 2
    assert len(whole(loader)) == len(images)
