"""The loader: the same batches whatever the workers, the processes or the point of return."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import picture, save_classes, to_bytes

from memoro.data import Augment, Batch, ImageSet, Loader, load_data, loader
from memoro.data.workers import DecodeAhead, WorkerPool
from memoro.errors import DataError
from memoro.images import Decoder, Preprocessing

SMALL = Preprocessing(resize=13, crop=(11, 7), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    """23 images in a zip, which every process has to open for itself."""
    path = tmp_path_factory.mktemp("loader") / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for at in range(23):
            archive.writestr(f"{'abc'[at % 3]}/{at:02}.png", to_bytes(picture(at)))
    train = load_data(path, val_fraction=0).train
    assert train is not None
    return train


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.pixels, b.pixels) and torch.equal(a.targets, b.targets) and torch.equal(a.index, b.index)
        for a, b in zip(one, other, strict=True)
    )


def test_batches_are_what_the_images_show(images: ImageSet) -> None:
    batches = list(Loader(images, SMALL, batch_size=5, workers=0).epoch(0))
    assert [len(batch.index) for batch in batches] == [5, 5, 5, 5, 3]
    assert torch.cat([batch.index for batch in batches]).tolist() == list(range(23))
    batch = batches[1]
    assert batch.pixels.shape == (5, 3, 11, 7)
    assert (batch.images.dtype, batch.pixels.dtype) == (torch.uint8, torch.float32)
    assert [bytes(digest.tolist()).hex() for digest in batch.digests] == [images.key(at) for at in range(5, 10)]
    assert torch.equal(batch.pixels[2], SMALL.to_tensor(images.open(7)))
    assert torch.equal(batch.targets, images.targets[5:10])


def test_workers_change_nothing(images: ImageSet) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    runs = []
    for workers in (0, 1, 2):
        loader = Loader(images, SMALL, batch_size=4, augment=Augment(), shuffle=True, seed=3, workers=workers)
        runs.append([list(loader.epoch(number)) for number in (0, 1)])
    for run in runs[1:]:
        assert all(map(same, runs[0], run))
    assert not same(*runs[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_loader_works_in_processes_that_inherit_nothing(images: ImageSet, context: str) -> None:
    expected = list(Loader(images, SMALL, batch_size=9, augment=Augment(), workers=0).epoch(1))
    loader = Loader(images, SMALL, batch_size=9, augment=Augment(), workers=1)
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(context, force=True)
    try:
        assert same(list(loader.epoch(1)), expected)
    finally:
        loader.close()
        multiprocessing.set_start_method(before, force=True)


def test_order_depends_on_seed_and_epoch(images: ImageSet) -> None:
    def index(seed: int, epoch: int) -> list[int]:
        loader = Loader(images, SMALL, batch_size=23, shuffle=True, seed=seed, workers=0)
        return next(iter(loader.epoch(epoch))).index.tolist()

    assert index(0, 1) == index(0, 1)
    assert sorted(index(0, 1)) == list(range(23))
    assert len({tuple(index(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_epoch_resumes_in_the_middle(images: ImageSet) -> None:
    loader = Loader(images, SMALL, batch_size=4, augment=Augment(), shuffle=True, workers=2)
    whole = list(loader.epoch(5))
    assert same(list(loader.epoch(5, start=3)), whole[3:])
    assert list(loader.epoch(5, start=6)) == []


def test_epoch_can_be_given_up(images: ImageSet) -> None:
    for workers in (0, 2):
        loader = Loader(images, SMALL, batch_size=2, shuffle=True, workers=workers)
        whole = list(loader.epoch(1))
        stale = loader.epoch(0)
        next(stale)
        assert same(list(loader.epoch(1)), whole)
        assert len(list(stale)) == 11  # or continued


def test_loaders_share_their_workers(images: ImageSet) -> None:
    expected = list(Loader(images, SMALL, batch_size=2, augment=Augment(), workers=0).epoch(1))
    others = set(multiprocessing.active_children())  # of loaders of other tests, whose pool has not ended yet
    loaders = [Loader(images, SMALL, batch_size=2, augment=Augment(), workers=2) for _ in range(10)]
    epochs = [loader.epoch(1) for loader in loaders]
    together = []
    for _ in expected:
        together.append([next(epoch) for epoch in epochs])
        assert len(set(multiprocessing.active_children()) - others) == 2
    assert all(same(list(batches), expected) for batches in zip(*together, strict=True))
    late = Loader(images, SMALL, batch_size=5, workers=1)
    assert same(list(late.epoch(0)), list(Loader(images, SMALL, batch_size=5, workers=0).epoch(0)))
    assert len(set(multiprocessing.active_children()) - others) == 2
    loaders[0].close()
    assert not set(multiprocessing.active_children()) - others
    assert same(list(loaders[1].epoch(1)), expected)


@pytest.mark.parametrize("method", ["close", "register"])
def test_pool_is_not_changed_by_another_thread_while_its_processes_start(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = WorkerPool()
    arguments = [max] if method == "register" else []
    waited = []

    class Slow(ProcessPoolExecutor):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            other = threading.Thread(target=getattr(pool, method), args=arguments)
            other.start()
            other.join(0.1)
            waited.append(other)
            alive.append(other.is_alive())

    alive: list[bool] = []
    monkeypatch.setattr("memoro.data.workers.ProcessPoolExecutor", Slow)
    assert list(pool.imap(len, ["abc"], 1)) == [("abc", 3)]
    waited[0].join()
    assert alive == [True]
    pool.close()


def test_splits_are_screened_by_the_same_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = save_classes(tmp_path / "train", {"a": 4, "b": 4})
    number = save_classes(tmp_path / "val", {"a": 2, "b": 2}, number)
    save_classes(tmp_path / "test", {"a": 2, "b": 2}, number)
    others = set(multiprocessing.active_children())
    started = []

    class Counted(ProcessPoolExecutor):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            started.append(1)

    monkeypatch.setattr("memoro.data.workers.ProcessPoolExecutor", Counted)
    splits = load_data(tmp_path, workers=1, quiet=True)
    assert [len(images) for images in (splits.train, splits.val, splits.test) if images is not None] == [8, 4, 4]
    assert len(started) == 1
    end = time.monotonic() + 30
    while set(multiprocessing.active_children()) - others and time.monotonic() < end:  # they end with the pool, later
        time.sleep(0.01)
    assert not set(multiprocessing.active_children()) - others


def test_a_worker_that_dies_is_an_error_not_a_hang(images: ImageSet) -> None:
    others = set(multiprocessing.active_children())
    loader = Loader(images, SMALL, batch_size=1, workers=1)
    batches = loader.epoch(0)
    next(batches)
    [worker] = set(multiprocessing.active_children()) - others
    worker.kill()
    worker.join()
    with pytest.raises(DataError, match="worker process died"):
        list(batches)
    assert len(list(loader.epoch(0))) == 23


def test_a_script_that_workers_cannot_import_is_told_so(tmp_path: Path) -> None:
    """Where processes are not forked, each imports the script, and would start processes of its own."""
    save_classes(tmp_path / "set", {"a": 4, "b": 4})
    (tmp_path / "script.py").write_text(f"""
import multiprocessing, memoro
from memoro.data.workers import DecodeAhead
from memoro.images import Decoder

multiprocessing.set_start_method("spawn", force=True)
ahead = DecodeAhead(Decoder((memoro.Preprocessing(20),)), 1)
for work in (
    lambda: memoro.load_data({str(tmp_path / "set")!r}, workers=1, quiet=True),
    lambda: list(ahead([[("name", b"junk")]])),
):
    try:
        work()
    except memoro.DataError as error:
        print(error)
""")
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    assert done.stdout.count('under `if __name__ == "__main__":`') == 2, done.stderr


def test_a_script_ends_quietly_while_it_holds_workers() -> None:
    """An executor that is collected while the interpreter shuts down prints a traceback."""
    script = "from memoro.data.workers import shared_pool; pool = shared_pool(); print(*pool.imap(abs, [-7], 1))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("(-7, 7)\n", "")


def test_skipped_batches_are_not_decoded(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 4, "b": 4})
    train = load_data(tmp_path, val_fraction=0).train
    assert train is not None
    os.remove(train.where(0))
    loader = Loader(train, SMALL, batch_size=2, workers=0)
    assert len(list(loader.epoch(0, start=1))) == 3
    with pytest.raises(DataError, match=r"0000\.png: No such file.*has changed since"):
        list(loader.epoch(0))


def test_unreadable_image_is_named_by_a_worker_too(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 4, "b": 4})
    (tmp_path / "a" / "bad.png").write_bytes(b"junk")
    train = load_data(tmp_path, val_fraction=0, screen=False).train
    assert train is not None
    with pytest.raises(DataError, match=r"bad\.png: not a readable image.*screen=True"):
        list(Loader(train, SMALL, batch_size=2, workers=1).epoch(0))


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_batches_of_one(images: ImageSet, world: int) -> None:
    options = {"batch_size": 7, "augment": Augment(), "shuffle": True, "workers": 0}
    alone = list(Loader(images, SMALL, **options).epoch(2))  # type: ignore[arg-type]
    ranks = [list(Loader(images, SMALL, rank=at, world=world, **options).epoch(2)) for at in range(world)]  # type: ignore[arg-type]
    for step, whole in enumerate(alone):
        parts = [rank[step] for rank in ranks]
        assert {part.total for part in parts} == {len(whole.index)} == {whole.total}
        index = torch.cat([part.index for part in parts])
        assert sorted(index.tolist()) == sorted(whole.index.tolist())
        assert max(len(part.index) for part in parts) - min(len(part.index) for part in parts) <= 1
        pixels = torch.cat([part.pixels for part in parts])
        back = [index.tolist().index(number) for number in whole.index.tolist()]
        assert torch.equal(pixels[back], whole.pixels)


def test_empty_part_of_a_last_batch(images: ImageSet) -> None:
    last = list(Loader(images.subset(range(9)), SMALL, batch_size=8, workers=0, rank=3, world=4).epoch(0))[-1]
    assert last.pixels.shape == (0, 3, 11, 7)
    assert last.targets.shape == (0,)
    assert last.total == 1


def test_length(images: ImageSet) -> None:
    loader = Loader(images, SMALL, batch_size=4, workers=0)
    assert len(loader) == len(list(loader.epoch(0))) == 6


def test_senseless_arguments(images: ImageSet) -> None:
    with pytest.raises(DataError, match="at least one image"):
        Loader(images, SMALL, batch_size=0)
    with pytest.raises(DataError, match="at least one image"):
        Loader(images, SMALL, batch_size=2, rank=0, world=3)
    with pytest.raises(DataError, match="workers"):
        Loader(images, SMALL, batch_size=2, workers=-1)
    with pytest.raises(DataError, match="different sizes"):
        Loader(images, Preprocessing(resize=20), batch_size=2)


def test_real_set() -> None:
    shared = Path(os.environ.get("MEMORO_SHARED", Path(__file__).parents[3] / "shared"))
    path = shared / "data" / "ants_bees.zip"
    if not path.exists():
        pytest.skip("no shared data: set MEMORO_SHARED to the folder that has data/ants_bees.zip")
    splits = load_data(path)
    assert splits.labels == ("ants", "bees")
    assert splits.train is not None
    assert splits.val is not None
    assert splits.test is not None
    assert (len(splits.train) + len(splits.val), len(splits.test)) == (240, 150)
    batch = next(Loader(splits.train, Preprocessing().at(112), batch_size=16, augment=Augment(), workers=0).epoch(0))
    assert batch.pixels.shape == (16, 3, 112, 112)
    assert batch.pixels.std() > 0.1


def test_little_shared_memory_changes_nothing(images: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, which has 64 MB: batches are copied through pipes instead."""
    monkeypatch.setattr(loader, "shared_pool", WorkerPool)
    alone = list(Loader(images, SMALL, batch_size=5, workers=0).epoch(0))
    shared = list(Loader(images, SMALL, batch_size=5, workers=2).epoch(0))
    monkeypatch.setattr("memoro.data.workers._has_little_shared_memory", lambda: True)
    copied = list(Loader(images, SMALL, batch_size=5, workers=2).epoch(0))
    assert same(alone, shared)
    assert same(alone, copied)
    assert all(batch.images.is_shared() for batch in shared)
    assert not any(batch.images.is_shared() for batch in copied)


@pytest.mark.parametrize(("images_ahead", "most"), [(1, 16), (16, 24), (1000, 32)])
def test_what_is_decoded_ahead_is_bounded_in_bytes(
    images: ImageSet, monkeypatch: pytest.MonkeyPatch, images_ahead: int, most: int
) -> None:
    many = images.subset(np.arange(64) % len(images))
    monkeypatch.setattr(
        "memoro.data.workers.PREFETCH_BYTES", images_ahead * torch.empty(3, 11, 7, dtype=torch.uint8).nbytes
    )
    loader = Loader(many, SMALL, batch_size=8, augment=Augment(), workers=2)
    asked: list[int] = []
    parts = loader.parts

    def counted(number: int, start: int = 0) -> Iterator[Any]:
        for samples, total in parts(number, start):
            asked.extend(samples.tolist())
            yield samples, total

    monkeypatch.setattr(loader, "parts", counted)
    batches = loader.epoch(1)
    first = next(batches)
    assert len(asked) <= most
    assert same([first, *batches], list(Loader(many, SMALL, batch_size=8, augment=Augment(), workers=0).epoch(1)))


def test_predictions_decode_ahead_within_the_same_bound(images: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [(images.where(at), b"junk" if at in {3, 9} else images.read(at)) for at in range(23)]
    asked: list[int] = []

    def batches() -> Iterator[list[Any]]:
        for start in range(0, 23, 5):
            asked.append(start)
            yield pictures[start : start + 5]

    decoder = Decoder((SMALL, Preprocessing(12)))  # of the second, images come out at different sizes
    monkeypatch.setattr("memoro.data.workers.PREFETCH_BYTES", 1)
    ahead = DecodeAhead(decoder, 2)(batches())
    first = next(ahead)
    assert len(asked) <= 2
    for batch, decoded in (first, *ahead):
        expected = decoder(batch)
        assert decoded.failures == expected.failures
        for own, other in zip(decoded.images, expected.images, strict=True):
            assert torch.equal(torch.cat([x.flatten() for x in own]), torch.cat([x.flatten() for x in other]))
            assert [x.shape for x in own] == [x.shape for x in other]
    assert len(asked) == 5
