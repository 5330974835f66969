"""What the tests of `memoro lab reproduce` share: small sets, requests about them, and records without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from memoro.lab.reproduce.measure import Budget
from memoro.lab.reproduce.methods import METHODS, Method
from memoro.lab.reproduce.plan import CPU, Job, Request
from memoro.lab.reproduce.records import Record
from memoro.lab.reproduce.runner import Runner, make_request

COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40))


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Two sets of four classes, told apart by colour."""
    generator = np.random.default_rng(0)
    for name, turn in (("one", 0), ("two", 1)):
        for split, count in (("train", 8), ("test", 3)):
            for number in range(len(COLOURS) * count):
                colour = np.array(COLOURS[(number + turn) % len(COLOURS)])
                pixels = np.clip(colour + generator.integers(-40, 40, (20, 20, 3)), 0, 255).astype(np.uint8)
                place = tmp_path / name / split / str(number % len(COLOURS)) / f"{number}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(place)
    return tmp_path


@pytest.fixture
def checkpoint(vit: Any, tmp_path: Path) -> Path:
    vit.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def request_of(table: str, shapes: Path, checkpoint: Path, *sets: str, **changes: Any) -> tuple[Request, Runner]:
    data = [str(shapes / name) for name in sets or ("one",)]
    numbers = {"epochs": 1, "steps": 2, "seeds": 2, "batch_size": 16, **changes}
    out = shapes / "out"
    return make_request(table, "cpu", data, [str(checkpoint)], out, command="memoro …", workers=0, changes=numbers)


def record_of(
    method: Method | str,
    correct: list[list[int]],
    *,
    set_name: str = "rsscn7",
    budget: Budget = CPU.masked,
    **result: Any,
) -> Record:
    job = Job("accuracy", "vit", (set_name,), (METHODS[method] if isinstance(method, str) else method,), budget)
    bits = [np.packbits(np.array(row, dtype=bool)) for row in correct]
    found = {
        "lr": 0.1, "scores": {"0.1": [0.5]}, "curve": [(5, 0.5), (10, 0.5)], "train_images": 30, "classes": 2,
        "test_images": len(correct[0]), "test": [float(np.mean(row)) for row in correct], "diverged": 0,
        "correct": [row.tobytes().hex() for row in bits], "parameters": 7, "head": 3, **result,
    }  # fmt: skip
    return Record.now("table2", job.key("abc", 20), found, 60.0, 2, "memoro lab reproduce table2")
