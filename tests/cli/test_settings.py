"""`--set NAME=VALUE`, and how messages of the library name options in the shell."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from memoro.cli import app
from memoro.cli.settings import FIELDS, name_options, read_settings
from memoro.data import Augment, DataOptions
from memoro.errors import MemoroError
from memoro.options import option, read_options
from memoro.training import Cache, Recipe, TrainOptions


def test_values_get_the_types_of_the_fields(tmp_path: Path) -> None:
    words = ["momentum=0.8", "warmup=3", "balance=true", "views=none", "crop_scale=0.5,1", "crop=pad", "cache=off"]
    found = read_settings("train", [*words, "cache_budget=2", "steps=1e3", "max-unreadable=0.5", "folds=0"])
    assert found[Recipe] == {"momentum": 0.8, "warmup": 3, "balance": True, "views": None, "steps": 1000}
    assert found[Augment] == {"scale": (0.5, 1.0), "crop": "pad"}
    assert found[TrainOptions] == {"cache": False, "folds": 0}
    assert (found[Cache], found[DataOptions]) == ({"budget": 2.0}, {"max_unreadable": 0.5})
    file = tmp_path / "settings.json"
    values = {"momentum": 0.8, "views": None, "crop_scale": [0.5, 1], "balance": True, "warmup": 1}
    file.write_text(json.dumps(values))
    found = read_settings("train", [f"@{file}", "warmup=2"])
    assert found[Recipe] == {"momentum": 0.8, "views": None, "balance": True, "warmup": 2}
    assert found[Augment] == {"scale": (0.5, 1.0)}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["momentun=0.8"], "Did you mean momentum?"),
        (["xyz=1"], "--set help lists them"),
        (["momentum"], "write NAME=VALUE"),
        (["momentum=much"], "momentum=much: choose a number."),
        (["warmup=1.5"], "choose a whole number"),
        (["crop=round"], "choose inception, pad, none"),
        (["crop_scale=0.5"], "choose 2 numbers separated by a comma"),
        (["balance=perhaps"], "choose true or false"),
        (["epochs=3"], "use --epochs"),
        (["@nothing.json"], "not a readable JSON file"),
    ],
)
def test_what_is_no_setting_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(MemoroError) as error:
        read_settings("train", words)
    assert problem in str(error.value)


def test_a_file_must_be_an_object(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(MemoroError, match="one JSON object"):
        read_settings("train", [f"@{tmp_path / 'list.json'}"])


@pytest.mark.parametrize("verb", FIELDS)
def test_all_settings_are_listed_with_help(verb: str) -> None:
    page = CliRunner().invoke(app, [verb, "--set", "help"], env={"COLUMNS": "200"})
    assert page.exit_code == 0, page.output
    settings = FIELDS[verb].named()
    assert settings
    for setting in settings.values():
        assert f" {setting.name} " in page.output
        assert len(setting.help.split()) >= 2, setting.name


def test_of_two_fields_with_one_name_the_first_counts() -> None:
    @dataclass
    class Left:
        size: int = option(1, "Size of the left one.")
        other: int = 3

    @dataclass
    class Right:
        size: int = option(2, "Size of the right one.")
        width: int = option(4, "Width of it.", name="size_of_right")

    globals().update(Left=Left, Right=Right)
    found = read_options(Left, Right)
    assert {name: (one.owner, one.default) for name, one in found.items()} == {
        "size": (Left, 1),
        "size_of_right": (Right, 4),
    }


def named(text: str, verb: str = "train") -> str:
    group: Any = typer.main.get_group(app)
    return name_options(text, verb, group.get_command(None, verb))


def test_messages_name_flags_and_settings() -> None:
    assert named("leave out `cells` and `from_layer`.") == "leave out --cells and --from-layer."
    assert named("use `kind='number'` or `resume=True`") == "use --kind number or --resume"
    assert named("use `views=4`, `cache=False`, `flip`") == "use --set views=4, --set cache=false, --set flip"
    assert named("more space (`Cache.budget`)") == "more space (--set cache_budget)"
    for text in (
        "load_task() and from_layer stay",
        "run `hf download x`, or `memoro.load_task`",
        "`no_such_argument` stays, and so does `extends",
    ):
        assert named(text) == text
    assert named("`views=4` and `max_queue`", "serve") == "`views=4` and --set max_queue"
    assert named("`views=4`", "inspect") == "`views=4`"
