"""Damaged feature files: training gives the same result, and the user is told. Seeded, and bounded in time."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from caches import cache, counted, curve, far, files, fill, images, keeper, small_files, splits, whole

from memoro.backbones import Backbone
from memoro.data import ImageSet, Splits
from memoro.engine.featurestore import clear
from memoro.training import Cache

__all__ = ["cache", "images", "small_files", "splits"]  # fixtures

NOTE = "is damaged: what it held is computed again"


def zero_quarter(data: bytearray, start: int, draw: random.Random) -> None:
    length = (len(data) - start) // 4
    at = draw.randrange(start, len(data) - length)
    data[at : at + length] = bytes(length)


def zero_page(data: bytearray, start: int, draw: random.Random) -> None:
    at = draw.randrange(start, len(data) - 4096)
    data[at : at + 4096] = bytes(4096)


def flip_bit(data: bytearray, start: int, draw: random.Random) -> None:
    data[draw.randrange(start, len(data))] ^= 1 << draw.randrange(8)


def random_bytes(data: bytearray, start: int, draw: random.Random) -> None:
    at = draw.randrange(start, len(data))
    data[at:] = draw.randbytes(len(data) - at)


def infinities(data: bytearray, start: int, draw: random.Random) -> None:
    at = draw.randrange(start, len(data) - 400) // 4 * 4
    data[at : at + 400] = bytes.fromhex("0000807f") * 100


def swap_blocks(data: bytearray, start: int, draw: random.Random) -> None:
    """As when two records of a file change places."""
    half = (len(data) - start) // 2
    data[start:] = data[start + half :] + data[start : start + half]


def cut(data: bytearray, start: int, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


Damage = Callable[[bytearray, int, random.Random], None]
DAMAGE: list[Damage] = [
    zero_quarter, zero_page, flip_bit, random_bytes, infinities, swap_blocks, cut,
]  # fmt: skip


def damage(path: Path, how: Damage, draw: random.Random) -> bool:
    """Whether the file is another one then."""
    before = path.read_bytes()
    data = bytearray(before)
    how(data, 0, draw)
    path.write_bytes(data)
    return bytes(data) != before


@pytest.mark.parametrize("how", DAMAGE, ids=lambda how: how.__name__)
def test_what_is_read_from_a_damaged_file_is_what_was_computed(
    backbone: Backbone,
    images: ImageSet,
    cache: Cache,
    small_files: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    how: Damage,
) -> None:
    images = images.subset(range(8))
    loader = keeper(backbone, images, cache)
    fill(loader)
    wanted, statistics = whole(loader), loader.statistics(range(8)).float()
    assert 1 < float(statistics.abs().max()) < 16
    shutil.copytree(cache.folder, tmp_path / "good")
    draw = random.Random(how.__name__)
    for _ in range(15):
        clear(cache.folder)
        shutil.copytree(tmp_path / "good", cache.folder, dirs_exist_ok=True)
        caplog.clear()
        changed = damage(draw.choice(files(cache)), how, draw)
        with counted() as count:
            loader = keeper(backbone, images, cache)
            fill(loader)
            found = whole(loader)
            pooled = loader.statistics(range(8))
        assert far(found, wanted) < 1e-5
        assert far(pooled, statistics) < 1e-2, "float16, of values below 16"
        assert count() <= 4  # the records of one file
        assert caplog.text.count(NOTE) <= 1  # of a damaged entry nobody knows
        assert count() or not changed
        caplog.clear()
        with counted() as count:  # the damaged file is gone
            loader = keeper(backbone, images, cache)
            fill(loader)
            assert far(whole(loader), wanted) < 1e-5
        assert count() == 0
        assert not caplog.text


@pytest.mark.parametrize("how", [zero_quarter, random_bytes, flip_bit])
def test_training_on_damaged_features_is_training_on_good_ones(
    backbone: Backbone,
    splits: Splits,
    cache: Cache,
    caplog: pytest.LogCaptureFixture,
    how: Damage,
) -> None:
    good, losses = curve(backbone, splits, cache, views=2)
    assert not caplog.text
    draw = random.Random(5)
    for path in files(cache):
        assert damage(path, how, draw)
    mine, found = curve(backbone, splits, cache, views=2)
    assert NOTE in caplog.text
    # Images that pass the backbone in another batch round differently.
    assert far(found, losses) < 1e-5
    for name, value in good.state_dict().items():
        assert far(value, mine.state_dict()[name]) < 1e-4


def test_what_is_computed_again_amid_mixed_precision_is_of_full_precision(
    backbone: Backbone, images: ImageSet, cache: Cache
) -> None:
    loader = keeper(backbone, images, cache)
    fill(loader)
    wanted = whole(loader)
    for path in files(cache):
        assert damage(path, zero_quarter, random.Random(5))
    loader = keeper(backbone, images, cache)
    with torch.autocast("cpu", dtype=torch.bfloat16), counted() as count:
        assert far(whole(loader), wanted) < 1e-5
    assert count() == len(images)


def test_each_record_is_checked_once(
    backbone: Backbone, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zlib

    fill(keeper(backbone, images, cache))
    loader = keeper(backbone, images, cache)
    real, calls = zlib.crc32, []
    monkeypatch.setattr(zlib, "crc32", lambda *given: (calls.append(1), real(*given))[1])
    first = whole(loader)
    assert len(calls) == 2 * len(images)  # key and record
    assert torch.equal(whole(loader), first)
    assert len(loader.statistics(range(len(images)))) == len(images)
    assert len(calls) == 2 * len(images)


def test_files_of_an_earlier_version_are_not_read(
    backbone: Backbone, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memoro.engine import featurestore

    with monkeypatch.context() as patch:
        patch.setattr(featurestore, "VERSION", featurestore.VERSION - 1)
        fill(keeper(backbone, images, cache))
    assert fill(keeper(backbone, images, cache)) == len(images)
