"""`evaluate`: how good tasks are on images that they may never have seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from memoro.backbones import Backbone
from memoro.composition import Composition, compose
from memoro.data import ImageSet, Loader, Splits, load_data
from memoro.errors import DataError
from memoro.extras import need
from memoro.task import HeadKind, Task
from memoro.train.course import collect_logits
from memoro.train.fit import check_labels
from memoro.train.metrics import measure


def evaluate(
    backbone: Backbone,
    tasks: Sequence[Task],
    data: Any | dict[str, Any],
    *,
    batch_size: int = 32,
    workers: int | None = None,
    quiet: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Each task's figures on the test split of its data (or on the whole set where there is none), by name.

    `data` is one set for all tasks, or a dict from a task's name to its own. Tasks on the same images that share
    labels and preprocessing are answered in one pass; `say` is told of every pass.
    """
    need("torchmetrics")
    model = compose(backbone, tasks)
    # A DatasetDict is a dict of splits: one set.
    wanted = dict(data) if type(data) is dict else dict.fromkeys(model.names, data)
    for name in wanted:
        if name not in model.tasks:
            raise DataError(f"no task {name!r} among {', '.join(model.names)}: write NAME=DATA with one of these.")
    sets: dict[tuple[Any, tuple[str, ...], HeadKind], tuple[ImageSet, str]] = {}
    groups: dict[tuple[Any, tuple[str, ...], HeadKind], list[str]] = {}
    for name, source in wanted.items():
        task = model.tasks[name]
        key = (source if isinstance(source, (str, Path)) else id(source), task.spec.labels, task.kind)
        if key not in sets:
            sets[key] = _test_images(source, task, workers, quiet)
        groups.setdefault(key, []).append(name)
    results: dict[str, dict[str, Any]] = {}
    for key, names in groups.items():
        images, split = sets[key]
        for preprocessing, together in model.passes(names).items():
            say(f"{images.name}: one pass over {len(images)} images for {', '.join(together)}")
            loader = Loader(images, preprocessing, batch_size=batch_size, workers=workers)
            logits, targets = collect_logits(_asker(model, together), backbone, loader)
            for name, out in zip(together, logits, strict=True):
                task = model.tasks[name]
                results[name] = {"split": split, **measure(task.kind, task.labels, out, targets)}
    return {name: results[name] for name in wanted}


def _asker(model: Composition, names: list[str]) -> Callable[[Tensor], list[Tensor]]:
    def ask(pixels: Tensor) -> list[Tensor]:
        answers = model(pixels, names)
        return [answers[name] for name in names]

    return ask


def _test_images(source: Any, task: Task, workers: int | None, quiet: bool) -> tuple[ImageSet, str]:
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
