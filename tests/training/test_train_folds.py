"""Folds in one pass: what is held out teaches nothing, and a sweep chooses by all of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_groups import LABELS, LOAD, grid, root, run_spec, same_result, sweep
from small_training import FRESH, QUICK, distance, double
from squares import save_squares

import memoro
from memoro.backbones import Backbone
from memoro.data import ImageSet, Splits, load_data
from memoro.data.splits import fold_numbers
from memoro.errors import TrainingError
from memoro.tasks.task import new_task
from memoro.training import Run, fit, train_runs
from memoro.training.loop import Trainer
from memoro.training.recipe import TrainOptions

__all__ = ["double", "root"]  # fixtures


@pytest.fixture(scope="module")
def pool(root: Path) -> Splits:
    return load_data(root / "many", val_fraction=0, **LOAD)


def fold_specs(backbone: Backbone, data: Splits, held: Sequence[Any], **given: Any) -> list[Run]:
    return [run_spec(backbone, "t", data, held_out=some, **given) for some in held]


def parts_of(data: Splits, folds: int = 2) -> list[Any]:
    assert data.train is not None
    number = fold_numbers(data.train, folds, 0)
    return [*(np.flatnonzero(number == fold) for fold in range(folds)), None]


def test_folds_come_out_as_if_alone(double: Backbone, pool: Splits) -> None:
    parts = parts_of(pool)
    [group] = Trainer(double, fold_specs(double, pool, parts), TrainOptions(workers=0)).groups
    assert len(group.val_sets) == 2
    results = train_runs(double, fold_specs(double, pool, parts), **FRESH)
    for part, result in zip(parts, results, strict=True):
        [alone] = train_runs(double, fold_specs(double, pool, [part]), **FRESH)
        same_result(result, alone)
        assert result.metrics["split"] == ("train" if part is None else "fold")
    assert min(distance(results[2].task, fold.task) for fold in results[:2]) > 1e-4
    # The last run is a plain training on all images.
    task = new_task(double, "t", LABELS, cells=2, seed=1)
    fit(double, task, pool, epochs=2, batch_size=5, lr=0.05, warmup=2, **QUICK)
    assert distance(task, results[2].task) < 1e-10


def test_a_sweep_over_folds(double: Backbone, pool: Splits) -> None:
    settings = grid((1,), (0,), (1e-6, 0.1))
    found = sweep(double, pool, settings, folds=4)
    assert (found.best.metrics["split"], found.best.metrics["images"]) == ("4 folds", 18)
    assert found.task.spec.metrics["split"] == "4 folds"
    assert len(found.results) == 2 * 5
    *folds, last = found.results[5:]
    assert found.task is last.task
    assert found.task.spec.training["lr"] == 0.1
    assert isinstance(pool.train, ImageSet)
    parts = parts_of(pool, 4)
    right = 0
    for part, fold in zip(parts[:4], folds, strict=True):
        pixels = [double.preprocessing.at(20).to_tensor(pool.train.open(int(at))) for at in part]
        said = memoro.compose(double, [fold.task])(torch.stack(pixels).double())["t"].argmax(-1)
        right += int((said == pool.train.targets[part]).sum())
    assert found.best.metrics["accuracy"] == pytest.approx(right / 18)
    assert found.rows[1].val == (found.best.metrics["accuracy"],)
    # A test split has the last word.
    tested = sweep(double, replace(pool, test=replace(pool.train, digests=None)), settings, folds=4)
    assert tested.best.metrics["split"] == "test"
    assert distance(tested.task, found.task) < 1e-10


def test_copies_stay_in_one_fold(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "many", tmp_path / "many")
    for path in sorted((tmp_path / "many").rglob("*.png"))[::2]:
        shutil.copy(path, path.with_stem(path.stem + "-copy"))
    train = load_data(tmp_path / "many", val_fraction=0, **LOAD).train
    assert train is not None
    number = fold_numbers(train, 4, 0)
    folds: dict[str, set[int]] = {}
    for at, fold in enumerate(number):
        folds.setdefault(train.key(at), set()).add(int(fold))
    assert (len(train), len(folds)) == (27, 18)
    assert all(len(found) == 1 for found in folds.values())
    assert {fold for found in folds.values() for fold in found} == {0, 1, 2, 3}


def test_what_is_held_out_does_not_count_for_balance(double: Backbone, tmp_path: Path) -> None:
    data = load_data(save_squares(tmp_path / "set", {"blue": 4, "green": 4, "red": 2}), val_fraction=0, **LOAD)
    assert data.train is not None
    last = len(data.labels) - 1
    held = np.flatnonzero(data.train.targets.numpy() == last)  # all there is of the last class
    [group] = Trainer(
        double, [run_spec(double, "t", data, held_out=held, balance=True)], TrainOptions(workers=0)
    ).groups
    assert group.runs[0].class_weights.tolist() == [1, 1, 0]
    [result] = train_runs(double, [run_spec(double, "t", data, held_out=held, balance=True)], **FRESH)
    assert result.metrics["images"] == len(held)


def test_a_fold_that_diverges_takes_its_combination_with_it(
    double: Backbone, pool: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = sweep(double, pool, grid((1,), (0,), (0.05, 0.1)), folds=3)
    with monkeypatch.context() as patch:
        real = Trainer.train

        def spoil(self: Trainer) -> float:
            self.runs[5].task.class_token.data[0] = float("nan")  # the second fold of the second rate
            return real(self)

        patch.setattr(Trainer, "train", spoil)
        found = sweep(double, pool, grid((1,), (0,), (0.05, 0.1)), folds=3)
    assert [row.diverged for row in found.rows] == [0, 1]
    assert [len(row.val) for row in found.rows] == [1, 0]
    assert found.task.spec.training["lr"] == 0.05
    assert found.rows[0] == replace(calm.rows[0], chosen=True)
    assert distance(found.results[3].task, calm.results[3].task) < 1e-10
    with pytest.raises(TrainingError, match="learning rate"):
        sweep(double, pool, grid((1,), (0,), (1e300, 1e301)), folds=3)


def test_fewer_images_than_make_up_the_folds(double: Backbone, tmp_path: Path) -> None:
    root = save_squares(tmp_path / "tiny", {"red": 2, "green": 1, "blue": 1})
    data = load_data(root, val_fraction=0, **LOAD)
    found = sweep(double, data, grid((0,), (5,), (0.1, 0.2)), folds=4, epochs=1)
    assert (found.best.metrics["split"], found.best.metrics["images"]) == ("2 folds", 2)


def test_a_rare_class_does_not_turn_folds_off(double: Backbone, tmp_path: Path) -> None:
    data = save_squares(tmp_path / "rare", {"red": 8, "green": 8, "blue": 3})
    result = memoro.train(data, backbone=double, lr=(0.001, 0.01), epochs=1, quiet=True, workers=0)
    assert (result.metrics["split"], result.metrics["images"]) == ("4 folds", 19)


def test_held_images_teach_nothing(double: Backbone, pool: Splits) -> None:
    [held, *_] = parts_of(pool)
    assert isinstance(pool.train, ImageSet)
    targets = pool.train.targets.clone()
    targets[held] = targets[held].roll(1)
    assert not torch.equal(targets, pool.train.targets)
    changed = replace(pool, train=replace(pool.train, targets=targets))
    [first] = train_runs(double, fold_specs(double, pool, [held]), **FRESH)
    [second] = train_runs(double, fold_specs(double, changed, [held]), **FRESH)
    assert distance(first.task, second.task) == 0
    assert [e["train_loss"] for e in first.history] == [e["train_loss"] for e in second.history]
    assert first.metrics["loss"] != second.metrics["loss"]
    seen = targets.clone()
    shown = np.setdiff1d(np.arange(len(seen)), held)[0]
    seen[shown] = (seen[shown] + 1) % 3
    other = replace(pool, train=replace(pool.train, targets=seen))
    [third] = train_runs(double, fold_specs(double, other, [held]), **FRESH)
    assert distance(first.task, third.task) > 1e-6
