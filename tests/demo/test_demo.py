"""The backbone that memoro ships, and the demo on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import memoro
from memoro.demo import run_demo
from memoro.demo.drawings import COLUMNS, FONTS, LETTERS, draw_letters, write_digits

WEIGHTS = Path(memoro.__file__).parent / "weights" / "memoro-tiny"


def test_memoro_tiny_is_small_and_has_a_task_of_its_own() -> None:
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) <= 12e6
    backbone = memoro.load_backbone()
    assert (backbone.name, backbone.image_size, backbone.dtype) == ("memoro-tiny", (112, 112), torch.float32)
    assert len(backbone.labels) == 202
    assert "African_elephant" in backbone.labels
    pixels = torch.rand(2, 3, 112, 112)
    task = memoro.new_task(backbone, "t", ["a", "b"])
    with torch.no_grad():
        answer = memoro.compose(backbone, [task])(pixels)["base"]
    assert answer.shape == (2, 202)
    assert torch.equal(answer, backbone.original(pixels))


def test_memoro_tiny_knows_photos(shared: Path) -> None:
    """Its own classifier on test images: far above the two-hundredth that guessing gives."""
    backbone = memoro.load_backbone("memoro-tiny")
    splits = memoro.load_data(shared / "data" / "tinyimagenet200.zip", labels=backbone.labels, screen=False, quiet=True)
    assert splits.test is not None
    some = range(0, len(splits.test), max(1, len(splits.test) // 200))
    pixels = torch.stack([backbone.preprocessing.to_tensor(splits.test.open(at)) for at in some])
    with torch.no_grad():
        guesses = backbone.original(pixels).argmax(-1)
    right = (guesses == splits.test.targets[list(some)]).float().mean()
    assert right > 0.25


def test_the_demo_draws_what_its_table_says(tmp_path: Path) -> None:
    table = draw_letters(tmp_path / "letters", 40)
    sets = memoro.load_columns(table, COLUMNS, quiet=True)
    assert sets["letter"].labels == tuple(LETTERS)
    assert set(sets["style"].labels) == set(FONTS)
    again = draw_letters(tmp_path / "again", 40)
    assert table.read_bytes() == again.read_bytes(), "the same seed draws the same"
    for at in range(40):
        image = np.asarray(Image.open(table.parent / f"{at:04}.png"))
        assert image.std() > 5, "a letter can be told from its ground"
    digits = memoro.load_data(write_digits(tmp_path / "digits", 100), quiet=True)
    assert digits.labels == tuple("0123456789")


def test_the_demo_does_the_whole_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(record=True, width=120)
    page = run_demo(console, tmp_path / "out", letters=60, digits=60, epochs=1)
    said = console.export_text()
    assert "bitwise equal" in said
    assert said.rstrip().endswith(f"memoro serve --open --tasks {tmp_path / 'out'}"), "it ends with what to try next"
    assert "parity extends digit" in said
    text = page.read_text()
    assert text.count('class="card"') == 16
    assert text.count("data:image/png") == 16
    assert text.count('class="meter"') == 16 * 5, "a bar for each answer"
    assert text.count("<svg") - 16 * 5 == 6, "the cost, and a chart for each task"
    files = {file.stem for file in (tmp_path / "out").glob("*.safetensors")}
    assert files == {"letter", "style", "case", "digit", "parity"}
    parity = memoro.load_task(tmp_path / "out" / "parity.safetensors")
    assert [parent.name for parent in parity.extends] == ["digit"]
