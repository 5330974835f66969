"""What a training says where classes have few images, or very different numbers of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import random_task
from families import CASES
from squares import save_square, save_squares
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone
from memoro.cli import app

Shell = Callable[..., Any]
QUICK = ("-b", "vit", "--image-size", 20, "--set", "batch_size=8", "--set", "workers=0", "--epochs", 1)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    CASES[0].model().save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Any:
        done = CliRunner().invoke(app, [str(one) for one in arguments])
        assert done.exit_code == 0, (done.output, done.exception)
        return done

    return run


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_score_on_the_training_images_is_no_result(shell: Shell) -> None:
    rows = ["path,sku"]
    for number in range(9):
        save_square(Path("shop") / f"{number}.png", "red", number)
        rows.append(f"{number}.png,item {number}")
    (Path("shop") / "products.csv").write_text("\n".join(rows) + "\n")
    done = shell("train", "shop/products.csv", "--label-column", "sku", *QUICK)
    assert "accuracy" not in done.stdout
    assert "loss" not in done.stdout
    assert "warning: sku: all 9 images were trained on, so there is no estimate of its accuracy" in flat(done.stderr)
    assert "9 of 9 classes have a single image in train" in flat(done.stderr)
    assert "Aim for 10 or more of each" in flat(done.stderr)
    assert memoro.load_task("sku.safetensors").spec.metrics == {"split": "train", "images": 9}
    report = (Path("runs") / "sku" / "report.html").read_text()
    assert "there is no estimate of its accuracy" in report
    record = json.loads(shell("train", "shop/products.csv", "--label-column", "sku", *QUICK, "--json").stdout)
    assert record["metrics"] == {"split": "train", "images": 9}
    assert "accuracy" not in shell("inspect", "sku.safetensors").stdout


def test_classes_of_two_or_three_images_are_named(shell: Shell) -> None:
    save_squares(Path("set"), {"red": 12, "green": 3, "blue": 2})
    told = flat(shell("train", "set", *QUICK).stderr)
    assert "2 of 3 classes have two or three images in train: blue, green. Aim for 10 or more of each." in told


def test_uneven_classes_are_judged_by_balanced_accuracy(shell: Shell) -> None:
    save_squares(Path("set") / "train", {"red": 40, "blue": 2})
    save_squares(Path("set") / "test", {"red": 20, "blue": 2}, first=100)
    for also, hint in (
        ((), True),
        (
            (
                "--set",
                "balance=true",
            ),
            False,
        ),
    ):
        done = shell("train", "set", *QUICK, "--lr", 0.05, *also)
        assert done.stdout.index("balanced accuracy") < done.stdout.replace("balanced accuracy", "").index("accuracy")
        assert ("--set balance=true gives rare classes more weight" in flat(done.stderr)) is hint
    assert memoro.load_task("set.safetensors").spec.training["balance"] is True
    done = shell("eval", "set", "-b", "vit", "-t", "set.safetensors", "--set", "workers=0")
    header = next(line for line in done.stdout.splitlines() if "accuracy" in line)
    assert "balanced" in header.partition("accuracy")[0]


def test_even_classes_are_judged_by_accuracy(backbone: Backbone, tmp_path: Path) -> None:
    told: list[str] = []
    data = save_squares(tmp_path / "set", {"red": 9, "blue": 4})
    task = random_task(backbone, "t", labels=["blue", "red"])
    found = memoro.evaluate(backbone, task, data, workers=0, log=told.append)["t"]
    assert found["imbalance"] == 9 / 4
    assert not any("balance" in text for text in told)
