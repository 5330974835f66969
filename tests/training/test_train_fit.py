"""`fit`: it learns, nothing but the task moves, and neither company nor workers nor batches change the result."""

from __future__ import annotations

import math
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_task
from small_training import FRESH, LABELS, PLAIN, QUICK, distance, double, same, squares, state
from squares import save_square, save_squares
from torch import Tensor

import memoro
from memoro import errors
from memoro.backbones import Backbone
from memoro.data import Augment, Splits, load_data
from memoro.errors import CompositionError, DataError, MemoroError, TrainingError
from memoro.regimes import REGIMES, TaskPlan, find_regime
from memoro.tasks.task import Task, new_task
from memoro.training import Recipe, Run, Trainer, TrainResult, fit, train_runs
from memoro.training.recipe import find_recipe
from memoro.training.run import build_forward

__all__ = ["double", "squares"]  # fixtures

# ------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize(("cells", "from_layer"), [(0, 0), (3, 0), (2, 3), (2, 5)])
def test_memory_overfits_a_tiny_set(backbone: Backbone, vit: Any, squares: Path, cells: int, from_layer: int) -> None:
    pixels = torch.randn(2, 3, 20, 20)
    weights, modes = state(vit), [module.training for module in vit.modules()]
    before = memoro.compose(backbone)(pixels)["base"]
    flags = [parameter.requires_grad for parameter in vit.parameters()]
    task = new_task(backbone, "squares", LABELS, cells=cells, from_layer=from_layer, seed=1)
    start = state(task)
    options = {"regime": "memory", "augment": PLAIN, "val_fraction": 0, **QUICK}
    result = fit(backbone, task, squares, epochs=12, batch_size=7, lr=0.05, **options)
    assert result.metrics["split"] == "train"
    assert result.metrics["accuracy"] == 1.0
    assert result.task is task
    moved = {name for name, value in state(task).items() if not torch.equal(value, start[name])}
    assert moved == {name for name, value in start.items() if value.numel()}
    assert task.spec.training["trained_parameters"] == 24 + (5 - from_layer) * cells * 24 + 3 * 24 + 3
    assert task.spec.training["steps"] == 12 * 4
    assert same(weights, state(vit))
    assert [module.training for module in vit.modules()] == modes
    assert [parameter.requires_grad for parameter in vit.parameters()] == flags
    assert all(parameter.grad is None for parameter in vit.parameters())
    answers = memoro.compose(backbone, [task])(pixels)
    assert torch.equal(answers["base"], before)
    assert answers["squares"].shape != before.shape


def test_head_overfits_where_a_line_separates(backbone: Backbone, squares: Path) -> None:
    task = new_task(backbone, "squares", LABELS, cells=0, from_layer=backbone.depth, seed=1)
    result = fit(backbone, task, squares, epochs=15, lr=0.3, augment=PLAIN, val_fraction=0, **QUICK)
    assert result.metrics["accuracy"] == 1.0
    assert task.spec.training["regime"] == "head"
    assert task.spec.training["trained_parameters"] == 3 * 24 + 3
    assert not task.class_token.any()  # it stays on the base's own token


@pytest.mark.parametrize("name", [name for name, regime in REGIMES.items() if regime.composes and regime.readout < 1])
def test_only_what_a_regime_trains_gets_a_gradient(
    name: str, backbone: Backbone, vit: Any, pixels: Tensor, squares: Path
) -> None:
    parent = random_task(backbone, "parent", cells=2)
    task = find_regime(name).build(backbone, TaskPlan("t", LABELS, cells=2, extends=[parent]))
    for key, tensor in task.lora.items():  # A has no gradient while B is zero
        if key.endswith("_B"):
            torch.nn.init.normal_(tensor)
    data = load_data(squares, workers=0, quiet=True)
    trainer = Trainer(backbone, [Run(task, Recipe(), find_regime(name), data, backbone.preprocessing)])
    [run] = trainer.runs
    [logits] = build_forward(backbone, [task])(pixels)
    logits.square().sum().backward()
    assert run.trained
    for key, parameter in task.named_parameters():
        assert (parameter.grad is not None) == (key in run.trained), key
        assert parameter.grad is None or parameter.grad.any()
    assert all(parameter.grad is None for parameter in [*vit.parameters(), *parent.parameters()])
    assert all(parameter.requires_grad for parameter in parent.parameters())  # its flags are its own


def test_half_precision_learns_beside_full_precision(backbone: Backbone, squares: Path) -> None:
    tasks = [new_task(backbone, "t", LABELS, cells=2, seed=1) for _ in range(2)]
    options = {"epochs": 8, "batch_size": 8, "lr": 0.05, "augment": PLAIN, "val_fraction": 0, **QUICK}
    full = fit(backbone, tasks[0], squares, **options)
    mixed = fit(backbone, tasks[1], squares, precision="bfloat16", **options)
    assert full.metrics["accuracy"] == mixed.metrics["accuracy"] == 1.0
    assert distance(*tasks) > 0


# ------------------------------------------------------------------------------------------------------- runs


VARIANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"cells": 3}, {"lr": 0.05}),
    ({"cells": 0, "from_layer": 2}, {"lr": 0.2, "clip": 0.0, "label_smoothing": 0.1}),
    ({"cells": 2, "from_layer": 4}, {"lr": 0.003, "optimizer": "adamw", "weight_decay": 0.1}),
    ({"cells": 0, "from_layer": 5}, {"lr": 0.3}),
    ({"cells": 1, "rank": 2, "from_layer": 3}, {"lr": 0.01, "optimizer": "adamw"}),
    ({"cells": 0, "rank": 3, "from_layer": 1}, {"lr": 0.01, "optimizer": "adamw"}),
]


def train_many(
    backbone: Backbone, splits: Splits, numbers: list[int], *, bad: int | None = None, weight: float = 0.0
) -> list[TrainResult]:
    """Some of the variants in one pass; a bad one has a huge rate, or a weight without bounds."""
    base = Recipe(epochs=3, batch_size=9, augment=Augment(), warmup=2)
    specs = []
    for number in numbers:
        shape, changes = VARIANTS[number]
        task = new_task(backbone, f"run {number}", LABELS, seed=number, **shape)
        if number == bad:
            changes = {} if weight else {"lr": 1e300}
            task.class_token.data[0] += weight
        regime = find_regime("head" if task.from_layer == backbone.depth else "memory")
        recipe = replace(base, seed=number, **changes)
        specs.append(Run(task, recipe, regime, splits, backbone.preprocessing.at(20)))
    return train_runs(backbone, specs, **FRESH)


def test_runs_together_equal_each_alone(double: Backbone, squares: Path) -> None:
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True)
    together = train_many(double, splits, [0, 1, 2, 3])
    for number, result in enumerate(together):
        [alone] = train_many(double, splits, [number])
        assert distance(result.task, alone.task) < 1e-10  # other shapes of the same products
        assert result.metrics["loss"] == pytest.approx(alone.metrics["loss"])
        assert [e["val_loss"] for e in result.history] == pytest.approx([e["val_loss"] for e in alone.history])
        assert [e["train_loss"] for e in result.history] == pytest.approx([e["train_loss"] for e in alone.history])
        start = new_task(double, "start", LABELS, seed=number, **VARIANTS[number][0])
        assert distance(result.task, start) > 1e-3
    assert len({float(result.task.head.weight.sum()) for result in together}) == 4


@pytest.mark.parametrize("weight", [0.0, math.inf, math.nan])
def test_a_run_that_diverges_leaves_its_neighbours_alone(double: Backbone, squares: Path, weight: float) -> None:
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True)
    results = train_many(double, splits, [0, 1, 2], bad=1, weight=weight)
    for number in (0, 2):
        [alone] = train_many(double, splits, [number])
        assert distance(results[number].task, alone.task) < 1e-10
        assert results[number].metrics["accuracy"] == alone.metrics["accuracy"]
        assert not any("learning rate" in note for note in results[number].notes)
    assert results[1].metrics == {}
    assert f"choose a learning rate below {0.1 if weight else 1e300:g}" in results[1].notes[-1]


def test_a_clock_that_does_not_tick_stops_no_training(
    double: Backbone, squares: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memoro.training.run.time", SimpleNamespace(monotonic=lambda: 1.0, perf_counter=lambda: 1.0))
    [result] = train_many(double, load_data(squares, labels=LABELS, workers=0, quiet=True), [0])
    assert result.metrics


def test_a_pass_has_no_ancestor_of_its_tasks(double: Backbone, squares: Path) -> None:
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True)
    tasks = [new_task(double, name, LABELS) for name in "ab"]
    child = new_task(double, "child", LABELS, extends=[tasks[0]])

    def run_spec(task: Task, **changes: Any) -> Run:
        return Run(task, Recipe(**changes), find_regime("memory"), splits, double.preprocessing)

    with pytest.raises(TrainingError, match="'child' extends 'a': train 'a' first"):
        train_runs(double, [run_spec(tasks[0]), run_spec(child)])


def test_accumulated_halves_equal_one_batch(double: Backbone, squares: Path) -> None:
    tasks = [new_task(double, "t", LABELS, cells=2, seed=1) for _ in range(3)]
    options = {"epochs": 3, "lr": 0.05, "val_fraction": 0, **QUICK}
    whole = fit(double, tasks[0], squares, batch_size=10, **options)
    halves = fit(double, tasks[1], squares, batch_size=5, accumulate=2, **options)
    fit(double, tasks[2], squares, batch_size=5, **options)
    assert distance(tasks[0], tasks[1]) < 1e-10
    assert distance(tasks[0], tasks[2]) > 1e-4
    assert tasks[0].spec.training["steps"] == tasks[1].spec.training["steps"] == 9
    for left, right in zip(whole.history, halves.history, strict=True):
        assert left["train_loss"] == pytest.approx(right["train_loss"], abs=1e-10)


def test_workers_do_not_change_the_result(backbone: Backbone, squares: Path) -> None:
    tasks = [new_task(backbone, "t", LABELS, cells=2, seed=1) for _ in range(3)]
    for task, workers, seed in zip(tasks, (0, 2, 0), (0, 0, 1), strict=True):
        options = {**QUICK, "workers": workers}
        fit(backbone, task, squares, epochs=2, batch_size=5, lr=0.05, data_seed=seed, **options)
    assert same(state(tasks[0]), state(tasks[1]))
    assert not same(state(tasks[0]), state(tasks[2]))


# ------------------------------------------------------------------------------------------------------- choices


def test_the_best_epoch_is_kept_and_patience_ends_it(backbone: Backbone, squares: Path) -> None:
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True, val_fraction=0.3)
    task = new_task(backbone, "t", LABELS, cells=2, seed=1)
    # So hot that it does not stay where it was best.
    hot = {"lr": 3.0, "clip": 0.0, "memory_rate": 1.0}
    result = fit(backbone, task, splits, epochs=40, patience=3, augment=PLAIN, **hot, **QUICK)
    scores = [(entry["val_accuracy"], -entry["val_loss"]) for entry in result.history]
    best = scores.index(max(scores)) + 1
    assert task.spec.training["best_epoch"] == best == len(scores) - 3 < 37
    assert result.metrics["split"] == "val"
    assert (result.metrics["accuracy"], -result.metrics["loss"]) == pytest.approx(max(scores), abs=1e-6)
    assert scores[-1] < max(scores)
    assert result.notes[-1] == "no better validation score for 3 epochs"


def test_a_validation_split_is_made_where_there_is_none(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    task = new_task(backbone, "t", LABELS, cells=1, seed=1)
    made = fit(backbone, task, squares, epochs=1, **QUICK)
    assert (made.metrics["split"], made.metrics["images"]) == ("val", 4)
    assert any("15% of train" in note for note in made.notes)
    for role, count in (("train", 4), ("val", 1), ("test", 2)):
        save_squares(tmp_path / "own" / role, dict.fromkeys(LABELS, count), first=100 * count)
    own = fit(backbone, task, tmp_path / "own", epochs=1, **QUICK)
    assert (own.metrics["split"], own.metrics["images"]) == ("test", 6)
    assert task.spec.training["images"] == 12


def test_balance_lifts_the_rare_class(backbone: Backbone, tmp_path: Path) -> None:
    for number in range(24):  # they cannot be told apart, only counted
        save_square(tmp_path / "set" / ("rare" if number < 4 else "common") / f"{number}.png", "red", number)
    share = {}
    for balance in (False, True):
        task = new_task(backbone, "t", ["common", "rare"], cells=0, from_layer=5, seed=1)
        options = {"epochs": 30, "lr": 0.05, "momentum": 0.0, "augment": PLAIN, "val_fraction": 0, **QUICK}
        fit(backbone, task, tmp_path / "set", batch_size=24, balance=balance, **options)
        said = memoro.compose(backbone, [task]).predict(tmp_path.rglob("*.png"))
        share[balance] = sum(answer["t"]["probabilities"]["rare"] for answer in said) / 24
    assert share[False] == pytest.approx(4 / 24, abs=0.1)
    assert share[True] == pytest.approx(1 / 2, abs=0.1)


def test_recipes_have_names_and_one_task_is_evaluated(backbone: Backbone, squares: Path) -> None:
    found = {}
    for name, recipe in {"paper": "paper", "default": "default", "given": find_recipe("default", "memory")[1]}.items():
        task = new_task(backbone, "squares", LABELS, cells=1, seed=1)
        fit(backbone, task, squares, recipe=recipe, epochs=1, **QUICK)
        found[name] = task
    assert found["default"].content_hash() == found["given"].content_hash() != found["paper"].content_hash()
    assert list(memoro.evaluate(backbone, found["paper"], squares, workers=0)) == ["squares"]
    with pytest.raises(CompositionError, match=r"'squares\.safetensors' is not a task"):
        memoro.evaluate(backbone, "squares.safetensors", squares, workers=0)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="unknown recipe 'papers': choose one of default, paper"):
        fit(backbone, task, squares, recipe="papers")


def test_steps_instead_of_epochs(backbone: Backbone, squares: Path) -> None:
    task = new_task(backbone, "t", LABELS, cells=0, from_layer=5)
    result = fit(backbone, task, squares, steps=7, batch_size=8, accumulate=2, val_fraction=0, **QUICK)
    assert [entry["step"] for entry in result.history] == [2, 4, 6, 7]  # three batches an epoch, in two steps
    assert task.spec.training["steps"] == 7


# ------------------------------------------------------------------------------------------------------- data


def test_folder_zip_and_splits_are_the_same_training(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "squares.zip", "w") as archive:
        for path in sorted(squares.rglob("*.png")):
            archive.write(path, path.relative_to(squares))
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True)
    tasks = []
    for data in (squares, str(squares), tmp_path / "squares.zip", splits):
        tasks.append(new_task(backbone, "t", LABELS, cells=1, seed=1))
        fit(backbone, tasks[-1], data, epochs=2, batch_size=8, **QUICK)
    assert len({task.content_hash() for task in tasks}) == 1


def write_table(root: Path, header: str, rows: list[str]) -> Path:
    colours = [*["red"] * 5, *["green"] * 5, *["blue"] * 5, *["grey"] * 5]
    for number, colour in enumerate(colours):
        save_square(root / f"{number}.png", colour, number)
    lines = [f"{number}.png,{rows[number // 5]}" for number in range(20)]
    (root / "set.csv").write_text("\n".join([header, *lines]) + "\n")
    return root / "set.csv"


TABLES = {
    "softmax": ("path,label", ["warm", "cold", "cold", "dull"], ["cold", "dull", "warm"], "accuracy", 1.0),
    "multilabel": ("path,labels", ["r", "g|dark", "b|dark", "r|g|b"], ["b", "dark", "g", "r"], "exact_match", 1.0),
    "regression": ("path,number", ["1.0", "2.0", "-1.0", "0.5"], ["number"], "r2", 0.95),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_every_kind(kind: Any, backbone: Backbone, tmp_path: Path) -> None:
    header, rows, labels, figure, bar = TABLES[kind]
    path = write_table(tmp_path, header, rows)
    task = new_task(backbone, "t", labels, cells=2, head=kind, seed=1)
    options = {"epochs": 16, "lr": 0.03, "optimizer": "adamw", "augment": PLAIN, "val_fraction": 0, **QUICK}
    result = fit(backbone, task, path, batch_size=10, folder=tmp_path / "run", **options)
    assert result.metrics[figure] >= bar
    assert (tmp_path / "run" / "report.html").is_file()
    saved = memoro.load_task(memoro.save_task(task, tmp_path / "t.safetensors"))
    again = memoro.evaluate(backbone, [saved], path, workers=0)["t"]
    assert again[figure] == pytest.approx(result.metrics[figure], abs=1e-5)


def test_labels_and_kinds_must_match(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    task = new_task(backbone, "t", ["red", "green"])
    with pytest.raises(DataError, match=r"labels that the task does not have.*blue"):
        fit(backbone, task, squares, **QUICK)
    splits = load_data(squares, workers=0, quiet=True)
    swapped = new_task(backbone, "t", LABELS)  # the same classes, numbered otherwise
    for call in (
        lambda: fit(backbone, swapped, splits, **QUICK),
        lambda: memoro.evaluate(backbone, [swapped], splits, workers=0),
    ):
        with pytest.raises(TrainingError, match=r"other labels than 't': load it with labels=task.labels"):
            call()
    numbers = write_table(tmp_path, "path,number", ["1", "2", "3", "4"])
    with pytest.raises(TrainingError, match="'t' has a softmax head, but set is a regression set"):
        fit(backbone, task, load_data(numbers, workers=0, quiet=True), **QUICK)
    with pytest.raises(TrainingError, match="no training images"):
        fit(backbone, swapped, replace(splits, train=None), **QUICK)
    with pytest.raises(TrainingError, match=r"unknown regime 'magic'; choose one of head, readout, memory"):
        fit(backbone, swapped, squares, regime="magic", **QUICK)


# ------------------------------------------------------------------------------------------------------- families


def test_a_child_learns_over_a_parent_that_does_not_move(double: Backbone, squares: Path, tmp_path: Path) -> None:
    old = random_task(double, "old", seed=4, cells=1, labels=["x", "y"])
    parent = random_task(double, "parent", seed=5, cells=2, from_layer=1, extends=[old])
    stranger = random_task(double, "stranger", seed=6, cells=3)
    before = [state(old), state(parent)]
    child = new_task(double, "child", LABELS, cells=2, seed=1, extends=[parent])
    orphan = new_task(double, "orphan", LABELS, cells=2, seed=1)
    results = [fit(double, task, squares, epochs=3, batch_size=8, lr=0.05, **QUICK) for task in (child, orphan)]
    assert same(before[0], state(old))
    assert same(before[1], state(parent))
    assert all(parameter.grad is None for task in (old, parent) for parameter in task.parameters())
    assert distance(child, orphan) > 1e-3  # it does read its parents
    assert results[0].metrics["loss"] != results[1].metrics["loss"]

    for task in (old, parent, stranger, child, orphan):
        memoro.save_task(task, tmp_path / f"{task.name}.safetensors")
    names = ["stranger", "child", "old", "orphan", "parent"]
    loaded = [memoro.load_task(tmp_path / f"{name}.safetensors") for name in names]
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True)
    pixels = torch.stack([double.preprocessing.at(20).to_tensor(splits.val.open(i)) for i in range(4)]).double()  # type: ignore[union-attr]
    composed = memoro.compose(double, loaded)(pixels)
    live = build_forward(double, [child, orphan])(pixels)
    for name, logits in zip(("child", "orphan"), live, strict=True):
        assert float((composed[name] - logits).detach().abs().max()) < 1e-10
    assert float((composed["child"] - composed["orphan"]).abs().max()) > 1e-3
    figures = memoro.evaluate(double, loaded, {"child": replace(splits, test=None)}, workers=0)
    assert figures["child"]["loss"] == pytest.approx(results[0].metrics["loss"], abs=1e-6)

    with pytest.raises(
        TrainingError, match=r"'child' was loaded from a file without its parent 'parent'.*create it again"
    ):
        fit(double, loaded[1], squares, epochs=1, **QUICK)


def test_saved_loaded_and_composed_it_says_the_same(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    first = new_task(backbone, "first", LABELS, cells=2, seed=1)
    second = new_task(backbone, "second", LABELS, cells=1, from_layer=3, seed=2)
    for task in (first, second):
        fit(backbone, task, squares, epochs=4, batch_size=8, lr=0.05, **QUICK)
    bundle = memoro.save_tasks([random_task(backbone, "noise"), second, first], tmp_path / "all.safetensors")
    files = sorted(squares.rglob("*.png"))[::3]
    alone = memoro.compose(backbone, [first]).predict(files)
    both = memoro.compose(backbone, memoro.load_tasks(bundle)).predict(files)
    for one, many in zip(alone, both, strict=True):
        assert one["first"]["label"] == many["first"]["label"]
        # float32, and the stream has other shapes in company
        assert one["first"]["probability"] == pytest.approx(many["first"]["probability"], abs=1e-5)
        assert one["first"]["probability"] != pytest.approx(many["second"]["probability"], abs=1e-5)


def test_metrics_go_to_a_tracker(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    task = new_task(backbone, "squares", LABELS, cells=0, from_layer=5)
    fit(backbone, task, squares, epochs=1, lr=0.1, folder=tmp_path, track="tensorboard", **QUICK)
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_missing_extra_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    errors.need("torch")
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(MemoroError, match=r"pip install 'memoro\[train\]'"):
        errors.need("accelerate")
