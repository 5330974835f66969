"""Commands, run in the process of the test as a user runs them in a shell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from memoro.cli import main


class Said(NamedTuple):
    out: str
    err: str


Shell = Callable[..., Said]


@pytest.fixture
def shell(
    vit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Runs a command in a folder with the backbone `vit`, wide enough for every line."""
    vit.save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: object, code: int = 0) -> Said:
        monkeypatch.setattr(sys, "argv", ["memoro", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        said = Said(*capfd.readouterr())
        assert (end.value.code or 0) == code, said
        return said

    return run


def save_images(folder: Path, *places: str) -> Path:
    for at, place in enumerate(places):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (40 * at, 90, 200 - 40 * at)).save(folder / place)
    return folder
