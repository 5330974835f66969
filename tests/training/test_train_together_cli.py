"""Several tasks, columns and halved sweeps from the shell."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import CASES
from run_groups import root
from typer.testing import CliRunner

import memoro
from memoro.cli import app

__all__ = ["root"]  # fixtures


@pytest.fixture
def shell(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    CASES[0].model().save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    common = ["-b", "vit", "--image-size", "20", "--set", "batch_size=5", "--set", "workers=0"]

    def run(command: str, *arguments: object, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [command, *map(str, arguments), *common])
        assert done.exit_code == code, (done.output, done.exception)
        return json.loads(done.stdout) if "--json" in arguments else done

    return run


def told(done: Any) -> str:
    return f"{done.output} {done.exception}"


def test_train_several_tasks_from_the_shell(shell: Callable[..., Any], root: Path, own_cache: Path) -> None:
    data = (f"a={root / 'many'}", f"b={root / 'few'}")
    record = shell("train", *data, "--out", "tasks", "--lr", 0.05, "--epochs", 2, "--json")
    assert [entry["task"] for entry in record["tasks"]] == ["a", "b"]
    tasks = [memoro.load_task(Path("tasks") / f"{name}.safetensors") for name in "ab"]
    assert [task.labels for task in tasks] == [["blue", "green", "red"], ["grey", "red"]]
    assert list(own_cache.glob("*/*.features"))
    alone = shell(
        "train", data[1], "--out", "b.safetensors", "--lr", 0.05, "--epochs", 2, "--json", "--set", "cache=false"
    )
    assert alone["task"] == "b"
    assert alone["metrics"]["loss"] == pytest.approx(record["tasks"][1]["metrics"]["loss"], abs=1e-2)

    several = ("--regime", "memory")  # no rate: three each
    swept = shell("train", *data, *several, "--out", "swept", "--epochs", 1, "--json")
    assert [len(entry["runs"]) for entry in swept["tasks"]] == [3, 3]
    assert sorted(path.name for path in Path("swept").iterdir()) == ["a.safetensors", "b.safetensors"]


def test_the_run_folder_of_many_tasks_has_a_short_name(shell: Callable[..., Any], root: Path) -> None:
    def folder(*names: str) -> Path:
        data = [f"{name}={root / 'few'}" for name in names]
        record = shell("train", *data, "--out", "tasks", "--lr", 0.05, "--epochs", 1, "--json")
        return Path(record["folder"])

    long = ["é" * 90, "b" * 90, "c" * 90]
    assert folder("a", "b").name == "a+b"
    first, second = folder(*long), folder(*long[:2], "d")
    assert re.fullmatch(r"é{20}\+2-more-[0-9a-f]{8}", first.name)
    assert first.is_dir()
    assert first != second, "other tasks have another folder"


def test_train_columns_from_the_shell(shell: Callable[..., Any], root: Path) -> None:
    both = ("--label-column", "x", "--label-column", "y")
    table = root / "table" / "table.csv"
    record = shell("train", table, *both, "--lr", 0.05, "--epochs", 1, "--out", "tasks", "--json")
    assert [entry["task"] for entry in record["tasks"]] == ["x", "y"]
    assert memoro.load_task("tasks/x.safetensors").labels == ["blue", "green", "grey", "red"]
    assert memoro.load_task("tasks/y.safetensors").labels == ["even", "odd"]
    one = shell("train", table, *both[:2], "--lr", 0.05, "--epochs", 1, "--out", "x.safetensors", "--json")
    assert one["task"] == "x"
    assert Path("x.safetensors").is_file()
    line = "--label-column trains a task per column of one table"
    for wrong in ([table, *both, "--task", "t"], [f"a={table}", f"b={table}", *both]):
        assert line in told(shell("train", *wrong, code=1))


def test_wrong_combinations_from_the_shell(shell: Callable[..., Any], root: Path) -> None:
    many, few = root / "many", root / "few"
    for wrong in ([many, few], [f"a={many}", f"a={few}"], [f"a={many}", few], [f"a={many}", f"b={few}", "-t", "c"]):
        assert "give NAME=DATA for each" in told(shell("train", *wrong, code=1))
    assert "looks like a path" in told(shell("train", f"x/y={many}", f"b={few}", code=1))
    assert "--set views=none" in told(shell("train", many, "--set", "cache=true", "--set", "views=none", code=1))
    assert "the features take" in told(
        shell("train", many, "--set", "cache=true", "--set", "cache_budget=0", "--lr", 0.1, code=1)
    )
