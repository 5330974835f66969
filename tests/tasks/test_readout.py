"""Read-outs: solved in closed form from statistics of every layer, alone or joined with what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caches import counted
from conftest import random_task
from PIL import Image
from run_groups import LOAD
from safetensors import safe_open
from small_training import LABELS, QUICK
from solved import SOLVED, logits, pixels_of, read
from squares import save_square, save_squares
from test_train_fit import TABLES, write_table

import memoro
from memoro.backbones import Backbone
from memoro.data import load_data
from memoro.data.screening import near_groups
from memoro.engine.featurestore import total_bytes
from memoro.errors import TaskError, TrainingError
from memoro.tasks.ridge import RidgeSystem
from memoro.tasks.task import new_task
from memoro.training import cached, finish, fit


@pytest.fixture
def squares(tmp_path: Path) -> Path:
    return save_squares(tmp_path / "squares")


# ------------------------------------------------------------------------------------------------------------ solving


def test_classes_are_read_out_without_training(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    file = tmp_path / "squares.safetensors"
    result = memoro.train(squares, backbone=backbone, out=file, folder=tmp_path / "run", **SOLVED)
    assert (result.metrics["split"], result.metrics["images"]) == ("leave-one-out", 24)
    assert result.metrics["accuracy"] == 1
    assert (result.history, result.rows) == ([], ())
    facts = result.task.spec.training
    assert facts["regime"] == "readout"
    assert facts["penalty"] > 0
    assert not {"epochs", "lr", "steps"} & set(facts)
    assert facts["trained_parameters"] == 3 * 4 * 3 * 24 + 3, "three vectors of four layers for each class"
    assert facts["calibration"] == "24 held-out images (leave-one-out)"
    assert (tmp_path / "run" / "report.html").is_file()

    loaded, images = memoro.load_task(file), load_data(squares, val_fraction=0, **LOAD).train
    assert images is not None
    pixels = pixels_of(backbone, images)
    found = logits(backbone, loaded, random_task(backbone, "other"), pixels=pixels)
    torch.testing.assert_close(found["squares"], read(backbone, result.task, pixels), rtol=0, atol=1e-4)
    assert torch.equal(found["squares"].argmax(dim=1), images.targets)
    assert torch.equal(found["base"], backbone.original(pixels))
    assert not any(parameter.any() for parameter in loaded.head.parameters())


def test_each_image_is_answered_without_it(backbone: Backbone, tmp_path: Path) -> None:
    """One has the wrong label: its answer is that of the others, although the task itself has learned it."""
    root = save_squares(tmp_path / "squares", {"blue": 3, "red": 3})
    save_square(root / "blue" / "999.png", "red", 999)
    images = load_data(root, val_fraction=0, **LOAD).train
    assert images is not None
    result = memoro.train(root, backbone=backbone, **SOLVED)
    wrong = next(at for at in range(7) if images.where(at).endswith("999.png"))
    assert result.logits is not None
    assert result.logits[wrong].argmax() == 1, "red, as it looks"
    assert result.metrics["accuracy"] == pytest.approx(6 / 7)
    seen = logits(backbone, result.task, pixels=pixels_of(backbone, images))["squares"]
    assert (seen - result.logits)[wrong, 0] > (seen - result.logits)[wrong, 1]


def test_balance_and_rare_classes(backbone: Backbone, tmp_path: Path) -> None:
    for number in range(24):  # they cannot be told apart, only counted
        save_square(tmp_path / "set" / ("rare" if number < 4 else "common") / f"{number}.png", "red", number)
    found = {}
    for balance in (False, True):
        result = memoro.train(tmp_path / "set", backbone=backbone, balance=balance, **SOLVED)
        assert result.logits is not None
        found[balance] = float(result.logits.softmax(dim=1)[:, 1].mean())
        assert ("balance" in result.task.spec.training) == balance
    assert found[False] == pytest.approx(4 / 24, abs=0.1)
    assert 0.6 > found[True] > found[False] + 0.08  # without one of four images, a class is rarer still

    single = save_squares(tmp_path / "single", {"blue": 1, "red": 9, "green": 9})
    for balance in (False, True):
        result = memoro.train(single, backbone=backbone, balance=balance, **SOLVED)
        assert result.task.labels == ["blue", "green", "red"]
        assert result.metrics["accuracy"] == pytest.approx(18 / 19), (
            "nothing is known of a class whose only image is left out"
        )
        images = load_data(single, val_fraction=0, **LOAD).train
        assert images is not None
        said = logits(backbone, result.task, pixels=pixels_of(backbone, images))["single"].argmax(dim=1)
        assert torch.equal(said, images.targets)


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_every_kind(kind: Any, backbone: Backbone, tmp_path: Path) -> None:
    header, rows, labels, figure, least = TABLES[kind]
    path, file = write_table(tmp_path, header, rows), tmp_path / "t.safetensors"
    result = memoro.train(path, backbone=backbone, out=file, **SOLVED)
    task = memoro.load_task(file)
    assert (task.kind, task.labels) == (kind, labels)
    assert task.spec.calibration is not None
    assert task.spec.calibration.source == "leave-one-out"
    seen = memoro.evaluate(backbone, [task], path, workers=0)["set"]
    assert seen[figure] >= least
    assert result.metrics[figure] >= least - 0.1
    assert result.metrics["loss"] != seen["loss"], "one is of images that were left out"


def test_rare_labels_are_found_with_balance(backbone: Backbone, tmp_path: Path) -> None:
    """Labels of half of the images, and of a few."""
    for number in range(24):
        save_square(tmp_path / f"{number}.png", "blue" if number < 12 else "red", number)
    rows = [
        f"{number}.png,{'b|rare' if number in {3, 15, 18} else 'b' if number < 12 else 'r'}" for number in range(24)
    ]
    (tmp_path / "set.csv").write_text("\n".join(["path,labels", *rows]) + "\n")
    found = [memoro.train(tmp_path / "set.csv", backbone=backbone, balance=how, **SOLVED) for how in (False, True)]
    shares = [(result.logits > 0).double().mean(dim=0) for result in found]
    assert [result.task.labels for result in found] == [["b", "r", "rare"]] * 2
    assert shares[1][2] > shares[0][2] + 0.2
    assert torch.allclose(shares[0][:2], torch.full((2,), 0.5, dtype=torch.double), atol=0.15)


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_numbers_of_any_size(backbone: Backbone, tmp_path: Path, unit: float) -> None:
    """Weights beyond float16 are kept in float32."""
    rows = [f"{number * unit}" for number in (1.0, 2.0, -1.0, 0.5)]
    path, file = write_table(tmp_path, "path,number", rows), tmp_path / "t.safetensors"
    result = memoro.train(path, backbone=backbone, kind="number", out=file, **SOLVED)
    assert result.metrics["r2"] > 0.9
    assert memoro.evaluate(backbone, [memoro.load_task(file)], path, workers=0)["set"]["r2"] > 0.95
    with safe_open(file, "pt") as opened:
        stored = opened.get_tensor("0.readout.weight")
    assert stored.dtype == (torch.float16 if unit == 1 else torch.float32)
    same = write_table(tmp_path / "same", "path,number", [f"{unit}"] * 4)
    constant = memoro.train(same, backbone=backbone, kind="number", **SOLVED)
    assert constant.logits is not None
    assert torch.allclose(constant.logits / unit, torch.ones(20, 1), atol=1e-3)


def test_seeds_do_not_matter(backbone: Backbone, squares: Path) -> None:
    splits = load_data(squares, labels=LABELS, val_fraction=0, **LOAD)
    tasks = []
    for seed, how in ((1, {"data_seed": 0}), (2, {"data_seed": 5}), (2, {"data_seed": 5, "balance": True})):
        tasks.append(new_task(backbone, "t", LABELS, cells=0, from_layer=backbone.depth, seed=seed))
        fit(backbone, tasks[-1], splits, **how, **SOLVED)
    assert tasks[0].content_hash() == tasks[1].content_hash()
    save_square(squares / "red" / "one-more.png", "red", 900)
    more = memoro.train(squares, backbone=backbone, task="t", **SOLVED).task
    assert more.content_hash() != tasks[0].content_hash()


def test_near_duplicates_are_left_out_together(backbone: Backbone, tmp_path: Path) -> None:
    """Labels that say nothing are known by heart where a copy of each image is learned from."""
    generator = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "noise" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image = generator.integers(0, 256, (24, 24, 3), dtype=np.int16)
        for copy in range(3):
            pixels = np.clip(image + generator.integers(-3, 4, image.shape), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:02}-{copy}.png")
    splits = load_data(tmp_path / "noise", val_fraction=0, **LOAD)
    assert splits.train is not None
    groups = near_groups(splits.train)
    assert len(np.unique(groups.numbers)) == 24
    honest = memoro.train(splits, backbone=backbone, **SOLVED)
    assert splits.train.targets.float().mean() == 0.5
    assert honest.metrics["accuracy"] < 0.75
    with pytest.MonkeyPatch.context() as patch:
        alone = groups._replace(numbers=np.arange(72))
        patch.setattr(finish, "near_groups", lambda images: alone)
        assert memoro.train(splits, backbone=backbone, **SOLVED).metrics["accuracy"] > 0.95


def test_columns_share_statistics_and_their_factorisation(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ["warm,r,1.0", "cold,g|dark,2.0", "cold,b|dark,-1.0", "dull,r|g|b,0.5"]
    table = write_table(tmp_path, "path,heat,labels,number", rows)
    made: list[int] = []

    class Counted(RidgeSystem):
        def __init__(self, count: int, *given: Any) -> None:
            made.append(count)
            super().__init__(count, *given)

    monkeypatch.setattr(finish, "RidgeSystem", Counted)
    with counted() as computed:
        found = memoro.train(table, backbone=backbone, label_column=["heat", "labels", "number"], **SOLVED)
    assert (made, computed()) == ([20], 20)
    assert [result.task.kind for result in found.values()] == ["softmax", "multilabel", "regression"]
    for name, result in found.items():
        alone = memoro.train(table, backbone=backbone, label_column=name, task=name, **SOLVED)
        assert alone.task.content_hash() == result.task.content_hash()
    assert made == [20] * 4


# ---------------------------------------------------------------------------------------------------- kept statistics


def test_kept_statistics_are_read_without_a_pass(
    backbone: Backbone, squares: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted() as computed:
        fresh = memoro.train(squares, backbone=backbone, **SOLVED, cache=False)
        assert (computed(), own_cache.exists()) == (0, False)
        first = memoro.train(squares, backbone=backbone, **SOLVED)
        assert computed() == 24
        assert 0 < total_bytes(own_cache) < 24 * (4 * 3 * 24 * 2 + 1000), "statistics, without keys and values"
        monkeypatch.setattr(cached, "pool_pass", lambda *given: pytest.fail("there was a pass"))
        again = memoro.train(squares, backbone=backbone, **SOLVED)
        assert computed() == 24
        save_square(squares / "red" / "one-more.png", "red", 900)
        memoro.train(squares, backbone=backbone, **SOLVED)
        assert computed() == 25
    assert again.task.content_hash() == first.task.content_hash()
    assert fresh.logits is not None
    assert first.logits is not None
    torch.testing.assert_close(fresh.logits, first.logits, rtol=0, atol=1e-2)  # float16, of batches of another size


# ---------------------------------------------------------------------------------------------------------- refusals

MEANINGLESS: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0.01}, "lr"),
    ({"cells": 2}, "cells"),
    ({"rank": 4}, "rank"),
    ({"from_layer": 2}, "from_layer"),
    ({"folds": 3}, "folds"),
    ({"seeds": 2}, "seeds"),
    ({"seed": 1}, "seed"),
    ({"epochs": 3}, "epochs"),
    ({"steps": 3}, "steps"),
    ({"views": 4}, "views"),
    ({"batch_size": 8}, "batch_size"),
    ({"optimizer": "sgd"}, "optimizer"),
    ({"patience": 2}, "patience"),
    ({"warmup": 0}, "warmup"),
    ({"lr": 0.01, "epochs": 3, "rank": 2}, "lr, rank, epochs"),
    ({"augment": memoro.data.Augment(crop="pad", flip=0.0)}, "crop, flip"),
]


@pytest.mark.parametrize(("given", "names"), MEANINGLESS, ids=[names for _, names in MEANINGLESS])
def test_options_without_meaning_are_refused_before_anything_is_read(given: dict[str, Any], names: str) -> None:
    quoted = ", ".join(f"`{name}`" for name in names.split(", "))
    with pytest.raises(TrainingError, match=f"solved in closed form, .* leave out {quoted}[.]$"):
        memoro.train("/nowhere", backbone="/nowhere", **{"regime": "readout", **given})


def test_a_read_out_alone_has_no_children(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    file = tmp_path / "parent.safetensors"
    parent = memoro.train(squares, backbone=backbone, task="parent", out=file, **SOLVED).task
    message = r"'child' cannot extend 'parent', which is a read-out alone: it has no token"
    with pytest.raises(TaskError, match=message):
        new_task(backbone, "child", LABELS, extends=parent)
    with pytest.raises(TaskError, match=message):
        memoro.train(squares, backbone=backbone, task="child", extends=file, epochs=1, **QUICK)
    head = new_task(backbone, "head", LABELS, cells=0, from_layer=backbone.depth)
    assert new_task(backbone, "child", LABELS, extends=head).extends == (head,)
    joint = random_task(backbone, "joint", labels=LABELS, cells=0, rank=2)
    fit(backbone, joint, squares, epochs=1, regime="joint", **QUICK)
    assert joint.spec.readout is not None
    assert new_task(backbone, "child", LABELS, extends=joint).extends == (joint,)
