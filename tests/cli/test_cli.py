"""The command line, run as a user runs it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import random_task
from PIL import Image
from test_train_cli import run

import memoro
from memoro.backbones import Backbone


def start(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A process that has imported nothing yet. Most tests run their commands in a fork of this one instead."""
    done = subprocess.run(
        [sys.executable, "-m", "memoro", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def folder(vit: Any, tmp_path: Path) -> Path:
    vit.save_pretrained(tmp_path / "vit")
    memoro.load_backbone(tmp_path / "vit")  # so that forks have everything imported
    return tmp_path / "vit"


@pytest.fixture
def files(backbone: Backbone, tmp_path: Path) -> tuple[Path, Path]:
    pets = random_task(backbone, "pets", labels=["cat", "dog"])
    breeds = random_task(backbone, "breeds", seed=1, extends=[pets])
    return (
        memoro.save_task(pets, tmp_path / "pets.safetensors"),
        memoro.save_task(breeds, tmp_path / "breeds.safetensors"),
    )


def test_without_arguments_it_teaches() -> None:
    out = start().stdout
    for command in ("demo", "inspect", "compose", "verify", "import", "lab"):
        assert f"memoro {command}" in out
    assert memoro.__version__ in start("--version").stdout


def test_inspect(files: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    table = run(tmp_path, "inspect", files[0]).stdout
    assert "cat, dog" in table
    record = json.loads(run(tmp_path, "inspect", files[1], "--backbone", folder, "--json").stdout)
    assert record["tasks"][0]["parents"] == ["pets"]
    assert record["tasks"][0]["backbone"]["match"] == "same"
    (tmp_path / "tasks").mkdir()
    for file in files:
        file.rename(tmp_path / "tasks" / file.name)
    both = json.loads(run(tmp_path, "inspect", "tasks", "--json").stdout)
    assert [one["file"] for one in both] == ["tasks/breeds.safetensors", "tasks/pets.safetensors"]
    said = run(tmp_path, "inspect", "tasks/pets", code=1)
    assert said.stderr == "error: tasks/pets: no such file. Did you mean tasks/pets.safetensors?\n"


def test_compose_and_verify(files: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.safetensors"
    run(tmp_path, "compose", files[1], files[0], "-o", bundle)
    assert [task.name for task in memoro.load_tasks(bundle)] == ["breeds", "pets"]
    said = run(tmp_path, "compose", files[0], "-o", bundle).stderr
    assert "the old file is kept as" in said
    (tmp_path / "bundle.safetensors.1").replace(bundle)
    assert len(memoro.load_tasks(bundle)) == 2
    receipt = json.loads(run(tmp_path, "verify", "--backbone", folder, "--tasks", bundle, "--json").stdout)
    assert receipt["base_equal"] is True
    Image.new("RGB", (30, 40), (200, 10, 10)).save(tmp_path / "red.png")
    text = run(tmp_path, "verify", "-b", folder, "-t", files[0], "-t", files[1], tmp_path / "red.png").stdout
    assert "bitwise equal" in text
    assert "1 image" in text
    assert "1 images" not in text


def test_errors_are_one_line(files: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    assert "Add pets.safetensors" in start("compose", files[1], "-o", tmp_path / "x", code=1).stderr
    assert not (tmp_path / "x").exists()
    assert (
        "two tasks are called 'pets'"
        in run(tmp_path, "compose", files[0], files[0], "-o", tmp_path / "x", code=1).stderr
    )
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(files[0].read_bytes()[:500])
    assert "download it again" in run(tmp_path, "inspect", broken, code=1).stderr
    assert "[red]" not in run(tmp_path, "inspect", tmp_path / "[red]x", code=1).stdout
    run(tmp_path, "verify", "--backbone", tmp_path / "none", "--tasks", files[0], code=1)
    run(tmp_path, "no-such-command", code=2)


PROBE = """
import sys
from memoro.cli import main

def run(*command):
    before = set(sys.modules)
    sys.argv = ["memoro", *command]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    return set(sys.modules) - before

new = run("--help")
print(sorted(new & {"torch", "transformers", "numpy", "PIL"}), file=sys.stderr)
import torch
from transformers import ViTModel
new = run("predict", "photos", "-b", "vit", "-t", "pets.safetensors")
print(sorted({name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)), file=sys.stderr)
new |= run("eval", "photos", "--json", "-b", "vit", "-t", "pets.safetensors")
print(sorted(name for name in new if name.startswith("memoro.training")), file=sys.stderr)
"""


def test_commands_import_what_they_need(files: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    """What costs seconds at the start: predict adds little to torch and one ViT, and help needs neither."""
    for label, colour in (("cat", "red"), ("dog", "blue")):
        (tmp_path / "photos" / label).mkdir(parents=True)
        Image.new("RGB", (30, 40), colour).save(tmp_path / "photos" / label / "0.png")
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    help_page, predict, training = (ast.literal_eval(line) for line in done.stderr.splitlines() if line.startswith("["))
    assert help_page == []
    of_typer = {"annotated_types", "pydantic", "pydantic_core", "pygments", "rich", "typer", "typing_inspection"}
    assert set(predict) <= {"memoro", "PIL", *of_typer}
    assert training == []


def test_import(shared: Path, tmp_path: Path) -> None:
    fixtures = shared / "fixtures" / "reproduction"
    out = tmp_path / "two.safetensors"
    command = ("import", fixtures / "extension_model.pt", "--backbone", fixtures / "base", "-o", out, "--names")
    assert "extends a" in run(tmp_path, *command, "a,b").stdout
    assert [task.name for task in memoro.load_tasks(out)] == ["a", "b"]
    assert "the old file is kept as" in run(tmp_path, *command, "c,d").stderr
    assert [task.name for task in memoro.load_tasks(tmp_path / "two.safetensors.1")] == ["a", "b"]


@pytest.mark.parametrize("command", ["inspect", "compose", "verify", "import", "demo", "lab bench engine"])
def test_help(command: str, tmp_path: Path) -> None:
    out = run(tmp_path, *command.split(), "--help").stdout
    assert "Usage" in out
