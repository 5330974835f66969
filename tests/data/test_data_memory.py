"""What is known of checked images is kept: the second check of a set reads none that has not changed."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from image_files import picture, save_classes, to_bytes
from test_data_tables import table

from memoro.cli.settings import read_settings
from memoro.data import DataOptions, Splits, load_data, screening
from memoro.data.open import load_any
from memoro.data.screening import FOLDER
from memoro.engine.featurestore import clear

LOAD: dict[str, Any] = {"val_fraction": 0.2, "quiet": True, "workers": 0}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The images that a check decodes."""
    names: list[str] = []
    own = screening.open_image
    monkeypatch.setattr(screening, "open_image", lambda data, **how: names.append(how["name"]) or own(data, **how))
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images that are old enough for their times to tell whether they change."""
    monkeypatch.setattr("memoro.data.source._SETTLED", 0.0)
    save_classes(tmp_path / "set", {"a": 12, "b": 12})
    (tmp_path / "set" / "a" / "deep.tif").write_bytes(deep())
    (tmp_path / "set" / "b" / "bad.png").write_bytes(b"junk")
    return tmp_path / "set"


def deep() -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30)).save(file, "TIFF")
    return file.getvalue()


def facts(splits: Splits) -> Any:
    sets = [one for one in (splits.train, splits.val, splits.test) if one is not None]
    return splits.notes, splits.skipped, [(one.digests.tobytes(), one.looks.tobytes(), one.levels) for one in sets]  # type: ignore[union-attr]


def as_folder(folder: Path) -> Any:
    return folder


def as_zip(folder: Path) -> Any:
    return shutil.make_archive(str(folder), "zip", folder)


def as_parquet(folder: Path) -> Any:
    file = str(folder.parent / "set.parquet")
    table(20).to_parquet(file)
    return file


def as_csv(folder: Path) -> Any:
    lines = [f"{path.relative_to(folder)},{path.parent.name}" for path in sorted(folder.rglob("*.*"))]
    (folder / "set.csv").write_text("\n".join(["path,label", *lines]))
    return folder / "set.csv"


def as_dataset(folder: Path) -> Any:
    return table(20)


@pytest.mark.parametrize("make", [as_folder, as_zip, as_csv, as_parquet, as_dataset])
def test_the_second_check_reads_nothing_and_says_the_same(
    make: Callable[[Path], Any], folder: Path, opened: list[str], own_cache: Path
) -> None:
    place = make(folder)
    first = load_data(place, **LOAD)
    assert len(opened) >= 20
    opened.clear()
    second = load_data(place, **LOAD)
    assert facts(second) == facts(first)
    assert all("bad.png" in name for name in opened)  # what cannot be read is tried again
    assert [oct(path.stat().st_mode & 0o777) for path in (own_cache, own_cache / FOLDER)] == ["0o700"] * 2


def test_images_that_change_are_read_again(folder: Path, opened: list[str]) -> None:
    first = load_data(folder, **LOAD)
    opened.clear()
    path = folder / "a" / "0003.png"
    times, size = path.stat(), path.stat().st_size
    path.write_bytes(to_bytes(picture(77))[:size].ljust(size, b"\0"))  # of the same size, with its former times
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    (folder / "a" / "new.png").write_bytes(to_bytes(picture(78)))
    (folder / "b" / "0020.png").unlink()
    second = load_data(folder, **LOAD)
    assert sorted(Path(name).name for name in opened) == ["0003.png", "bad.png", "new.png"]
    assert facts(second) != facts(first)


def test_an_image_that_has_just_changed_is_not_kept(
    folder: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memoro.data.source._SETTLED", 3600.0)
    load_data(folder, **LOAD)
    opened.clear()
    load_data(folder, **LOAD)
    assert len(opened) == 26


def test_nothing_is_kept_unless_it_is_wanted(folder: Path, opened: list[str], own_cache: Path, tmp_path: Path) -> None:
    for _ in range(2):
        load_data(folder, cache=False, **LOAD)
    assert len(opened) == 52
    load_any(folder, 0, cache=False)
    assert not own_cache.exists()
    for verb in ("eval", "calibrate"):
        assert read_settings(verb, ["cache=false"])[DataOptions] == {"cache": False}
    load_data(folder, cache=tmp_path / "elsewhere", **LOAD)
    assert not own_cache.exists()
    assert len(list((tmp_path / "elsewhere" / FOLDER).glob("*.features"))) == 1


def test_nothing_is_left_of_a_cache_that_is_cleared(folder: Path, own_cache: Path) -> None:
    load_data(folder, **LOAD)
    assert clear(own_cache) > 0
    assert list(own_cache.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"junk" * 99, None])
def test_a_damaged_memory_is_made_again(folder: Path, opened: list[str], own_cache: Path, damage: bytes | None) -> None:
    first = load_data(folder, **LOAD)
    [file] = (own_cache / FOLDER).glob("*.features")
    file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
    opened.clear()
    assert facts(load_data(folder, **LOAD)) == facts(first)
    assert len(opened) == 26
    opened.clear()
    load_data(folder, **LOAD)
    assert len(opened) == 1


def test_sets_that_are_read_at_the_same_time_are_checked_once(folder: Path, opened: list[str]) -> None:
    """As by the processes of one training."""
    found: list[Splits] = []
    own = screening.open_image

    def slow(data: Any, **how: Any) -> Any:
        time.sleep(0.01)
        return own(data, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screening, "open_image", slow)
        threads = [threading.Thread(target=lambda: found.append(load_data(folder, **LOAD))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 3
    assert facts(found[0]) == facts(found[1]) == facts(found[2])
    assert len(opened) <= 25 + 3  # the one that cannot be read, by each


def test_tables_that_name_files_are_not_kept(tmp_path: Path, opened: list[str]) -> None:
    """The fingerprint of a table does not change with the files that it names."""
    save_classes(tmp_path, {"a": 12})
    rows = {"image": [{"bytes": None, "path": str(tmp_path / "a" / f"{at:04}.png")} for at in range(12)]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    made = datasets.Dataset.from_dict({**rows, "label": ["x", "y"] * 6}, features=features)
    for _ in range(2):
        load_data(made, allow_absolute=True, **LOAD)
    assert len(opened) == 24
