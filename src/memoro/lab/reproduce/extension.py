"""A task that extends another against the same task alone, over numbers of training images. Not in the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memoro.data import Splits
from memoro.data.splits import strata, stratified_split
from memoro.errors import DataError
from memoro.lab.reproduce.measure import (
    Bench,
    Budget,
    describe_splits,
    held_out_parts,
    keep_classes,
    limit_training,
    select_rates,
    summarise,
    train_seeds,
)
from memoro.lab.reproduce.methods import Method
from memoro.lab.reproduce.plan import CHILDREN
from memoro.tasks.task import Task

SIZES = (40, 160, 640)
"""Training images of the child."""
ALONE = "alone"


def measure_extension(
    bench: Bench, splits: Splits, other: Splits | None, methods: Sequence[Method], budget: Budget, child: str
) -> dict[str, Any]:
    """Test accuracy of the child by size and case, `METHOD, PARENT`; every seed is a run of the child.

    The child `classes` is every second class. Its parents: the classes between them, and another set. The child
    `groups` says whether the number of an image's class is odd; its parent knows the classes, from the other half of
    the training images. `notes` say which sizes were skipped, if any.
    """
    own, sources = _tasks_of(splits, other, child)
    assert own.train is not None
    images = len(own.train)
    if images < SIZES[0]:
        raise DataError(f"{splits.name}: the child has {images} training images; extension needs {SIZES[0]} or more.")
    parents = {
        (name, method.name): _train_parent(bench, replace(source, name=name), method, budget.on_set(source.name))
        for name, source in sources.items()
        for method in methods
    }
    budget = budget.on_set(splits.name)
    found: dict[str, Any] = {}
    notes = []
    for size in SIZES:
        if size > images:
            notes.append(f"{size} training images were skipped: the child has {images}.")
            continue
        few = limit_training(own, size)
        if not held_out_parts(few, budget):
            notes.append(f"{size} training images were skipped: {len(own.labels)} classes, none of them with two.")
            continue
        cases: dict[str, tuple[Method, tuple[Task, ...]]] = {f"{one.name}, {ALONE}": (one, ()) for one in methods}
        cases |= {f"{one.name}, {name}": (one, (parents[name, one.name],)) for name in sources for one in methods}
        variants = [replace(method, name=name) for name, (method, _) in cases.items()]
        extends = {name: tasks for name, (_, tasks) in cases.items()}
        selected = select_rates(bench, few, variants, budget, extends)
        trained = train_seeds(bench, few, [(one, selected[one.name].lr) for one in variants], budget, extends)
        found[str(size)] = {
            one.name: {**selected[one.name].to_json(), **summarise(trained[one.name])} for one in variants
        }
    return {"sizes": found, **({"notes": notes} if notes else {}), **describe_splits(own)}


def _tasks_of(splits: Splits, other: Splits | None, child: str) -> tuple[Splits, dict[str, Splits]]:
    """The child's data, and that of its parents by name."""
    labels = splits.labels
    if len(labels) < 4:
        raise DataError(f"{splits.name} has {len(labels)} classes: extension needs four or more.")
    even, odd = range(0, len(labels), 2), range(1, len(labels), 2)
    if child == CHILDREN[0]:
        parents = {"sibling classes": keep_classes(splits, {labels[at]: [at] for at in even})}
        if other is not None:
            parents["another set"] = other
        return keep_classes(splits, {labels[at]: [at] for at in odd}), parents
    assert splits.train is not None
    first, second = (splits.train.subset(half) for half in stratified_split(strata(splits.train.targets), 0.5, 0))
    own = keep_classes(replace(splits, train=first), {"even": list(even), "odd": list(odd)})
    return own, {"its classes": replace(splits, train=second)}


def _train_parent(bench: Bench, splits: Splits, method: Method, budget: Budget) -> Task:
    budget = replace(budget, folds=1)
    lr = select_rates(bench, splits, [method], budget)[method.name].lr
    [result] = train_seeds(bench, splits, [(method, lr)], budget, seeds=[0])[method.name]
    task: Task = result.task
    return task
