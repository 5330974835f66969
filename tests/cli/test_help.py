"""The help of the command line: short, whole phrases, an example first."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import typer.main

import memoro
from memoro.cli import VERBS, app, main

SCREENS = 2 * 50


def command_of(verb: str) -> Any:
    group: Any = typer.main.get_group(app)
    return group.get_command(None, verb)


def printed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str, width: int = 80) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "argv", ["memoro", *words])
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    return capfd.readouterr().out


def test_the_first_page_has_every_verb_once_and_fits_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = printed(capfd, monkeypatch, "--help")
    assert page.rstrip() == printed(capfd, monkeypatch).rstrip()
    assert len(set(VERBS) - {"lab"}) <= 18
    for verb in VERBS:
        assert sum(line.startswith(f"  memoro {verb} ") for line in page.splitlines()) == 1, verb
    assert max(map(len, page.splitlines())) <= 80
    assert printed(capfd, monkeypatch, "--version") == f"{memoro.__version__}\n"


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "lab"])
def test_help_has_an_example_first_then_whole_phrases(
    verb: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = printed(capfd, monkeypatch, verb, "--help")
    lines = [line.strip() for line in page.splitlines() if line.strip()]
    assert lines[0].startswith("Usage")
    assert lines[1].startswith(f"memoro {verb}")
    assert "…" not in page
    for parameter in command_of(verb).params:
        assert parameter.name == "help" or len((parameter.help or "").split()) >= 2, parameter.name
        assert not str(parameter.help).startswith(("Of ", "For --", "That ")), parameter.name


def test_the_help_of_train_is_short(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = printed(capfd, monkeypatch, "train", "--help")
    assert len(page.splitlines()) <= SCREENS
    options = [parameter for parameter in command_of("train").params if parameter.param_type_name == "option"]
    assert len(options) + 1 <= 25, "with --help"
    assert "--set help" in " ".join(page.replace("│", " ").split())


def test_help_is_as_wide_as_the_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (72, 400):
        lines = [line.strip() for line in printed(capfd, monkeypatch, "predict", "--help", width=width).splitlines()]
        [start] = [at for at, line in enumerate(lines) if line.startswith("Probabilities are calibrated if")]
        paragraph = lines[start : lines.index("", start)]
        assert " ".join(paragraph).endswith("it depends on which tasks are attached.")
        assert all(len(line) > width - 20 for line in paragraph[:-1])
        assert (len(paragraph) == 1) == (width == 400)


def test_commands_of_the_laboratory_have_help(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = printed(capfd, monkeypatch, "lab", "--help")
    for name in ("reproduce", "bench", "train-baseline"):
        assert name in page
    assert "memoro lab reproduce table2" in printed(capfd, monkeypatch, "lab", "reproduce", "--help")
