"""What the tests of the feature cache share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_task
from small_training import LABELS, QUICK
from squares import save_squares
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import Augment, ImageSet, Loader, Splits, load_data
from memoro.engine import featurestore
from memoro.engine.featurestore import RecordFormat
from memoro.engine.streams import Features
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import Task, new_task
from memoro.training import Cache, cached, fit
from memoro.training.cached import CachedLoader, make_room
from memoro.training.run import build_forward

SIZE = 20


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Splits:
    root = save_squares(tmp_path_factory.mktemp("squares") / "squares", dict.fromkeys(LABELS, 4))
    return load_data(root, labels=LABELS, val_fraction=0.25, workers=0, quiet=True)


@pytest.fixture
def images(splits: Splits) -> ImageSet:
    assert splits.train is not None
    return splits.train


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "features", dtype="float32")


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch, backbone: Backbone) -> int:
    """A batch, which is four records, to a file; returns the size of a record."""
    reads = ReadOut.of(backbone.anatomy)
    shape = (0, 5, 24, 3, 1 + (SIZE // 4) ** 2)
    size = RecordFormat(*shape, "float32", reads.from_layer, reads.statistics).size
    monkeypatch.setattr(featurestore, "FILE_BYTES", 4 * size + 1)
    return size


def keeper(
    backbone: Backbone, images: ImageSet, cache: Cache, first: int = 0, size: int = SIZE, **how: Any
) -> CachedLoader:
    if how:
        how = {"augment": Augment(), "shuffle": True, "views": 1, **how}
    loader = Loader(images, backbone.preprocessing.at(size), batch_size=4, workers=0, **how)
    return CachedLoader(loader, backbone, cache, first)


def fill(*loaders: CachedLoader, budget: float = 20.0) -> int:
    """How many images were computed."""
    counts: list[int] = []
    make_room(loaders, Cache(loaders[0].store.root, budget))
    for loader in loaders:
        loader.store.refresh()  # they may share records
        loader.fill(counts.append)
    return sum(counts)


def files(cache: Cache) -> list[Path]:
    return sorted(cache.folder.glob("*/*.features"))


def age(paths: Iterable[Path], seconds: float) -> None:
    """As if they had not been used for so long."""
    for path in paths:
        os.utime(path, (time.time() - seconds,) * 2)


def far(left: Tensor, right: Tensor) -> float:
    return float((left - right).detach().abs().max())


def whole(loader: CachedLoader) -> Tensor:
    """All that it reads, as one tensor."""
    return torch.cat(
        [torch.cat([part[1].flatten(1) for part in batch.read().layers], 1).clone() for batch in loader.epoch(0)]
    )


def tasks_of(backbone: Backbone, first: int) -> list[Task]:
    """With and without memory, a child of a parent, a late fork and a head: those that fork at `first` or later."""
    parent = random_task(backbone, "parent", seed=1, cells=2, from_layer=min(first + 1, backbone.depth))
    tasks = [
        random_task(backbone, "plain", seed=2, cells=0),
        random_task(backbone, "memory", seed=3, cells=3),
        random_task(backbone, "late", seed=4, cells=2, from_layer=2),
        random_task(backbone, "child", seed=5, cells=1, from_layer=2, extends=[parent]),
        random_task(backbone, "head", seed=6, cells=0, from_layer=backbone.depth),
    ]
    return [task for task in tasks if task.from_layer >= first]


def answers(backbone: Backbone, loader: CachedLoader, tasks: list[Task]) -> list[tuple[Tensor, Tensor]]:
    """Each task's logits from features, and from pixels."""
    shared, pairs = build_forward(backbone, tasks), []
    with torch.no_grad():
        for kept, fresh in zip(loader.epoch(0), loader.loader.epoch(0), strict=True):
            assert torch.equal(kept.index, fresh.index)
            assert torch.equal(kept.targets, fresh.targets)
            pairs.append((torch.cat(shared(kept.read()), 1), torch.cat(shared(fresh.pixels.to(backbone.dtype)), 1)))
    return pairs


def curve(backbone: Backbone, splits: Splits, keep: Cache | bool, **options: Any) -> tuple[Task, Tensor]:
    task = new_task(backbone, "t", LABELS, cells=2, from_layer=1, seed=1)
    options = {"epochs": 3, "batch_size": 4, "lr": 0.05, **QUICK, **options}
    result = fit(backbone, task, splits, **{**options, "cache": keep})
    return task, torch.tensor([[entry["train_loss"], entry["val_loss"]] for entry in result.history])


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """How many images went through the backbone to be kept."""
    counts: list[int] = []
    real = cached.keep_features

    def count(backbone: Backbone, pixels: Tensor, format: RecordFormat) -> Features:
        counts.append(len(pixels))
        return real(backbone, pixels, format)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached, "keep_features", count)
        yield lambda: sum(counts)
