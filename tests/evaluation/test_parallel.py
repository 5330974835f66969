"""Predictions by a process for each device. Two CPUs stand for two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bulk_jobs import photos, predictor
from prediction_inputs import tasks

from memoro.engine.answers import list_pictures
from memoro.errors import DataError
from memoro.evaluation import parallel
from memoro.evaluation.parallel import SharedPredictor, list_devices, share
from memoro.evaluation.predictions import Predictor

__all__ = ["photos", "predictor", "tasks"]  # fixtures
CPUS = [torch.device("cpu")] * 2


def test_cuda_is_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_devices(None) == list_devices("cpu") == [torch.device("cpu")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert list_devices("cuda") == list_devices(None) == [torch.device("cuda", number) for number in range(3)]
    assert list_devices("cpu") == [torch.device("cpu")]


def test_processes_answer_alike_and_in_order(
    photos: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "CHUNK", 1)
    wanted = list(predictor.predict(list_pictures(photos)))
    assert len(wanted) > 3 * predictor.how.batch_size
    with share(predictor, CPUS[:1], 0) as alone:
        assert alone is predictor
    with share(predictor, CPUS, 0) as shared:
        assert isinstance(shared, SharedPredictor)
        assert shared.decoder(3) is None
        found = list(shared.predict(list_pictures(photos)))
        assert [one.image for one in found] == [one.image for one in wanted]
        assert [one.to_json() for one in found] == [one.to_json() for one in wanted]
        [first, *_] = shared.predict(list_pictures(photos))  # again, by the same processes
        assert first.to_json() == wanted[0].to_json()
        assert shared.describe() == predictor.describe()


def test_a_process_that_dies_is_an_error(photos: Path, predictor: Predictor) -> None:
    with share(predictor, CPUS, 0) as shared:
        assert isinstance(shared, SharedPredictor)
        shared.pool.submit(abs, 1).result()
        for process in list(shared.pool._processes.values()):
            process.kill()
        with pytest.raises(DataError, match="a process of a GPU died"):
            list(shared.predict(list_pictures(photos)))
