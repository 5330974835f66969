"""Mutated task files with training facts and metrics: memoro's own errors, or a task that works."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_task
from families import CASES
from safetensors import safe_open
from safetensors.torch import save
from trust import add_readout

import memoro
from memoro.backbones import Backbone
from memoro.errors import CompositionError, TaskFileError
from memoro.evaluation.inspect import inspect_tables, inspect_tasks
from memoro.tasks.hub import save_pretrained
from memoro.tasks.task import Task

TRAINING: dict[str, Any] = {
    "regime": "memory", "epochs": 3, "seconds": 1.5, "trained_parameters": 99, "seed": 0, "best_epoch": 1,
    "recipe": {"lr": 0.01, "augment": {"crop": "none", "flip": 0.5}, "clip": None},
}  # fmt: skip
METRICS: dict[str, Any] = {
    "split": "test", "accuracy": 0.5, "loss": 1.25, "images": 10, "worst_classes": ["cat", "dog"],
    "per_class": {"cat": {"accuracy": 0.5, "images": 4}}, "confusion": [[1, 2], [3, 4]],
}  # fmt: skip
JUNK: list[Any] = [
    None, True, -1, 0, 2**70, 1e308, -0.0, "", "x" * 5000, "\x1b[2J\u202e", "../../etc/passwd", "base", [], {}, [[]],
    {"": None}, ["cat", "cat"], {"name": {}}, [1], [None] * 50, 10**400, [-(10**400)], {"cat": -(10**400)},
]  # fmt: skip


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return memoro.load_backbone(CASES[0].model())


@pytest.fixture(scope="module")
def file(backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pets = random_task(backbone, "pets", cells=1, from_layer=4, labels=["cat", "dog"])
    breeds = random_task(backbone, "breeds", cells=1, from_layer=4, seed=1, extends=[pets])
    add_readout(backbone, breeds, from_layer=4)
    for task in (pets, breeds):
        task.update_spec(training=TRAINING, metrics=METRICS, preprocessing=backbone.preprocessing)
    return memoro.save_tasks([pets, breeds], tmp_path_factory.mktemp("attack") / "two.safetensors")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, part in inside for found in [(*path, key), *places(part, (*path, key))]]


def mutate(record: Any, chance: random.Random) -> Any:
    """The record with one to three of its values removed, renamed or replaced by junk or by each other."""
    record = copy.deepcopy(record)
    for _ in range(chance.randint(1, 3)):
        *path, last = chance.choice(places(record))
        holder = record
        for key in path:
            holder = holder[key]
        kind = chance.choice(["junk", "junk", "remove", "rename", "swap"])
        if kind == "remove" or (kind == "rename" and isinstance(holder, list)):
            del holder[last]
        elif kind == "rename":
            holder[str(chance.choice(["x", "format", "content", "name", ""]))] = holder.pop(last)
        else:
            holder[last] = copy.deepcopy(chance.choice(JUNK if kind == "junk" else [record, *JUNK]))
        if not places(record):
            break
    return record


def show(path: Path, tasks: list[Task], folder: Path) -> None:
    """What `memoro inspect` and `memoro card` say of the tasks."""
    inspect_tables(inspect_tasks(path, tasks))
    for task in tasks:
        if task.spec.metrics.get("confusion") == METRICS["confusion"]:  # drawing it is slow
            task.update_spec(metrics={**task.spec.metrics, "confusion": []})
    save_pretrained(tasks, folder)
    (folder / "README.md").unlink()


def check(path: Path, backbone: Backbone, again: Path) -> bool:
    """Whether the file was read; then all that a user does with its tasks must work, or be memoro's own error."""
    reason = None
    try:
        tasks = memoro.load_tasks(path)
    except TaskFileError as error:
        reason = str(error)
    if reason is not None:
        assert str(path) in reason
        assert len(reason) < 20_000
        return False
    show(path, memoro.load_tasks(path), again.parent / "card")
    memoro.save_tasks(tasks, again)
    assert [task.content_hash() for task in memoro.load_tasks(again)] == [task.content_hash() for task in tasks]
    try:
        model = memoro.compose(backbone, tasks)
    except CompositionError:
        return True
    with torch.no_grad():
        out = model(torch.zeros(1, 3, 20, 20), any_size=True)
    assert all(answer.isfinite().all() for answer in out.values())
    return True


def test_mutated_records(file: Path, backbone: Backbone, tmp_path: Path) -> None:
    with safe_open(file, "pt") as opened:
        record = json.loads(opened.metadata()["memoro"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    path, chance, read = tmp_path / "mutated.safetensors", random.Random(12), 0
    for _ in range(700):
        text = json.dumps(mutate(record, chance), ensure_ascii=chance.random() < 0.5)
        if chance.random() < 0.05:
            text = text.replace("0.5", chance.choice(["NaN", "1e999", "-Infinity", "0." + "5" * 5000]), 1)
        path.write_bytes(save(tensors, metadata={"memoro": text}))
        read += check(path, backbone, tmp_path / "again.safetensors")
    assert 50 < read < 650  # notes may change, all else may not


def test_every_value_of_a_record_replaced(file: Path, backbone: Backbone, tmp_path: Path) -> None:
    """One value at a time, but for notes: of a chance among all, some are never drawn."""
    with safe_open(file, "pt") as opened:
        record = json.loads(opened.metadata()["memoro"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    path, read, seen = tmp_path / "mutated.safetensors", 0, 0
    for place in places(record):
        if {"training", "metrics", "sketch"} & set(place):
            continue
        for junk in (None, True, 0, "", "x" * 5000, [], {}):
            changed = copy.deepcopy(record)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = junk
            path.write_bytes(save(tensors, metadata={"memoro": json.dumps(changed)}))
            read += check(path, backbone, tmp_path / "again.safetensors")
            seen += 1
    assert seen > 300
    assert read < seen / 4


def test_mutated_bytes(file: Path, backbone: Backbone, tmp_path: Path) -> None:
    data, path, chance, read = file.read_bytes(), tmp_path / "mutated.safetensors", random.Random(3), 0
    header = 8 + int.from_bytes(data[:8], "little")
    for number in range(400):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(header if number % 3 else len(changed))
            kind = chance.choice(["flip", "set", "cut", "insert", "repeat"]) if number % 5 == 0 else "set"
            if kind == "flip":
                changed[at] ^= 1 << chance.randrange(8)
            elif kind == "set":
                changed[at] = chance.randrange(256)
            elif kind == "cut":
                del changed[at : at + chance.randrange(1, 50)]
            else:
                changed[at:at] = changed[: chance.randrange(20)] if kind == "repeat" else chance.randbytes(3)
            if len(changed) < header:
                break
        path.write_bytes(changed)
        read += check(path, backbone, tmp_path / "again.safetensors")
    assert read < 200


def test_the_file_itself_is_read(file: Path, backbone: Backbone, tmp_path: Path) -> None:
    assert check(file, backbone, tmp_path / "again.safetensors")
    assert file.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_text_that_is_not_unicode_is_kept(file: Path, tmp_path: Path) -> None:
    """The name of a folder may have any bytes: a training that is done must not fail because of it."""
    task = memoro.load_tasks(file)[0]
    task.update_spec(training={"data": os.fsdecode(b"caf\xe9"), "plain": "café"})
    again = memoro.load_task(memoro.save_task(task, tmp_path / "task.safetensors"))
    assert again.spec.training == task.spec.training
    memoro.save_task(again, tmp_path / "task.safetensors")


def test_a_record_of_endless_lists_is_refused(file: Path, tmp_path: Path) -> None:
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    path = tmp_path / "lists.safetensors"
    path.write_bytes(save(tensors, metadata={"memoro": "[" + "[]," * (1 << 18) + "[]]"}))
    with pytest.raises(TaskFileError, match="too many parts"):
        memoro.load_tasks(path)


@pytest.mark.parametrize("content", ["", "0", "../x", "f" * 65, 0, None])
def test_a_parent_is_named_by_a_content_hash(content: object, file: Path, backbone: Backbone, tmp_path: Path) -> None:
    with safe_open(file, "pt") as opened:
        record = json.loads(opened.metadata()["memoro"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(save(tensors, metadata={"memoro": json.dumps(record)}))
    assert check(path, backbone, tmp_path / "again.safetensors")
    record["tasks"][1]["parents"][0]["content"] = content
    path.write_bytes(save(tensors, metadata={"memoro": json.dumps(record)}))
    assert not check(path, backbone, tmp_path / "again.safetensors")


@pytest.mark.parametrize("place", ["training", "metrics"])
def test_facts_and_metrics_are_any_json(place: str, file: Path, backbone: Backbone, tmp_path: Path) -> None:
    """Each entry that memoro knows, with values of every kind: they are shown as far as they can be."""
    odd = [*JUNK, [10**400, 0.5], {"cat": 0.5, "dog": -(10**400)}, {"cat": "x"}, [[1, 2], [3, 10**400]], [[1]]]
    with safe_open(file, "pt") as opened:
        record = json.loads(opened.metadata()["memoro"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    names = {"training": [*TRAINING, "members", "phases", "history", "image_sketch"], "metrics": [*METRICS]}
    path = tmp_path / "odd.safetensors"
    for value in odd:
        record["tasks"][0][place] = dict.fromkeys(names[place], value)
        path.write_bytes(save(tensors, metadata={"memoro": json.dumps(record)}))
        assert check(path, backbone, tmp_path / "again.safetensors")
