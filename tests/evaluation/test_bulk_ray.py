"""Bulk prediction with a stand-in for Ray. A real cluster is in tests_ray/."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bulk_jobs import COUNT, new_job, photos, predictor
from prediction_inputs import tasks
from shell import shell

from memoro.data.open import open_source
from memoro.data.source import Chain, Places, Stream
from memoro.errors import DataError
from memoro.evaluation import parallel
from memoro.evaluation.bulk import Job, begin
from memoro.evaluation.parallel import place_workers
from memoro.evaluation.predictions import Predictor

__all__ = ["photos", "predictor", "shell", "tasks"]  # fixtures


@pytest.mark.parametrize(
    ("machines", "wanted", "right"),
    [
        ([(8, 0)], None, (2, 4, 0)),
        ([(6, 0)], None, (1, 6, 0)),
        ([(2, 0)] * 2, None, (2, 2, 0)),  # a worker of four cores would never be placed
        ([(2, 0)] * 2, 1, (1, 2, 0)),
        ([(2, 0)] * 2, 3, (3, 1, 0)),
        ([(2, 0)] * 2, 9, (9, 1, 0)),
        ([(0, 0), (16, 0), (1, 0)], None, (5, 3, 0)),
        ([(16, 0), (16, 4)], None, (4, 4, 1)),
        ([(16, 2), (3, 1)], None, (3, 3, 1)),
        ([(16, 2), (2, 4)], None, (4, 1, 1)),
        ([(0, 2), (8, 0)], None, (2, 4, 0)),  # a worker on a GPU needs a core as well
        ([(0, 0)], None, (1, 1, 0)),
        ([], 3, (3, 1, 0)),
    ],
)
def test_workers_fit_on_single_machines(
    machines: list[tuple[int, int]], wanted: int | None, right: tuple[int, int, int]
) -> None:
    assert place_workers([{"CPU": cpus, "GPU": gpus} for cpus, gpus in machines], wanted) == right


def test_a_ray_worker_out_of_memory_is_replaced(
    photos: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Ray that runs calls when their results are asked for."""
    errors = {name: type(name, (Exception,), {}) for name in ("RayActorError", "OutOfMemoryError", "RayTaskError")}
    asked, told, deaths = list[dict[str, int]](), list[str](), [errors["OutOfMemoryError"], errors["RayActorError"]]

    class Remote:
        def __init__(self, job: Job) -> None:
            self.ready = SimpleNamespace(remote=lambda *given: lambda: None)
            self.answer = SimpleNamespace(remote=lambda shard: lambda: job.answer(shard))

    def get(call: Callable[[], Any]) -> Any:
        if deaths and (found := call()) is not None:
            raise deaths.pop()(found)
        return call()

    def wait(calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        waits.append(timeout)
        return (calls[:1] if len(waits) > 2 else []), calls

    waits: list[float] = []
    node = {"Alive": True, "Resources": {"CPU": 2.0}}
    fake = SimpleNamespace(
        nodes=lambda: [node, node, {**node, "Alive": False}],
        remote=lambda **options: asked.append(options) or (lambda kind: SimpleNamespace(remote=Remote)),
        put=lambda job: job,
        get=get,
        wait=wait,
        exceptions=SimpleNamespace(**errors),
        is_initialized=lambda: True,
    )
    job = new_job(photos, predictor)
    monkeypatch.setitem(sys.modules, "ray", fake)
    tally = parallel.answer_on_ray(job, begin(job), tell=told.append)
    assert asked == [{"num_cpus": 2, "num_gpus": 0}]
    assert told == ["no worker is ready after 60 s; each needs 2 cores of one machine. See `ray status`."]
    assert (tally.images, deaths) == (COUNT, [])
    assert len(list(job.folder.glob("part-*"))) == 3


def test_streams_are_refused_with_ray(photos: Path, predictor: Predictor) -> None:
    stream = Stream("owner/name:train", "image", Places("."), None, COUNT)
    for source in (stream, Chain((open_source(["photos"]), stream))):
        with pytest.raises(DataError, match="leave out `ray` or `streaming`"):
            parallel.check_ray(new_job(source, predictor))
