"""Statistics of photographs, by which tasks learn what is unfamiliar: read from images, kept, shipped."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import CASES
from PIL import Image
from trust import colours, run

import memoro
from memoro.backbones import Backbone
from memoro.engine.featurestore import clear
from memoro.engine.streams import pool_pass
from memoro.errors import DataError
from memoro.evaluation.calibrate import (
    CHANGED,
    CHANGES,
    FEWEST,
    FILE,
    find_photographs,
    read_changes,
    read_photographs,
    write_photographs,
)
from memoro.tasks.familiarity import PRINCIPAL, Others, fit_familiarity
from memoro.training.cached import find_cache, read_statistics

__all__ = ["colours"]  # fixtures


def save_photographs(folder: Path, count: int, seed: int = 0) -> Path:
    """Smooth images of many colours, without labels."""
    folder.mkdir()
    generator = np.random.default_rng(seed)
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (4, 5, 3), dtype=np.uint8))
        coarse.resize((50, 40), Image.Resampling.BICUBIC).save(folder / f"{number:03}.png")
    return folder


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_photographs(tmp_path_factory.mktemp("others") / "photographs", 60)


def same(one: Others | None, other: Others | None) -> bool:
    assert one is not None
    assert other is not None
    return torch.equal(one.mean, other.mean) and torch.equal(one.directions, other.directions)


def read(backbone: Backbone, source: Path, folder: Path | None, size: int = 20) -> Others:
    return read_photographs(backbone, backbone.preprocessing.at(size), source, folder, workers=0)


def test_they_are_statistics_of_the_upper_layers(backbone: Backbone, photographs: Path, tmp_path: Path) -> None:
    found = read(backbone, photographs, None)
    assert found.directions.shape == (PRINCIPAL, 4, 3, 24)
    preprocessing = backbone.preprocessing.at(20)
    files = sorted(photographs.iterdir())
    pixels = torch.stack([preprocessing.to_tensor(Image.open(file)) for file in files])
    mean = pool_pass(backbone.anatomy, pixels, 1).mean(dim=0)
    assert (found.mean.float() - mean).norm() < 1e-3 * mean.norm(), "half precision"
    assert not same(found, read(backbone, save_photographs(tmp_path / "new", 60, seed=1), None))
    siglip = memoro.load_backbone(next(case for case in CASES if case.name == "siglip").model())
    assert read(siglip, photographs, None).mean.shape == (4, 2, 24)


def test_changes_are_differences_of_statistics(backbone: Backbone, colours: Path) -> None:
    images = memoro.load_data(colours / "own", workers=0, quiet=True).train
    assert images is not None
    preprocessing = backbone.preprocessing.at(20)
    few, many = (read_changes(backbone, preprocessing, some) for some in (images.subset([3]), images))
    assert (few.shape, len(many)) == ((len(CHANGES), 4, 3, 24), CHANGED * len(CHANGES))
    image = images.open(3)
    darker = image.point(lambda value: round(value * 0.7))
    pixels = torch.stack([preprocessing.to_tensor(one) for one in (image, darker)])
    plain, changed = pool_pass(backbone.anatomy, pixels, 1)
    assert torch.allclose(few[list(CHANGES).index("darker by 30 %")], changed - plain, atol=1e-5)


def test_images_of_any_shape_and_depth_are_changed(backbone: Backbone) -> None:
    strip = Image.new("RGB", (70_000, 2), "red")  # longer than a JPEG may be
    deep = [Image.fromarray(np.full((24, 24), level, np.uint16)) for level in (900, 1800, 4095)]
    preprocessing = backbone.preprocessing.at(20)
    for pictures, white in (([strip, strip], None), (deep, 4095)):
        data = pictures, list("abc")[: len(pictures)]
        images = memoro.load_data(data, val_fraction=0, screen=False, quiet=True).train
        assert images is not None
        changes = read_changes(backbone, replace(preprocessing, white=white), images)
        assert changes.isfinite().all()
        assert changes.abs().max() > 1e-3


def test_they_are_kept_by_backbone_and_preprocessing(backbone: Backbone, photographs: Path, tmp_path: Path) -> None:
    folder, preprocessing = tmp_path / "cache" / "features", backbone.preprocessing.at(20)
    assert find_photographs(backbone, preprocessing, folder) is None
    first = read(backbone, photographs, folder)
    assert same(find_photographs(backbone, preprocessing, folder), first)
    assert find_photographs(backbone, preprocessing, None) is None
    assert find_photographs(backbone, preprocessing, tmp_path / "elsewhere") is None
    assert find_photographs(backbone, preprocessing.at(28), folder) is None
    other = memoro.load_backbone(CASES[0].model(seed=8))
    assert find_photographs(other, preprocessing, folder) is None
    second, third = read(other, photographs, folder), read(backbone, photographs, folder, size=28)
    assert same(find_photographs(other, preprocessing, folder), second)
    assert same(find_photographs(backbone, preprocessing.at(28), folder), third)
    assert same(find_photographs(backbone, preprocessing, folder), first)
    assert not same(first, second)
    assert not same(first, third)
    again = read(backbone, save_photographs(tmp_path / "new", 60, seed=1), folder)
    assert same(find_photographs(backbone, preprocessing, folder), again), "the latest ones count"
    clear(folder)
    assert find_photographs(backbone, preprocessing, folder) is None


def test_only_their_owner_may_read_them(backbone: Backbone, photographs: Path, tmp_path: Path) -> None:
    read(backbone, photographs, tmp_path / "cache")
    folders = [tmp_path / "cache", *(tmp_path / "cache").rglob("*/")]
    assert len(folders) == 2
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 2


def test_damaged_files_are_passed_over(backbone: Backbone, photographs: Path, tmp_path: Path) -> None:
    found = read(backbone, photographs, tmp_path)
    [path] = tmp_path.rglob("*.features")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"x" * 1000):
        path.write_bytes(damaged)
        assert find_photographs(backbone, backbone.preprocessing.at(20), tmp_path) is None
    path.write_bytes(whole)
    assert same(find_photographs(backbone, backbone.preprocessing.at(20), tmp_path), found)


def test_too_few_are_refused(backbone: Backbone, tmp_path: Path) -> None:
    some = save_photographs(tmp_path / "some", FEWEST - 1)
    with pytest.raises(DataError, match=r"49 photographs are too few to learn what is unfamiliar from: give 50 or"):
        read(backbone, some, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    shutil.copy(some / "000.png", some / "more.png")
    read(backbone, some, tmp_path / "cache")


def test_memoro_tiny_has_its_own_at_its_preprocessing(backbone: Backbone, photographs: Path, tmp_path: Path) -> None:
    tiny = memoro.load_backbone("memoro-tiny")
    shipped = find_photographs(tiny, tiny.preprocessing, None)
    assert shipped is not None
    anatomy = tiny.anatomy
    layers = anatomy.depth - anatomy.depth // 3
    assert shipped.mean.shape == (layers, anatomy.statistics, anatomy.dim)
    assert all(bool(part.isfinite().all()) for part in (shipped.mean, shipped.directions))
    size = tiny.preprocessing.size
    assert size is not None
    assert find_photographs(tiny, tiny.preprocessing.at(size[0] // 2), None) is None
    assert find_photographs(backbone, tiny.preprocessing, None) is None
    own = Others(shipped.mean + 1, shipped.directions)
    write_photographs(tmp_path / FILE, own, tiny, tiny.preprocessing)
    assert same(find_photographs(tiny, tiny.preprocessing, tmp_path), shipped), "kept under another name"
    mine = read_photographs(tiny, tiny.preprocessing, photographs, tmp_path, workers=0)
    assert same(find_photographs(tiny, tiny.preprocessing, tmp_path), mine), "the user's own count more"
    assert not same(mine, shipped)


def test_training_and_calibrating_learn_from_them(
    colours: Path,
    photographs: Path,
    tmp_path: Path,
    own_cache: Path,
) -> None:
    quick: dict[str, Any] = {"epochs": 1, "workers": 0, "quiet": True, "lr": 0.1, "image_size": 20}
    backbone = memoro.load_backbone(str(colours / "vit"))

    def train(**options: Any) -> memoro.Task:
        return memoro.train(colours / "own", backbone=backbone, task="own", **{**quick, **options}).task

    plain, taught, later = train(), train(others=photographs), train()
    private = train(cache=False)
    sizes = [0 if task.spec.familiarity is None else len(task.spec.familiarity.reader) for task in
             (plain, taught, later, private)]  # fmt: skip
    assert sizes == [0, 4 * 3 * 24, 4 * 3 * 24, 0], "kept for later trainings, unless nothing is to be kept"
    texts = [task.spec.training["familiarity"] for task in (plain, taught)]
    assert texts == [
        "40 training images, left out in turn, against no photographs",
        "40 training images, left out in turn, against ordinary photographs",
    ]
    images = memoro.load_data(colours / "own", workers=0, quiet=True).train
    preprocessing = backbone.preprocessing.at(20)
    assert images is not None
    statistics = read_statistics(backbone, images, preprocessing, find_cache(None), workers=0)
    others, changes = read(backbone, photographs, None), read_changes(backbone, preprocessing, images)
    fits = [fit_familiarity(statistics(torch.arange(40)), images.targets, others, one) for one in (changes, None)]
    readers = [None if found is None else found.reader for found in (taught.spec.familiarity, *fits)]
    assert readers[0] is not None
    assert [one is not None and torch.equal(readers[0], one) for one in readers] == [True, True, False]
    clear(own_cache)
    path = memoro.save_task(plain, tmp_path / "own.safetensors")
    run("calibrate", path, colours / "own" / "val", "-b", colours / "vit", "--others", photographs)
    found = memoro.load_task(path).spec.familiarity
    assert found is not None
    assert len(found.reader) == 4 * 3 * 24
    assert found.images == 24
    assert found.coarse, "of 24 images"
