"""Kept features in a GPU's memory. The CPU's stands for it."""

from __future__ import annotations

import pytest
import torch
from caches import cache, fill, images, keeper, splits, whole

from memoro.backbones import Backbone
from memoro.data import ImageSet
from memoro.engine.featurestore import FeatureStore, free_memory
from memoro.training import Cache, cached

__all__ = ["cache", "images", "splits"]  # fixtures


def test_features_that_fit_are_copied_once(
    backbone: Backbone, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted_loader, loader = (keeper(backbone, images, cache, views=2) for _ in range(2))
    fill(loader)
    wanted_loader.store.refresh()
    wanted = [whole(wanted_loader), torch.cat([batch.read().token.clone() for batch in wanted_loader.epoch(1)])]
    copies: list[int] = []
    copy = FeatureStore.copy
    monkeypatch.setattr(
        FeatureStore, "copy", lambda self, keys, *how: (copies.append(len(keys)), copy(self, keys, *how))[1]
    )
    size = loader.resident_bytes
    form = loader.store.format
    each = (form.layers + 1) * form.dim + form.layers * 2 * form.tokens * form.dim
    assert size == 2 * len(images) * each * 4
    monkeypatch.setattr(cached, "free_memory", lambda device: size)
    found = [whole(loader), torch.cat([batch.read().token.clone() for batch in loader.epoch(1)])]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert sum(copies) == 2 * len(images), "each record once, whatever is read"
    whole(loader)
    assert sum(copies) == 2 * len(images)
    monkeypatch.setattr(cached, "free_memory", lambda device: size - 1)
    small = keeper(backbone, images, cache, views=2)
    assert torch.equal(whole(small), wanted[0])
    assert sum(copies) == 3 * len(images), "too large: read from disk"


def test_other_devices_have_none(backbone: Backbone) -> None:
    assert free_memory(torch.device("cpu")) == free_memory(torch.device("meta")) == 0
