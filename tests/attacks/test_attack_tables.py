"""Tables whose cells name foreign files and URLs, and damaged tables: nothing outside the table's folder is opened."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from image_files import picture, to_bytes

from memoro.data import Splits, load_data
from memoro.errors import DataError, MemoroError

IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


URL = "http://127.0.0.1/image.png"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that were opened; each of them is an image."""
    urls: list[str] = []
    monkeypatch.setattr(
        datasets.utils.file_utils, "xopen", lambda url, mode: urls.append(url) or io.BytesIO(to_bytes(picture(9)))
    )
    return urls


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "secret.png").write_bytes(to_bytes(picture(50)))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "inside.png").write_bytes(to_bytes(picture(51)))
    return tmp_path / "secret.png"


def cells(*paths: str) -> list[dict[str, Any]]:
    """30 images with their bytes, then one for each path."""
    return [
        *({"bytes": to_bytes(picture(at)), "path": None} for at in range(30)),
        *({"bytes": None, "path": path} for path in paths),
    ]


def parquet(folder: Path, *paths: str) -> Path:
    rows = cells(*paths)
    labels = pyarrow.array(["a", "b"] * len(rows))[: len(rows)]
    table = pyarrow.table({"image": pyarrow.array(rows, IMAGE), "label": labels})
    pyarrow.parquet.write_table(table, folder / "set.parquet")
    return folder / "set.parquet"


def last_image(splits: Splits) -> bytes:
    assert splits.train is not None
    return splits.train.open(len(splits.train) - 1).tobytes()


@pytest.mark.parametrize("way", ["absolute", "relative", "url", "file url", "chained url"])
@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_cell_that_names_something_outside(
    outside: Path, asked: list[str], way: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(outside.parent / "set")
    path = {
        "absolute": str(outside),
        "relative": "x/../../secret.png",
        "url": URL,
        "file url": f"file://{outside}",
        "chained url": f"zip://x.png::{URL}::hf://datasets/a/b/x.zip",
    }[way]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": cells(path), "label": [at % 2 for at in range(31)]}
    made = datasets.Dataset.from_dict(rows, features=features)
    read = {
        "parquet": lambda: load_data(parquet(Path(), path)),
        "dataset": lambda: load_data(made),
    }
    with pytest.raises(DataError, match=r"leaves the table's folder.*allow_absolute=True"):
        read[kind]()
    assert asked == []


def test_cell_that_names_something_inside_or_trusted(outside: Path, asked: list[str]) -> None:
    folder = outside.parent / "set"
    assert last_image(load_data(parquet(folder, "inside.png"), val_fraction=0)) == picture(51).tobytes()
    trusted = load_data(parquet(folder, str(outside)), val_fraction=0, allow_absolute=True)
    assert last_image(trusted) == picture(50).tobytes()
    trusted = load_data(parquet(folder, URL), val_fraction=0, allow_absolute=True)
    assert trusted.skipped == ()
    assert last_image(trusted) == picture(9).tobytes()
    assert set(asked) == {URL}


@pytest.mark.parametrize("what", ["pipe", "device", "nothing", "empty"])
def test_trusted_cell_that_is_no_image_file_is_skipped(tmp_path: Path, what: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    path = "/dev/zero" if what == "device" else str(tmp_path / what)
    [(_, reason)] = load_data(parquet(tmp_path, path), allow_absolute=True).skipped
    assert "empty" in reason if what == "empty" else "no such file" in reason


def test_cells_have_the_size_limit_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memoro.data import source

    noise = to_bytes(picture(1, (200, 200)))
    monkeypatch.setattr(source, "MAX_BYTES", len(noise) - 1)
    (tmp_path / "big.png").write_bytes(noise)
    assert "more than" in load_data(parquet(tmp_path, "big.png")).skipped[0].reason


def test_label_column_that_claims_to_be_images_opens_nothing(outside: Path, asked: list[str]) -> None:
    """The types of a Parquet file's columns are as untrusted as their cells."""
    rows = cells("inside.png", "inside.png")
    table = datasets.Dataset.from_dict(
        {"image": rows, "label": [{"bytes": None, "path": URL}, {"bytes": None, "path": str(outside)}] * 16},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Image()}),
    )
    path = outside.parent / "set" / "set.parquet"
    pyarrow.parquet.write_table(table.data.table, path)
    with pytest.raises(DataError):
        load_data(path, image_column="image", label_column="image")
    splits = load_data(path, image_column="image", label_column="label")
    assert len(splits.labels) == 2
    assert asked == []


def test_mutated_parquet_gives_a_dataset_or_memoros_error(tmp_path: Path) -> None:
    """60 files, seeded: a few bytes overwritten, or the file cut off."""
    whole = parquet(tmp_path).read_bytes()
    generator = np.random.default_rng(13)
    refused = 0
    for _ in range(60):
        data = bytearray(whole)
        # Mostly in the footer, where types and offsets are.
        for at in len(data) - 1 - generator.integers(0, 600, generator.integers(1, 5)):
            data[at] = generator.integers(0, 256)
        if generator.random() < 0.2:
            data = data[: generator.integers(0, len(data))]
        (tmp_path / "set.parquet").write_bytes(data)
        try:
            load_data(tmp_path / "set.parquet", quiet=True)
        except MemoroError:
            refused += 1
    assert refused > 20
