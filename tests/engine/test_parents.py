"""A child belongs to the versions of its parents that it was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_task
from families import CASES
from reproduction_checkpoint import save_checkpoint
from squares import save_squares

import memoro
from memoro.backbones import Backbone
from memoro.errors import CompositionError, TrainingError

LABELS = ["blue", "green", "red"]
OPTIONS: dict[str, Any] = {"epochs": 1, "batch_size": 7, "image_size": 20, "workers": 0, "quiet": True}


@pytest.fixture
def squares(tmp_path: Path) -> Path:
    return save_squares(tmp_path / "squares", dict.fromkeys(LABELS, 4))


def test_a_parent_that_was_trained_after_its_child(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    pets = memoro.new_task(backbone, "pets", LABELS, cells=1, seed=1)
    memoro.fit(backbone, pets, squares, lr=0.05, **OPTIONS)
    first = memoro.save_task(pets, tmp_path / "pets.safetensors")
    breeds = memoro.new_task(backbone, "breeds", LABELS, cells=1, seed=2, extends=[pets])
    memoro.fit(backbone, breeds, squares, lr=0.05, **OPTIONS)
    memoro.compose(backbone, [pets, breeds])
    version, content = breeds.parents, breeds.content_hash()

    memoro.fit(backbone, pets, squares, lr=0.1, **OPTIONS)
    assert version[0].content != pets.content_hash()
    assert (breeds.parents, breeds.content_hash()) == (version, content)
    message = r"'breeds' extends a different version of 'pets' .*trained or changed since.* train 'breeds' again"
    with pytest.raises(CompositionError, match=message):
        memoro.compose(backbone, [pets, breeds])
    with pytest.raises(CompositionError, match=message):
        memoro.evaluate(backbone, [pets, breeds], squares)
    saved = memoro.load_task(memoro.save_task(breeds, tmp_path / "breeds.safetensors"))
    with pytest.raises(CompositionError, match=message):
        memoro.compose(backbone, [pets, saved])
    memoro.compose(backbone, [memoro.load_task(first), saved])
    memoro.compose(backbone, [memoro.load_task(first), breeds])

    memoro.fit(backbone, breeds, squares, lr=0.05, **OPTIONS)
    assert breeds.parents[0].content == pets.content_hash()
    memoro.compose(backbone, [pets, breeds])


def test_a_grandchild_of_a_parent_that_was_trained_since(backbone: Backbone, squares: Path) -> None:
    pets = memoro.new_task(backbone, "pets", LABELS, cells=1, seed=1)
    breeds = memoro.new_task(backbone, "breeds", LABELS, cells=1, seed=2, extends=[pets])
    kittens = memoro.new_task(backbone, "kittens", LABELS, cells=1, seed=3, extends=[breeds])
    for task in (pets, breeds, pets):
        memoro.fit(backbone, task, squares, lr=0.05, **OPTIONS)
    before = kittens.content_hash()
    with pytest.raises(
        CompositionError, match=r"'breeds' extends a different version of 'pets' .* train 'breeds' again"
    ):
        memoro.fit(backbone, kittens, squares, lr=0.05, **OPTIONS)
    assert kittens.content_hash() == before
    for task in (breeds, kittens):
        memoro.fit(backbone, task, squares, lr=0.05, **OPTIONS)
    memoro.compose(backbone, [pets, breeds, kittens])


def test_a_child_that_nobody_trained_follows_its_parent(backbone: Backbone) -> None:
    pets = random_task(backbone, "pets")
    breeds = memoro.new_task(backbone, "breeds", LABELS, extends=[pets])
    with torch.no_grad():
        pets.memory.add_(1)
    assert breeds.parents[0].content == pets.content_hash()
    memoro.compose(backbone, [pets, breeds])


def test_a_child_from_a_bundle_has_its_parents(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    parent = random_task(backbone, "parent")
    child = random_task(backbone, "child", seed=1, labels=LABELS, extends=[parent])
    memoro.save_tasks([child, parent], tmp_path / "both.safetensors")
    memoro.save_task(child, tmp_path / "child.safetensors")
    loaded, older = memoro.load_tasks(tmp_path / "both.safetensors")
    assert loaded.extends == (older,)
    assert loaded.parents == child.parents
    memoro.fit(backbone, loaded, squares, **OPTIONS)
    assert memoro.compose(backbone, [older, loaded]).names == ["parent", "child"]
    [alone] = memoro.load_tasks(tmp_path / "child.safetensors")
    with pytest.raises(TrainingError, match="without its parent 'parent'"):
        memoro.fit(backbone, alone, squares, **OPTIONS)


def test_a_refused_training_records_nothing(backbone: Backbone, squares: Path) -> None:
    pets = random_task(backbone, "pets")
    breeds = memoro.new_task(backbone, "breeds", LABELS, extends=[pets])
    toys = memoro.new_task(backbone, "toys", LABELS[::-1])
    splits = memoro.load_data(squares, labels=LABELS, workers=0, quiet=True)
    with pytest.raises(TrainingError, match="other labels than 'toys'"):
        memoro.fit_tasks(backbone, [(breeds, splits), (toys, splits)], lr=0.05, **OPTIONS)
    with torch.no_grad():
        pets.memory.add_(1)
    assert breeds.parents[0].content == pets.content_hash()


def test_a_loaded_task_is_trained_where_the_backbone_is(
    backbone: Backbone, squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = memoro.new_task(backbone, "pets", LABELS, cells=1)
    loaded = memoro.load_task(memoro.save_task(task, tmp_path / "pets.safetensors"))
    moves: list[tuple[str, Any]] = []
    move = memoro.Task.to

    def watch(self: memoro.Task, *args: Any, **options: Any) -> memoro.Task:
        moves.append((self.name, *args))
        return move(self, *args, **options)

    monkeypatch.setattr(memoro.Task, "to", watch)
    memoro.fit(backbone, loaded, squares, lr=0.05, **OPTIONS)
    assert moves == [("pets", backbone.device)]


def test_many_generations_are_hashed_once_each(backbone: Backbone, tmp_path: Path, monkeypatch: Any) -> None:
    """Tasks that each extend all earlier ones, as an extension of the reproduction does: 2^40 steps without memory."""
    path = save_checkpoint(tmp_path / "model.pt", backbone, tasks=40, extend=True)
    tasks = memoro.import_tasks(backbone, path)
    assert [len(task.extends) for task in tasks] == list(range(40))
    hashed: list[str] = []
    hash_content = type(tasks[0].spec).hash_content

    def count(self: Any, *args: Any, **own: Any) -> str:
        hashed.append(self.name)
        return hash_content(self, *args, **own)

    monkeypatch.setattr(type(tasks[0].spec), "hash_content", count)
    last = tasks[-1].content_hash()
    assert sorted(hashed) == sorted(task.name for task in tasks)
    hashed.clear()
    memoro.compose(backbone, tasks)
    assert len(hashed) <= 40
    hashed.clear()
    saved = memoro.save_tasks(tasks, tmp_path / "all.safetensors")
    assert len(hashed) == 40
    assert memoro.load_tasks(saved)[-1].content_hash() == last


def test_a_long_chain_does_not_recurse(backbone: Backbone) -> None:
    chain: list[memoro.Task] = []
    for number in range(1200):
        chain.append(memoro.new_task(backbone, str(number), ["a", "b"], cells=0, from_layer=5, extends=chain[-1:]))
    assert chain[-1].parents[0].content == chain[-2].content_hash()


def test_parents_must_be_of_this_backbone(backbone: Backbone, squares: Path) -> None:
    other = memoro.load_backbone(next(case for case in CASES if case.name == "vit").model(seed=8))
    foreign = random_task(other, "foreign")
    child, stranger = memoro.new_task(backbone, "t", LABELS, extends=[foreign]), memoro.new_task(other, "t", LABELS)
    for task in (child, stranger):
        with pytest.raises(CompositionError, match="other weights"):
            memoro.fit(backbone, task, squares, **OPTIONS)
