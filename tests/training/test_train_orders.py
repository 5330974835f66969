"""What `memoro train` and `sweep` make of orders that are small, odd or partly impossible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_groups import LOAD, root, run_spec
from small_training import FRESH
from squares import save_square, save_squares
from test_train_together_cli import shell, told

from memoro.backbones import Backbone, load_backbone
from memoro.data import load_data
from memoro.errors import BackboneError, TrainingError
from memoro.training import train_runs
from memoro.training.result import SettingRow

__all__ = ["root", "shell"]  # fixtures

QUICK = ("--epochs", 1, "--set", "cache=false")


def table(folder: Path, numbers: list[float]) -> Path:
    for at in range(len(numbers)):
        save_square(folder / f"{at}.png", "red" if at % 2 else "blue", at)
    rows = [f"{at}.png,{number}" for at, number in enumerate(numbers)]
    (folder / "table.csv").write_text("\n".join(["path,number", *rows]) + "\n")
    return folder / "table.csv"


@pytest.mark.parametrize("rates", [("--lr", 0.1), ()])
def test_a_task_that_fails_takes_no_other_with_it(
    shell: Callable[..., Any], root: Path, tmp_path: Path, rates: tuple[Any, ...]
) -> None:
    huge = table(tmp_path / "huge", [number * 1e25 for number in range(12)])
    done = shell("train", f"huge={huge}", f"ok={root / 'many'}", *rates, *QUICK, "--out", "tasks/", code=1)
    assert "huge: no file was written" in done.stdout.replace("\n", " ")
    assert [file.name for file in Path("tasks").iterdir()] == ["ok.safetensors"]


def test_a_set_too_small_for_folds_or_for_a_choice(shell: Callable[..., Any], tmp_path: Path) -> None:
    small = save_squares(tmp_path / "small", {"blue": 1, "green": 1, "red": 1})
    memory = shell("train", small, *QUICK, "--regime", "memory")
    assert "no validation images to choose a learning rate with: using 0.1" in told(memory)
    assert "to choose a learning rate with" not in told(shell("train", small, *QUICK)), "side has a single rate"
    tried = told(shell("train", small, *QUICK, "--rank", "4,16", "--seeds", 2, code=1))
    assert "every class has a single image: give one --lr, one seed and one of each size, or add images." in tried
    assert "folds need at least two images of a class" in told(
        shell("train", small, *QUICK, "--set", "folds=3", code=1)
    )


def test_small_columns_get_folds_like_small_folders(shell: Callable[..., Any], root: Path) -> None:
    both = ("--label-column", "x", "--label-column", "y")
    record = shell("train", root / "table" / "table.csv", *both, *QUICK, "--out", "tasks", "--json")
    assert [entry["metrics"]["split"] for entry in record["tasks"]] == ["4 folds", "4 folds"]


def test_what_does_nothing_is_told(shell: Callable[..., Any], root: Path) -> None:
    many = root / "many"
    assert "--set folds=3 is not used, because there is only one setting" in told(
        shell("train", many, *QUICK, "--set", "folds=3", "--regime", "side")
    )
    assert "the task is measured by 3-fold cross-validation" in told(shell("train", many, *QUICK, "--set", "folds=3"))
    assert "--set patience is not used" in told(shell("train", many, *QUICK, "--set", "patience=1"))


def test_rates_follow_the_optimiser_and_heads_are_tried_once(shell: Callable[..., Any], root: Path) -> None:
    record = shell("train", root / "many", *QUICK, "--set", "optimizer=adamw", "--regime", "head", "--json")
    assert [(run["cells"], run["from_layer"], run["lr"]) for run in record["runs"]] == [
        (0, 5, rate) for rate in (0.003, 0.01, 0.03)
    ]


def test_where_the_file_goes(shell: Callable[..., Any], root: Path) -> None:
    one, quick = root / "many", (*QUICK, "--lr", 0.1, "--json")
    Path("there").mkdir()
    assert shell("train", one, *quick, "--out", "there")["file"] == "there/many.safetensors"
    assert shell("train", one, *quick, "--out", "new/")["file"] == "new/many.safetensors"
    assert shell("train", one, *quick, "--out", "a/b.safetensors")["file"] == "a/b.safetensors"
    several = (f"a={one}", f"b={root / 'few'}", *quick[:-1])
    Path("file").write_text("")
    for wrong in ("file", "c.safetensors"):
        assert "several tasks need a folder" in told(shell("train", *several, "--out", wrong, code=1))


def test_one_task_cannot_learn_twice_at_once(backbone: Backbone, root: Path) -> None:
    data = load_data(root / "many", val_fraction=0, **LOAD)
    twice = run_spec(backbone, "t", data)
    with pytest.raises(TrainingError, match="'t' was passed twice"):
        train_runs(backbone, [twice, twice], **FRESH)


def test_a_model_that_was_changed_after_loading(vit: Any, root: Path) -> None:
    backbone, data = load_backbone(vit), load_data(root / "many", val_fraction=0, **LOAD)
    given = run_spec(backbone, "t", data, epochs=1)
    train_runs(backbone, [given], **FRESH)
    with torch.no_grad():
        vit.vit.layers[0].mlp.fc1.weight.mul_(1.5)
    with pytest.raises(BackboneError, match="changed since it was loaded"):
        train_runs(backbone, [given], **FRESH)
    again = load_backbone(vit)
    assert train_runs(again, [run_spec(again, "t", data, epochs=1)], **FRESH)[0].metrics


def test_what_went_beyond_all_bounds_is_never_the_best() -> None:
    lost = SettingRow(0, 0, 0, 0.1, val=(), val_loss=float("inf"), test=(), diverged=1)
    blank = SettingRow(
        0, 0, 0, 0.2, val=(float("-inf"),), val_loss=0.5, test=(), diverged=0
    )  # a figure nobody can take
    assert max([lost, blank], key=lambda row: row.order) is blank


def test_a_set_with_few_classes_is_chosen_on_folds(shell: Callable[..., Any], tmp_path: Path) -> None:
    folder = save_squares(tmp_path / "two", {"red": 5, "blue": 5})
    assert shell("train", folder, *QUICK, "--json")["metrics"]["split"] == "4 folds"
