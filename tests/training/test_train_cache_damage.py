"""Damaged files of the feature cache are passed over."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import cache, files, fill, header_size, images, keeper, small_shards, splits, whole

from memoro.backbones import Backbone
from memoro.data import ImageSet
from memoro.training import Cache

__all__ = ["cache", "images", "small_shards", "splits"]  # fixtures

Header = dict[str, Any]


def lie(name: str, **changes: Any) -> Callable[[Header], Any]:
    return lambda header: {**header, name: {**header[name], **changes}}


def shape(name: str, *, more: int = 0, **changed: Any) -> Callable[[Header], Any]:
    """Axis `a<number>` of a tensor has another length."""

    def tell(header: Header) -> Any:
        axes = list(header[name]["shape"]) + [1] * more
        for axis, length in changed.items():
            axes[int(axis[1:])] = length
        return lie(name, shape=axes)(header)

    return tell


LIES: dict[str, Callable[[Header], Any]] = {
    "empty": lambda header: b"",
    "half": lambda header: json.dumps(header)[:-40].encode(),
    "no text": lambda header: b"\xff\xfe\x00junk",
    "deep": lambda header: b"[" * 200_000,
    "deep objects": lambda header: b'{"a":' * 200_000,
    "a list": lambda header: [header],
    "no keys": lambda header: {name: part for name, part in header.items() if name != "keys"},
    "no tokens": lambda header: {name: part for name, part in header.items() if name != "tokens"},
    "a tensor of another kind": lambda header: {**header, "pairs": 5},
    "another name": lambda header: {("other" if name == "pairs" else name): part for name, part in header.items()},
    "one key less": shape("keys", a0=1),
    "a key too many": shape("keys", a0=3),
    "no key at all": shape("keys", a0=0),
    "shorter keys": shape("keys", a0=4, a1=16),
    "keys as text": lie("keys", dtype="STR"),
    "keys of other numbers": lie("keys", dtype="I8"),
    "keys without rows": lie("keys", shape=[]),
    "another number of layers": shape("tokens", a0=3, a1=4),
    "as many layers as no model has": shape("tokens", a0=1, a1=12),
    "no axis": lie("tokens", shape=[]),
    "one axis more": shape("tokens", more=1),
    "a negative axis": shape("tokens", a0=-1),
    "a float": shape("tokens", a0=2.0),
    "a truth": shape("tokens", a0=True),
    "swapped axes": shape("pairs", a2=3, a3=2),
    "fewer statistics": shape("pooled", a2=2),
    "no statistics": lambda header: {name: part for name, part in header.items() if name != "pooled"},
    "huge": shape("pairs", a0=10**30),
    "overflowing": shape("pairs", a0=2**62, a1=2**62),
    "infinite": shape("pairs", a0=math.inf),
    "no number": shape("pairs", a0=math.nan),
    "a dtype that there is not": lie("pairs", dtype="F17"),
    "a dtype of the same size": lie("pairs", dtype="I32"),
    "offsets beyond the end": lie("pairs", data_offsets=[0, 10**9]),
    "offsets that overlap": lie("pairs", data_offsets=[0, 64]),
    "offsets backwards": lie("pairs", data_offsets=[64, 0]),
}


def rewrite_header(path: Path, told: Any) -> None:
    data = told if isinstance(told, bytes) else json.dumps(told).encode()
    rest = path.read_bytes()[header_size(path) :]
    path.write_bytes(len(data).to_bytes(8, "little") + data + rest)


@pytest.mark.parametrize("how", LIES)
def test_a_damaged_header_is_passed_over(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int, how: str
) -> None:
    images = images.subset(range(8))
    fill(keeper(backbone, images, cache))
    path = files(cache)[0]
    rewrite_header(path, LIES[how](json.loads(path.read_bytes()[8 : header_size(path)])))
    loader = keeper(backbone, images, cache)
    assert fill(loader) == 2
    assert fill(keeper(backbone, images, cache)) == 0
    assert torch.equal(whole(loader), whole(keeper(backbone, images, cache)))


def test_a_header_that_is_written_anew_is_read(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int
) -> None:
    fill(keeper(backbone, images, cache))
    for path in files(cache):
        rewrite_header(path, json.loads(path.read_bytes()[8 : header_size(path)]))
    assert fill(keeper(backbone, images, cache)) == 0


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
