"""Text from strangers in CSV files: a spreadsheet must not run it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import random_task
from shell import Shell, save_images, shell

import memoro
from memoro.backbones import Backbone
from memoro.evaluation.predictions import no_formula

__all__ = ["shell"]  # a fixture

CALC = "=cmd|' /C calc'!A0"
LABELS = [CALC, "+1+cmd|x!A", "-2+3", "@SUM(1)", "\t=1", "\uff1d1", "-1", "+1.5", "plain", "'=1", "a=1"]
SAFE = [f"'{label}" for label in LABELS[:6]] + LABELS[6:]


@pytest.fixture
def predict(shell: Shell, backbone: Backbone, tmp_path: Path) -> Callable[..., str]:
    """Runs `memoro predict` with a task of these labels on two images, one of which cannot be read."""
    memoro.save_task(random_task(backbone, "@pets", labels=LABELS), tmp_path / "pets.safetensors")
    save_images(tmp_path, "=1.png")
    (tmp_path / "=2.png").write_bytes(b"junk")

    def run(*more: object) -> str:
        said = shell("predict", "=1.png", "=2.png", "-b", "vit", "-t", "pets.safetensors", "--top", 99, *more)
        assert "such as =2.png: not a readable image" in said.err
        return said.out

    return run


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_text_that_a_spreadsheet_would_run_gets_an_apostrophe() -> None:
    assert [no_formula(label) for label in LABELS] == SAFE
    assert [no_formula(number) for number in (-1.5, -2, None)] == [-1.5, -2, None]


@pytest.mark.parametrize("folder", [False, True])
def test_csv_runs_nothing_in_a_spreadsheet(folder: bool, predict: Callable[..., str]) -> None:
    def rows(*more: str) -> list[dict[str, str]]:
        if not folder:
            return read(predict("-f", "csv", *more))
        name = f"out{len(more)}/"
        for resume in ((), ("--resume",)):  # which reads errors from the shards
            predict("-f", "csv", *more, "-o", name, *resume)
        return read((Path(name) / "part-000000.csv").read_bytes().decode())

    safe, raw = rows(), rows("--raw-csv")
    assert sorted(row["label"] for row in safe[:-1]) == sorted(SAFE)
    assert sorted(row["label"] for row in raw[:-1]) == sorted(LABELS)
    assert {(row["image"], row["task"]) for row in safe} == {("'=1.png", "'@pets"), ("'=2.png", "")}
    assert {(row["image"], row["task"]) for row in raw} == {("=1.png", "@pets"), ("=2.png", "")}
    names = ("image", "task", "label")
    assert [{**row, **dict.fromkeys(names)} for row in safe] == [{**row, **dict.fromkeys(names)} for row in raw]


def test_other_formats_keep_the_text(predict: Callable[..., str]) -> None:
    answer = json.loads(predict("-f", "jsonl").splitlines()[0])
    assert answer["image"] == "=1.png"
    assert set(answer["answers"]["@pets"]["probabilities"]) == set(LABELS)


def test_the_list_of_skipped_images_runs_nothing(shell: Shell, tmp_path: Path) -> None:
    save_images(tmp_path / "@set", *(f"{label}/{number}.png" for label in ("a", "b") for number in range(6)))
    (tmp_path / "@set" / "a" / "0.png").write_bytes(b"junk")
    how = (
        "--epochs",
        1,
        "--lr",
        0.1,
        "--regime",
        "head",
        "--set",
        "workers=0",
        "--set",
        "max_unreadable=0.5",
        "--folder",
        "run",
    )
    shell("train", "@set", "-b", "vit", *how, "--out", "a.safetensors")
    [row] = read((tmp_path / "run" / "skipped.csv").read_text())
    assert row["image"] == "'@set/a/0.png"
