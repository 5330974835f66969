"""`memoro.train`: what the command does, from Python."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from conftest import random_task
from families import CASES
from run_groups import root
from small_training import FRESH
from squares import save_squares
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone
from memoro.cli import app
from memoro.data import Augment
from memoro.errors import DataError, TrainingError
from memoro.training import Recipe, TrainOptions
from memoro.training.recipe import RECIPES

__all__ = ["root"]  # fixtures

QUICK: dict[str, Any] = {"image_size": 20, "batch_size": 5, "epochs": 2, "workers": 0, "quiet": True}
WORDS = ["--image-size", "20", "--set", "batch_size=5", "--epochs", "2", "--set", "workers=0", "--json"]


def test_the_function_and_the_command_give_the_same(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CASES[0].model().save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", str(root / "many"), "-b", "vit", *WORDS])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    before = sorted(tmp_path.rglob("*"))
    result = memoro.train(root / "many", backbone="vit", **QUICK)
    assert sorted(tmp_path.rglob("*")) == before  # it writes nothing unless told where
    assert (result.file, result.folder) == (None, None)
    assert result.task.content_hash() == memoro.load_task(record["file"]).content_hash()
    assert result.metrics == record["metrics"]
    assert result.rows == ()
    assert "runs" not in record
    assert result.task.spec.training["lr"] == 0.001, "the only rate of side"
    assert list(result.notes) == record["notes"]
    assert len(result.history) == 2
    task, history, metrics = result
    assert (task, history, metrics) == (result.task, result.history, result.metrics)
    other = memoro.train(root / "many", backbone="vit", lr=0.5, **QUICK)
    assert other.rows == ()
    assert other.task.content_hash() != result.task.content_hash()


def test_the_defaults_are_in_one_place() -> None:
    """The command passes on only what was given, but for the defaults of its flags, which are those of the fields."""
    known = {field.name: field.default for kind in (Recipe, TrainOptions) for field in fields(kind)}
    known |= {name: one.default for name, one in inspect.signature(memoro.train).parameters.items()}
    known |= {"lr": None, "seed": Recipe().seed, "extends": None}
    command = typer.main.get_group(app).get_command(None, "train")
    for parameter in command.params:
        if parameter.name in known and parameter.name not in {"data", "backbone", "out", "folder"}:
            assert parameter.default == known[parameter.name], parameter.name
    differing = {
        field.name
        for field in fields(Recipe)
        if len({repr(getattr(one, field.name)) for _, one in RECIPES.values()}) > 1
    }
    assert differing == {"lr", "optimizer", "weight_decay", "views"}
    assert not differing & {parameter.name for parameter in command.params} - {"lr"}


def test_several_tasks_give_a_result_each(backbone: Backbone, root: Path, tmp_path: Path) -> None:
    sets = {"a": root / "many", "b": root / "few"}
    found = memoro.train(sets, backbone=backbone, lr=0.05, out=tmp_path, folder=tmp_path / "run-{task}", **QUICK)
    assert list(found) == ["a", "b"]
    assert [result.task.name for result in found.values()] == ["a", "b"]
    assert [result.file for result in found.values()] == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    assert (tmp_path / "run-a+b" / "metrics.jsonl").is_file()
    columns = memoro.train(root / "table" / "table.csv", backbone=backbone, label_column=["x", "y"], lr=0.1, **QUICK)
    assert [task.task.labels for task in columns.values()] == [["blue", "green", "grey", "red"], ["even", "odd"]]
    alone = memoro.train(root / "table" / "table.csv", backbone=backbone, label_column="y", lr=0.1, **QUICK)
    assert alone.task.labels == ["even", "odd"]


def test_several_values_are_a_sweep(backbone: Backbone, root: Path) -> None:
    options = {**QUICK, **FRESH}
    found = memoro.train(root / "many", backbone=backbone, cells=(0, 2), from_layer=[3], lr=0.1, seeds=2, **options)
    assert [(row.cells, row.from_layer, row.lr, len(row.val)) for row in found.rows] == [(0, 3, 0.1, 2), (2, 3, 0.1, 2)]
    assert found.task.cells in {0, 2}
    tested = memoro.load_data(root / "many", val_fraction=0, workers=0, quiet=True)
    with pytest.raises(TrainingError, match="no validation images to choose by"):
        memoro.train(tested, backbone=backbone, lr=(0.1, 0.2), folds=0, val_fraction=0, **options)


def test_values_may_be_arrays(backbone: Backbone, root: Path) -> None:
    sizes: dict[str, Any] = {"cells": np.arange(2), "from_layer": np.int64(3), "lr": np.logspace(-4, -3, 2)}
    found = memoro.train(root / "many", backbone=backbone, **sizes, **{**QUICK, **FRESH})
    assert [(row.cells, row.lr) for row in found.rows] == [(0, 0.0001), (0, 0.001), (1, 0.0001), (1, 0.001)]
    json.dumps(found.to_json())
    shown = repr(found)
    assert "accuracy" in shown
    assert not any(word in shown for word in ("history", "rows", "skipped"))


def test_a_child_is_built_on_tasks_and_on_files(backbone: Backbone, root: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backbone": backbone, "lr": 0.1, "cells": 1, **QUICK}
    file = tmp_path / "parent.safetensors"
    parent = memoro.train(root / "many", task="parent", out=file, **options)
    children = [
        memoro.train(root / "few", task="child", extends=source, **options).task
        for source in ([parent.task], parent.task, file, str(file))
    ]
    assert children[0].parents[0].content == parent.task.content_hash()
    assert {child.content_hash() for child in children} == {children[0].content_hash()}
    alone = memoro.train(root / "few", task="child", **options).task
    assert alone.content_hash() != children[0].content_hash()


def test_files_are_linked_and_given_tasks_are_left_alone(backbone: Backbone, root: Path, tmp_path: Path) -> None:
    pets = random_task(backbone, "pets")
    breeds, toys = (random_task(backbone, name, extends=[pets]) for name in ("breeds", "toys"))
    files = [memoro.save_task(task, tmp_path / f"{task.name}.safetensors") for task in (pets, toys)]
    loaded = memoro.load_task(files[1])
    records = loaded.extends
    for toy in (files[1], loaded):
        options: dict[str, Any] = {"backbone": backbone, "lr": 0.1, "extends": [breeds, files[0], toy], **QUICK}
        given, parent, linked = memoro.train(root / "few", task="child", **options).task.extends
        assert given is breeds
        assert linked.extends == (parent,)
    assert breeds.extends == (pets,)
    assert loaded.extends == records


def test_wrong_arguments_are_refused_before_anything_is_read(root: Path) -> None:
    none: dict[str, Any] = {"backbone": "/nowhere/at/all"}
    for given, options, message in (
        (root, {"speed": 3}, "unknown training option 'speed'"),
        ({"a": root, "b": root}, {"task": "c"}, "give NAME=DATA for each"),
        ({"a": root}, {"label_column": "x"}, "a task per column of one table"),
        ({"a": root, "b": root}, {"out": "one.safetensors"}, "several tasks need a folder"),
        (root, {"cache": True, "views": None}, "a fixed number of views"),
        (root, {"streaming": True}, "streaming was removed: data sets of the hub are downloaded"),
        (root, {"halving": True}, "halving was removed"),
        (root, {"lr": [0.1, -1]}, "lr -1.0: choose a number above 0"),
        (root, {"seeds": "2"}, "seeds '2': choose a whole number"),
        (root, {"ensemble": 3}, "ensemble was removed"),
    ):
        with pytest.raises((TrainingError, DataError), match=message):
            memoro.train(given, **none, **options)


def test_a_size_that_is_given_and_is_the_default_counts_once(backbone: Backbone, tmp_path: Path) -> None:
    save_squares(tmp_path / "set", {"blue": 8, "red": 8})
    found = memoro.train(tmp_path / "set", backbone=backbone, rank=(None, 4), lr=0.001, seeds=np.int64(2), **QUICK)
    assert [(row.rank, len(row.val)) for row in found.rows] == [(4, 2)]


def test_a_task_without_validation_images_leaves_the_others_alone(backbone: Backbone, tmp_path: Path) -> None:
    save_squares(tmp_path / "single", {"blue": 1, "red": 1})
    save_squares(tmp_path / "many", {"blue": 8, "red": 8})
    both = {name: tmp_path / name for name in ("single", "many")}
    found = memoro.train(both, backbone=backbone, regime="memory", **QUICK)
    assert (len(found["single"].rows), len(found["many"].rows)) == (0, 3)
    assert found["many"].metrics["split"] == "4 folds"


def test_a_score_that_is_undefined_does_not_lose_the_task(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R² of a single validation image."""
    save_squares(tmp_path, {"blue": 6})
    rows = [f"blue/{path.name},{at}.5" for at, path in enumerate(sorted((tmp_path / "blue").iterdir()))]
    (tmp_path / "set.csv").write_text("\n".join(["path,number", *rows]))
    monkeypatch.chdir(tmp_path)
    how: dict[str, Any] = {"lr": (0.001, 0.003), "folds": 0, "folder": "run", "out": "set.safetensors"}
    found = memoro.train("set.csv", backbone=backbone, **how, **QUICK)
    assert not any(np.isfinite(row.val).any() for row in found.rows)
    assert memoro.load_task("set.safetensors").content_hash() == found.task.content_hash()


def test_a_recipe_decides_the_rate_and_not_the_regime(backbone: Backbone, root: Path) -> None:
    recipe = Recipe(lr=0.5, optimizer="adamw")
    done = memoro.train(root / "many", backbone=backbone, recipe=recipe, **QUICK)
    facts = done.task.spec.training
    assert (facts["regime"], facts["lr"], facts["optimizer"], done.rows) == ("joint", 0.5, "adamw", ())
    done = memoro.train(root / "many", backbone=backbone, recipe=recipe, regime="head", lr=0.1, **QUICK)
    assert (done.task.spec.training["regime"], done.task.spec.training["lr"]) == ("head", 0.1)


@pytest.mark.parametrize(
    ("augment", "changes", "views"),
    [
        (Augment(), {}, 1),
        (Augment(crop="pad"), {}, 4),
        (Augment(flip=0.5), {}, 4),
        (Augment(scale=(0.5, 1.0)), {}, 4),
        (Augment(crop="none", flip=0), {}, 1),
        (Augment(crop="pad"), {"views": 1}, 1),
        (Augment(crop="pad"), {"recipe": Recipe(views=1)}, 1),
    ],
)
def test_random_views_are_drawn_where_they_are_asked_for(
    backbone: Backbone, root: Path, monkeypatch: pytest.MonkeyPatch, augment: Augment, changes: Any, views: int
) -> None:
    class StoppedError(Exception):
        pass

    def stop(backbone: Backbone, plans: Any, options: Any) -> None:
        assert plans[0].recipe.views == views
        raise StoppedError

    monkeypatch.setattr(sys.modules["memoro.training.train"], "train_plans", stop)
    notes: list[str] = []
    how = {"backbone": backbone, "augment": augment, "log": notes.append, **QUICK}
    with pytest.raises(StoppedError):
        memoro.train(root / "many", **how, **changes)
    assert any("several views of an image: using 4" in note for note in notes) == (views == 4)


def test_a_head_has_no_sizes_and_there_is_a_seed(backbone: Backbone, tmp_path: Path) -> None:
    squares = save_squares(tmp_path / "squares")
    with pytest.raises(TrainingError, match="regime 'head' has no layers of its own: leave out `cells`"):
        memoro.train(squares, backbone=backbone, regime="head", cells=[0, 5])
    with pytest.raises(TrainingError, match="seeds 0: choose a whole number, 1 or more"):
        memoro.train(squares, backbone=backbone, seeds=0)


def test_a_folder_that_ends_with_a_slash_is_made(backbone: Backbone, tmp_path: Path) -> None:
    squares = save_squares(tmp_path / "squares")
    quick: dict[str, Any] = {"epochs": 1, "lr": 0.1, "image_size": 20, "workers": 0, "quiet": True}
    found = memoro.train(squares, backbone=backbone, regime="head", out=f"{tmp_path}/new/tasks/", **quick)
    assert found.file == tmp_path / "new" / "tasks" / "squares.safetensors"
