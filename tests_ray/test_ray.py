"""Bulk prediction on a real Ray cluster of this machine: the same rows as without it, also when a worker is killed."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home folder
import ray
from families import CASES
from prediction_inputs import picture
from pyarrow import parquet
from random_tasks import random_task

import memoro
from memoro.data.open import open_source
from memoro.engine.answers import AnswerOptions
from memoro.errors import DataError
from memoro.evaluation.bulk import MANIFEST, Job, answer_here, begin
from memoro.evaluation.parallel import answer_on_ray
from memoro.evaluation.predictions import Predictor

COUNT, SHARD = 96, 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield
    ray.shutdown()


@pytest.fixture
def predictor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Predictor:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number in range(COUNT):
        picture(number, 20, 20).save(f"photos/{number:03}.png")
    Path("photos/050.png").write_bytes(b"junk")
    backbone = memoro.load_backbone(next(case for case in CASES if case.name == "vit").model())
    pets = random_task(backbone, "pets", labels=["cat", "dog"])
    breeds = random_task(backbone, "breeds", seed=1, extends=[pets], head="multilabel")
    return Predictor(backbone, (pets, breeds), AnswerOptions(4, embeddings=True))


def new_job(predictor: Predictor, folder: str) -> Job:
    return Job(open_source(["photos"]), predictor, Path(folder).absolute(), shard_size=SHARD)


def read_rows(job: Job) -> list[dict[str, Any]]:
    return [row for file in sorted(job.folder.glob("part-*")) for row in parquet.read_table(file).to_pylist()]


def check_rows(job: Job, predictor: Predictor) -> None:
    right = new_job(predictor, "right")
    answer_here(right, begin(right, resume=True))
    found, expected = read_rows(job), read_rows(right)
    assert len(found) == len(expected) > 3 * COUNT
    for row, other in zip(found, expected, strict=True):
        # Another number of threads may round differently.
        assert row.pop("embedding") == pytest.approx(other.pop("embedding"), abs=1e-5)
        assert row.pop("probability") == pytest.approx(other.pop("probability"), abs=1e-5)
        assert row == other
    assert len(os.listdir(job.folder)) == 2 + COUNT // SHARD, (
        "nothing but the manifest, the list of images and the shards"
    )
    assert (job.folder / MANIFEST).is_file()


def worker_processes() -> dict[int, str]:
    """The processes of this cluster's workers, with what they do, such as `ray::Worker.answer`."""
    parents, found = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(status[1])
        if command.startswith("ray::Worker"):
            found[int(folder.name)] = command

    def is_ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return {pid: command for pid, command in found.items() if is_ours(pid)}


def test_two_workers_give_the_same_rows(cluster: None, predictor: Predictor) -> None:
    job = new_job(predictor, "answers")
    ticks: list[int] = []
    tally = answer_on_ray(job, begin(job), workers=2, tick=ticks.append)
    assert (tally.images, tally.unreadable) == (COUNT, 1)
    assert ticks == [SHARD] * (COUNT // SHARD)
    check_rows(job, predictor)
    for number in (2, 7):
        job.path(number).unlink()
    assert answer_on_ray(job, begin(job, resume=True), workers=2).images == 2 * SHARD
    check_rows(job, predictor)


def test_a_worker_is_killed_half_way(cluster: None, predictor: Predictor) -> None:
    job = new_job(predictor, "answers")
    killed: list[int] = []

    def tick(count: int) -> None:
        busy = [pid for pid, command in worker_processes().items() if "answer" in command]
        if not killed and busy:
            os.kill(busy[0], signal.SIGKILL)
            killed.append(busy[0])

    tally = answer_on_ray(job, begin(job), workers=2, tick=tick)
    assert killed, "a worker was busy with a shard"
    assert tally.images == COUNT
    check_rows(job, predictor)


def test_errors_of_workers_reach_the_user(cluster: None, predictor: Predictor) -> None:
    job = new_job(predictor, "answers")
    todo = begin(job)
    (job.folder / MANIFEST).unlink()
    with pytest.raises(DataError, match=r"answers is not visible on \S+: use a folder that all machines share\.$"):
        answer_on_ray(job, todo, workers=1)
