"""What the tests of several runs in one pass share: small sets, specs on them, and when results are the same."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_training import FRESH, distance
from squares import save_square, save_squares

from memoro.backbones import Backbone
from memoro.data import Splits, load_data
from memoro.regimes import REGIMES, find_regime
from memoro.tasks.task import new_task
from memoro.training import Recipe, Run, TrainOptions, TrainResult
from memoro.training.finish import finish_plans
from memoro.training.plan import Plan, Setting, combine
from memoro.training.result import SettingRow
from memoro.training.train import run_all

LABELS = ("blue", "green", "red")
LOAD: dict[str, Any] = {"workers": 0, "quiet": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of different sizes, and a table whose images have a class, several labels and a number."""
    root = tmp_path_factory.mktemp("together")
    save_squares(root / "many", dict.fromkeys(LABELS, 6))
    save_squares(root / "few", {"red": 4, "grey": 4}, first=100)
    lines = ["path,x,y,labels,number"]
    for number in range(24):
        colour = ("red", "green", "blue", "grey")[number % 4]
        save_square(root / "table" / f"{number}.png", colour, 200 + number)
        lines.append(f"{number}.png,{colour},{'odd' if number % 2 else 'even'},{colour}|all,{number / 10}")
    (root / "table" / "table.csv").write_text("\n".join(lines) + "\n")
    return root


@functools.cache
def sets(root: Path) -> list[Splits]:
    table = root / "table" / "table.csv"
    return [
        *(load_data(root / name, val_fraction=0.25, **LOAD) for name in ("many", "few")),
        *(load_data(table, label_column=name, val_fraction=0.25, **LOAD) for name in ("labels", "number")),
    ]


def run_spec(
    backbone: Backbone, name: str, data: Splits, *, size: int = 20, held_out: Any = None, seed: int = 1, **given: Any
) -> Run:
    shape = {key: given.pop(key) for key in ("cells", "from_layer", "extends") if key in given}
    task = new_task(backbone, name, data.labels, head=data.kind, seed=seed, **{"cells": 2, **shape})
    recipe = Recipe(**{"epochs": 2, "batch_size": 5, "lr": 0.05, "warmup": 2, **given})
    regime = find_regime("head" if task.from_layer == backbone.depth else "memory")
    return Run(task, recipe, regime, data, backbone.preprocessing.at(size), held_out)


def same_result(left: TrainResult, right: TrainResult) -> None:
    assert distance(left.task, right.task) < 1e-10
    assert len(left.history) == len(right.history)
    for mine, wanted in zip(left.history, right.history, strict=True):
        for name in ("epoch", "step", "train_loss", "val_loss", "val_accuracy", "val_mean_absolute_error"):
            assert mine.get(name) == pytest.approx(wanted.get(name)), name
    for name, value in right.metrics.items():
        assert left.metrics[name] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value)


@dataclass(frozen=True)
class Swept:
    """A plan's result, and all its runs."""

    best: TrainResult
    results: list[Run]

    @property
    def task(self) -> Any:
        return self.best.task

    @property
    def rows(self) -> Sequence[SettingRow]:
        return self.best.rows


def grid(
    cells: tuple[int, ...] = (0,), layers: tuple[int, ...] = (0,), rates: tuple[float, ...] = (0.1,), seeds: int = 1
) -> tuple[Setting, ...]:
    return combine(rates, cells=cells, from_layer=layers, seeds=range(seeds))


def sweep(
    backbone: Backbone,
    data: Splits,
    settings: Sequence[Setting],
    *,
    folds: int = 0,
    log: Any = None,
    **given: Any,
) -> Swept:
    recipe = Recipe(**{"epochs": 2, "batch_size": 5, "warmup": 2, **given})
    plan = Plan("t", REGIMES["memory"], data, backbone.preprocessing.at(20), recipe, settings, folds)
    by_setting, options = plan.start_runs(backbone), TrainOptions(**FRESH, log=log)
    runs = [run for own in by_setting.values() for run in own]
    [best] = finish_plans([plan], [by_setting], run_all(backbone, runs, options), options)
    return Swept(best, runs)
