"""Halved sweeps: the worse half stops, and no other run changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_groups import LOAD, root, run_spec, sets, sweep
from test_train_fit import FRESH, PLAIN, distance, double

import memoro
from memoro.backbones import Backbone
from memoro.data import load_data
from memoro.errors import TrainingError
from memoro.regimes import REGIMES, TaskPlan
from memoro.training import FitResult, Recipe, RunSpec
from memoro.training.loop import Trainer
from memoro.training.recipe import TrainOptions
from memoro.training.sweep import Grid, SweepSpec, run_sweeps

__all__ = ["double", "root"]  # fixtures


def test_halving_stops_the_worse_half_and_changes_no_other(double: Backbone, root: Path) -> None:
    data = load_data(root / "many", val_fraction=0.3, **LOAD)
    grid = Grid((0, 2), (0,), (1e-5, 0.01, 0.05, 0.2))
    full = sweep(double, data, grid, epochs=4, augment=PLAIN)
    found = sweep(double, data, grid, epochs=4, augment=PLAIN, halving=True)
    lengths = [len(result.history) for result in found.results]
    assert sorted(lengths) == [1, 1, 1, 1, 2, 2, 3, 4]
    told = [result.notes[-1] for result in found.results]
    for length, note, mine, wanted in zip(lengths, told, found.results, full.results, strict=True):
        assert (f"not among the better half after epoch {length}" in note) == (length < 4)
        assert [e["val_loss"] for e in mine.history] == pytest.approx([e["val_loss"] for e in wanted.history[:length]])
        if length == 4:
            assert distance(mine.task, wanted.task) < 1e-10
            assert found.task is mine.task
    # Who was stopped first had been worse than who went on.
    scores = [max((e["val_accuracy"], -e["val_loss"]) for e in result.history[:1]) for result in full.results]
    ranked = sorted(range(8), key=lambda at: scores[at], reverse=True)
    assert {at for at in range(8) if lengths[at] == 1} == set(ranked[4:])


@pytest.mark.parametrize(("epochs", "ends"), [(1, []), (4, [1, 2, 3]), (6, [2, 3, 5]), (15, [4, 8, 12])])
def test_halving_comes_with_every_quarter(double: Backbone, root: Path, epochs: int, ends: list[int]) -> None:
    data = sets(root)[0]
    specs = [run_spec(double, "t", data, cells=0, from_layer=5, epochs=epochs) for _ in range(16)]
    [group] = Trainer(double, specs, TrainOptions(workers=0, halving=True)).groups
    for at, run in enumerate(group.runs):
        run.best_score = (at / 16, 0.0)
    left = []
    for _ in range(epochs):
        group.halve()
        group.next_epoch()
        left.append(group.active)
    assert [at for at, runs in enumerate(left, start=1) if len(runs) < len([[*group.runs], *left][at - 1])] == ends
    assert left[-1] == list(group.runs)[-(16 >> len(ends)) :]


def test_halving_ranks_each_task_apart(double: Backbone, root: Path) -> None:
    many, few = (load_data(root / name, val_fraction=0.3, **LOAD) for name in ("many", "few"))
    recipe, size = Recipe(epochs=4, batch_size=5), double.preprocessing.at(20)
    grid, head = Grid((0,), (5,), (1e-5, 0.1), 2), REGIMES["head"]
    specs = [
        SweepSpec(TaskPlan(name, data.labels), head, data, size, grid, recipe)
        for name, data in (("a", many), ("b", few))
    ]
    found = run_sweeps(double, specs, **FRESH, halving=True)
    for result in found:
        assert sorted(len(one.history) for one in result.results) == [1, 1, 2, 4]
        assert len(result.best.history) == 4
    with pytest.raises(TrainingError, match="folds"):
        sweep(double, many, grid, folds=3, halving=True)


@pytest.mark.parametrize("halving", [False, True])
def test_what_was_stopped_early_is_not_chosen_for_its_mean(
    double: Backbone, root: Path, monkeypatch: pytest.MonkeyPatch, halving: bool
) -> None:
    scores = {(0.1, 0): 0.9, (0.1, 1): 0.5, (0.2, 0): 0.75, (0.2, 1): 0.76}

    def train_runs(backbone: Backbone, specs: Sequence[RunSpec], options: Any) -> list[FitResult]:
        found = [(one.task, scores[one.recipe.lr, one.recipe.seed]) for one in specs]
        metrics = {"split": "val", "loss": 1.0}
        return [FitResult(task, [{"val_accuracy": s, "val_loss": 1.0}], metrics, None, ()) for task, s in found]

    monkeypatch.setattr("memoro.training.sweep.train_runs", train_runs)
    found = sweep(double, sets(root)[0], Grid((0,), (5,), (0.1, 0.2), 2), halving=halving)
    assert found.best.history[0]["val_accuracy"] == (0.9 if halving else 0.76)


def test_halving_needs_epochs(double: Backbone, root: Path) -> None:
    with pytest.raises(TrainingError, match="give --epochs instead of --steps"):
        memoro.train(root / "many", backbone=double, halving=True, steps=20)
