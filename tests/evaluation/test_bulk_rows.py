"""Bulk prediction: the rows of shards, decoder processes that change nothing, and embeddings."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from bulk_jobs import COUNT, NAMES, new_job, photos, predictor, read_all, read_rows
from conftest import random_task
from prediction_inputs import mess, tasks
from pyarrow import parquet
from shell import Shell, shell
from trust import fit

import memoro
from memoro.backbones import Backbone
from memoro.data import workers
from memoro.data.open import open_source
from memoro.engine.answers import AnswerOptions, Routing
from memoro.evaluation.bulk import IMAGES, MANIFEST, answer_here, begin
from memoro.evaluation.predictions import Predictor
from memoro.images import decoding

__all__ = ["mess", "photos", "predictor", "shell", "tasks"]  # fixtures


def test_shards_have_the_rows_of_plain_predict(shell: Shell, mess: Path, tasks: list[str], tmp_path: Path) -> None:
    common = ("predict", "mess", "-b", "vit", *tasks, "--set", "batch_size=2")
    shell(*common, "--out", "one.parquet")
    said = shell(*common, "--out", "many/", "--shard-size", 4)
    whole = parquet.read_table(tmp_path / "one.parquet").to_pylist()
    assert read_rows(tmp_path / "many") == whole, "the same batches, so the same numbers"
    assert sorted(os.listdir("many")) == [IMAGES, MANIFEST, "part-000000.parquet", "part-000001.parquet"]
    assert parquet.read_table("many").num_rows == len(whole), "readers of folders leave out the manifest"
    assert "Wrote predictions for 7 images to many." in said.err
    assert "2 of 7 images could not be read" in said.err
    assert sum(row["error"] is not None for row in whole) == 2
    shell(*common, "--out", "text/", "--shard-size", 4, "--format", "csv")
    assert "".join(file.read_text() for file in sorted(Path("text").glob("*.csv"))).count("\n") == len(whole) + 2
    again = shell(*common, "--out", "many/", "--shard-size", 4, "--resume")
    assert "Already done: 7 images. Still to do: 0." in again.err
    assert "predictions for" not in again.err


@pytest.mark.parametrize("embeddings", [False, True])
def test_an_image_whose_answers_are_dropped_has_a_row(photos: Path, predictor: Predictor, embeddings: bool) -> None:
    pets, dim = predictor.models[0], predictor.backbone.dim
    assert isinstance(pets, memoro.Task)
    near = torch.randn(30, dim, generator=torch.Generator().manual_seed(0)) / 1000  # nothing looks like these
    pets.update_spec(familiarity=fit(near, torch.arange(30) % 2))
    how = AnswerOptions(4, routing=Routing("drop", 1.0), embeddings=embeddings)
    job = new_job(photos, Predictor(predictor.backbone, (pets,), how))
    answer_here(job, begin(job))
    rows = read_rows(job.folder)
    assert [row["image"] for row in rows] == [f"photos/{name}" for name in NAMES]
    assert [row["image"] for row in rows if row["error"]] == ["photos/05.png"]
    assert {row["task"] for row in rows if not row["error"]} == {"base" if embeddings else None}
    assert {row["label"] for row in rows} == {None}


def test_worker_processes_change_nothing(photos: Path, predictor: Predictor) -> None:
    here, there = (new_job(photos, predictor, name) for name in ("here", "there"))
    ticks: list[int] = []
    answer_here(here, begin(here), tick=ticks.append)
    with pytest.MonkeyPatch.context() as patch:
        started = []
        new = workers.ProcessPoolExecutor
        patch.setattr(
            workers, "ProcessPoolExecutor", lambda *given, **options: started.append(1) or new(*given, **options)
        )
        tally = answer_here(there, begin(there), workers=2)
    assert len(started) == 1, "the processes go on from shard to shard"
    assert read_rows(here.folder) == read_rows(there.folder)
    assert (tally.images, tally.unreadable, sum(ticks)) == (COUNT, 1, COUNT)


def test_an_image_that_kills_its_decoder_is_a_row_with_an_error(
    photos: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = list(predictor.predict(read_all(open_source(["photos"]), COUNT)))
    own, here = decoding.open_image, os.getpid()

    def crash(picture: Any, **options: Any) -> Any:
        if str(picture) in {"photos/03.png", "photos/11.png"}:
            assert os.getpid() != here
            os.kill(os.getpid(), signal.SIGKILL)
        return own(picture, **options)

    monkeypatch.setattr(decoding, "open_image", crash)
    found = list(predictor.predict(read_all(open_source(["photos"]), COUNT), predictor.decoder(2)))
    assert {one.image: one.error for one in found if one.error and "process" in one.error} == dict.fromkeys(
        ["photos/03.png", "photos/11.png"], "the process that decoded it died, possibly out of memory."
    )
    assert [one.image for one in found] == [one.image for one in right]
    assert found[5] == right[5], "errors of other images stay"
    for one, other in zip(found, right, strict=True):
        if one.error is None:  # two batches are one image smaller, which rounds differently
            expected = other.answers["pets"]["probability"]
            assert one.answers["pets"]["probability"] == pytest.approx(expected, abs=1e-5)


def test_embeddings_are_the_engines_tokens(photos: Path, backbone: Backbone, predictor: Predictor) -> None:
    tags = random_task(backbone, "tags", seed=2, head="multilabel", from_layer=2)
    how = AnswerOptions(COUNT, embeddings=True)
    job = new_job(photos, Predictor(backbone, (*predictor.models, tags), how), shard_size=COUNT)
    answer_here(job, begin(job))
    rows = read_rows(job.folder)
    model = memoro.compose(backbone, [*predictor.models, tags])
    (preprocessing,) = model.passes()
    names = [name for name in NAMES if name != "05.png"]
    pixels = torch.stack([preprocessing.to_tensor(memoro.images.open_image(photos / name)) for name in names])
    with torch.no_grad():
        out = model.run(pixels)
    found = {}
    for name, right in out.tokens.items():
        cells = [row["embedding"] for row in rows if row["task"] == name and row["embedding"] is not None]
        found[name] = torch.tensor(cells)
        assert torch.equal(found[name], right), name
    assert set(found) == {"base", "pets", "age", "tags"}
    assert torch.equal(tags.head(found["tags"]), out.logits["tags"]), "what the head reads"
    assert not torch.allclose(found["pets"], found["base"])
    base = [row for row in rows if row["task"] == "base"]
    assert [row["image"] for row in base] == [f"photos/{name}" for name in names]
    assert {row["label"] for row in base} == {None}
    assert len([row for row in rows if row["task"] == "tags"]) == 3 * len(names), "one row for each label"


def test_embeddings_need_parquet(shell: Shell, mess: Path, tasks: list[str], tmp_path: Path) -> None:
    common = ("predict", "mess/c.png", "-b", "vit", *tasks, "--embeddings")
    assert "write Parquet" in shell(*common, "--out", "a.csv", code=1).err
    assert "write Parquet" in shell(*common, "--out", "a/", "--format", "csv", code=1).err
    shell(*common, "--out", "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32())
    assert table["task"].to_pylist() == ["base", "pets", "tags", "tags", "tags", "age"]
    assert [cell is not None for cell in table["embedding"].to_pylist()] == [True, True, True, False, False, True]
