"""Several tasks, folds and halved sweeps in one pass: each run comes out as if it had been alone."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import CASES
from test_train_recipe import save_square, save_squares
from typer.testing import CliRunner

import memoro
from memoro import engine
from memoro.backbones import Backbone, load_backbone
from memoro.cli import app
from memoro.data import Augment, ImageSet, Splits, load_columns, load_data, splits
from memoro.data.splits import fold_numbers
from memoro.errors import DataError, TrainingError
from memoro.regimes import REGIMES, TaskPlan, find_regime
from memoro.task import Task, new_task
from memoro.train import Cache, FitResult, Lesson, Recipe, fit, fit_tasks, loop, teach
from memoro.train.lessons import Courses
from memoro.train.sweep import Grid, Subject, SweepResult, run_sweeps

FIT = sys.modules["memoro.train.fit"]  # by its name it is the function
LABELS = ("blue", "green", "red")
PLAIN = Augment(crop="none", flip=0.0)
LOAD: dict[str, Any] = {"workers": 0, "quiet": True}
QUICK: dict[str, Any] = {"image_size": 20, **LOAD}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memoro.train.folder.draw_run", lambda *given: [])


@pytest.fixture(scope="module")
def double() -> Backbone:
    return load_backbone(CASES[0].model(), dtype=torch.float64)


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


def lesson(
    backbone: Backbone, name: str, data: Splits, *, size: int = 20, held: Any = None, seed: int = 1, **given: Any
) -> Lesson:
    shape = {key: given.pop(key) for key in ("cells", "from_layer", "extends") if key in given}
    task = new_task(backbone, name, data.labels, head=data.kind, seed=seed, **{"cells": 2, **shape})
    recipe = Recipe(**{"epochs": 2, "batch_size": 5, "lr": 0.05, "warmup": 2, **given})
    regime = find_regime("head" if task.from_layer == backbone.depth else "memory")
    return Lesson(task, recipe, regime, data, backbone.preprocessing.at(size), held)


def distance(left: Task, right: Task) -> float:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())


def same_result(left: FitResult, right: FitResult) -> None:
    assert distance(left.task, right.task) < 1e-10
    assert len(left.history) == len(right.history)
    for mine, wanted in zip(left.history, right.history, strict=True):
        for name in ("epoch", "step", "train_loss", "val_loss", "val_accuracy", "val_mean_absolute_error"):
            assert mine.get(name) == pytest.approx(wanted.get(name)), name
    for name, value in right.metrics.items():
        assert left.metrics[name] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value)


# ------------------------------------------------------------------------------------------------------- several sets


@functools.cache
def sets(root: Path) -> list[Splits]:
    table = root / "table" / "table.csv"
    return [
        *(load_data(root / name, val_fraction=0.25, **LOAD) for name in ("many", "few")),
        *(load_data(table, label_column=name, val_fraction=0.25, **LOAD) for name in ("labels", "number")),
    ]


def several(backbone: Backbone, root: Path) -> list[Lesson]:
    """Other set sizes, batches, image sizes, heads, forks and recipes."""
    many, few, labels, number = sets(root)
    assert [one.kind for one in (many, few, labels, number)] == ["softmax", "softmax", "multilabel", "regression"]
    return [
        lesson(backbone, "many", many),
        lesson(backbone, "few", few, batch_size=4, epochs=4, lr=0.2, from_layer=2, data_seed=3),
        lesson(backbone, "labels", labels, batch_size=7, optimizer="adamw", lr=0.01, size=24, views=2, epochs=3),
        lesson(backbone, "number", number, batch_size=2, accumulate=3, cells=0, from_layer=5, augment=PLAIN),
    ]


def test_tasks_with_sets_of_their_own_come_out_as_if_alone(double: Backbone, root: Path) -> None:
    assert len(Courses(double, several(double, root), cache=None, workers=0).list) == 4
    together = teach(double, several(double, root), workers=0)
    assert len({result.history[-1]["step"] for result in together}) == 3
    for number, result in enumerate(together):
        one = several(double, root)[number]
        start = new_task(double, "s", result.task.labels, head=result.task.kind, seed=1, **shape_of(result.task))
        [alone] = teach(double, [one], workers=0)
        same_result(result, alone)
        assert distance(result.task, start) > 1e-3


def test_a_set_whose_run_diverges_leaves_the_others_alone(double: Backbone, root: Path) -> None:
    def lessons() -> list[Lesson]:
        first, second, *_ = several(double, root)
        return [first, replace(second, recipe=replace(second.recipe, lr=1e300))]

    good, bad = teach(double, lessons(), workers=0)
    same_result(good, teach(double, lessons()[:1], workers=0)[0])
    assert bad.metrics == {}
    assert "choose a smaller learning rate than 1e+300" in bad.notes[-1]


def test_several_sets_from_the_cache(double: Backbone, root: Path, tmp_path: Path) -> None:
    def lessons() -> list[Lesson]:
        return [replace(one, recipe=replace(one.recipe, views=2)) for one in several(double, root)[:3]]

    cache = Cache(tmp_path / "features", dtype="float32")
    kept, fresh = teach(double, lessons(), cache=cache, workers=0), teach(double, lessons(), workers=0)
    for mine, wanted in zip(kept, fresh, strict=True):
        for name in ("train_loss", "val_loss"):
            assert [e[name] for e in mine.history] == pytest.approx([e[name] for e in wanted.history], abs=1e-4)
        assert 0 < distance(mine.task, wanted.task) < 1e-3
    assert len(list(cache.folder.iterdir())) == 2  # two image sizes


def shape_of(task: Task) -> dict[str, Any]:
    return {"cells": task.cells, "from_layer": task.from_layer}


def test_a_token_is_computed_for_its_own_images_alone(
    double: Backbone, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[int, ...], int]] = []
    passes: list[tuple[int, ...]] = []
    step, embed = engine.step_stream, double.anatomy.embed

    def watch(block: Any, plan: Any, memory: Any, stream: Any, keys: Any, *rest: Any) -> Any:
        if block is double.anatomy.blocks[-1] and torch.is_grad_enabled():
            seen.append((tuple(stream.shape[:2]), len(keys)))
        return step(block, plan, memory, stream, keys, *rest)

    def embedded(pixels: Any) -> Any:
        if torch.is_grad_enabled():
            passes.append(tuple(pixels.shape))
        return embed(pixels)

    monkeypatch.setattr(engine, "step_stream", watch)
    many, few = (load_data(root / name, val_fraction=0, **LOAD) for name in ("many", "few"))
    lessons = [
        lesson(double, "a", many, batch_size=9, epochs=1),
        lesson(double, "b", many, batch_size=9, epochs=1, cells=0),
        lesson(double, "c", few, batch_size=8, epochs=2),
    ]
    teach(double, lessons, workers=0)
    # Two tokens for each of the nine images, one for each of the eight; the epochs are of two steps and of one.
    assert seen == [((9, 2), 9), ((8, 1), 8), ((9, 2), 9), ((8, 1), 8)]


# ------------------------------------------------------------------------------------------------------- columns


def test_columns_of_a_table_are_one_course(double: Backbone, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screened: list[str] = []
    real = splits.screen_images
    monkeypatch.setattr(
        splits,
        "screen_images",
        lambda images, *given, **how: (screened.append(images.name), real(images, *given, **how))[1],
    )
    columns = load_columns(root / "table" / "table.csv", ["x", "y", "labels", "number"], val_fraction=0.25, **LOAD)
    assert len(screened) == 1  # every image is decoded once
    assert [one.kind for one in columns.values()] == ["softmax", "softmax", "multilabel", "regression"]
    assert [one.name for one in columns.values()] == ["table-x", "table-y", "table-labels", "table-number"]
    parts = list(columns.values())
    for one in parts:
        assert one.train is not None
        assert one.val is not None
        assert (len(one.train), len(one.val)) == (18, 6)
        assert np.array_equal(one.val.rows, parts[0].val.rows)  # type: ignore[union-attr]
        assert np.array_equal(one.train.rows, parts[0].train.rows)  # type: ignore[union-attr]
        assert not set(one.train.rows) & set(one.val.rows)

    def lessons() -> list[Lesson]:
        return [lesson(double, name, one, seed=at) for at, (name, one) in enumerate(columns.items())]

    [course] = Courses(double, lessons(), cache=None, workers=0).list
    assert (len(course.runs), len(course.exams)) == (4, 1)
    together = teach(double, lessons(), workers=0)
    for number in (1, 2, 3):
        same_result(together[number], teach(double, [lessons()[number]], workers=0)[0])
    # The first is cut as a set that knows of no others.
    own = load_data(root / "table" / "table.csv", label_column="x", val_fraction=0.25, **LOAD)
    same_result(together[0], teach(double, [lesson(double, "x", own, seed=0)], workers=0)[0])


def test_columns_that_are_examined_on_the_same_images_keep_their_own_labels(double: Backbone, root: Path) -> None:
    columns = load_columns(root / "table" / "table.csv", ["x", "y"], val_fraction=0.25, **LOAD)

    def lessons() -> list[Lesson]:  # other views: two courses, but one set of validation images
        return [lesson(double, "x", columns["x"]), lesson(double, "y", columns["y"], augment=PLAIN)]

    assert len(Courses(double, lessons(), cache=None, workers=0).list) == 2
    for number, result in enumerate(teach(double, lessons(), workers=0)):
        same_result(result, teach(double, [lessons()[number]], workers=0)[0])


def test_columns_of_a_set_with_splits_of_its_own(root: Path, tmp_path: Path) -> None:
    lines = (root / "table" / "table.csv").read_text().splitlines()
    roles = ["split", *["train"] * 12, *["val"] * 6, *["test"] * 6]
    shutil.copytree(root / "table", tmp_path / "table")
    text = "\n".join(f"{line},{role}" for line, role in zip(lines, roles, strict=True))
    (tmp_path / "table" / "table.csv").write_text(text + "\n")
    columns = load_columns(tmp_path / "table" / "table.csv", ["x", "y"], **LOAD)
    for one in columns.values():
        assert [len(part or ()) for part in (one.train, one.val, one.test)] == [12, 6, 6]
        assert one.test is not None
        assert one.test.digests is not None
    for wrong in ([], ["x", "x"]):
        with pytest.raises(DataError, match="each of them once"):
            load_columns(tmp_path / "table" / "table.csv", wrong, **LOAD)
    with pytest.raises(DataError, match="nothing"):
        load_columns(tmp_path / "table" / "table.csv", ["x", "nothing"], **LOAD)


def test_columns_keep_out_what_cannot_be_read(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "table", tmp_path / "table")
    (tmp_path / "table" / "5.png").write_bytes(b"no image")
    columns = load_columns(tmp_path / "table" / "table.csv", ["x", "y"], val_fraction=0.25, **LOAD)
    for one in columns.values():
        rows = [*one.train.rows, *one.val.rows]  # type: ignore[union-attr]
        assert sorted(rows) == [row for row in range(24) if row != 5]
        assert len(one.skipped) == 1
    assert np.array_equal(columns["x"].val.rows, columns["y"].val.rows)  # type: ignore[union-attr]
    assert [one.val.name for one in columns.values()] == ["table:val"] * 2  # type: ignore[union-attr]


def test_a_class_that_another_column_takes_away_is_told(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "table", tmp_path / "table")
    table = tmp_path / "table" / "table.csv"
    held = load_columns(table, ["x"], val_fraction=0.25, **LOAD)["x"].val
    assert held is not None
    header, *lines = table.read_text().splitlines()
    lines = [f"{line},{'rare' if row == held.rows[0] else 'usual'}" for row, line in enumerate(lines)]
    table.write_text("\n".join([f"{header},z", *lines]) + "\n")
    told = load_columns(table, ["x", "z"], val_fraction=0.25, **LOAD)["z"].notes
    assert any("have no image in train: rare" in note for note in told)
    assert not any("a single image" in note for note in told)  # so it was before the split


# ------------------------------------------------------------------------------------------------------- families


def test_a_child_waits_for_its_parent(double: Backbone, root: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "batch_size": 5, "lr": 0.05, **QUICK}

    def make() -> list[Task]:
        parent = new_task(double, "parent", LABELS, cells=2, seed=1)
        child = new_task(double, "child", LABELS, cells=1, seed=2, extends=[parent])
        return [child, parent, new_task(double, "other", ["grey", "red"], cells=1, from_layer=3, seed=3)]

    data = [root / "many", root / "many", root / "few"]
    together = make()
    results = fit_tasks(double, list(zip(together, data, strict=True)), folder=tmp_path / "run", **options)
    assert [result.task for result in results] == together
    apart = make()
    for at in (1, 0, 2):
        same_result(results[at], fit(double, apart[at], data[at], **options))
    wrong = make()  # over a parent that has learned nothing yet
    assert distance(fit(double, wrong[0], data[0], **options).task, together[0]) > 1e-6
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1", "2"]
    assert together[0].parents[0].content == together[1].content_hash()

    again = make()
    fit_tasks(double, list(zip(again, data, strict=True)), folder=tmp_path / "run", resume=True, **options)
    assert [task.content_hash() for task in again] == [task.content_hash() for task in together]
    child = lesson(double, "child", sets(root)[0], extends=[together[1]])
    with pytest.raises(TrainingError, match="train that first"):
        teach(double, [child, replace(child, task=together[1])])


# ------------------------------------------------------------------------------------------------------- resume


def die_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Dies in place of this call, counted from 1."""
    calls = iter(range(1, 10_000))

    def wrapped(*given: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given)

    return wrapped


@pytest.mark.parametrize("call", [2, 6])
def test_two_courses_are_resumed(
    double: Backbone, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    monkeypatch.setattr(FIT, "Training", functools.partial(loop.Training, every=0.0))  # a checkpoint every step

    def train(name: str, resume: bool = False) -> list[FitResult]:
        return teach(double, several(double, root)[:2], folder=tmp_path / name, resume=resume, workers=0)

    calm = train("calm")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_step", die_at(call, loop._step))
        process = multiprocessing.get_context("fork").Process(target=train, args=("killed",))
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    for mine, wanted in zip(train("killed", resume=True), calm, strict=True):
        for name, value in wanted.task.state_dict().items():
            assert torch.equal(value, mine.task.state_dict()[name])
        assert mine.history == wanted.history
    lines = [
        [
            {key: value for key, value in json.loads(line).items() if key != "images_per_second"}
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("calm", "killed")
    ]
    assert lines[0] == lines[1]
    assert {line["course"] for line in lines[0]} == {"1: many", "2: few"}


# ------------------------------------------------------------------------------------------------------- folds


@pytest.fixture(scope="module")
def pool(root: Path) -> Splits:
    return load_data(root / "many", val_fraction=0, **LOAD)


def fold_lessons(backbone: Backbone, data: Splits, held: Sequence[Any], **given: Any) -> list[Lesson]:
    return [lesson(backbone, "t", data, held=some, **given) for some in held]


def parts_of(data: Splits, folds: int = 2) -> list[Any]:
    assert data.train is not None
    number = fold_numbers(data.train, folds, 0)
    return [*(np.flatnonzero(number == fold) for fold in range(folds)), None]


def test_folds_come_out_as_if_alone(double: Backbone, pool: Splits) -> None:
    parts = parts_of(pool)
    [course] = Courses(double, fold_lessons(double, pool, parts), cache=None, workers=0).list
    assert len(course.exams) == 2
    results = teach(double, fold_lessons(double, pool, parts), workers=0)
    for part, result in zip(parts, results, strict=True):
        [alone] = teach(double, fold_lessons(double, pool, [part]), workers=0)
        same_result(result, alone)
        assert result.metrics["split"] == ("train" if part is None else "fold")
    assert min(distance(results[2].task, fold.task) for fold in results[:2]) > 1e-4
    # The last run is a plain training on all images.
    task = new_task(double, "t", LABELS, cells=2, seed=1)
    fit(double, task, pool, epochs=2, batch_size=5, lr=0.05, warmup=2, **QUICK)
    assert distance(task, results[2].task) < 1e-10


def test_held_images_teach_nothing(double: Backbone, pool: Splits) -> None:
    [held, *_] = parts_of(pool)
    assert isinstance(pool.train, ImageSet)
    targets = pool.train.targets.clone()
    targets[held] = targets[held].roll(1)
    assert not torch.equal(targets, pool.train.targets)
    changed = replace(pool, train=replace(pool.train, targets=targets))
    [first] = teach(double, fold_lessons(double, pool, [held]), workers=0)
    [second] = teach(double, fold_lessons(double, changed, [held]), workers=0)
    assert distance(first.task, second.task) == 0
    assert [e["train_loss"] for e in first.history] == [e["train_loss"] for e in second.history]
    assert first.metrics["loss"] != second.metrics["loss"]
    seen = targets.clone()
    shown = np.setdiff1d(np.arange(len(seen)), held)[0]
    seen[shown] = (seen[shown] + 1) % 3
    other = replace(pool, train=replace(pool.train, targets=seen))
    [third] = teach(double, fold_lessons(double, other, [held]), workers=0)
    assert distance(first.task, third.task) > 1e-6


def sweep(
    backbone: Backbone, data: Splits, grid: Grid, *, folds: int = 0, halving: bool = False, **given: Any
) -> SweepResult:
    recipe = Recipe(**{"epochs": 2, "batch_size": 5, "warmup": 2, **given})
    subject = Subject(TaskPlan("t", data.labels), data, folds)
    size = backbone.preprocessing.at(20)
    [result] = run_sweeps(backbone, [subject], REGIMES["memory"], grid, recipe, size, workers=0, halving=halving)
    return result


def test_a_sweep_over_folds(double: Backbone, pool: Splits) -> None:
    grid = Grid((1,), (0,), (1e-6, 0.1))
    found = sweep(double, pool, grid, folds=4)
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
    tested = sweep(double, replace(pool, test=pool.train), grid, folds=4)
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


def test_a_fold_that_diverges_takes_its_combination_with_it(
    double: Backbone, pool: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = sweep(double, pool, Grid((1,), (0,), (0.05, 0.1)), folds=3)
    with monkeypatch.context() as patch:
        real, calls = FIT.Courses, []

        def spoil(*given: Any, **options: Any) -> Any:
            courses = real(*given, **options)
            calls.append(courses)
            courses.runs[5].task.class_token.data[0] = float("nan")  # the second fold of the second rate
            return courses

        patch.setattr(FIT, "Courses", spoil)
        found = sweep(double, pool, Grid((1,), (0,), (0.05, 0.1)), folds=3)
    assert [row.diverged for row in found.rows] == [0, 1]
    assert [len(row.val) for row in found.rows] == [1, 0]
    assert found.task.spec.training["lr"] == 0.05
    assert found.rows[0] == calm.rows[0]
    assert distance(found.results[3].task, calm.results[3].task) < 1e-10
    with pytest.raises(TrainingError, match="learning rate"):
        sweep(double, pool, Grid((1,), (0,), (1e300, 1e301)), folds=3)


def test_fewer_images_than_make_up_the_folds(double: Backbone, tmp_path: Path) -> None:
    root = save_squares(tmp_path / "tiny", {"red": 2, "green": 1, "blue": 1})
    data = load_data(root, val_fraction=0, **LOAD)
    found = sweep(double, data, Grid((0,), (5,), (0.1, 0.2)), folds=4, epochs=1)
    assert (found.best.metrics["split"], found.best.metrics["images"]) == ("2 folds", 2)


# ------------------------------------------------------------------------------------------------------- halving


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
    lessons = [lesson(double, "t", data, cells=0, from_layer=5, epochs=epochs) for _ in range(16)]
    [course] = Courses(double, lessons, cache=None, workers=0, halving=True).list
    for at, run in enumerate(course.runs):
        run.best_score = (at / 16, 0.0)
    left = []
    for _ in range(epochs):
        course.halve()
        course.next_epoch()
        left.append(course.active)
    assert [at for at, runs in enumerate(left, start=1) if len(runs) < len([[*course.runs], *left][at - 1])] == ends
    assert left[-1] == list(course.runs)[-(16 >> len(ends)) :]


def test_halving_ranks_each_task_apart(double: Backbone, root: Path) -> None:
    many, few = (load_data(root / name, val_fraction=0.3, **LOAD) for name in ("many", "few"))
    subjects = [Subject(TaskPlan("a", many.labels), many), Subject(TaskPlan("b", few.labels), few)]
    recipe, size = Recipe(epochs=4, batch_size=5), double.preprocessing.at(20)
    grid = Grid((0,), (5,), (1e-5, 0.1), 2)
    found = run_sweeps(double, subjects, REGIMES["head"], grid, recipe, size, workers=0, halving=True)
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

    def taught(backbone: Backbone, lessons: Sequence[Lesson], **options: Any) -> list[FitResult]:
        found = [(one.task, scores[one.recipe.lr, one.recipe.seed]) for one in lessons]
        metrics = {"split": "val", "loss": 1.0}
        return [FitResult(task, [{"val_accuracy": s, "val_loss": 1.0}], metrics, None, ()) for task, s in found]

    monkeypatch.setattr("memoro.train.sweep.teach", taught)
    found = sweep(double, sets(root)[0], Grid((0,), (5,), (0.1, 0.2), 2), halving=halving)
    assert found.best.history[0]["val_accuracy"] == (0.9 if halving else 0.76)


# ------------------------------------------------------------------------------------------------------- the shell


@pytest.fixture
def shell(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    CASES[0].model().save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memoro.train.command.draw_sweep", lambda path, *given: path)
    common = ["-b", "vit", "--image-size", "20", "--batch-size", "5", "--workers", "0"]

    def run(command: str, *arguments: object, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [command, *map(str, arguments), *common])
        assert done.exit_code == code, (done.output, done.exception)
        return json.loads(done.stdout) if code == 0 else done

    return run


def test_train_several_tasks_from_the_shell(shell: Callable[..., Any], root: Path, own_cache: Path) -> None:
    data = (f"a={root / 'many'}", f"b={root / 'few'}")
    record = shell("train", *data, "--out", "tasks", "--lr", 0.05, "--epochs", 2, "--json")
    assert [entry["task"] for entry in record["tasks"]] == ["a", "b"]
    tasks = [memoro.load_task(Path("tasks") / f"{name}.safetensors") for name in "ab"]
    assert [task.labels for task in tasks] == [["blue", "green", "red"], ["grey", "red"]]
    assert list(own_cache.glob("*/*.bin"))
    alone = shell("train", data[1], "--out", "b.safetensors", "--lr", 0.05, "--epochs", 2, "--json", "--no-cache")
    assert alone["task"] == "b"
    assert alone["metrics"]["loss"] == pytest.approx(record["tasks"][1]["metrics"]["loss"], abs=1e-2)

    swept = shell("train", *data, "--out", "swept", "--epochs", 1, "--json")  # no rate: three each
    assert [len(entry["runs"]) for entry in swept["tasks"]] == [3, 3]
    assert sorted(path.name for path in Path("swept").iterdir()) == ["a.safetensors", "b.safetensors"]
    assert {Path(entry["picture"]).name for entry in swept["tasks"]} == {"sweep-a.png", "sweep-b.png"}


def test_train_columns_from_the_shell(shell: Callable[..., Any], root: Path) -> None:
    both = ("--label-column", "x", "--label-column", "y")
    table = root / "table" / "table.csv"
    record = shell("train", table, *both, "--lr", 0.05, "--epochs", 1, "--out", "tasks", "--json")
    assert [entry["task"] for entry in record["tasks"]] == ["x", "y"]
    assert memoro.load_task("tasks/x.safetensors").labels == ["blue", "green", "grey", "red"]
    assert memoro.load_task("tasks/y.safetensors").labels == ["even", "odd"]
    one = shell("train", table, *both[:2], "--lr", 0.05, "--epochs", 1, "--out", "x.safetensors", "--json")
    assert one["task"] == "x"
    assert Path("x.safetensors").is_file()
    line = "--label-column makes a task of each column of one table"
    for wrong in ([table, *both, "--task", "t"], [f"a={table}", f"b={table}", *both]):
        assert line in told(shell("train", *wrong, code=1))


def told(done: Any) -> str:
    return f"{done.output} {done.exception}"


def test_wrong_combinations_from_the_shell(shell: Callable[..., Any], root: Path) -> None:
    many, few = root / "many", root / "few"
    for wrong in ([many, few], [f"a={many}", f"a={few}"], [f"a={many}", few], [f"a={many}", f"b={few}", "-t", "c"]):
        assert "give NAME=DATA for each" in told(shell("train", *wrong, code=1))
    assert "looks like a path" in told(shell("train", f"x/y={many}", f"b={few}", code=1))
    assert "--views" in told(shell("train", many, "--cache", "--views", 0, code=2))
    assert "the features take" in told(shell("train", many, "--cache", "--cache-budget", 0, "--lr", 0.1, code=1))


def test_halving_from_the_shell(shell: Callable[..., Any], root: Path) -> None:
    options = ("--cells", "0", "--from-layer", "5", "--lr", "0.0001,0.1", "--seeds", 2, "--epochs", 4, "--json")
    record = shell("sweep", root / "many", *options, "--halving", "--regime", "head")
    assert [len(row["val"]) for row in record["runs"]] == [2, 2]
    assert record["metrics"]["split"] == "val"
    steps = [json.loads(line) for line in (Path(record["folder"]) / "metrics.jsonl").read_text().splitlines()]
    epochs = [line["run"] for line in steps if "train_loss" in line]
    assert sorted(epochs.count(run) for run in set(epochs)) == [1, 1, 2, 4]
    assert record["training"]["epochs"] == 4
