"""Sets of the hub and the known names: what is asked for, what a local copy gives, what is said without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from image_files import save_classes
from test_data_tables import table

from memoro.data import load_data
from memoro.data.hub import KNOWN
from memoro.errors import DataError


def test_hub_id_with_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, config: str | None, *, split: str | None, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        return table() if split else datasets.DatasetDict({"train": table(), "test": table(6)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_data("owner/name").test is not None
    only = load_data("owner/name:test", config="small")
    assert only.train is None
    assert load_data("owner/name:train[:10%]").train is not None
    assert asked == [
        ("owner/name", None, None, False),
        ("owner/name", "small", "test", False),
        ("owner/name", None, "train[:10%]", False),
    ]


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"from the hub: Couldn't reach the hub\. Online, .*hf download") as error:
        load_data("owner/name:train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", KNOWN)
def test_known_name_says_what_to_fetch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ConnectionError("offline\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setenv("MEMORO_DATA", str(tmp_path / "sets"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=rf"{name} was not found.*Download .*{tmp_path}/sets or data as {name}.*MEMORO_DATA"
    ):
        load_data(name)


def test_known_names_are_the_papers() -> None:
    assert set(KNOWN) == {"cifar100", "inaturalist2017", "places365", "sun397"}


def test_known_name_with_a_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMORO_DATA", str(tmp_path))
    number = save_classes(tmp_path / "places365" / "train", {"a": 20, "b": 20})
    save_classes(tmp_path / "places365" / "val", {"a": 2, "b": 2}, number)
    splits = load_data("places365")
    assert splits.test is not None
    assert splits.val is not None
    assert (len(splits.test), len(splits.val)) == (4, 6)
    assert any("official validation split is the test split" in note for note in splits.notes)
    assert any("40 train images, the official set 1,803,460" in note for note in splits.notes)


def test_inaturalist_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMORO_DATA", str(tmp_path))
    root = tmp_path / "inaturalist2017"
    save_classes(root / "train_val_images" / "Aves", {"Pica pica": 4, "Corvus corax": 4})
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    categories = [{"id": 7, "name": "Pica pica"}, {"id": 3, "name": "Corvus corax"}]
    for name, part in (("train2017.json", files[:3] + files[4:7]), ("val2017.json", [files[3], files[7]])):
        record = {
            "images": [{"id": file, "file_name": file} for file in part],
            "annotations": [{"image_id": file, "category_id": 7 if "Pica" in file else 3} for file in part],
            "categories": categories,
        }
        (root / name).write_text(json.dumps(record))
    splits = load_data("inaturalist2017", val_fraction=0)
    assert splits.labels == ("Corvus corax", "Pica pica")
    assert splits.train is not None
    assert splits.test is not None
    assert splits.train.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert [Path(splits.test.where(at)).parent.name for at in range(2)] == ["Corvus corax", "Pica pica"]
    (root / "val2017.json").write_text('{"images": 3}')
    with pytest.raises(DataError, match=r"val2017\.json: not the annotations"):
        load_data("inaturalist2017")
