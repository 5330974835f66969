"""Arguments that can be checked without images are checked before any image is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from image_files import save_classes
from shell import Shell, shell

import memoro
from memoro.backbones import Backbone
from memoro.errors import DataError, MemoroError

__all__ = ["shell"]  # a fixture


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"from_layer": 40}, r"`from_layer` must be between 0 and \d+, not 40"),
        ({"from_layer": [1, 40]}, r"`from_layer` must be between 0 and \d+, not 40"),
        ({"rank": 10_000}, r"`rank` must be between 0 and \d+, not 10000"),
        ({"cells": -1}, r"`cells` must be between 0 and \d+, not -1"),
    ],
)
def test_sizes_that_the_backbone_does_not_have(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], message: str
) -> None:
    save_classes(tmp_path / "set", {"a": 3, "b": 3})

    def read(*given: Any, **options: Any) -> None:
        raise AssertionError("images were read")

    monkeypatch.setattr("memoro.training.plan.load_data", read)
    with pytest.raises(MemoroError, match=message):
        memoro.train(tmp_path / "set", backbone=backbone, task="pets", regime="side", quiet=True, **wrong)
    with pytest.raises(AssertionError, match="images were read"):
        memoro.train(tmp_path / "set", backbone=backbone, task="pets", regime="side", quiet=True)


def test_a_folder_that_is_missing_is_all_that_is_told(shell: Shell, tmp_path: Path) -> None:
    said = shell("train", "nothing-here", code=1)
    assert "there is no such file or folder" in said.err
    assert "backbone" not in said.err
    assert said.out == ""
    with pytest.raises(DataError, match="there is no such file or folder"):
        memoro.train(tmp_path / "gone", backbone="no/such/backbone")
    (tmp_path / "note.txt").write_text("")
    with pytest.raises(DataError, match="is not a dataset: give a folder"):
        memoro.train(tmp_path / "note.txt", backbone="no/such/backbone")
