"""The feature cache's records: never of something else, no more of them than are read, and none twice."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caches import SIZE, answers, cache, counted, fill, images, keeper, splits, tasks_of, whole
from conftest import random_task
from families import CASES
from small_training import LABELS
from squares import save_square, save_squares

import memoro
from memoro.backbones import Backbone, load_backbone
from memoro.data import Augment, ImageSet, Splits, load_data
from memoro.data.splits import fold_numbers
from memoro.engine.featurestore import clear, total_bytes
from memoro.errors import DataError
from memoro.regimes import find_regime
from memoro.tasks.task import new_task
from memoro.training import Cache, Recipe, Run, train_runs
from memoro.training.cached import estimate

__all__ = ["cache", "images", "splits"]  # fixtures


def test_only_the_same_is_read_back(backbone: Backbone, images: ImageSet, cache: Cache, tmp_path: Path) -> None:
    number = len(images)

    def computed(images: ImageSet = images, net: Backbone = backbone, keep: Cache = cache, **how: Any) -> int:
        with counted() as count:
            fill(keeper(net, images, keep, **how))
        return count()

    assert computed() == number
    assert computed() == 0
    assert computed(net=load_backbone(CASES[0].model())) == 0  # the same weights in another object
    assert computed(net=load_backbone(CASES[0].model(seed=8))) == number
    assert computed(net=load_backbone(CASES[0].model(), dtype=torch.float64)) == number
    for part, attribute, value in (("mlp", "activation_fn", torch.nn.ReLU()), ("layernorm_before", "eps", 1e-3)):
        other = CASES[0].model()  # the same weights in another function
        layer = other.vit.layers[0]
        setattr(getattr(layer, part), attribute, value)
        assert computed(net=load_backbone(other)) == number
    assert computed(size=24) == number
    tinted = replace(backbone, preprocessing=replace(backbone.preprocessing, mean=(0.4, 0.5, 0.5)))
    assert computed(net=tinted) == number
    assert computed(keep=replace(cache, dtype="float16")) == number
    assert computed(images.subset([3, 1])) == 0  # in another order
    assert computed(views=1) == 0  # the plain view is the one of validation
    assert computed(views=2) == number
    assert computed(views=2) == 0
    assert computed(views=3) == number
    assert computed(views=2, seed=1) == number
    assert computed(views=2, augment=Augment(flip=0.25)) == number
    assert computed(views=2, seed=1) == 0

    root = save_squares(tmp_path / "own", {"red": 1, "green": 1})
    own = load_data(root, val_fraction=0, workers=0, quiet=True).train
    assert own is not None
    assert computed(own) == 1  # red/000.png is in `images` too
    save_square(root / "red" / "000.png", "blue", 77)
    own = load_data(root, val_fraction=0, workers=0, quiet=True).train
    assert own is not None
    assert computed(own) == 1


@pytest.mark.parametrize("library", ["PIL", "torch", "transformers"])
def test_what_another_version_computed_is_not_read(
    backbone: Backbone, splits: Splits, monkeypatch: pytest.MonkeyPatch, own_cache: Path, library: str
) -> None:
    def computed() -> int:
        with counted() as count:
            memoro.train(splits, backbone=backbone, lr=0.001, image_size=SIZE, epochs=1, workers=0, quiet=True)
        return count()

    assert own_cache == Cache().folder
    assert (computed(), computed()) == (len(splits.train or []) + len(splits.val or []), 0)
    module = sys.modules[library]
    monkeypatch.setattr(module, "__version__", f"{module.__version__}.post1")
    assert (computed(), computed()) == (len(splits.train or []) + len(splits.val or []), 0)


def test_images_that_nobody_screened_are_told_apart_as_well(
    backbone: Backbone, images: ImageSet, cache: Cache, tmp_path: Path
) -> None:
    root = save_squares(tmp_path / "own", {"red": 2, "green": 2})
    for changed in (False, True):
        if changed:
            save_square(root / "red" / "000.png", "blue", 77)
        own = load_data(root, val_fraction=0, screen=False, workers=0, quiet=True).train
        assert own is not None
        assert own.digests is None
        assert fill(keeper(backbone, own, cache)) == (1 if changed else 4)


def test_an_image_that_changes_under_way_is_not_kept_as_what_it_was(
    backbone: Backbone, cache: Cache, tmp_path: Path
) -> None:
    root = save_squares(tmp_path / "own", {"red": 4, "green": 4})
    own = load_data(root, val_fraction=0, workers=0, quiet=True).train
    assert own is not None
    loader = keeper(backbone, own, cache, views=2)
    path = Path(own.where(5))
    before = path.read_bytes()
    save_square(path, "blue", 77)
    with pytest.raises(DataError, match=f"{path.name} has changed since it was screened"):
        fill(loader)
    path.write_bytes(before)
    assert fill(keeper(backbone, own, cache)) == 4  # the first batch was good


def test_one_from_an_earlier_layer_serves_a_later_fork(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    assert fill(keeper(backbone, images, cache, first=2)) == len(images)
    assert fill(keeper(backbone, images, cache, first=0)) == len(images)  # too little was kept
    for first in (2, 4, backbone.depth):
        late = keeper(backbone, images, cache, first)
        assert fill(late) == 0
        for kept, fresh in answers(backbone, late, [t for t in tasks_of(backbone, first) if t.name != "child"]):
            torch.testing.assert_close(kept, fresh, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_no_more_than_the_forks_read_is_stored(
    backbone: Backbone, images: ImageSet, tmp_path: Path, dtype: Any
) -> None:
    for first in (0, 2, 5):
        keep = Cache(tmp_path / str(first), dtype=dtype)
        loader = keeper(backbone, images, keep, first)
        tokens = 1 + (SIZE // 4) ** 2
        pairs = (5 - first) * 2 * tokens * 24 * (2 if dtype == "float16" else 4)
        pooled = 4 * 3 * 24 * 2  # three vectors of each layer from the second on
        wanted = 32 + 8 + (5 - first + 1) * 24 * 4 + pooled + pairs
        assert loader.store.format.size == wanted
        assert estimate([loader]) == (len(images), len(images) * wanted)
        fill(loader)
        assert 0 <= total_bytes(keep.folder) - len(images) * wanted < 4096  # a page of the file system
        assert estimate([loader]) == (0, 0)
        assert clear(keep.folder) >= len(images) * wanted
        assert not list(keep.folder.iterdir())


def test_training_keeps_the_layers_from_the_first_fork_on(backbone: Backbone, splits: Splits, cache: Cache) -> None:
    parent = random_task(backbone, "parent", cells=1, from_layer=2)
    tasks = [
        new_task(backbone, "late", LABELS, cells=1, from_layer=4),
        new_task(backbone, "child", LABELS, cells=1, from_layer=3, extends=[parent]),
    ]
    regime, size = find_regime("memory"), backbone.preprocessing.at(SIZE)
    specs = [Run(task, Recipe(epochs=1, views=1), regime, splits, size) for task in tasks]
    train_runs(backbone, specs, cache=cache, workers=0, quiet=True)
    assert all(fill(keeper(backbone, found, cache, first=2)) == 0 for found in (splits.train, splits.val) if found)
    assert splits.train is not None
    assert fill(keeper(backbone, splits.train, cache, first=1)) == len(splits.train)


def test_copies_and_folds_share_records(backbone: Backbone, splits: Splits, cache: Cache, tmp_path: Path) -> None:
    root = save_squares(tmp_path / "own", dict.fromkeys(LABELS, 4))
    shutil.copy(root / "red" / "000.png", root / "red" / "copy.png")
    own = load_data(root, labels=LABELS, val_fraction=0, workers=0, quiet=True)
    assert own.train is not None
    assert (len(own.train), fill(keeper(backbone, own.train, cache))) == (13, 12)
    assert whole(keeper(backbone, own.train, cache)).shape[0] == 13

    shutil.rmtree(cache.folder)
    number = fold_numbers(own.train, 3, 0)
    regime, size = find_regime("memory"), backbone.preprocessing.at(SIZE)
    specs = [
        Run(
            new_task(backbone, "t", LABELS),
            Recipe(epochs=2, views=2),
            regime,
            own,
            size,
            np.flatnonzero(number == fold),
        )
        for fold in range(3)
    ]
    with counted() as count:
        train_runs(backbone, specs, cache=cache, workers=0, quiet=True)
    assert count() == 12 + 13  # plain ones once, a random view of each copy, nothing for the folds
    loaders = [keeper(backbone, own.train, Cache(tmp_path / "n")), keeper(backbone, own.train, Cache(tmp_path / "n"))]
    assert estimate(loaders)[0] == 12  # nothing is counted twice
