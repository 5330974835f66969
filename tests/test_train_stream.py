"""Training from a stream, and TensorBoard on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

import memoro
from memoro.backbones import Backbone
from memoro.data import Loader, Streams, load_stream
from memoro.errors import DataError, MemoroError, TrainingError
from memoro.images import Preprocessing


@pytest.fixture
def streams(table: datasets.IterableDataset) -> Streams:
    return load_stream(datasets.IterableDatasetDict({"train": table, "test": table}))


@pytest.fixture
def table() -> datasets.IterableDataset:
    generator = np.random.default_rng(0)

    def rows() -> list[dict[str, object]]:
        found = []
        for number in range(48):
            values = generator.integers(0, 60, (24, 24, 3), dtype=np.uint8)
            values[..., number % 2] += 190
            found.append({"image": Image.fromarray(values), "label": number % 2})
        return found

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["red", "green"])})
    return datasets.Dataset.from_list(rows(), features=features).to_iterable_dataset()


def test_a_stream_trains_a_task(backbone: Backbone, streams: Streams, tmp_path: Path) -> None:
    task = memoro.new_task(backbone, "colours", list(streams.labels), from_layer=3, cells=1, seed=0)
    fitted, history, metrics = memoro.fit(
        backbone,
        task,
        streams,
        steps=24,
        batch_size=8,
        lr=0.1,
        folder=tmp_path,
        quiet=True,
        workers=0,
        tensorboard=True,
    )
    assert fitted is task
    assert history[-1]["step"] == 24
    assert metrics["split"] == "test"
    assert metrics["accuracy"] > 0.9
    assert list((tmp_path / "tensorboard" / "0").glob("events*")), "a folder for each run"


def test_a_stream_with_a_validation_split_of_its_own(backbone: Backbone, table: datasets.IterableDataset) -> None:
    streams = load_stream(datasets.IterableDatasetDict({"train": table}), val_fraction=0.4)
    task = memoro.new_task(backbone, "colours", list(streams.labels), from_layer=5, cells=0, seed=0)
    result = memoro.fit(backbone, task, streams, steps=2, batch_size=8, quiet=True, workers=0)
    assert result.metrics["split"] == "val"
    assert 0 < result.metrics["images"] < 48


def test_what_a_stream_cannot_tell(backbone: Backbone, streams: Streams) -> None:
    task = memoro.new_task(backbone, "colours", list(streams.labels), from_layer=5, cells=0)
    with pytest.raises(MemoroError, match="--steps 1000 instead of --epochs"):
        memoro.fit(backbone, task, streams, epochs=1, quiet=True, workers=0)
    with pytest.raises(TrainingError, match="balance and folds need the whole dataset in advance"):
        memoro.fit(backbone, task, streams, steps=2, balance=True, quiet=True, workers=0)


def test_a_missing_extra_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    from memoro import extras

    extras.need("torch")
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(MemoroError, match=r"pip install 'memoro\[train\]'"):
        extras.need("accelerate")


def test_how_many_images_of_a_stream_may_be_unreadable(table: datasets.IterableDataset) -> None:
    rows = [{"image": {"bytes": b"no image", "path": None} if at % 10 == 0 else row["image"], "label": row["label"]}
            for at, row in enumerate([*table, *table, *table])]  # fmt: skip
    broken = datasets.Dataset.from_list(rows, features=table.features).to_iterable_dataset()

    def read(**options: Any) -> Loader:
        train = load_stream(broken, val_fraction=0, **options).train
        assert train is not None
        loader = Loader(train, Preprocessing(resize=20).at(20), batch_size=16, workers=0)
        assert sum(len(batch.targets) for batch in loader.epoch(0)) == 144 - 15
        return loader

    first = read(max_unreadable=0.2).skipped[0]
    assert first.where.endswith("image 0 of the stream")
    assert first.where not in first.reason
    with pytest.raises(DataError, match=r"more than 5%: .*image 0 of the stream: not a readable image"):
        read()


def test_a_stream_without_labelled_images_is_an_error(backbone: Backbone) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["red", "green"])})
    rows = [{"image": Image.new("RGB", (24, 24)), "label": None} for _ in range(9)]
    hidden = datasets.Dataset.from_list(rows, features=features).to_iterable_dataset()
    streams = load_stream(datasets.IterableDatasetDict({"train": hidden}), val_fraction=0)
    task = memoro.new_task(backbone, "colours", list(streams.labels), from_layer=5, cells=0)
    with pytest.raises(DataError, match="the stream has no labelled images"):
        memoro.fit(backbone, task, streams, steps=2, quiet=True, workers=0)
