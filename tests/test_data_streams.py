"""Streams: the same images as a table, split and shuffled without knowing their number."""

from __future__ import annotations

import datasets
import pytest
import torch
from test_data_images import picture, to_bytes
from test_data_tables import NAMES, table

from memoro.data import Loader, load_data, load_stream
from memoro.errors import DataError
from memoro.images import Preprocessing

SMALL = Preprocessing(resize=12, crop=(10, 8))


def test_stream_gives_the_same_images_as_the_table() -> None:
    streams = load_stream(table(13).to_iterable_dataset(), val_fraction=0)
    assert streams.labels == tuple(NAMES)
    assert streams.val is None
    assert streams.train is not None
    plain = load_data(table(13), val_fraction=0).train
    assert plain is not None
    for workers in (0, 2):
        got = list(Loader(streams.train, SMALL, batch_size=5, workers=workers).epoch(0))
        expected = list(Loader(plain, SMALL, batch_size=5, workers=0).epoch(0))
        assert [len(batch.index) for batch in got] == [5, 5, 3]
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.pixels, other.pixels)
            assert torch.equal(one.targets, other.targets)
            assert torch.equal(one.index, other.index)


def test_stream_is_split_at_random() -> None:
    streams = load_stream(table(60).to_iterable_dataset(), val_fraction=0.3, seed=5)
    assert streams.train is not None
    assert streams.val is not None
    train, val = ([sample.number for sample in side.samples()] for side in (streams.train, streams.val))
    assert sorted(train + val) == list(range(60))
    assert 5 < len(val) < 35


def test_stream_is_shuffled_by_epoch_and_resumes() -> None:
    train = load_stream(table(20).to_iterable_dataset(), val_fraction=0).train
    assert train is not None
    loader = Loader(train, SMALL, batch_size=4, shuffle=True, seed=1, workers=0)
    first, again, other = ([batch.index.tolist() for batch in loader.epoch(number)] for number in (0, 0, 1))
    assert first == again != other
    assert sorted(number for batch in first for number in batch) == list(range(20))
    assert [batch.index.tolist() for batch in loader.epoch(0, start=3)] == first[3:]
    with pytest.raises(DataError, match="--steps 1000 instead of --epochs"):
        len(loader)


def test_numbers_of_a_stream_come_in_the_order_of_the_labels() -> None:
    made = datasets.Dataset.from_dict({"image": [to_bytes(picture(0))], "x": [1.0], "y": [10.0]}).to_iterable_dataset()
    splits = load_stream(made, label_column=["y", "x"], labels=["x", "y"], val_fraction=0)
    assert splits.labels == ("x", "y")
    assert splits.train is not None
    assert [sample.target.tolist() for sample in splits.train.samples()] == [[1, 10]]
    with pytest.raises(DataError, match="1 numbers per image"):
        load_stream(made, label_column="x", labels=["x", "y"])


def test_unreadable_images_of_a_stream_are_skipped_and_counted() -> None:
    rows = {"image": [to_bytes(picture(at)) for at in range(200)], "label": ["a", "b"] * 100}
    rows["image"][7] = b"junk"
    train = load_stream(datasets.Dataset.from_dict(rows).to_iterable_dataset(), labels=["a", "b"], val_fraction=0).train
    assert train is not None
    loader = Loader(train, SMALL, batch_size=50, workers=0)
    batches = list(loader.epoch(0))
    assert [len(batch.pixels) for batch in batches] == [49, 50, 50, 50]
    assert 7 not in batches[0].index
    assert len(batches[0].targets) == 49
    assert [where for where, _ in loader.skipped] == ["dataset:train, image 7 of the stream"]
    rows["image"][:20] = [b"junk"] * 20
    train = load_stream(datasets.Dataset.from_dict(rows).to_iterable_dataset(), labels=["a", "b"], val_fraction=0).train
    assert train is not None
    with pytest.raises(DataError, match="20 of 100 images cannot be read"):
        list(Loader(train, SMALL, batch_size=50, workers=0).epoch(0))


def test_stream_and_table_are_not_mixed_up() -> None:
    with pytest.raises(DataError, match="load_stream"):
        load_data(table().to_iterable_dataset())
    with pytest.raises(DataError, match="load_data"):
        load_stream(table())
    with pytest.raises(DataError, match="pass them as labels"):
        load_stream(table().cast_column("label", datasets.Value("string")).to_iterable_dataset())
