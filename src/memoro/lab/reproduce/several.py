"""Jobs over several sets: models put together (section 4.4 of the paper), and tasks that extend others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from memoro.data import Loader, Splits
from memoro.data.splits import strata, stratified_split
from memoro.engine.composition import compose
from memoro.errors import DataError
from memoro.evaluation.logits import collect_logits
from memoro.lab.baselines.dense import NaiveConcatenation
from memoro.lab.reproduce.measure import (
    Bench,
    Budget,
    compare_answers,
    describe_splits,
    held_out_parts,
    keep_classes,
    limit_training,
    measure_methods,
    select_rates,
    summarise_answers,
    train_seeds,
)
from memoro.lab.reproduce.methods import Method
from memoro.lab.reproduce.plan import CHILDREN
from memoro.tasks.task import Task

SIZES = (40, 160, 640)
"""Training images of a child."""
ALONE = "alone"


def measure_concat(
    bench: Bench, sets: Sequence[Splits], methods: Sequence[Method], budget: Budget, seed: int, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Test accuracy of each set's model alone, then with those of the other sets beside it, one after the other.

    `methods` are the unmasked and the masked one. `known` holds rates that were chosen before, by set and method.
    """
    rates: dict[str, dict[str, float]] = {splits.name: dict(known.get(splits.name, {})) for splits in sets}
    curves: dict[str, Any] = {}
    trained: dict[str, dict[str, Any]] = {method.name: {} for method in methods}
    for splits in sets:
        own = budget.on_set(splits.name)
        for method in methods:
            if method.name not in rates[splits.name]:
                chosen = select_rates(bench, splits, [method], own)[method.name]
                rates[splits.name][method.name] = chosen["lr"]
                curves[f"{splits.name}, {method.name}"] = chosen["curve"]
            [result] = train_seeds(bench, splits, rates[splits.name], [method], own, seeds=[seed])[method.name]
            trained[method.name][splits.name] = result.task
    unmasked, masked = (trained[method.name] for method in methods)
    found = {}
    for splits in sets:
        order = [splits.name, *(one.name for one in sets if one is not splits)]
        some = [order[:count] for count in range(1, len(order) + 1)]
        naive = [NaiveConcatenation([unmasked[name] for name in names]) for names in some]
        composed = [compose(bench.backbone, [masked[name] for name in names]) for names in some]
        logits, targets = _test_logits(bench, splits, [*naive, *composed], budget.batch_size)
        right = [compare_answers(one, targets) for one in logits]
        alone = logits[len(naive)]
        found[splits.name] = {
            "order": order,
            "naive": summarise_answers(right[: len(naive)]),
            "masked": summarise_answers(right[len(naive) :]),
            "largest_change": max(float((one - alone).abs().max()) for one in logits[len(naive) :]),
            **describe_splits(splits),
        }
    return {"rates": rates, "curves": curves, "sets": found}


def _test_logits(
    bench: Bench, splits: Splits, models: Sequence[Any], batch_size: int
) -> tuple[Sequence[Tensor], Tensor]:
    """What each model answers for the set, and the targets."""
    assert splits.test is not None
    loader = Loader(splits.test, bench.preprocessing, batch_size=batch_size, workers=bench.options.workers)
    return collect_logits(lambda pixels: [model(pixels)[splits.name] for model in models], bench.backbone, loader)


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
    cases: dict[str, tuple[Method, tuple[Task, ...]]] = {f"{one.name}, {ALONE}": (one, ()) for one in methods}
    cases |= {f"{one.name}, {name}": (one, (parents[name, one.name],)) for name in sources for one in methods}
    variants = [replace(method, name=name) for name, (method, _) in cases.items()]
    extends = {name: tasks for name, (_, tasks) in cases.items()}
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
        found[str(size)] = measure_methods(bench, few, variants, budget, extends)
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
    rates = {method.name: select_rates(bench, splits, [method], budget)[method.name]["lr"]}
    [result] = train_seeds(bench, splits, rates, [method], budget, seeds=[0])[method.name]
    task: Task = result.task
    return task
