"""What the tests of bulk prediction share: a folder of photos, two tasks, jobs, and the rows of their shards."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from prediction_inputs import picture
from pyarrow import parquet
from random_tasks import random_task

from memoro.backbones import Backbone
from memoro.data.open import open_source
from memoro.data.source import Source
from memoro.engine.answers import AnswerOptions
from memoro.evaluation.bulk import Job
from memoro.evaluation.predictions import Predictor

COUNT = 21
NAMES = [f"{number:02}.png" for number in range(COUNT)]


def png(number: int) -> bytes:
    file = io.BytesIO()
    picture(number, 20, 20).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("photos")
    folder.mkdir()
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(png(number))
    (folder / "05.png").write_bytes(b"junk")
    return folder


@pytest.fixture
def predictor(backbone: Backbone) -> Predictor:
    pets = random_task(backbone, "pets", labels=["cat", "dog"])
    return Predictor(backbone, (pets, random_task(backbone, "age", seed=1, head="regression")), AnswerOptions(4))


def new_job(source: Source | Path, predictor: Predictor, folder: str = "answers", **options: Any) -> Job:
    source = open_source([str(source)]) if isinstance(source, Path) else source
    return Job(source, predictor, Path(folder), **{"shard_size": 8, **options})


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("part-*.parquet")) for row in parquet.read_table(file).to_pylist()]


def read_all(source: Source, step: int) -> Any:
    """All images of a source, read in parts of `step`."""
    keys = list(source.keys())
    return (picture for at in range(0, len(keys), step) for picture in source.read(keys[at : at + step]))
