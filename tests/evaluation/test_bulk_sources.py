"""Where bulk prediction finds images: folders, zips, tables, datasets and streams, alone and mixed."""

from __future__ import annotations

import json
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from bulk_jobs import COUNT, NAMES, new_job, photos, png, predictor, read_all, read_rows
from prediction_inputs import read_csv, tasks
from pyarrow import parquet
from shell import Shell, shell

from memoro.data.open import open_source
from memoro.data.source import Stream, is_endless
from memoro.errors import DataError
from memoro.evaluation.bulk import answer_here, begin
from memoro.evaluation.predictions import Predictor
from memoro.images import find_images, finding

__all__ = ["photos", "predictor", "shell", "tasks"]  # fixtures


def write_zip(folder: Path) -> None:
    with zipfile.ZipFile("set.zip", "w") as archive:
        archive.writestr("__MACOSX/x.png", b"x")
        for name in NAMES:
            archive.writestr(f"deep/{name}", (folder / name).read_bytes())


def write_csv(folder: Path) -> None:
    Path("set.csv").write_text("id,path\n" + "".join(f"{name[:2]},photos/{name}\n" for name in NAMES))


def write_json_lines(folder: Path) -> None:
    Path("set.jsonl").write_text("".join(json.dumps({"image": f"photos/{name}"}) + "\n" for name in NAMES))


def write_paths(folder: Path) -> None:
    parquet.write_table(pyarrow.table({"path": [f"photos/{name}" for name in NAMES]}), "paths.parquet")


def write_images(folder: Path) -> None:
    cells = [{"bytes": (folder / name).read_bytes(), "path": None} for name in NAMES]
    parquet.write_table(pyarrow.table({"n": list(range(COUNT)), "photo": cells}), "images.parquet", row_group_size=5)


def save_dataset(folder: Path) -> None:
    cells = [{"bytes": (folder / name).read_bytes(), "path": None} for name in NAMES]
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": cells}, features=features).save_to_disk("saved")


SOURCES: dict[str, Callable[[Path], None]] = {
    "set.zip": write_zip,
    "set.csv": write_csv,
    "set.jsonl": write_json_lines,
    "paths.parquet": write_paths,
    "images.parquet": write_images,
    "saved": save_dataset,
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_answers(name: str, photos: Path, predictor: Predictor) -> None:
    SOURCES[name](photos)
    found = list(predictor.predict(read_all(open_source([name]), 6)))  # no multiple of a batch or a row group
    right = list(predictor.predict(read_all(open_source(["photos"]), COUNT)))
    assert [one.answers for one in found] == [one.answers for one in right]
    assert [at for at, one in enumerate(found) if one.error] == [5]
    assert len({one.image for one in found}) == COUNT
    assert found[3].answers != found[4].answers


def test_sources_can_be_mixed(photos: Path, predictor: Predictor) -> None:
    write_zip(photos)
    write_images(photos)
    write_paths(photos)
    source = open_source(["photos/01.png", "photos", "set.zip", "*.parquet"])
    images = [name for name, _ in read_all(source, 10)]
    assert len(images) == 4 * COUNT
    assert images[:3] == ["photos/01.png", "photos/00.png", "photos/02.png"], "each file once"
    assert images[COUNT] == "set.zip/deep/00.png"
    assert images[-1] == "photos/20.png"
    assert "images.parquet, row 20" in images


def test_a_job_of_several_sources_is_continued_where_one_has_changed(photos: Path, predictor: Predictor) -> None:
    write_zip(photos)
    places = ["photos/20.png", "set.zip", "photos"]
    job = new_job(open_source(places), predictor)
    answer_here(job, begin(job))
    assert not begin(new_job(open_source(places), predictor), resume=True).changes
    job.path(4).unlink()
    (photos / "19.png").rename(photos / "new.png")
    job = new_job(open_source(places), predictor)
    todo = begin(job, resume=True)
    assert todo.changes == [
        "New since this job began: 1 image (photos/new.png).",
        "Gone since this job began: 1 image (photos/19.png); rows stay for 1 of them.",
    ]
    answer_here(job, todo)
    names = [row["image"] for row in read_rows(job.folder) if row["task"] != "age"]
    assert sorted(names) == sorted([*(name for name, _ in read_all(job.source, 10)), "photos/19.png"])


def test_links_to_other_folders_are_followed_once(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "x.png").write_bytes(png(1))
    (tmp_path / "far" / "deep" / "back").symlink_to(photos.resolve())
    (tmp_path / "far" / "deep" / "round").symlink_to(tmp_path / "far")
    before = list(find_images(["photos"]))
    (photos / "link").symlink_to(tmp_path / "far")
    (photos / "up").symlink_to(photos.resolve().parent)
    assert list(find_images(["photos"])) == [*before, Path("photos/link/x.png")]


def test_places_that_overlap_give_each_image_once(photos: Path) -> None:
    (photos / "deep").mkdir()
    (photos / "deep" / "x.png").write_bytes(png(1))
    (photos / "link").symlink_to("deep")
    Path("other").mkdir()
    Path("other/y.png").write_bytes(png(2))
    places = ["photos/deep", "photos/*.png", "photos", "photos/link", "other", "./photos/0*", "other/y.png", "**/*.png"]
    found = list(find_images(places))
    separate = [path for place in places for path in find_images([place])]
    assert found == list(dict.fromkeys(separate))
    assert len(found) < len(separate)
    assert list(find_images(["other/y.png"] * 2)) == [Path("other/y.png")]


def test_folders_that_do_not_overlap_are_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "walk_images", lambda folder: (Path(folder, f"{at}.png") for at in range(20_000)))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    tracemalloc.start()
    assert sum(1 for _ in find_images([tmp_path / "one", tmp_path / "two"])) == 40_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400_000, "the paths of one folder have several megabytes"


def test_a_bad_row_of_a_table_is_a_row_with_an_error(photos: Path, predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png(0))
    (photos / "set.csv").write_text("path,note\n00.png,\nmissing.png,\n../secret.png,\n,empty\n")
    found = list(predictor.predict(read_all(open_source(["photos/set.csv"]), 9)))
    assert [one.error and one.error.split(";")[0] for one in found] == [
        None, "no such file.", "'../secret.png' leaves the table's folder", "no image.",
    ]  # fmt: skip
    assert "allow_absolute=True" in (found[2].error or "")
    trusted = open_source(["photos/set.csv"], allow_absolute=True)
    assert [one.error for one in predictor.predict(read_all(trusted, 9))][2] is None


def test_unusable_tables_are_refused_with_the_reason(photos: Path) -> None:
    Path("odd.csv").write_text("name,size\na,1\n")
    with pytest.raises(DataError, match=r"no column for the image's path \(columns: 'name', 'size'\)"):
        open_source(["odd.csv"])
    Path("odd.jsonl").write_text('{"path": "1.png"}\n[1]\n')
    with pytest.raises(DataError, match=r"odd.jsonl, line 2: not a JSON object"):
        list(open_source(["odd.jsonl"]).keys())
    Path("odd.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        open_source(["odd.parquet"])


def test_streams_without_a_length(photos: Path, predictor: Predictor) -> None:
    def rows() -> Any:
        for name in NAMES[:16]:
            yield {"image": {"bytes": (photos / name).read_bytes(), "path": None}}

    features = datasets.Features({"image": datasets.Image()})
    source = open_source([datasets.IterableDataset.from_generator(rows, features=features)])
    assert isinstance(source, Stream)
    assert is_endless(source)
    job = new_job(source, predictor)
    assert answer_here(job, begin(job)).images == 16
    assert len(list(job.folder.glob("part-*"))) == 2, "none for an empty rest"
    job.path(1).unlink()
    assert answer_here(job, begin(job, resume=True)).images == 8
    pets = [row for row in read_rows(job.folder) if row["task"] == "pets"]
    right = predictor.predict(read_all(open_source(["photos"]), COUNT))
    assert [row["probability"] for row in pets] == [
        one.answers["pets"]["probability"] for one in right if one.error is None
    ][:15]
    with pytest.raises(DataError, match="name one split only"):
        open_source([datasets.IterableDataset.from_generator(rows, features=features), "photos"])


def test_predict_reads_tables_and_zips_too(shell: Shell, tasks: list[str], photos: Path) -> None:
    write_zip(photos)
    rows = read_csv(shell("predict", "set.zip", "-b", "vit", *tasks, "-f", "csv").out)
    assert rows[0]["image"] == "set.zip/deep/00.png"
    assert "nothing.png: no such file" in shell("predict", "nothing.png", "-b", "vit", *tasks, code=1).err
