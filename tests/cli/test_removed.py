"""Verbs and options that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from memoro.cli import app
from memoro.cli.removed import REMOVED
from memoro.errors import MemoroError

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


@pytest.mark.parametrize("old", REMOVED)
def test_what_is_gone_names_what_replaces_it(old: str) -> None:
    done = CliRunner().invoke(app, [*old.split(), "1", "photos"])
    assert isinstance(done.exception, MemoroError), done.output
    assert str(done.exception) == f"memoro {old} was removed. Instead, use {REMOVED[old]}."
    verb, _, option = old.partition(" ")
    rows = [line for line in CHANGELOG.read_text().splitlines() if line.startswith(f"| `memoro {verb}")]
    assert any(f"`memoro {old}`" in row or f"`{option}`" in row for row in rows)
