"""Bulk prediction that was killed or whose disk was full is resumed; a different job is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from bulk_jobs import COUNT, NAMES, new_job, photos, png, predictor, read_rows
from conftest import in_fork, random_task
from prediction_inputs import mess, tasks
from pyarrow import parquet
from shell import Said, Shell, shell

from memoro.backbones import Backbone
from memoro.data.open import open_source
from memoro.engine.answers import AnswerOptions
from memoro.errors import DataError
from memoro.evaluation import bulk
from memoro.evaluation.bulk import IMAGES, MANIFEST, Job, answer_here, begin
from memoro.evaluation.predictions import Predictor
from memoro.images import open_image

__all__ = ["mess", "photos", "predictor", "shell", "tasks"]  # fixtures


def test_killed_in_the_middle_and_resumed(photos: Path, predictor: Predictor) -> None:
    """The second shard is under way, and its file begun, when the process is killed."""

    def run() -> None:
        seen = 0

        def tick(count: int) -> None:
            nonlocal seen
            seen += count
            if seen > 8:
                Path("waiting").touch()
                time.sleep(600)

        answer_here(job, begin(job), workers=1, tick=tick)

    job = new_job(photos, predictor)
    process = in_fork(run)
    while not Path("waiting").exists():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert [file.name for file in job.folder.glob("part-*")] == ["part-000000.parquet"]
    assert len(list(job.folder.glob(".part-000001*"))) == 1, "half a shard has a hidden name"
    first = job.path(0).stat()
    todo = begin(job, resume=True)
    assert (todo.images, todo.answered.images, todo.done) == (COUNT, 8, {0})
    assert answer_here(job, todo).images == COUNT - 8
    assert job.path(0).stat() == first, "what is done is not done again"
    assert sorted(os.listdir(job.folder)) == [IMAGES, MANIFEST, *(f"part-00000{number}.parquet" for number in range(3))]
    rows = read_rows(job.folder)
    assert [row["image"] for row in rows if row["task"] != "age"] == [f"photos/{name}" for name in NAMES]
    assert [row["image"] for row in rows if row["error"]] == ["photos/05.png"]


def test_killed_while_the_manifest_was_written(photos: Path, predictor: Predictor) -> None:
    def run() -> None:
        os.replace = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        begin(job)

    job = new_job(photos, predictor)
    in_fork(run).join()
    assert [file.suffix for file in job.folder.iterdir()] == [".part"]
    assert not (job.folder / IMAGES).exists()
    assert answer_here(job, begin(job, resume=True)).images == COUNT
    assert not list(job.folder.glob(".*"))


def test_a_failing_disk_leaves_no_shard(photos: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rows: Any, *given: Any, **options: Any) -> None:
        next(rows)
        raise DataError("full")

    job = new_job(photos, predictor)
    todo = begin(job)
    with monkeypatch.context() as patch:
        patch.setattr(bulk, "write_predictions", fail)
        with pytest.raises(DataError, match="full"):
            answer_here(job, todo)
    assert sorted(os.listdir(job.folder)) == [IMAGES, MANIFEST]
    assert answer_here(job, begin(job, resume=True)).images == COUNT


def test_a_disk_that_is_full_at_the_end_of_a_shard(
    photos: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rows: Any, *given: Any, **options: Any) -> None:
        list(rows)
        raise DataError("full")

    def run() -> None:
        with pytest.raises(DataError, match="full"):
            answer_here(job, todo)
        ended.append(True)

    monkeypatch.setattr(bulk, "write_predictions", fail)
    job, ended = new_job(photos, predictor), list[bool]()
    todo = begin(job)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(120)
    assert ended, "it stops with the error instead of waiting forever"
    assert sorted(os.listdir(job.folder)) == [IMAGES, MANIFEST]


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_resuming_knows_what_could_not_be_read_before(
    form: str,
    shell: Shell,
    mess: Path,
    tasks: list[str],
) -> None:
    (mess / "junk.jpg").rename(mess / "bad, 1.jpg")
    resume = ("predict", "mess", "-b", "vit", *tasks, "-o", "out/", "-f", form, "--shard-size", 4, "--resume")
    shell(*resume)
    first, last = sorted(Path("out").glob("part-*"))
    said = shell(*resume, "--strict", code=1).err
    assert "2 of 7 images could not be read, such as mess/bad, 1.jpg: not a readable image" in said
    last.unlink()
    assert "2 of 7 images" in shell(*resume, "--strict", code=1).err
    last.unlink()
    (mess / "deep" / "photo").write_bytes(b"\xff\xd8\xff")
    (mess / "deep" / "wrong.txt").write_bytes(b"RIFF0000WEBP")
    assert "4 of 7 images" in shell(*resume).err, "some could be read before"
    first.write_bytes(b"\xff")
    assert "is damaged" in shell(*resume, code=1).err


def test_another_job_is_refused(photos: Path, predictor: Predictor, backbone: Backbone) -> None:
    job = new_job(photos, predictor)
    answer_here(job, begin(job))
    with pytest.raises(DataError, match=r"already has 3 shards of answers\. To continue, add `resume=True`"):
        begin(job)
    with pytest.raises(DataError, match="photos is not an empty folder"):
        begin(replace(job, folder=photos))
    age = predictor.models[1]
    trained = random_task(backbone, "pets", seed=5, labels=["cat", "dog"])
    others: dict[str, Job] = {
        "the tasks": replace(job, predictor=replace(predictor, models=(trained, age))),
        "`top`": replace(job, predictor=replace(predictor, how=AnswerOptions(4, top=2))),
        "`shard_size`": replace(job, shard_size=4),
        "`format`": replace(job, form="csv"),
        "`raw_csv`": replace(job, raw_csv=True),
    }
    for what, other in others.items():
        with pytest.raises(DataError, match=f"these differ: {what}\\. Repeat"):
            begin(other, resume=True)
    begin(replace(job, predictor=replace(predictor, how=AnswerOptions(2))), resume=True)  # the same but for rounding
    with pytest.raises(DataError, match="these differ: the images"):
        begin(replace(job, source=open_source(["photos/0*.png"])), resume=True)
    (job.folder / IMAGES).write_text("{")
    with pytest.raises(DataError, match=r"_images\.list is missing or damaged"):
        begin(job, resume=True)
    (job.folder / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"_manifest\.json is missing or damaged"):
        begin(job, resume=True)


def test_trusting_a_table_is_part_of_the_job(
    photos: Path, predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.png").write_bytes(png(0))
    monkeypatch.chdir(photos)
    Path("set.csv").write_text("path\n../secret.png\n")
    cells = [{"bytes": None, "path": "../secret.png"}]
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    parquet.write_table(pyarrow.table({"image": pyarrow.array(cells, kind)}), "set.parquet")
    dataset = datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))
    for number, table in enumerate(["set.csv", "set.parquet", dataset, dataset.to_iterable_dataset()]):
        plain, trusting = (
            new_job(open_source([table], allow_absolute=trust), predictor, f"answers-{number}")
            for trust in (False, True)
        )
        answer_here(plain, begin(plain))
        [row] = read_rows(plain.folder)
        assert "use `allow_absolute=True`" in row["error"]
        with pytest.raises(DataError, match="these differ: `allow_absolute`"):
            begin(trusting, resume=True)
        plain.path(0).unlink()
        assert answer_here(trusting, begin(trusting, resume=True)).unreadable == 0
        with pytest.raises(DataError, match="these differ: `allow_absolute`"):
            begin(plain, resume=True)


@pytest.fixture
def answers(photos: Path, shell: Shell, tasks: list[str]) -> Callable[..., Said]:
    """Runs `memoro predict` on the photos, with a folder for the answers."""
    shared = ("predict", "photos", "-b", "vit", *tasks, "-o", "out/", "-f", "jsonl", "--shard-size", 8)
    return lambda *more, code=0: shell(*shared, *more, code=code)


def images_in(folder: str) -> list[str]:
    lines = (line for file in sorted(Path(folder).glob("part-*.jsonl")) for line in file.read_text().splitlines())
    return [json.loads(line)["image"] for line in lines]


def test_images_that_come_and_go_while_it_runs_change_nothing(
    photos: Path, answers: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(source: Any, **options: Any) -> Any:
        if (photos / "20.png").exists():
            (photos / "20.png").unlink()
            (photos / "00a.png").write_bytes(png(0))
        return open_image(source, **options)

    with monkeypatch.context() as patch:
        patch.setattr("memoro.images.decoding.open_image", change)
        said = answers("--set", "workers=0")
    assert "2 of 21 images could not be read, such as photos/05.png" in said.err
    assert images_in("out") == [f"photos/{name}" for name in NAMES]
    said = answers("--resume")
    assert "New since this job began: 1 image (photos/00a.png)." in said.err
    assert "Gone since this job began: 1 image (photos/20.png); rows stay for 1 of them." in said.err
    assert "Already done: 21 images. Still to do: 1." in said.err
    assert images_in("out") == [*(f"photos/{name}" for name in NAMES), "photos/00a.png"]


def test_resume_answers_what_is_new_and_says_what_is_gone(photos: Path, answers: Callable[..., Said]) -> None:
    answers()
    Path("out/part-000001.jsonl").unlink()  # as if it had been stopped before
    for name in ("02.png", "09.png", "10.png"):
        (photos / name).unlink()
    for number in range(11):
        (photos / f"00{number:02}.png").write_bytes(png(number))
    said = answers("--resume")
    assert "New since this job began: 11 images, such as photos/0000.png." in said.err
    assert "Gone since this job began: 3 images, such as photos/02.png; rows stay for 1 of them." in said.err
    assert "Already done: 13 images. Still to do: 17." in said.err
    found = images_in("out")
    assert sorted(found) == sorted([*(str(path) for path in photos.iterdir()), "photos/02.png"])
    assert found[:8] == [f"photos/{name}" for name in NAMES[:8]]
    before = [file.read_bytes() for file in sorted(Path("out").iterdir())]
    (photos / "09.png").write_bytes(png(9))
    said = answers("--resume")
    assert "New since this job began: 1 image (photos/09.png)." in said.err
    assert images_in("out") == [*found, "photos/09.png"]
    assert [file.read_bytes() for file in sorted(Path("out").glob("part-*"))][: len(before) - 2] == before[2:]
    assert "Still to do: 0." in answers("--resume").err


WAIT_AT_AN_IMAGE = """
import sys, time
from pathlib import Path
from memoro.cli import main
from memoro.images import decoding

def wait(source, **options):
    Path("running").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    return open_image(source, **options)

open_image, decoding.open_image = decoding.open_image, wait
main()
"""
"""Runs memoro with the arguments that follow; it waits at the first image until there is a file named `go`."""


def test_one_job_owns_a_folder(photos: Path, answers: Callable[..., Said], tasks: list[str], shell: Shell) -> None:
    """While the first command answers an image, the same and another one are refused; killed, it frees the folder."""
    command = ("predict", "photos", "-b", "vit", *tasks, "-o", "out/", "-f", "jsonl", "--shard-size", "8")
    other = ("predict", "photos/03.png", "-b", "vit", *tasks, "-o", "out/", "-f", "jsonl")
    for kill in (True, False):
        first = subprocess.Popen([sys.executable, "-c", WAIT_AT_AN_IMAGE, *command, "--set", "workers=0"])
        while not Path("running").exists():
            assert first.poll() is None
            time.sleep(0.01)
        held = {file.name: file.read_bytes() for file in Path("out").iterdir()}
        for said in (answers(code=1), answers("--resume", code=1), shell(*other, code=1)):
            assert "another job is writing to out: wait for it, or choose another folder" in said.err
        assert {file.name: file.read_bytes() for file in Path("out").iterdir()} == held
        if kill:
            first.kill()
        else:
            Path("go").touch()
        assert first.wait(120) == (-signal.SIGKILL if kill else 0)
        Path("running").unlink()
    assert images_in("out") == [f"photos/{name}" for name in NAMES]
    assert sorted(file.name for file in Path("out").glob("[._]*")) == [IMAGES, MANIFEST]
    assert "already has 3 shards" in shell(*other, code=1).err
    assert "these differ: the images" in shell(*other, "--resume", code=1).err


def test_text_that_is_not_unicode_in_a_table_is_a_row(shell: Shell, tasks: list[str], photos: Path) -> None:
    Path("set.jsonl").write_text('{"path": "photos/03.png"}\n{"path": "photos/\\ud800.png"}\n')
    common = ("predict", "set.jsonl", "-b", "vit", *tasks, "-f", "jsonl")
    plain = shell(*common).out
    for more in ((), ("--resume",)):
        said = shell(*common, "-o", "out/", *more)
        assert r"1 of 2 images could not be read, such as photos/\ud800.png: not a readable image" in said.err
        assert Path("out/part-000000.jsonl").read_text() == plain
    assert [json.loads(line)["image"] for line in plain.splitlines()] == ["photos/03.png", "photos/\ud800.png"]
