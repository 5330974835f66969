"""Golden records: what a set gives stays the same however it is read, or caches and resumed jobs are lost."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from image_files import picture

from memoro.backbones import Backbone
from memoro.data import Augment, Loader, Splits, load_data
from memoro.data.open import open_source
from memoro.images import Preprocessing
from memoro.training.cached import Cache, CachedLoader

NEAREST = Preprocessing(resize=13, crop=(11, 7), resample=0, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
RECORD = {
    "images": "70eacbf41f4d0e1d",
    "plain": "52bb492fba25d2df",
    "inception": "0548a532ca275d6a",
    "pad": "505f38dd0695d5b8",
    "keys": "89171225439d7f7a",
}


def sha(*parts: Any) -> str:
    return hashlib.sha256(
        b"".join(part if isinstance(part, bytes) else repr(part).encode() for part in parts)
    ).hexdigest()[:16]


def bitmap(number: int) -> bytes:
    """An encoded image that is the same with every version of Pillow and zlib."""
    file = io.BytesIO()
    picture(number).save(file, "BMP")
    return file.getvalue()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same images as a folder, a zip and two tables."""
    monkeypatch.chdir(tmp_path)
    lines, rows = ["path,label"], []
    with zipfile.ZipFile("set.zip", "w") as archive:
        for number in range(15):
            name = f"{'abc'[number % 3]}/{number:02}.bmp"
            path = tmp_path / "set" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bitmap(number))
            archive.writestr(name, bitmap(number))
    for path in sorted((tmp_path / "set").rglob("*.bmp")):
        name = path.relative_to(tmp_path).as_posix()
        lines.append(f"{name},{path.parent.name}")
        rows.append(json.dumps({"path": name, "label": path.parent.name}))
    Path("set.csv").write_text("\n".join(lines))
    Path("set.jsonl").write_text("\n".join(rows))
    return ["set", "set.zip", "set.csv", "set.jsonl"]


def record(splits: Splits, backbone: Backbone) -> dict[str, str]:
    assert splits.train is not None
    assert splits.val is not None
    sets = [splits.train, splits.val]
    found = {
        "images": sha(
            splits.labels, splits.kind,
            *([Path(one.where(at)).name for at in range(len(one))] for one in sets),
            *([one.key(at) for at in range(len(one))] for one in sets),
            *(one.targets.tolist() for one in sets),
            *(one.looks.tobytes() for one in sets if one.looks is not None),
        )
    }  # fmt: skip
    for name, augment in (("plain", None), ("inception", Augment("inception")), ("pad", Augment("pad", flip=0.5))):
        loader = Loader(splits.train, NEAREST, batch_size=4, augment=augment, shuffle=True, seed=3, workers=0)
        batches = [batch for epoch in (0, 1) for batch in loader.epoch(epoch)]
        found[name] = sha(*((batch.index.tolist(), batch.pixels.numpy().tobytes()) for batch in batches))
    views = Loader(splits.train, backbone.preprocessing, batch_size=4, augment=Augment("pad"), views=3, workers=0)
    found["keys"] = sha(CachedLoader(views, backbone, Cache(Path("features")), 2).keys)
    return found


def test_every_source_gives_the_golden_record(places: list[str], backbone: Backbone) -> None:
    for place in places:
        splits = load_data(place, quiet=True, workers=0, val_fraction=0.2)
        assert record(splits, backbone) == RECORD, place


def test_what_a_bulk_job_compares_when_it_is_resumed(places: list[str]) -> None:
    found = {place: (open_source([place]).describe(), list(open_source([place]).keys())) for place in places}
    names = [f"set/{label}/{number:02}.bmp" for at, label in enumerate("abc") for number in range(at, 15, 3)]
    hashed = hashlib.sha256("\0".join(name.removeprefix("set/") for name in names).encode()).hexdigest()
    size = {place: Path(place).stat().st_size for place in places}
    table = {"column": "path", "allow_absolute": False}
    assert found == {
        "set": ([{"path": "set"}], names),
        "set.zip": ([{"path": "set.zip", "bytes": size["set.zip"], "names": hashed}], list(range(15))),
        "set.csv": ([{"path": "set.csv", "bytes": size["set.csv"], **table}], names),
        "set.jsonl": ([{"path": "set.jsonl", "bytes": size["set.jsonl"], **table}], names),
    }
