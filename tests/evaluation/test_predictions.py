"""Predicting as a user does it: messy folders, every format, answers as they come."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import in_fork, random_task
from PIL import ExifTags, Image
from prediction_inputs import READABLE, UNREADABLE, encoded, mess, picture, read_csv, tasks
from pyarrow import parquet
from rich.console import Console
from shell import Shell, shell

import memoro
from memoro.answer import Answer
from memoro.backbones import Backbone
from memoro.engine.answers import Prediction
from memoro.errors import ImageError
from memoro.evaluation.predictions import FORMS, predictions_table, write_predictions
from memoro.images import open_image

__all__ = ["mess", "shell", "tasks"]  # fixtures

# ------------------------------------------------------------------------------------------------- rows with errors


def test_every_format_has_a_row_for_every_image(shell: Shell, mess: Path, tasks: list[str], tmp_path: Path) -> None:
    names = sorted([*READABLE[:3], *UNREADABLE]) + READABLE[3:]
    common = ("mess", "-b", "vit", *tasks)
    shell("predict", *common, "-o", "out.parquet")
    document = json.loads(shell("predict", *common, "--format", "json").out)
    lines = [json.loads(line) for line in shell("predict", *common, "-f", "jsonl").out.splitlines()]
    rows = read_csv(shell("predict", *common, "-f", "csv").out)
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    said = shell("predict", *common)
    assert list(document) == [line["image"] for line in lines] == [f"mess/{name}" for name in names]
    assert list(dict.fromkeys(row["image"] for row in rows)) == list(document)
    assert [row["image"] for row in table] == [row["image"] for row in rows]
    for name, reason in UNREADABLE.items():
        where = f"mess/{name}"
        error = document[where]["error"]
        assert error.startswith(reason)
        assert {"image": where, "error": error} in lines
        assert [row["error"] for row in rows if row["image"] == where] == [error]
        assert [row["error"] for row in table if row["image"] == where] == [error]
        assert where in said.out
        assert reason in said.out
    assert "2 of 7 images could not be read, such as mess/empty.png: the file is empty (0 bytes)." in said.err
    answers = {line["image"]: line["answers"] for line in lines if "answers" in line}
    assert answers == {name: found for name, found in document.items() if "error" not in found}
    assert all(list(found) == ["pets", "tags", "age"] for found in answers.values())


def test_strict_fails_if_an_image_cannot_be_read(shell: Shell, mess: Path, tasks: list[str], tmp_path: Path) -> None:
    shell("predict", "mess", "-b", "vit", *tasks, "--strict", "-o", "all.csv", code=1)
    assert {row["image"] for row in read_csv((tmp_path / "all.csv").read_text())} >= {"mess/a.avif", "mess/junk.jpg"}
    shell("predict", "mess", "-b", "vit", *tasks, "-o", "all.csv")
    shell("predict", "mess/deep", "-b", "vit", *tasks, "--strict", "-o", "all.csv")


def test_heic_says_what_to_install(mess: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_image(mess / "b.heic").size == (36, 24)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    assert open_image(encoded(picture(0), "HEIF", exif=exif.tobytes())).size == (24, 36), "upright"
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(ImageError, match=r"b\.heic: a HEIC photo: to read these, pip install 'memoro\[heif\]'"):
        open_image(mess / "b.heic")
    assert open_image(mess / "a.avif").size == (36, 24), "AVIF needs no plugin"


def test_damaged_heic_is_an_image_or_an_image_error() -> None:
    generator = np.random.default_rng(0)
    whole = encoded(picture(0), "HEIF")
    outcomes = set()
    for _ in range(60):
        data = bytearray(whole)
        for at in generator.integers(12, len(data), generator.integers(1, 9)):
            data[at] = generator.integers(0, 256)
        try:
            outcomes.add(open_image(bytes(data)).mode)
        except ImageError:
            outcomes.add("refused")
    assert outcomes == {"RGB", "refused"}


# -------------------------------------------------------------------------------------------------- probabilities


def test_csv_gives_every_label_of_a_multilabel_task(shell: Shell, mess: Path, tasks: list[str]) -> None:
    common = ("mess/c.png", "-b", "vit", *tasks)
    rows = read_csv(shell("predict", *common, "-f", "csv").out)
    found = json.loads(shell("predict", *common, "--format", "json").out)["mess/c.png"]
    tags = [row for row in rows if row["task"] == "tags"]
    assert {row["label"]: float(row["probability"]) for row in tags} == found["tags"]["probabilities"]
    assert [row["label"] for row in tags if row["predicted"] == "true"] == found["tags"]["labels"]
    assert {row["predicted"] for row in tags} <= {"true", "false"}
    [pet] = [row for row in rows if row["task"] == "pets"]
    assert (pet["label"], float(pet["probability"])) == (found["pets"]["label"], found["pets"]["probability"])
    [age] = [row for row in rows if row["task"] == "age"]
    assert (age["label"], float(age["value"]), age["probability"]) == ("years", found["age"]["values"]["years"], "")


def test_a_table_shows_a_probability_where_no_label_is_predicted(
    shell: Shell,
    backbone: Backbone,
    mess: Path,
    tmp_path: Path,
) -> None:
    task = random_task(backbone, "tags", labels=["red", "old"], head="multilabel")
    with torch.no_grad():
        task.head.weight.zero_()
        task.head.bias.copy_(torch.tensor([-2.0, -1.0]))
    memoro.save_task(task, tmp_path / "tags.safetensors")
    said = shell("predict", "mess/c.png", "-b", "vit", "-t", "tags.safetensors").out
    assert "none, best old 0.27" in said


def test_a_table_wider_than_the_terminal_has_a_row_for_each_task() -> None:
    def answer(label: str, **more: Any) -> Answer:
        return Answer(label=label, probability=0.9, probabilities={label: 0.9}, **more)

    tasks = {f"a-long-task-{number}": answer("golden retriever", unfamiliar=number > 0) for number in range(4)}
    rows = [Prediction("a.jpg", tasks), Prediction("b.jpg", {}, "no image")]
    wide, narrow = predictions_table(rows, 2, width=200), predictions_table(rows, 2, width=80)
    assert [column.header.plain for column in wide.columns] == ["image", *tasks, "error"]
    lines = io.StringIO()
    Console(file=lines, width=80).print(narrow)
    shown = lines.getvalue()
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert re.search(r"a\.jpg +│ a-long-task-0 │ golden retriever 0\.90 +│\n", shown)
    assert re.search(r"│ +│ a-long-task-3 │ unfamiliar \(golden retriever 0\.90\) │\n", shown)
    assert re.search(r"b\.jpg +│ +│ no image +│\n", shown)
    scored = {name: replace(one, score=float(number)) for number, (name, one) in enumerate(tasks.items())}
    table = predictions_table([Prediction("a.jpg", scored)], 1, width=60)
    assert [str(cell) for cell in table.columns[1].cells] == sorted(tasks, reverse=True)
    assert [str(cell) for cell in table.columns[0].cells] == ["a.jpg", "", "", ""]
    assert "most likely" in str(table.title)


def test_top_gives_the_best_labels(shell: Shell, mess: Path, tasks: list[str], backbone: Backbone) -> None:
    common = ("mess/c.png", "-b", "vit", *tasks)
    whole = json.loads(shell("predict", *common, "--format", "json").out)["mess/c.png"]
    short = json.loads(shell("predict", *common, "--format", "json", "--top", 2).out)["mess/c.png"]
    best = list(whole["pets"]["probabilities"].items())[:2]
    assert list(short["pets"]["probabilities"].items()) == best
    assert short["pets"]["label"] == whole["pets"]["label"]
    assert short["tags"]["labels"] == whole["tags"]["labels"]
    rows = read_csv(shell("predict", *common, "-f", "csv", "--top", 2).out)
    pets = [row for row in rows if row["task"] == "pets"]
    assert [(row["label"], float(row["probability"])) for row in pets] == best
    assert [row["predicted"] for row in pets] == ["true", "false"]
    shown = shell("predict", *common, "--top", 2).out
    assert all(f"{label} {p:.2f}" in shown for label, p in best)
    model = memoro.compose(backbone, [memoro.load_task("pets.safetensors")])
    alone = model.predict("mess/c.png", top=2)[0]["pets"]
    assert alone["label"] == short["pets"]["label"]
    # One task in the pass instead of three: products of other shapes round differently.
    assert alone["probabilities"] == pytest.approx(short["pets"]["probabilities"], abs=1e-6)


# ---------------------------------------------------------------------------------------------------------- streams


def test_predict_reads_no_further_than_a_batch_ahead(backbone: Backbone) -> None:
    read: list[int] = []

    def camera() -> Iterator[Image.Image]:  # never ends
        while True:
            read.append(len(read))
            yield picture(len(read))

    model = memoro.compose(backbone, [random_task(backbone, "pets")])
    stream = model.predict_stream(camera(), batch_size=3)
    for number in range(7):
        row = next(stream)
        assert (row.image, row.error) == (f"image {number}", None)
        assert len(read) == 3 * (number // 3 + 1)


@pytest.mark.parametrize("form", FORMS)
def test_writing_keeps_no_predictions(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memoro.evaluation.predictions.ROW_GROUP", 7)
    alive: list[int] = [0]
    most, sizes = 0, []

    def end() -> None:
        alive[0] -= 1

    def rows(file: Any) -> Iterator[Prediction]:
        nonlocal most
        for number in range(100):
            sizes.append(file.tell())
            row = Prediction(f"{number}.jpg", {"pets": Answer(label="a", probability=1.0, probabilities={"a": 1.0})})
            weakref.finalize(row, end)
            alive[0] += 1
            most = max(most, alive[0])
            yield row

    with (tmp_path / "out").open("wb") as file:
        write_predictions(rows(file), form, file)
    assert most <= 3, "constant memory"
    assert sizes[90] > sizes[50] > sizes[10], "written as they come"


def test_json_has_no_nan() -> None:
    answers = {
        "pets": Answer(label="a", probability=math.nan, probabilities={"a": math.nan, "b": 0.5}, score=1.0),
        "age": Answer(values={"years": math.inf}, intervals={"years": [-math.inf, math.inf]}),
    }
    right = {
        "pets": {"label": "a", "probability": None, "probabilities": {"a": None, "b": 0.5}, "score": 1.0},
        "age": {"values": {"years": None}, "intervals": {"years": [None, None]}},
    }

    def refuse(token: str) -> None:
        raise AssertionError(token)

    for form, expected in {"json": {"1.jpg": right}, "jsonl": {"image": "1.jpg", "answers": right}}.items():
        file = io.BytesIO()
        write_predictions([Prediction("1.jpg", answers)], form, file)
        assert json.loads(file.getvalue(), parse_constant=refuse) == expected


def test_out_lets_torch_wait_without_spinning() -> None:
    code = """
import os, sys
from unittest.mock import patch
from memoro.cli import main, predict
def stop():
    assert "torch" not in sys.modules
    share()
    sys.exit(os.environ["OMP_WAIT_POLICY"])
share = predict.share_cores
with patch.object(predict, "share_cores", stop):
    main()
"""
    command = [sys.executable, "-c", code, "predict", "1.png", "-t", "pets.safetensors", "-o", "a.csv"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stderr == "PASSIVE\n"


def test_interrupted_predictions_keep_what_was_answered(
    shell: Shell,
    mess: Path,
    tasks: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "out.csv").write_text("older answers")

    def stop(source: Any, **options: Any) -> Image.Image:
        if Path(source).name == "junk.jpg":
            raise KeyboardInterrupt
        return open_image(source, **options)

    monkeypatch.setattr("memoro.images.decoding.open_image", stop)
    said = shell("predict", "mess", "-b", "vit", *tasks, "-o", "out.csv", "--set", "batch_size=1", code=130)
    assert "stopped after 4 images.\nThe answers so far are in out.csv.part." in said.err
    assert (tmp_path / "out.csv").read_text() == "older answers"
    rows = read_csv((tmp_path / "out.csv.part").read_text())
    assert list(dict.fromkeys(row["image"] for row in rows)) == [
        "mess/a.avif",
        "mess/b.heic",
        "mess/c.png",
        "mess/empty.png",
    ]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    shell("predict", "mess", "-b", "vit", *tasks, "-o", "out.csv")
    assert len({row["image"] for row in read_csv((tmp_path / "out.csv").read_text())}) == 7
    assert not (tmp_path / "out.csv.part").exists()


def test_two_commands_that_write_one_file_never_mix(
    shell: Shell,
    mess: Path,
    tasks: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> None:
        def wait(source: Any, **options: Any) -> Image.Image:
            while Path(source).name == "junk.jpg" and not Path("go").exists():
                Path("half").touch()
                time.sleep(0.01)
            return open_image(source, **options)

        monkeypatch.setattr("memoro.images.decoding.open_image", wait)
        shell(*command, "--top", 1)

    command = ("predict", "mess", "-b", "vit", *tasks, "-o", "out.csv", "--set", "batch_size=1")
    first = in_fork(run)
    while not Path("half").exists():
        assert first.is_alive()
        time.sleep(0.01)
    shell(*command, "--top", 2)
    second = Path("out.csv").read_text()
    Path("go").touch()
    first.join(120)
    assert first.exitcode == 0
    assert [one.name for one in tmp_path.iterdir() if "out.csv" in one.name] == ["out.csv"]
    shell(*command[:-4], "-o", "right-1.csv", "--set", "batch_size=1", "--top", 1)
    shell(*command[:-4], "-o", "right-2.csv", "--set", "batch_size=1", "--top", 2)
    assert [Path("out.csv").read_text(), second] == [Path(f"right-{top}.csv").read_text() for top in (1, 2)]


def test_out_names_a_file(shell: Shell, mess: Path, tasks: list[str]) -> None:
    assert "not an empty folder" in shell("predict", "mess", "-b", "vit", *tasks, "-o", "mess", code=1).err
    assert "--out answers/" in shell("predict", "mess", "-b", "vit", *tasks, "-o", "x.csv", "--resume", code=2).err
    assert "name a file with --out" in shell("predict", "mess", "-b", "vit", *tasks, "-f", "parquet", code=2).err
    assert "jsonl" in shell("predict", "mess", "-b", "vit", *tasks, "-f", "xml", code=2).err
    assert "nothing: no such file or folder" in shell("predict", "mess", "nothing", "-b", "vit", *tasks, code=1).err
