"""The feature cache: what is read back is what was computed, and training from it is the same."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caches import SIZE, answers, cache, counted, curve, far, fill, images, keeper, splits, tasks_of
from families import CASES, Case
from small_training import LABELS

from memoro.backbones import Backbone, load_backbone
from memoro.data import ImageSet, Splits
from memoro.data.splits import fold_numbers
from memoro.engine.featurestore import default_folder, total_bytes
from memoro.errors import CacheError, TrainingError
from memoro.regimes import find_regime
from memoro.tasks.task import new_task
from memoro.training import Cache, Recipe, Run, fit, train_runs
from memoro.training.loop import Trainer
from memoro.training.recipe import TrainOptions

__all__ = ["cache", "images", "splits"]  # fixtures


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_features_answer_as_pixels_do(case: Case, images: ImageSet, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64):
        backbone = load_backbone(case.model(), dtype=dtype)
        for first in (0, 2, backbone.depth) if dtype == torch.float32 else (0,):
            loader = keeper(backbone, images, Cache(tmp_path / f"{dtype} {first}", dtype="float32"), first)
            assert fill(loader) == len(images)
            for kept, fresh in answers(backbone, loader, tasks_of(backbone, first)):
                torch.testing.assert_close(kept, fresh, rtol=1e-5, atol=1e-5)
                assert kept.dtype == dtype
                assert float(kept.std()) > 0.1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_the_bits_answer_nearly_so(backbone: Backbone, images: ImageSet, tmp_path: Path, dtype: Any) -> None:
    loader = keeper(backbone, images, Cache(tmp_path, dtype=dtype))
    fill(loader)
    bound = 0.02 if dtype == "float16" else 0.2
    for kept, fresh in answers(backbone, loader, tasks_of(backbone, 0)):
        head = slice(-len(LABELS), None)
        assert 1e-6 < far(kept, fresh) < bound * float(fresh.abs().max())
        assert far(kept[:, head], fresh[:, head]) < 1e-5  # class tokens are kept exactly


@pytest.mark.parametrize("value", [1e6, math.nan])
def test_numbers_that_float16_cannot_hold(backbone: Backbone, images: ImageSet, tmp_path: Path, value: float) -> None:
    large = CASES[0].model()
    with torch.no_grad():
        next(p for name, p in large.named_parameters() if name.endswith(("value.bias", "v_proj.bias")))[0] = value
    net = load_backbone(large)
    with pytest.raises(CacheError, match=r"do not fit into float16: choose `Cache.dtype` bfloat16 or float32"):
        fill(keeper(net, images, Cache(tmp_path, dtype="float16")))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    if not math.isnan(value):
        assert fill(keeper(net, images, Cache(tmp_path, dtype="bfloat16"))) == len(images)


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(CacheError, match="'float8': choose float16, bfloat16, float32"):
        Cache(dtype="float8")  # type: ignore[arg-type]


def test_the_folder_may_be_text() -> None:
    assert Cache("features") == Cache(Path("features"))  # type: ignore[arg-type]


def test_features_are_read_when_they_are_asked_for(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    loader = keeper(backbone, images, cache)
    fill(loader)
    first, *rest = list(loader.epoch(0))
    keys = first.read().layers[0].keys
    before = keys.clone()
    assert torch.equal(first.read().layers[0].keys, before)
    last = rest[-1].read()  # into the same memory
    assert len(last.token) == len(images) - 8
    assert not torch.equal(keys, before)
    again = list(loader.epoch(0, start=2))
    assert [len(batch.targets) for batch in again] == [len(images) - 8]


def test_validation_sets_share_the_memory_that_they_read_into(backbone: Backbone, splits: Splits, cache: Cache) -> None:
    assert splits.train is not None
    held = [np.flatnonzero(fold_numbers(splits.train, 3, 0) == fold) for fold in range(3)]
    task, size = partial(new_task, backbone, "t", LABELS), backbone.preprocessing.at(SIZE)
    recipe, regime = Recipe(views=1, accumulate=2, batch_size=4), find_regime("memory")
    specs = [Run(task(), recipe, regime, splits, size, some) for some in held]
    trainer = Trainer(backbone, specs, TrainOptions(workers=0), cache=cache)
    train, *val_sets = trainer.loaders.cached
    assert len(val_sets) == 3
    assert len({id(loader.buffers) for loader in val_sets}) == 1
    assert val_sets[0].buffers is not train.buffers


def test_where_it_lies_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_cache: Path) -> None:
    assert Cache().folder == default_folder() == own_cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "memoro" / "features"
    for unset in (False, True):
        monkeypatch.delenv("XDG_CACHE_HOME") if unset else monkeypatch.setenv("XDG_CACHE_HOME", "")
        assert default_folder() == Path.home() / ".cache" / "memoro" / "features"


def test_training_from_the_cache_is_training_on_the_same_views(
    backbone: Backbone, splits: Splits, cache: Cache
) -> None:
    _, fresh = curve(backbone, splits, False, views=2)
    _, exact = curve(backbone, splits, cache, views=2)
    _, half = curve(backbone, splits, replace(cache, dtype="float16"), views=2)
    assert far(exact, fresh) < 1e-4
    assert 0 < far(half, fresh) < 1e-3
    _, other = curve(backbone, splits, False, views=None)
    assert far(other[:2], fresh[:2]) > 1e-3  # without views the first epoch is a random one already
    several = {"views": 2, "accumulate": 3, "batch_size": 2, "epochs": 2}
    assert far(curve(backbone, splits, cache, **several)[1], curve(backbone, splits, False, **several)[1]) < 1e-4


def test_half_precision_from_the_cache(backbone: Backbone, splits: Splits, cache: Cache) -> None:
    _, full = curve(backbone, splits, cache, views=1)
    _, fresh = curve(backbone, splits, False, views=1, precision="bfloat16")
    with counted() as count:
        _, kept = curve(backbone, splits, cache, views=1, precision="bfloat16")
        assert count() > 0, "features of another precision are others"
    assert far(kept, fresh) < 1e-6  # float16 holds small numbers of bfloat16 exactly
    assert 1e-6 < far(kept, full) < 0.05


def test_the_number_of_views_is_fixed(backbone: Backbone, splits: Splits, cache: Cache) -> None:
    with counted() as count:
        curve(backbone, splits, cache, views=3)
    assert splits.train is not None
    assert splits.val is not None
    assert count() == 3 * len(splits.train) + len(splits.val)
    spec = Run(
        new_task(backbone, "t", LABELS),
        Recipe(views=None),
        find_regime("memory"),
        splits,
        backbone.preprocessing.at(SIZE),
    )
    with pytest.raises(TrainingError, match="fixed number of views"):
        train_runs(backbone, [spec], cache=cache, workers=0, quiet=True)


def test_views_that_no_epoch_gets_to_are_not_computed(backbone: Backbone, splits: Splits, cache: Cache) -> None:
    task = new_task(backbone, "squares", splits.labels, cells=1)
    fit(backbone, task, splits, views=4, epochs=1, cache=cache, image_size=20, workers=0, quiet=True)
    assert splits.train is not None
    first = total_bytes(cache.folder)
    fit(backbone, task, splits, views=4, epochs=2, cache=cache, image_size=20, workers=0, quiet=True)
    assert first < total_bytes(cache.folder)
