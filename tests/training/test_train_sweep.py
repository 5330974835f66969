"""Sweeps: every combination is a run of one pass, and the best by validation is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from run_groups import grid

import memoro
from memoro.backbones import Backbone
from memoro.data import Augment, Splits
from memoro.errors import TrainingError
from memoro.regimes import REGIMES
from memoro.training import Plan, Recipe, Setting, TrainResult, combine, train_plans
from memoro.training.plan import choose_rates, choose_sizes


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for number in range(40):
        values = generator.integers(0, 90, (24, 24, 3), dtype=np.uint8)
        values[..., number % 2] += 120
        path = tmp_path / "photos" / ("red", "green")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(path)
    return tmp_path / "photos"


def test_settings_are_every_combination() -> None:
    settings = combine((0.1, 0.3), cells=(0, 5), from_layer=(0, 3), seeds=range(2))
    assert len(settings) == len(set(settings)) == 16
    assert combine((0.1,), cells=(5, 5), from_layer=(0,)) == ((5, 0, None, 0.1, 0),)
    with pytest.raises(TrainingError, match="at least one value each for cells"):
        combine((0.1,), cells=())


@pytest.mark.parametrize(
    ("given", "rates"),
    [(np.logspace(-4, -2, 3), (0.0001, 0.001, 0.01)), (torch.tensor([0.5]), (0.5,)), ("0.1", (0.1,)), (1, (1.0,))],
    ids=str,
)
def test_arrays_and_single_values(backbone: Backbone, given: Any, rates: tuple[float, ...]) -> None:
    assert choose_rates(given, REGIMES["memory"], Recipe()) == rates
    asked: dict[str, Any] = {"cells": np.arange(2), "from_layer": np.int64(3), "rank": None}
    sizes = choose_sizes(asked, REGIMES["memory"], None, backbone)
    assert sizes == {"cells": (0, 1), "from_layer": (3,), "rank": (None,)}
    assert {type(value) for value in (*sizes["cells"], *sizes["from_layer"])} == {int}


def test_a_learning_rate_is_a_number(backbone: Backbone, photos: Path) -> None:
    with pytest.raises(TrainingError, match="lr 'fast': choose one or more numbers"):
        memoro.train(photos, backbone=backbone, lr="fast")


def sweep(backbone: Backbone, splits: Splits, settings: Sequence[Setting], recipe: Recipe) -> TrainResult:
    plan = Plan("colours", REGIMES["memory"], splits, backbone.preprocessing, recipe, settings)
    [result] = train_plans(backbone, [plan], workers=0, cache=False, quiet=True)
    return result


def test_the_best_by_validation_is_chosen(backbone: Backbone, photos: Path) -> None:
    splits = memoro.load_data(photos, val_fraction=0.3, quiet=True)
    recipe = Recipe(epochs=3, batch_size=8, augment=Augment(crop="none"))
    result = sweep(backbone, splits, grid((0, 2), (0, 3), (1e-6, 0.1), 2), recipe)
    assert len(result.rows) == 8
    assert all(len(row.val) == 2 and row.diverged == 0 for row in result.rows)
    best = max(result.rows, key=lambda row: row.order)
    assert best.lr == 0.1, "a rate of nearly nothing cannot win"
    assert (result.task.cells, result.task.from_layer) == (best.cells, best.from_layer)
    assert result.task.spec.training["lr"] == 0.1
    # The chosen task is what the same run gives alone.
    seed = result.task.spec.training["seed"]
    alone = sweep(backbone, splits, grid((best.cells,), (best.from_layer,), (0.1,), seed + 2), recipe)
    [twin] = alone.rows
    assert twin.val[seed] == pytest.approx(best.val[seed])


def test_a_sweep_needs_something_to_choose_by(backbone: Backbone, photos: Path) -> None:
    splits = memoro.load_data(photos, val_fraction=0, quiet=True)
    with pytest.raises(TrainingError, match="no validation images"):
        sweep(backbone, splits, grid(rates=(0.03, 0.1)), Recipe())


def test_sweep_from_the_shell(vit: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from memoro.cli import app

    vit.save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    arguments = [
        "train",
        str(photos),
        "-b",
        str(tmp_path / "vit"),
        "--cells",
        "0,1",
        "--lr",
        "0.03,0.1",
        "--seeds",
        "2",
    ]
    done = CliRunner().invoke(
        app, [*arguments, "--epochs", "2", "--set", "batch_size=8", "--set", "workers=0", "--json"]
    )
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert len(record["runs"]) == 4
    task = memoro.load_task(record["file"])
    assert task.name == "photos"
    with torch.no_grad():
        answers = memoro.compose(memoro.load_backbone(tmp_path / "vit"), [task]).predict(photos / "red" / "0.png")
    assert set(answers[0]["photos"]["probabilities"]) == {"red", "green"}


def test_a_setting_that_diverged_prints_valid_json(
    vit: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from memoro.cli import app

    vit.save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    arguments = ["train", str(photos), "-b", str(tmp_path / "vit"), "--cells", "1", "--lr", "0.03,1e38", "--seeds", "1"]
    done = CliRunner().invoke(
        app, [*arguments, "--epochs", "2", "--set", "batch_size=8", "--set", "workers=0", "--json"]
    )
    assert done.exit_code == 0, done.output
    runs = json.loads(done.stdout, parse_constant=pytest.fail)["runs"]
    assert [(run["diverged"], run["val_loss"] is None) for run in runs] == [(0, False), (1, True)]
