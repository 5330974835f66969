"""`evaluate`: how good tasks are on images that they may never have seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import say_images
from memoro.data import ImageSet, Loader, Splits, Streams, load_data
from memoro.engine.composition import Composition, compose
from memoro.errors import DataError, TrainingError
from memoro.evaluation.logits import collect_logits
from memoro.evaluation.metrics import measure
from memoro.extras import need
from memoro.heads import HeadKind
from memoro.images import Preprocessing
from memoro.regimes.baseline import Baseline
from memoro.tasks.spec import by_name
from memoro.tasks.task import Task


def evaluate(
    backbone: Backbone,
    tasks: Sequence[Task | Baseline],
    data: Any | dict[str, Any],
    *,
    batch_size: int = 32,
    workers: int | None = None,
    quiet: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Each task's figures on the test split of its data (or on the whole set where there is none), by name.

    `data` is one set for all tasks, or a dict from a task's name to its own. Tasks on the same images that share
    labels and preprocessing are answered in one pass, baselines in a pass each; `say` is told of every pass, and of
    data without a test split: a task may have learned from those very images.
    """
    need("torchmetrics")
    model = compose(backbone, [task for task in tasks if not isinstance(task, Baseline)])
    members = by_name(tasks)
    for task in tasks:
        task.spec.check_backbone(backbone)
    # A DatasetDict is a dict of splits: one set.
    wanted = dict(data) if type(data) is dict else dict.fromkeys(members, data)
    for name in wanted:
        if name not in members:
            raise DataError(f"no task {name!r} among {', '.join(members)}: write NAME=DATA with one of these.")
    sets: dict[tuple[Any, tuple[str, ...], HeadKind], tuple[ImageSet, str]] = {}
    groups: dict[tuple[Any, tuple[str, ...], HeadKind], list[str]] = {}
    for name, source in wanted.items():
        task = members[name]
        key = (source if isinstance(source, (str, Path)) else id(source), task.spec.labels, task.kind)
        if key not in sets:
            sets[key] = _test_images(source, task, workers, quiet)
        groups.setdefault(key, []).append(name)
    results: dict[str, dict[str, Any]] = {}
    for key, names in groups.items():
        images, split = sets[key]
        if split != "test":
            say(_untested(images, split, names))
        passes: list[tuple[Preprocessing, list[str], Callable[[Tensor], list[Tensor]]]] = [
            (preprocessing, together, _asker(model, together))
            for preprocessing, together in model.passes([name for name in names if name in model.tasks]).items()
        ]
        for name in names:
            if isinstance(alone := members[name], Baseline):
                passes.append((alone.spec.preprocessing or backbone.preprocessing, [name], _one_pass(alone)))
        for preprocessing, together, ask in passes:
            say(f"{images.name}: one pass over {say_images(len(images))} for {', '.join(together)}")
            loader = Loader(images, preprocessing, batch_size=batch_size, workers=workers)
            logits, targets = collect_logits(ask, backbone, loader)
            for name, out in zip(together, logits, strict=True):
                task = members[name]
                results[name] = {"split": split, **measure(task.kind, task.labels, out, targets)}
    return {name: results[name] for name in wanted}


def _untested(images: ImageSet, split: str, names: list[str]) -> str:
    name, _, _ = images.name.rpartition(":")
    measured = f"all {say_images(len(images))}" if split == "all" else f"the {say_images(len(images))} of {split}"
    trained = f"{names[0]} was" if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]} were"
    if split == "all":
        known = f"If {trained} trained on them, this says nothing about new ones."
    else:
        known = f"If {trained} chosen by them, this says too much good of new ones."
    return f"note: {name or images.name} has no test split: measured on {measured}. {known}"


def _asker(model: Composition, names: list[str]) -> Callable[[Tensor], list[Tensor]]:
    def ask(pixels: Tensor) -> list[Tensor]:
        answers = model(pixels, names)
        return [answers[name] for name in names]

    return ask


def _one_pass(model: Baseline) -> Callable[[Tensor], list[Tensor]]:
    return lambda pixels: [model(pixels)]


def _test_images(source: Any, task: Task | Baseline, workers: int | None, quiet: bool) -> tuple[ImageSet, str]:
    splits = source
    if not isinstance(source, Splits):
        kind = None if task.kind == "softmax" else task.kind
        splits = load_data(source, kind=kind, labels=task.labels, val_fraction=0, workers=workers, quiet=quiet)
    check_labels(task, splits)
    for name in ("test", "val", "train"):
        images: ImageSet | None = getattr(splits, name)
        if images is not None:
            return images, name if name != "train" else "all"
    raise DataError(f"{splits.name}: there are no images in it.")


def check_labels(task: Task | Baseline, splits: Splits | Streams) -> None:
    """Raises where a set has other labels than the task, or another kind of them."""
    if splits.kind != task.kind:
        raise TrainingError(f"{task.name!r} has a {task.kind} head, but {splits.name} is a {splits.kind} set.")
    if tuple(task.labels) != splits.labels:
        raise TrainingError(f"{splits.name} has other labels than {task.name!r}: load it with labels=task.labels.")
