"""`datasets` objects, and Parquet files that contain images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from image_files import picture, to_bytes

from memoro.data import load_data
from memoro.errors import DataError

NAMES = ["zebra", "ant", "bee"]


def table(count: int = 12, **columns: Any) -> datasets.Dataset:
    """A table of images and class numbers of `NAMES`."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    rows = {"image": [picture(at) for at in range(count)], "label": [at % 3 for at in range(count)]}
    made = datasets.Dataset.from_dict(rows, features=features)
    for name, values in columns.items():
        made = made.add_column(name, values)
    return made


def test_parquet_of_images(tmp_path: Path) -> None:
    table().to_parquet(str(tmp_path / "set.parquet"))
    splits = load_data(tmp_path / "set.parquet", val_fraction=0)
    assert splits.labels == tuple(NAMES)
    assert splits.train is not None
    assert splits.train.open(4).tobytes() == picture(4).tobytes()


def test_dataset_object_keeps_its_class_order() -> None:
    splits = load_data(table(), val_fraction=0)
    assert splits.labels == tuple(NAMES)
    assert splits.train is not None
    assert splits.train.targets.tolist() == [0, 1, 2] * 4
    assert splits.train.open(5).tobytes() == picture(5).tobytes()


def test_dataset_dict_and_its_splits(tmp_path: Path) -> None:
    whole = table(12)
    parts = {
        "train": whole.select(range(6)),
        "validation": whole.select(range(6, 9)),
        "test": whole.select(range(9, 12)),
    }
    made = datasets.DatasetDict({**parts, "unlabelled": whole})
    splits = load_data(made)
    assert splits.train is not None
    assert splits.val is not None
    assert splits.test is not None
    assert (len(splits.train), len(splits.val), len(splits.test)) == (6, 3, 3)
    assert splits.test.open(0).tobytes() == picture(9).tobytes()
    assert any("unlabelled" in note for note in splits.notes)
    only = load_data(made, split="test")
    assert only.train is None
    assert only.test is not None
    with pytest.raises(DataError, match="no split 'dev'; it has train, validation, test, unlabelled"):
        load_data(made, split="dev")
    made.save_to_disk(str(tmp_path / "saved"))
    saved = load_data(tmp_path / "saved").test
    assert saved is not None
    assert saved.open(0).tobytes() == picture(9).tobytes()


def test_dataset_images_without_label_are_left_out() -> None:
    hidden = table(6).cast_column("label", datasets.Value("int64"))
    hidden = hidden.map(lambda row, at: {"label": -1 if at < 2 else row["label"]}, with_indices=True)
    hidden = hidden.cast_column("label", datasets.ClassLabel(names=NAMES))
    splits = load_data(hidden, val_fraction=0)
    assert splits.train is not None
    assert splits.train.targets.tolist() == [2, 0, 1, 2]
    assert splits.train.open(0).tobytes() == picture(2).tobytes()
    assert any("2 images were left out: they have no label." in note for note in splits.notes)


def test_dataset_of_unnamed_classes_and_odd_columns() -> None:
    numbers = table(12).remove_columns("label").add_column("label", [10, 9] * 6)
    assert load_data(numbers).labels == ("9", "10")
    with pytest.raises(DataError, match=r"no column for the label \(columns: 'other'\).*label_column"):
        load_data(numbers.rename_column("label", "other"))
    with pytest.raises(DataError, match="not images"):
        load_data(datasets.Dataset.from_dict({"image": [1, 2], "label": ["a", "b"]}))


def test_dataset_of_several_labels() -> None:
    features = datasets.Features({"image": datasets.Image(), "tags": datasets.List(datasets.ClassLabel(names=NAMES))})
    made = datasets.Dataset.from_dict({"image": [picture(0), picture(1)], "tags": [[0, 2], [1]]}, features=features)
    splits = load_data(made, val_fraction=0)
    assert splits.kind == "multilabel"
    assert splits.train is not None
    assert splits.train.targets.tolist() == [[1, 0, 1], [0, 1, 0]]


def test_lists_of_numbers_are_refused() -> None:
    made = datasets.Dataset.from_dict({"image": [to_bytes(picture(0))] * 2, "value": [[0.5, 1.5], [2.5, 3.5]]})
    with pytest.raises(DataError, match="column 'value' has lists of numbers: make a column of each number"):
        load_data(made)
    with pytest.raises(DataError, match="an iterable dataset: make a datasets"):
        load_data(made.to_iterable_dataset())


def test_kind_asked_against_the_column() -> None:
    splits = load_data(table(6), kind="multilabel", val_fraction=0)
    assert splits.train is not None
    assert splits.train.targets[1].tolist() == [0, 1, 0]
    several = datasets.Dataset.from_dict({"image": [to_bytes(picture(0))], "label": [["a", "b"]]})
    with pytest.raises(DataError, match="kind='labels'"):
        load_data(several, kind="softmax")
