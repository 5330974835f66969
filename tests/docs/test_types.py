"""Types of public functions, as a user's mypy sees them."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import memoro
from memoro.answer import Answer, AnswerDict
from memoro.data.dataset import DataOptions, DataSettings
from memoro.training.recipe import FitSettings, Recipe, Settings, TrainOptions, TrainSettings

USER = Path(__file__).with_name("user.py")
WIDER = {"folder", "kind"}
"""A path may be a string, and a kind has two names."""


@pytest.mark.slow
def test_a_users_program_is_checked(tmp_path: Path) -> None:
    """As a user runs it, without the settings of this repository."""
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nignore_missing_imports = True\n[mypy-memoro.*]\nignore_errors = True\n"
    )
    env = {**os.environ, "MYPYPATH": str(Path(memoro.__file__).parents[1])}
    command = [sys.executable, "-m", "mypy", "--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path)]
    done = subprocess.run([*command, str(USER)], capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def hints(*kinds: Any) -> dict[str, Any]:
    return {name: kind for one in kinds for name, kind in get_type_hints(one).items()}


def test_keyword_arguments_are_the_fields_of_recipe_and_options() -> None:
    own = {field.name for kind in (Recipe, TrainOptions) for field in fields(kind) if field.init}
    assert set(hints(Settings)) == own - {"lr", "processes"}  # found, not given
    expected = hints(Recipe, TrainOptions)
    for name, kind in hints(Settings).items():
        assert name in WIDER or kind == expected[name], name
    assert hints(FitSettings)["lr"] == expected["lr"]


def test_keyword_arguments_of_load_data_are_the_fields_of_its_options() -> None:
    assert hints(DataSettings).keys() == hints(DataOptions).keys()
    for name, kind in hints(DataSettings).items():
        assert name in WIDER or kind == hints(DataOptions)[name], name


def test_keyword_arguments_of_train_are_all_of_its_own() -> None:
    own = {name for name, one in inspect.signature(memoro.train).parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert set(hints(TrainSettings)) - set(hints(Settings)) == own - {"label_column"}


def test_an_answer_as_a_dictionary_has_its_fields() -> None:
    assert set(hints(AnswerDict)) == {field.name for field in fields(Answer)}
    for name, kind in hints(AnswerDict).items():
        assert name == "attention" or hints(Answer)[name] == kind | None, name


def test_public_functions_have_types() -> None:
    """Nothing is untyped, and nothing returns Any."""
    for name in memoro.__all__:
        value = getattr(memoro, name)
        if inspect.isclass(value):
            continue
        shape = inspect.signature(value)
        assert shape.return_annotation not in {"Any", shape.empty}, name
        for parameter in shape.parameters.values():
            assert parameter.annotation is not shape.empty, f"{name}: {parameter}"
