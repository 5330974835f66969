"""The feature cache: what is read back is what was computed, never of something else, and no crash spoils it."""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_task
from families import CASES, Case
from test_train_recipe import save_square, save_squares
from torch import Tensor

from memoro import featurestore
from memoro.backbones import Backbone, load_backbone
from memoro.data import Augment, ImageSet, Loader, Splits, load_data
from memoro.data.splits import fold_numbers
from memoro.engine import Features
from memoro.errors import CacheError, DataError, TrainingError
from memoro.featurestore import ABANDONED, Layout, clear, clear_abandoned, default_folder, make_room, total_bytes
from memoro.regimes import find_regime
from memoro.task import Task, new_task
from memoro.train import Cache, Lesson, Recipe, cached, fit, loop, teach
from memoro.train.cached import CachedLoader, estimate, fill_caches
from memoro.train.runs import SharedPass

FIT = sys.modules["memoro.train.fit"]  # by its name it is the function
LABELS = ["red", "green", "blue"]
SIZE = 20
QUICK: dict[str, Any] = {"image_size": SIZE, "workers": 0, "quiet": True}


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
    fill_caches(loaders, Cache(loaders[0].store.root, budget), counts.append)
    return sum(counts)


def files(cache: Cache, kind: str = "bin") -> list[Path]:
    return sorted(cache.folder.glob(f"*/*.{kind}"))


def far(left: Tensor, right: Tensor) -> float:
    return float((left - right).detach().abs().max())


def whole(loader: CachedLoader) -> Tensor:
    """All that it reads, as one tensor."""
    return torch.cat(
        [torch.cat([part[1].flatten(1) for part in batch.features.layers], 1).clone() for batch in loader.epoch(0)]
    )


# ------------------------------------------------------------------------------------------------------- exactness


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
    shared, pairs = SharedPass(backbone, tasks), []
    with torch.no_grad():
        for kept, fresh in zip(loader.epoch(0), loader.loader.epoch(0), strict=True):
            assert torch.equal(kept.index, fresh.index)
            assert torch.equal(kept.targets, fresh.targets)
            pairs.append((torch.cat(shared(kept.features), 1), torch.cat(shared(fresh.pixels.to(backbone.dtype)), 1)))
    return pairs


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


def test_batches_live_as_long_as_a_step_needs_them(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    loader = CachedLoader(keeper(backbone, images, cache).loader, backbone, cache, 0, hold=2)
    fill(loader)
    batches = loader.epoch(0)
    held = [next(batches), next(batches)]
    before = [batch.features.layers[0].keys.clone() for batch in held]
    third = next(batches)
    for batch, keys in zip(held, before, strict=True):
        assert torch.equal(batch.features.layers[0].keys, keys)
    assert len(third.features.token) == len(images) - 8  # the last one is smaller, its buffer is not
    again = list(loader.epoch(0, start=2))
    assert [len(batch.targets) for batch in again] == [len(images) - 8]


# ------------------------------------------------------------------------------------------------------- training


def curve(backbone: Backbone, splits: Splits, keep: Cache | bool, **options: Any) -> tuple[Task, Tensor]:
    task = new_task(backbone, "t", LABELS, cells=2, from_layer=1, seed=1)
    options = {"epochs": 3, "batch_size": 4, "lr": 0.05, **QUICK, **options}
    result = fit(backbone, task, splits, cache=keep, **options)
    return task, torch.tensor([[entry["train_loss"], entry["val_loss"]] for entry in result.history])


def test_training_from_the_cache_is_training_on_the_same_views(
    backbone: Backbone, splits: Splits, cache: Cache
) -> None:
    _, fresh = curve(backbone, splits, False, views=2)
    _, exact = curve(backbone, splits, cache, views=2)
    _, half = curve(backbone, splits, replace(cache, dtype="float16"), views=2)
    assert far(exact, fresh) < 1e-4
    assert 0 < far(half, fresh) < 2e-2
    _, other = curve(backbone, splits, False)
    assert far(other[:2], fresh[:2]) > 1e-3  # without views the first epoch is a random one already
    several = {"views": 2, "accumulate": 3, "batch_size": 2, "epochs": 2}
    assert far(curve(backbone, splits, cache, **several)[1], curve(backbone, splits, False, **several)[1]) < 1e-4


def test_mixed_precision_from_the_cache(backbone: Backbone, splits: Splits, cache: Cache) -> None:
    _, fresh = curve(backbone, splits, False, views=1, precision="bf16")
    _, kept = curve(backbone, splits, cache, views=1, precision="bf16")
    assert 0 < far(kept, fresh) < 0.1  # the kept pass itself is of full precision


def test_the_number_of_views_is_fixed(
    backbone: Backbone, splits: Splits, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FIT, "VIEWS", 3)
    with counted() as count:
        curve(backbone, splits, cache)
    assert splits.train is not None
    assert splits.val is not None
    assert count() == 3 * len(splits.train) + len(splits.val)
    lesson = Lesson(
        new_task(backbone, "t", LABELS), Recipe(), find_regime("memory"), splits, backbone.preprocessing.at(SIZE)
    )
    with pytest.raises(TrainingError, match="fixed number of views"):
        teach(backbone, [lesson], cache=cache, workers=0)


def in_fork(target: Callable[..., Any], *given: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=given)
    process.start()
    return process


def die_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Dies in place of this call, counted from 1."""
    calls = iter(range(1, 10_000))

    def wrapped(*given: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **options)

    return wrapped


def test_a_resume_from_the_cache_gives_the_same_weights(
    backbone: Backbone, splits: Splits, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FIT, "Training", functools.partial(loop.Training, every=0.0))  # a checkpoint every step
    monkeypatch.setattr("memoro.train.folder.draw_run", lambda *given: [])
    half = replace(cache, dtype="float16")
    calm, losses = curve(backbone, splits, half, folder=tmp_path / "calm")
    shutil.rmtree(half.folder)  # killed in a step, and the features gone as well
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_step", die_at(5, loop._step))
        process = in_fork(lambda: curve(backbone, splits, half, folder=tmp_path / "killed"))
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    shutil.rmtree(half.folder)
    mine, again = curve(backbone, splits, half, folder=tmp_path / "killed", resume=True)
    for name, value in calm.state_dict().items():
        assert torch.equal(value, mine.state_dict()[name])
    assert torch.equal(losses, again)
    with pytest.raises(TrainingError, match="cannot resume: features differ"):
        curve(backbone, splits, cache, folder=tmp_path / "killed", resume=True)


# ------------------------------------------------------------------------------------------------------- never stale


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """How many images went through the backbone to be kept."""
    counts: list[int] = []
    real = cached.keep_features

    def count(backbone: Backbone, pixels: Tensor, first: int) -> Features:
        counts.append(len(pixels))
        return real(backbone, pixels, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached, "keep_features", count)
        yield lambda: sum(counts)


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
        wanted = (5 - first + 1) * 24 * 4 + (5 - first) * 2 * tokens * 24 * (2 if dtype == "float16" else 4)
        assert loader.store.layout.size == wanted
        assert estimate([loader]) == (len(images), len(images) * wanted)
        fill(loader)
        assert total_bytes(keep.folder) == len(images) * wanted
        assert estimate([loader]) == (0, 0)
        assert clear(keep.folder) > len(images) * wanted
        assert not list(keep.folder.iterdir())


def test_training_keeps_the_layers_from_the_first_fork_on(backbone: Backbone, splits: Splits, cache: Cache) -> None:
    parent = random_task(backbone, "parent", cells=1, from_layer=2)
    tasks = [
        new_task(backbone, "late", LABELS, cells=1, from_layer=4),
        new_task(backbone, "child", LABELS, cells=1, from_layer=3, extends=[parent]),
    ]
    regime, size = find_regime("memory"), backbone.preprocessing.at(SIZE)
    lessons = [Lesson(task, Recipe(epochs=1, views=1), regime, splits, size) for task in tasks]
    teach(backbone, lessons, cache=cache, workers=0)
    assert {json.loads(index.read_text())["layout"]["first"] for index in files(cache, "json")} == {2}


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
    lessons = [
        Lesson(
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
        teach(backbone, lessons, cache=cache, workers=0)
    assert count() == 12 + 13  # plain ones once, a random view of each copy, nothing for the folds
    loaders = [keeper(backbone, own.train, Cache(tmp_path / "n")), keeper(backbone, own.train, Cache(tmp_path / "n"))]
    assert estimate(loaders)[0] == 12  # nothing is counted twice


# ------------------------------------------------------------------------------------------------------- crashes


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch, backbone: Backbone) -> int:
    """Two records to a file."""
    layout = Layout(0, 5, 24, 3, 1 + (SIZE // 4) ** 2, "float32")
    monkeypatch.setattr(featurestore, "SHARD_BYTES", 2 * layout.size + 1)
    return layout.size


# In place of which call the process dies, and how many records are left.
DEATHS: dict[str, tuple[Any, str, int, int]] = {
    "in a pass": (cached, "keep_features", 2, 4),
    "between a file and its index": (featurestore, "write_whole", 2, 2),
    "before a file has its name": (os, "replace", 3, 2),
}


@pytest.mark.parametrize("death", DEATHS)
def test_killed_while_it_fills(
    backbone: Backbone,
    images: ImageSet,
    cache: Cache,
    small_shards: int,
    monkeypatch: pytest.MonkeyPatch,
    death: str,
) -> None:
    home, name, call, left = DEATHS[death]
    with monkeypatch.context() as patch:
        patch.setattr(home, name, die_at(call, getattr(home, name)))
        process = in_fork(lambda: fill(keeper(backbone, images, cache)))
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    loader = keeper(backbone, images, cache)
    assert fill(loader) == len(images) - left
    for kept, fresh in answers(backbone, loader, tasks_of(backbone, 0)):
        torch.testing.assert_close(kept, fresh, rtol=1e-5, atol=1e-5)


def test_what_a_killed_process_left_is_cleared_later(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int
) -> None:
    fill(keeper(backbone, images, cache))
    folder, good = files(cache)[0].parent, set(files(cache) + files(cache, "json"))
    strays = [folder / "a.part", folder / "b.bin", folder / "c.json", folder / ".d.json.x.part"]
    for stray in strays:
        stray.write_bytes(b"x" * 9)
    clear_abandoned(cache.folder)
    assert all(stray.exists() for stray in strays)  # another process may be at it
    for path in (*strays, *good):
        os.utime(path, (time.time() - ABANDONED - 9,) * 2)
    fill(keeper(backbone, images.subset([0]), cache))
    assert not any(stray.exists() for stray in strays)
    assert all(path.exists() for path in good)


def test_an_interrupt_keeps_what_is_complete(
    backbone: Backbone, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = iter(range(9)), cached.keep_features

    def stop(*given: Any) -> Features:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(cached, "keep_features", stop)
        with pytest.raises(KeyboardInterrupt):
            fill(keeper(backbone, images, cache))
    assert not files(cache, "part")
    assert fill(keeper(backbone, images, cache)) == len(images) - 4


def test_an_interrupt_amid_a_record(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    loader = keeper(backbone, images, cache)
    [batch, *_] = loader.loader.epoch(0)
    features = cached.keep_features(backbone, batch.pixels, 0)
    writer = loader.store.writer()
    writer.add(loader.keys[0][:2], features)
    assert writer._file is not None
    writer._file.write(b"half of the third")
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert fill(keeper(backbone, images, cache)) == len(images) - 2


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


def test_two_processes_fill_at_once(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int, tmp_path: Path
) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2)

    def work(number: int) -> None:
        loader = keeper(backbone, images, cache)
        barrier.wait(30)
        count = fill(loader)
        torch.save((count, whole(loader)), tmp_path / f"{number}.pt")

    processes = [in_fork(work, number) for number in range(2)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    found = [torch.load(tmp_path / f"{number}.pt") for number in range(2)]
    assert torch.equal(found[0][1], found[1][1])
    assert sum(count for count, _ in found) > 0
    fresh = keeper(backbone, images, cache)
    assert fill(fresh) == 0
    assert torch.equal(whole(fresh), found[0][1])
    assert not files(cache, "part")


def test_files_that_another_process_removes_stay_readable(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    fill(keeper(backbone, images, cache))
    loader = keeper(backbone, images, cache)
    assert fill(loader) == 0
    wanted = whole(keeper(backbone, images, cache))
    clear(cache.folder)
    assert torch.equal(whole(loader), wanted)


def test_a_folder_that_is_only_lent(
    backbone: Backbone, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(keeper(backbone, images, cache))

    def refuse(*given: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:  # root, as tests may run, can write anywhere
        patch.setattr(os, "utime", refuse)
        assert fill(keeper(backbone, images, cache)) == 0
    (cache.folder / "file").write_text("in the way")
    with pytest.raises(CacheError, match=r"cannot keep features in .*--cache-folder.*--no-cache"):
        fill(keeper(backbone, images, Cache(cache.folder / "file" / "below")))


# ------------------------------------------------------------------------------------------------------- room


def gigabytes(number: float) -> float:
    return number / 1e9


def test_what_does_not_fit_names_the_choices(backbone: Backbone, images: ImageSet, cache: Cache) -> None:
    loader = keeper(backbone, images, cache, views=2)
    size = 2 * len(images) * loader.store.layout.size
    assert fill(loader, budget=gigabytes(size)) == 2 * len(images)
    with pytest.raises(CacheError) as told:
        fill(loader, budget=gigabytes(size - 1))
    for choice in ("a later fork", "fewer views (--views 1", "a larger one (--cache-budget)", "--no-cache"):
        assert choice in str(told.value)
    with pytest.raises(CacheError) as told:
        fill(keeper(backbone, images, cache, first=3), budget=0)
    assert "fewer views" not in str(told.value)
    assert "a later fork" not in str(told.value)
    assert "--no-cache" in str(told.value)


def test_a_disk_that_is_nearly_full(
    backbone: Backbone, images: ImageSet, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(cache.folder.parent)
    monkeypatch.setattr(cached.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CacheError, match=r"the disk has 0.0 GB left.*--cache-folder"):
        fill(keeper(backbone, images, cache))
    assert not files(cache)


def age(paths: list[Path], seconds: float) -> None:
    for path in paths:
        os.utime(path.with_suffix(".json"), (time.time() - seconds,) * 2)


def test_the_longest_unused_makes_room(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int, tmp_path: Path
) -> None:
    other = load_backbone(CASES[0].model(seed=8))
    fill(keeper(backbone, images.subset(range(4)), cache))
    mine = files(cache)
    fill(keeper(other, images.subset(range(6)), cache))
    theirs = [path for path in files(cache) if path not in mine]
    assert (len(mine), len(theirs)) == (2, 3)
    for seconds, path in enumerate(theirs, start=1):
        age([path], 100 * seconds)
    age(mine, 1e6)  # oldest of all, but used now
    # Two more records beside the four: room for eight in all, so that one file of the others stays.
    loader = keeper(backbone, images.subset(range(6)), cache)
    assert fill(loader, budget=gigabytes(8 * small_shards)) == 2
    assert all(path.exists() for path in mine)
    assert [path.exists() for path in theirs] == [True, False, False]
    assert len(files(cache)) == len(files(cache, "json")) == 4
    assert len(whole(loader)) == 6

    assert make_room(cache.folder, 0, 10**9, set()) == set()
    rest = set(files(cache)) - set(mine)
    assert make_room(cache.folder, 0, 0, set(mine)) == rest
    assert files(cache) == mine


def test_room_is_never_made_of_what_a_neighbour_needs(
    backbone: Backbone, images: ImageSet, cache: Cache, small_shards: int
) -> None:
    parts = [images.subset(range(4)), images.subset(range(4, 8)), images.subset(range(8, 9))]
    for part in parts[:2]:
        fill(keeper(backbone, part, cache))
    fill(keeper(load_backbone(CASES[0].model(seed=8)), images.subset(range(2)), cache))
    # The loaders' own files are the oldest.
    loaders = [keeper(backbone, part, cache) for part in parts]
    mine = loaders[0].store.files_of(loaders[0].keys[0]) | loaders[1].store.files_of(loaders[1].keys[0])
    age(sorted(mine), 1e6)
    assert fill(*loaders, budget=gigabytes(9 * small_shards)) == 1
    assert [len(whole(loader)) for loader in loaders] == [4, 4, 1]
    assert all(path.exists() for path in mine)
    assert total_bytes(cache.folder) == 9 * small_shards


def test_where_it_need_not_fit_it_is_computed_anew(
    backbone: Backbone, splits: Splits, cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    fresh, _ = curve(backbone, splits, False, views=2)
    for tight in (replace(cache, budget=0.0), replace(cache, folder=tmp_path / "file" / "below")):
        with pytest.raises(CacheError):
            curve(backbone, splits, tight, views=2)
        mine, _ = curve(backbone, splits, replace(tight, required=False), views=2, quiet=False)
        assert all(torch.equal(value, mine.state_dict()[name]) for name, value in fresh.state_dict().items())
        told = " ".join(capsys.readouterr().err.split())
        assert "note: every pass is computed anew" in told
    assert not files(cache)


class Full:
    """A file on a disk that takes so many more writes."""

    def __init__(self, file: Any, writes: int, when: str) -> None:
        self._file, self._writes, self._when = file, writes, when

    def write(self, data: bytes) -> int:
        self._writes -= 1
        if self._when == "write" and self._writes < 0:
            raise OSError(28, "No space left on device")
        return int(self._file.write(data))

    def close(self) -> None:
        self._file.close()
        if self._when == "close":
            raise OSError(28, "No space left on device")  # what was still in the buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("when", ["write", "close", "index"])
def test_a_full_disk(
    backbone: Backbone,
    splits: Splits,
    images: ImageSet,
    cache: Cache,
    small_shards: int,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    fill(keeper(backbone, images.subset(range(2)), cache))
    before, real = files(cache), Path.open

    def opened(path: Path, *given: Any, **options: Any) -> Any:
        file = real(path, *given, **options)
        return Full(file, 1, when) if path.suffix == ".part" else file

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if when == "index":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(Path, "open", opened)
        with pytest.raises(CacheError, match=r"No space left on device.*--no-cache. What was kept so far stays"):
            fill(keeper(backbone, images, cache))
        assert files(cache) == before
        assert not [path for path in cache.folder.rglob("*") if path.suffix not in {".bin", ".json", ""}]
        curve(backbone, splits, replace(cache, required=False), views=1, epochs=1)
    assert fill(keeper(backbone, images, cache)) == len(images) - 2


@pytest.mark.parametrize("value", [1e6, math.nan])
def test_numbers_that_float16_cannot_hold(backbone: Backbone, images: ImageSet, tmp_path: Path, value: float) -> None:
    large = CASES[0].model()
    with torch.no_grad():
        next(p for name, p in large.named_parameters() if name.endswith(("value.bias", "v_proj.bias")))[0] = value
    net = load_backbone(large)
    with pytest.raises(CacheError, match=r"do not fit into float16: choose --cache-dtype bfloat16 or float32"):
        fill(keeper(net, images, Cache(tmp_path, dtype="float16")))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    if not math.isnan(value):
        assert fill(keeper(net, images, Cache(tmp_path, dtype="bfloat16"))) == len(images)


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(CacheError, match="'float8': choose float16, bfloat16, float32"):
        Cache(dtype="float8")  # type: ignore[arg-type]


def test_where_it_lies_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_cache: Path) -> None:
    assert Cache().folder == default_folder() == own_cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "memoro" / "features"
    for unset in (False, True):
        monkeypatch.delenv("XDG_CACHE_HOME") if unset else monkeypatch.setenv("XDG_CACHE_HOME", "")
        assert default_folder() == Path.home() / ".cache" / "memoro" / "features"
