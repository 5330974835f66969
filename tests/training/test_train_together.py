"""Several tasks with sets of their own in one pass: each comes out as if it had been alone."""

from __future__ import annotations

import multiprocessing
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_groups import LABELS, LOAD, root, run_spec, same_result, sets
from small_training import FRESH, PLAIN, QUICK, distance, double
from test_train_resume import at_call, figures, often

from memoro.backbones import Backbone
from memoro.data import load_data
from memoro.engine import streams
from memoro.errors import TrainingError
from memoro.tasks.task import Task, new_task
from memoro.training import Cache, Run, TrainResult, fit, fit_tasks, train_runs
from memoro.training.loop import Trainer
from memoro.training.recipe import TrainOptions

__all__ = ["double", "often", "root"]  # fixtures


def several(backbone: Backbone, root: Path) -> list[Run]:
    """Other set sizes, batches, image sizes, heads, forks and recipes."""
    many, few, labels, number = sets(root)
    assert [one.kind for one in (many, few, labels, number)] == ["softmax", "softmax", "multilabel", "regression"]
    return [
        run_spec(backbone, "many", many),
        run_spec(backbone, "few", few, batch_size=4, epochs=4, lr=0.2, from_layer=2, data_seed=3),
        run_spec(backbone, "labels", labels, batch_size=7, optimizer="adamw", lr=0.01, size=24, views=2, epochs=3),
        run_spec(backbone, "number", number, batch_size=2, accumulate=3, cells=0, from_layer=5, augment=PLAIN),
    ]


def shape_of(task: Task) -> dict[str, Any]:
    return {"cells": task.cells, "from_layer": task.from_layer}


def test_tasks_with_sets_of_their_own_come_out_as_if_alone(double: Backbone, root: Path) -> None:
    assert len(Trainer(double, several(double, root), TrainOptions(workers=0)).groups) == 4
    together = train_runs(double, several(double, root), **FRESH)
    assert len({result.history[-1]["step"] for result in together}) == 3
    for number, result in enumerate(together):
        one = several(double, root)[number]
        start = new_task(double, "s", result.task.labels, head=result.task.kind, seed=1, **shape_of(result.task))
        [alone] = train_runs(double, [one], **FRESH)
        same_result(result, alone)
        assert distance(result.task, start) > 1e-3


def test_a_set_whose_run_diverges_leaves_the_others_alone(double: Backbone, root: Path) -> None:
    def specs() -> list[Run]:
        first, second, *_ = several(double, root)
        return [first, replace(second, recipe=replace(second.recipe, lr=1e300))]

    good, bad = train_runs(double, specs(), **FRESH)
    same_result(good, train_runs(double, specs()[:1], **FRESH)[0])
    assert bad.metrics == {}
    assert "choose a learning rate below 1e+300" in bad.notes[-1]


def test_several_sets_from_the_cache(double: Backbone, root: Path, tmp_path: Path) -> None:
    def specs() -> list[Run]:
        return [replace(one, recipe=replace(one.recipe, views=2)) for one in several(double, root)[:3]]

    cache = Cache(tmp_path / "features", dtype="float32")
    kept, fresh = (
        train_runs(double, specs(), cache=cache, workers=0, quiet=True),
        train_runs(double, specs(), **FRESH),
    )
    for mine, wanted in zip(kept, fresh, strict=True):
        for name in ("train_loss", "val_loss"):
            assert [e[name] for e in mine.history] == pytest.approx([e[name] for e in wanted.history], abs=1e-4)
        assert 0 < distance(mine.task, wanted.task) < 1e-3
    assert len(list(cache.folder.iterdir())) == 2  # two image sizes


def test_a_token_is_computed_for_its_own_images_alone(
    double: Backbone, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[int, ...], int]] = []
    read = streams.TaskStream.read

    def watch(stream: Any, layer: int, base: Any) -> None:
        read(stream, layer, base)
        if layer == double.depth - 1 and torch.is_grad_enabled():
            seen.append((tuple(stream._rows.shape[:2]), len(base.keys)))

    monkeypatch.setattr(streams.TaskStream, "read", watch)
    many, few = (load_data(root / name, val_fraction=0, **LOAD) for name in ("many", "few"))
    specs = [
        run_spec(double, "a", many, batch_size=9, epochs=1),
        run_spec(double, "b", many, batch_size=9, epochs=1, cells=0),
        run_spec(double, "c", few, batch_size=8, epochs=2),
    ]
    train_runs(double, specs, **FRESH)
    # Two tokens for each of the nine images, one for each of the eight; the epochs are of two steps and of one.
    assert seen == [((9, 2), 9), ((8, 1), 8), ((9, 2), 9), ((8, 1), 8)]


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
    child = run_spec(double, "child", sets(root)[0], extends=[together[1]])
    with pytest.raises(TrainingError, match="train 'parent' first"):
        train_runs(double, [child, replace(child, task=together[1])])


@pytest.mark.parametrize("call", [2, 6])
def test_two_courses_are_resumed(
    double: Backbone, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None, call: int
) -> None:
    def train(name: str, resume: bool = False) -> list[TrainResult]:
        return train_runs(double, several(double, root)[:2], folder=tmp_path / name, resume=resume, **FRESH)

    calm = train("calm")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", at_call(call, Trainer.step))
        process = multiprocessing.get_context("fork").Process(target=train, args=("killed",))
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    for mine, wanted in zip(train("killed", resume=True), calm, strict=True):
        for name, value in wanted.task.state_dict().items():
            assert torch.equal(value, mine.task.state_dict()[name])
        assert mine.history == wanted.history
    lines = figures(tmp_path / "calm")
    assert lines == figures(tmp_path / "killed")
    assert {line["group"] for line in lines} == {"1: many", "2: few"}
