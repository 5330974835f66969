"""Damaged checkpoints: every flipped bit and every changed field is noticed, with an error of memoro's own."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import CASES
from safetensors import safe_open
from safetensors.torch import save_file
from squares import save_squares

from memoro.backbones import Backbone, load_backbone
from memoro.data import Splits, load_data
from memoro.errors import TrainingError
from memoro.tasks.task import new_task
from memoro.training import fit
from memoro.training.checkpoint import KEY

LABELS = ["red", "green", "blue"]
OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 6, "lr": 0.05, "optimizer": "adamw", "image_size": 20}
FRESH: dict[str, Any] = {"workers": 0, "cache": False, "quiet": True}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone(CASES[0].model())


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Splits:
    root = save_squares(tmp_path_factory.mktemp("squares"), dict.fromkeys(LABELS, 4))
    return load_data(root, labels=LABELS, val_fraction=0.25, workers=0, quiet=True)


@pytest.fixture(scope="module")
def resume(
    backbone: Backbone, splits: Splits, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Callable[[Path], None]], str]:
    """Trains once, then resumes from a damaged copy of the checkpoint; the task's content hash."""
    root = tmp_path_factory.mktemp("runs")

    def train(name: str, **options: Any) -> str:
        task = new_task(backbone, "squares", LABELS, cells=1, from_layer=3, seed=1)
        fit(backbone, task, splits, folder=root / name, **OPTIONS, **FRESH, **options)
        return task.content_hash()

    whole = train("whole")

    def damaged(damage: Callable[[Path], None]) -> str:
        shutil.rmtree(root / "copy", ignore_errors=True)
        shutil.copytree(root / "whole", root / "copy")
        damage(root / "copy" / "checkpoint.safetensors")
        return train("copy", resume=True)

    assert damaged(lambda path: None) == whole
    return damaged


def flip(path: Path, number: int) -> None:
    """Flips one bit; `number` seeds which."""
    data = bytearray(path.read_bytes())
    at = random.Random(number).randrange(8 * len(data))
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


def test_every_flipped_bit_is_noticed(resume: Callable[[Callable[[Path], None]], str]) -> None:
    for number in range(60):
        with pytest.raises(TrainingError, match=r"checkpoint\.safetensors .*start over without `resume`"):
            resume(lambda path, number=number: flip(path, number))  # type: ignore[misc]


def test_cut_and_overwritten_files_are_noticed(resume: Callable[[Callable[[Path], None]], str]) -> None:
    def overwrite(path: Path, source: random.Random) -> None:
        data = bytearray(path.read_bytes())
        start = source.randrange(len(data))
        part = data[start : start + source.randrange(1, 400)]
        data[start : start + len(part)] = source.choice([bytes(len(part)), source.randbytes(len(part)), b""])
        path.write_bytes(data)

    for number in range(30):
        with pytest.raises(TrainingError, match="start over without `resume`"):
            resume(lambda path, number=number: overwrite(path, random.Random(number)))  # type: ignore[misc]


def fields_of(record: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all fields in a nested record."""
    inner = list(record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ())
    return [*([path] if path else []), *(place for key, value in inner for place in fields_of(value, (*path, key)))]


def rewrite(path: Path, number: int) -> None:
    """Removes a field of the record or gives it another value."""
    source = random.Random(number)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    record = json.loads(metadata[KEY])
    *way, last = source.choice(fields_of(record))
    place = record
    for key in way:
        place = place[key]
    if source.random() < 0.5:
        del place[last]
    else:
        others = [None, -1, "x", [], {}, 1e300, [[]], {"x": None}]
        place[last] = source.choice([value for value in others if value != place[last]])
    if source.random() < 0.1:
        del metadata[source.choice(list(metadata))]
    save_file(tensors, path, metadata={**metadata, KEY: json.dumps(record)})


def test_a_changed_or_missing_field_is_noticed(resume: Callable[[Callable[[Path], None]], str]) -> None:
    for number in range(60):
        with pytest.raises(TrainingError, match="start over without `resume`"):
            resume(lambda path, number=number: rewrite(path, number))  # type: ignore[misc]
