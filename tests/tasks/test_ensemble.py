"""Ensembles: several members as one task, whose answers are their mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_task
from families import CASES, Case
from random_tasks import SIZES, join_members, members_of
from safetensors import safe_open
from squares import save_squares
from task_files import rewrite
from test_train_told import rendered

import memoro
from memoro.backbones import Backbone
from memoro.errors import CompositionError, TaskFileError, TrainingError
from memoro.evaluation.inspect import describe_task, inspect_tables, inspect_tasks
from memoro.regimes.start import start_from
from memoro.tasks.mask import trace_lineage
from memoro.tasks.task import Task, split_members


def as_tasks(members: list[Task]) -> list[Task]:
    """The same under names of their own, so that they can be composed."""
    for number, member in enumerate(members):
        member.update_spec(name=str(number))
    return members


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_ensemble_answers_the_mean_of_its_members(case: Case) -> None:
    backbone = memoro.load_backbone(case.model().double())
    pixels = torch.randn(2, 3, *backbone.image_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    members = members_of(backbone)
    model = memoro.compose(backbone, [random_task(backbone, "other", seed=7), join_members(members)])
    with torch.no_grad():
        found = model(pixels)
        alone = torch.stack([memoro.compose(backbone, [member])(pixels)["three"] for member in members])
        assert torch.equal(found["base"], backbone.original(pixels))
        assert (model(pixels, ["three"])["three"] - found["three"]).abs().max() < 1e-10
    assert (found["three"] - alone.mean(dim=0)).abs().max() < 1e-10
    assert (found["three"] - alone).abs().amax(dim=(1, 2)).min() > 1e-3


def test_a_child_sees_all_members_of_its_parent(backbone: Backbone, pixels: torch.Tensor) -> None:
    parent = join_members(members_of(backbone))
    child = random_task(backbone, "child", seed=9, extends=[parent])
    apart = as_tasks(members_of(backbone))
    same = random_task(backbone, "child", seed=9, extends=apart)
    fewer = random_task(backbone, "child", seed=9, extends=apart[:2])
    with torch.no_grad():
        found = memoro.compose(backbone, [child, parent])(pixels)["child"]
        expected = memoro.compose(backbone, [*apart, same])(pixels)["child"]
        other = memoro.compose(backbone, [*apart, fewer])(pixels)["child"]
    assert torch.allclose(found, expected, atol=1e-5)  # float32: rows of the stream are in another order
    assert not torch.allclose(found, other, atol=1e-3)


def test_members_see_their_ancestors_but_not_each_other() -> None:
    lineage = trace_lineage("abc", [[], ["a"], ["b"]], [0, 2, 1])
    split, members = lineage.split([2, 3, 1])
    assert members == [range(2), range(2, 5), range(5, 6)]
    assert split.visible(3, 2) == (3, 0, 1)
    assert split.visible(5, 1) == (5, 0, 1)
    assert split.visible(5, 2) == (5, 2, 3, 4, 0, 1)
    assert split.closure([4]) == (0, 1, 4)


def test_an_ensemble_can_be_explained(backbone: Backbone, pixels: torch.Tensor) -> None:
    parent = join_members(members_of(backbone, "parent"))
    members = members_of(backbone, extends=[parent])
    whole = memoro.compose(backbone, [parent, join_members(members)]).explain(pixels, "three", normalised=True)
    alone = [memoro.compose(backbone, [parent, member]).explain(pixels, "three", normalised=True) for member in members]
    assert whole.layers == alone[0].layers
    for name in ("patches", "prefix", "itself", "memory"):
        mean = torch.stack([getattr(one, name) for one in alone]).mean(dim=0)
        assert torch.allclose(getattr(whole, name), mean, atol=1e-5), name
    assert sum(whole.shares().values()) == pytest.approx(1, abs=1e-5)
    assert whole.shares()["parent"] > 0.01


def test_an_ensemble_is_not_trained(backbone: Backbone) -> None:
    members = members_of(backbone)
    assert split_members(members[0]) == [members[0]]
    with pytest.raises(CompositionError, match="leave out live"):
        memoro.compose(backbone, [join_members(members)], live=True)


# ---------------------------------------------------------------------------------------------------------- files


def test_files_keep_ensembles(backbone: Backbone, pixels: torch.Tensor, tmp_path: Path) -> None:
    task = join_members(members_of(backbone))
    path = memoro.save_task(task, tmp_path / "three.safetensors")
    loaded = memoro.load_task(path)
    assert (loaded.members, loaded.content_hash()) == (3, task.content_hash())
    assert describe_task(loaded)["members"] == 3
    with torch.no_grad():
        assert torch.equal(*(memoro.compose(backbone, [one])(pixels)["three"] for one in (task, loaded)))
    single = memoro.save_task(members_of(backbone)[0], tmp_path / "one.safetensors")
    records = [json.loads(safe_open(file, "pt").metadata()["memoro"]) for file in (path, single)]
    assert [(record["format"], record["tasks"][0].get("members")) for record in records] == [(3, 3), (2, None)]


@pytest.mark.parametrize(("count", "words"), [(2, "shape"), (1, "members"), (65, "members"), ("3", "members")])
def test_wrong_numbers_of_members_are_refused(backbone: Backbone, tmp_path: Path, count: Any, words: str) -> None:
    path = memoro.save_task(join_members(members_of(backbone)), tmp_path / "three.safetensors")
    rewrite(path, lambda record, tensors: record["tasks"][0].update(members=count))
    with pytest.raises(TaskFileError, match=words):
        memoro.load_task(path)


# ------------------------------------------------------------------------------------------------------- training


def test_members_of_an_ensemble_are_trained_further_one_by_one(backbone: Backbone, tmp_path: Path) -> None:
    data, members = save_squares(tmp_path / "squares"), members_of(backbone, labels=["blue", "green", "red"])
    task = join_members(members)
    with pytest.raises(TrainingError, match="start_from"):
        memoro.fit(backbone, task, data)
    fresh = memoro.new_task(backbone, "three", ["red", "black", "blue"], seed=5, **SIZES)
    for number, member in enumerate(members):
        start = start_from(task, fresh, number)
        assert torch.equal(start.class_token, member.class_token)
        assert torch.allclose(start.head.weight[0], member.head.weight[2])
        assert torch.equal(start.head.weight[1], fresh.head.weight[1])
    notes: list[str] = []
    how: dict[str, Any] = {"backbone": backbone, "start_from": task, "epochs": 1, "quiet": True, "log": notes.append}
    further = memoro.train(data, **how, seed=0, lr=1e-9, folds=0, val_fraction=0).task
    pixels = torch.randn(4, 3, *backbone.image_size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        alone, found = (memoro.compose(backbone, [one])(pixels)["three"] for one in (members[0], further))
    moved = task.head.bias - members[0].head.bias  # an ensemble has one bias
    assert torch.allclose(alone + moved, found, atol=1e-3)
    assert (further.members, further.spec.training["history"][0]["content"]) == (1, task.content_hash())
    assert any("an ensemble of 3 members" in note for note in notes)


def test_a_child_of_an_ensemble_is_trained(backbone: Backbone, tmp_path: Path) -> None:
    data, parent = save_squares(tmp_path / "squares"), join_members(members_of(backbone))
    child = memoro.new_task(backbone, "child", ["blue", "green", "red"], extends=[parent])
    before = child.class_token.detach().clone()
    memoro.fit(backbone, child, data, epochs=1, quiet=True)
    assert not torch.equal(child.class_token, before)


def test_a_small_file_cannot_ask_for_endless_attention(backbone: Backbone) -> None:
    """Ensembles that extend each other in a chain see more the longer it is."""
    lineage = trace_lineage(list("abcd"), [(), "a", "b", "c"], [0] * 4)
    lineage.check_size([3] * 4, [2] * 4)
    # b sees a, c sees both, d all three: six pairs of 64 members, each with its own token and 100 cells.
    with pytest.raises(CompositionError, match="compose fewer of them"):
        lineage.check_size([64] * 4, [100] * 4)
    chain: list[Task] = []
    for number in range(4):
        alike = [random_task(backbone, str(number), seed=seed, cells=10, extends=chain[-1:]) for seed in range(100)]
        chain.append(join_members(alike))
    with pytest.raises(CompositionError, match="compose fewer of them"):
        memoro.compose(backbone, chain)


def test_a_bundle_of_an_ensemble_and_a_plain_task_is_inspected(backbone: Backbone, tmp_path: Path) -> None:
    tasks = [join_members(members_of(backbone)), random_task(backbone, "plain", seed=5)]
    for order in (tasks, tasks[::-1]):
        file = memoro.save_tasks(order, tmp_path / "both.safetensors")
        [table] = inspect_tables({**inspect_tasks(file, memoro.load_tasks(file)), "file": "both"})
        assert "3 members" in rendered(table)


def test_a_live_composition_takes_an_ensemble_that_others_extend(backbone: Backbone, pixels: torch.Tensor) -> None:
    parent = join_members(members_of(backbone))
    child = random_task(backbone, "child", seed=9, extends=[parent])
    model = memoro.compose(backbone, [parent, child], live=True)
    model(pixels)["child"].sum().backward()
    assert child.class_token.grad is not None
    assert all(parameter.grad is None for parameter in parent.parameters())
    with pytest.raises(CompositionError, match="is an ensemble, which cannot be trained"):
        memoro.compose(backbone, [parent], live=True)
