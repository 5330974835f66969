"""`evaluate`: metrics of tasks on a test split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memoro.arguments import several
from memoro.backbones import Backbone
from memoro.console import bar, format_count, plain_console
from memoro.data import ImageSet, Loader, Splits, load_data
from memoro.data.load import has_columns
from memoro.engine.composition import compose
from memoro.errors import DataError, TrainingError
from memoro.evaluation.logits import collect_logits
from memoro.evaluation.metrics import measure_task, warn_of
from memoro.evaluation.report import TaskReport, write_report
from memoro.evaluation.training_images import learned_from, learned_images, on_record
from memoro.heads import HeadKind
from memoro.images import Preprocessing
from memoro.tasks.spec import Model, by_name
from memoro.tasks.task import Task


def _print_warning(text: str) -> None:
    if text.startswith("warning: "):
        plain_console(stderr=True, soft_wrap=True).print(text)


def evaluate(
    backbone: Backbone,
    tasks: Task | Sequence[Task],
    data: Any | dict[str, Any],
    *,
    batch_size: int = 32,
    workers: int | None = None,
    quiet: bool = True,
    log: Callable[[str], None] = _print_warning,
    report: str | Path | None = None,
    **reading: Any,
) -> dict[str, dict[str, Any]]:
    """Each task's metrics on the test split of its data (or on the whole set where there is none), by name.

    `data` is one set for all tasks, or a dict from a task's name to its own; `label_column`, `image_column` and
    `allow_absolute` are for tables, as in `load_data`. Tasks that have the same images, labels and preprocessing share
    one pass. Images of classes that a task does not know are left out and counted in
    `unknown_classes`, unreadable ones in `skipped`. `log` receives a line for every pass, notes, such as on data
    without a test split, and warnings, which are printed to stderr by default. `report` is a file to which a page about
    the answers is written.
    """
    tasks = several(tasks)
    composition = compose(backbone, tasks)
    models = by_name(tasks)
    for task in tasks:
        task.spec.check_backbone(backbone)
    # A DatasetDict is a dict of splits: one set.
    sources = dict(data) if type(data) is dict else dict.fromkeys(models, data)
    groups: dict[Any, tuple[Splits, ImageSet, str, dict[str, int], list[str]]] = {}
    for name, source in sources.items():
        if name not in models:
            raise DataError(f"no task {name!r} among {', '.join(models)}: write NAME=DATA with one of these.")
        task = models[name]
        column = reading.get("label_column")
        own = name if has_columns(source, task=name, kind=task.kind, labels=task.labels, label_column=column) else ""
        key = (source if isinstance(source, (str, Path)) else id(source), task.spec.labels, task.kind, own)
        if key not in groups:
            how: dict[str, Any] = {"workers": workers, "quiet": quiet, "measured_only": report is None}
            groups[key] = (*load_test_images(source, task, **how, **reading), [])
        groups[key][-1].append(name)

    def forward(names: list[str]) -> Callable[[Tensor], list[Tensor]]:
        return lambda pixels: [logits for name, logits in composition(pixels, names).items() if name != "base"]

    results: dict[str, dict[str, Any]] = {}
    reports: dict[str, TaskReport] = {}
    for splits, images, split, unknown, names in groups.values():
        notes = [*splits.notes]
        for text in notes:
            log(text if text.startswith("warning: ") else f"note: {text}")
        if unknown:
            notes.append(_not_known(unknown, models[names[0]].kind, images, names))
            log(f"note: {notes[-1]}")
        left_out = _find_learned(images, split, [models[name] for name in names], tasks)
        for name, learned in left_out.items():
            notes.append(f"{name}: {_describe_learned(images, learned)}")
            log(f"warning: {notes[-1]}")
        told = _check_new(images, split, [models[name] for name in names if name not in left_out], tasks)
        if told is not None:
            notes.append(told.removeprefix("note: "))
            log(told)
        for preprocessing, together in composition.passes(names).items():
            if (scaled := _check_levels(images, preprocessing, together)) is not None:
                notes.append(scaled.removeprefix("warning: "))
                log(scaled)
            log(f"{images.name}: one pass over {format_count(len(images), 'image')} for {', '.join(together)}")
            loader = Loader(images, preprocessing, batch_size=batch_size, workers=workers)
            with bar(f"evaluating on {images.name}", len(images), quiet=quiet) as tick:
                logits, targets = collect_logits(forward(together), backbone, loader, tick=tick)
            for name, out in zip(together, logits, strict=True):
                own_images, own_targets, counted = images, targets, {}
                if name in left_out:
                    new = ~left_out[name]
                    own_images = images.subset(np.flatnonzero(new))
                    out, own_targets = out[torch.from_numpy(new)], targets[torch.from_numpy(new)]
                    counted = {"learned_images": int(left_out[name].sum())}
                found = {"split": split, **measure_task(models[name], out, own_targets), **counted}
                results[name] = {**found, **({"unknown_classes": unknown} if unknown else {})}
                if splits.skipped:
                    results[name]["skipped"] = len(splits.skipped)
                if (warning := warn_of(found, balanced=bool(models[name].spec.training.get("balance")))) is not None:
                    log(f"warning: {name}: {warning}")
                told_of = [*notes, *filter(None, [warning])]
                about = (models[name], results[name], out, own_targets, own_images, splits, told_of)
                reports[name] = TaskReport(*about, model=composition)
    if report is not None:
        write_report(Path(report), ", ".join(sources), backbone, [reports[name] for name in sources])
    return {name: results[name] for name in sources}


def _check_levels(images: ImageSet, preprocessing: Preprocessing, names: Sequence[str]) -> str | None:
    """What to know if the tasks of a pass have another scale for pixels of more than 8 bits than these images."""
    levels, white = images.levels, preprocessing.white
    if levels is None or (white is not None and levels.high <= white):
        return None
    found = f"warning: {images.name} has pixels of more than 8 bits, with values up to {levels.high:,.6g}, but"
    if white is None:
        return (
            f"{found} no such images were among the training images of {', '.join(names)}, so their scale is a guess."
        )
    return f"{found} {white:,.6g} is white in the training images of {', '.join(names)}: brighter pixels become white."


def _find_learned(
    images: ImageSet, split: str, models: Sequence[Task], tasks: Sequence[Task]
) -> dict[str, npt.NDArray[np.bool_]]:
    """By the model's name which images of a test split it or its ancestors learned from, where that is known exactly
    and is a part of them only."""
    found = {model.name: learned_images(model, images, tasks) for model in models} if split == "test" else {}
    return {name: learned for name, learned in found.items() if learned is not None and 0 < learned.sum() < len(images)}


def _describe_learned(images: ImageSet, learned: npt.NDArray[np.bool_]) -> str:
    count = format_count(int(learned.sum()), "image")
    first = images.where(int(learned.argmax()))
    return f"{count} of {images.name}, such as {first}, were learned from: the metrics are those of the others."


def _check_new(
    images: ImageSet,
    split: str,
    models: Sequence[Task],
    tasks: Sequence[Task],
) -> str | None:
    """What to know if a model may have been trained on the images; None if there is nothing to say."""
    if not models:
        return None
    names = [model.name for model in models]
    recorded = [model for model in models if on_record(model, tasks)]
    reasons = [learned_from(model, images, others=tasks) for model in models]
    learned = [reason for reason in reasons if reason is not None]
    optimistic = f"{'; '.join(learned)}, so this overestimates accuracy on new images."
    if split == "test":
        return f"warning: {images.name}: {optimistic}" if learned else None
    count = format_count(len(images), "image")
    used, how = (f"all {count}", "trained") if split == "all" else (f"the {count} of {split}", "selected")
    text = f"{images.name.rpartition(':')[0] or images.name} has no test split: evaluated on {used}."
    if learned:
        return f"warning: {text} {optimistic}"
    if split == "all" and len(recorded) == len(models):
        return f"note: {text} None of them is among the recorded training images."
    were = f"{names[0]} was" if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]} were"
    return f"note: {text} If {were} {how} on them, this overestimates accuracy on new images."


def _not_known(unknown: dict[str, int], kind: HeadKind, images: ImageSet, names: list[str]) -> str:
    which = ", ".join(f"{label} ({count})" for label, count in list(unknown.items())[:20])
    more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
    what, rest = ("label", "") if kind == "multilabel" else ("class", "; their images were left out")
    count = f"{len(unknown)} {what}{'' if len(unknown) == 1 else 'es' if what == 'class' else 's'}"
    return f"{images.name} has {count} that {', '.join(names)} cannot predict: {which}{more}{rest}."


def load_test_images(
    source: Any,
    task: Model,
    *,
    workers: int | None = None,
    quiet: bool = True,
    measured_only: bool = True,
    **reading: Any,
) -> tuple[Splits, ImageSet, str, dict[str, int]]:
    """The splits, the images to measure on, their split's name, and the unknown labels among them with their counts."""
    splits = source
    if not isinstance(source, Splits):
        splits = load_data(
            source,
            kind=task.kind,
            labels=task.labels,
            task=task.name,
            drop_unknown=True,
            val_fraction=0,
            measured_only=measured_only,
            workers=workers,
            quiet=quiet,
            **reading,
        )
    check_labels(task, splits)
    split, images = splits.to_measure()
    return splits, images, split, dict(splits.unknown.get("train" if split == "all" else split, {}))


def check_labels(task: Model, splits: Splits) -> None:
    """Raises where a set has other labels than the task, or another kind of them."""
    if splits.kind != task.kind:
        raise TrainingError(f"{task.name!r} has a {task.kind} head, but {splits.name} is a {splits.kind} set.")
    if tuple(task.labels) != splits.labels:
        raise TrainingError(f"{splits.name} has other labels than {task.name!r}: load it with labels=task.labels.")
