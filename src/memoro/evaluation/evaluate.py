"""`evaluate`: metrics of tasks on a test split, alone and together, and how well they notice images of other sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import bar, format_count, make_table, plain_console
from memoro.data import ImageSet, Loader, Splits, load_data
from memoro.data.columns import left_out as describe_left_out
from memoro.data.open import has_columns, load_any
from memoro.engine.answers import Outputs
from memoro.engine.composition import Composition, compose
from memoro.errors import DataError, TrainingError
from memoro.evaluation.logits import collect_logits, collect_outputs
from memoro.evaluation.metrics import measure_task, warn_of
from memoro.evaluation.report import TaskReport, write_report
from memoro.evaluation.training_images import describe_learned, find_learned, learned_some, warn_learned
from memoro.heads import Head
from memoro.images import Preprocessing
from memoro.options import several
from memoro.tasks.familiarity import FALSE_ALARMS
from memoro.tasks.spec import Model, by_name
from memoro.tasks.task import Task

COVERAGES = (1.0, 0.9, 0.8, 0.7, 0.5)
"""Shares of the images, the surest answers first, over which accuracy is reported."""
RECALL = 0.95


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
    together: bool = False,
    **reading: Any,
) -> dict[str, dict[str, Any]]:
    """Each task's metrics on the test split of its data (or on the whole set if there is none), by name.

        pets = memoro.load_task("pets.safetensors")
        metrics = memoro.evaluate(memoro.load_backbone(pets.spec.backbone), pets, "photos/pets")
        print(metrics["pets"]["accuracy"])

    `data` is one set for all tasks, or a dict from a task's name to its own; `label_column`, `image_column` and
    `allow_absolute` are for tables, as in `load_data`. Tasks that have the same images, labels and preprocessing share
    one pass. Images of classes that a task does not know are left out and counted in
    `unknown_classes`, unreadable ones in `skipped`. `log` receives a line for every pass, notes, such as on data
    without a test split, and warnings, which are printed to stderr by default. `report` is a file to which a page about
    the answers is written. With `together`, tasks of classes have `together`: see `measure_together`.
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
        if (
            splits.train is None
            and split == "test"
            and any(learned_some(models[name], images, tasks) for name in names)
        ):
            how = {"workers": workers, "quiet": quiet, "measured_only": False}
            splits, images, split, unknown = load_test_images(sources[names[0]], models[names[0]], **how, **reading)
        notes = [*splits.notes]
        for text in notes:
            log(text if text.startswith("warning: ") else f"note: {text}")
        if unknown:
            notes.append(_not_known(unknown, models[names[0]].head_kind, images, names))
            log(f"note: {notes[-1]}")
        left_out = find_learned(splits, images, split, [models[name] for name in names], tasks)
        for name, learned in left_out.items():
            notes.append(f"{name}: {describe_learned(images, learned)}")
            log(f"warning: {notes[-1]}")
        told = warn_learned(images, split, [models[name] for name in names if name not in left_out], tasks)
        if told is not None:
            notes.append(told.removeprefix("note: "))
            log(told)
        for preprocessing, members in composition.passes(names).items():
            if (scaled := _check_levels(images, preprocessing, members)) is not None:
                notes.append(scaled.removeprefix("warning: "))
                log(scaled)
            log(f"{images.name}: one pass over {format_count(len(images), 'image')} for {', '.join(members)}")
            loader = Loader(images, preprocessing, batch_size=batch_size, workers=workers)
            with bar(f"evaluating on {images.name}", len(images), quiet=quiet) as tick:
                logits, targets = collect_logits(forward(members), backbone, loader, tick=tick)
            for name, out in zip(members, logits, strict=True):
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
                if together and models[name].head_kind.has_classes:
                    results[name]["together"] = measure_together(composition, name, own_images, batch_size, workers)
                if (warning := warn_of(found, balanced=bool(models[name].spec.training.get("balance")))) is not None:
                    log(f"warning: {name}: {warning}")
                told_of = [*notes, *filter(None, [warning])]
                about = (models[name], results[name], out, own_targets, own_images, splits, told_of)
                reports[name] = TaskReport(*about, model=composition)
    if report is not None:
        write_report(Path(report), ", ".join(sources), backbone, [reports[name] for name in sources])
    return {name: results[name] for name in sources}


def measure_together(
    model: Composition, name: str, images: ImageSet, batch_size: int = 32, workers: int | None = None
) -> dict[str, float]:
    """The accuracy of a task `alone`, `composed` with the others, and `routed`: then an image goes to the task with the
    highest score, and the answer counts if the task and the class are right. `right_task` is how often the task is."""
    options: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    alone, targets = collect_outputs(model.alone(name), images, [name], **options)
    composed, _ = collect_outputs(model, images, model.names, **options)
    right = [outputs.logits[name].argmax(dim=-1) == targets for outputs in (alone, composed)]
    accuracy = {"alone": float(right[0].double().mean()), "composed": float(right[1].double().mean())}
    candidates = [task for task in model.names if task in composed.recognition]
    if name not in candidates:
        return accuracy
    scores = torch.stack([composed.recognition[task].score for task in candidates])
    chosen = scores.argmax(dim=0) == candidates.index(name)
    return {
        **accuracy,
        "routed": float((chosen & right[1]).double().mean()),
        "right_task": float(chosen.double().mean()),
    }


def together_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """What `measure_together` gives, a row for each task that has it."""
    columns = {"alone": "alone", "composed": "composed", "routed": "routed", "right_task": "right task"}
    rows = [
        [name, str(metrics["images"]), *(_format(metrics["together"], key) for key in columns)]
        for name, metrics in results.items()
        if "together" in metrics
    ]
    return make_table(["task", "images", *columns.values()], rows, "Accuracy", left=1)


def _check_levels(images: ImageSet, preprocessing: Preprocessing, names: Sequence[str]) -> str | None:
    """A note if the tasks of a pass have another scale for pixels of more than 8 bits than these images."""
    levels, white = images.levels, preprocessing.white
    if levels is None or (white is not None and levels.high <= white):
        return None
    found = f"warning: {images.name} has pixels of more than 8 bits, with values up to {levels.high:,.6g}, but"
    if white is None:
        return (
            f"{found} no such images were among the training images of {', '.join(names)}, so their scale is a guess."
        )
    return f"{found} {white:,.6g} is white in the training images of {', '.join(names)}: brighter pixels become white."


def _not_known(unknown: dict[str, int], head: Head, images: ImageSet, names: list[str]) -> str:
    which = ", ".join(f"{label} ({count})" for label, count in list(unknown.items())[:20])
    more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
    what, rest = head.noun, "; their images were left out" if head.has_classes else ""
    count = f"{len(unknown)} {what}{'' if len(unknown) == 1 else 'es' if head.has_classes else 's'}"
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
    """Raises if a set has other labels than the task, or another kind of them."""
    if splits.kind != task.kind:
        raise TrainingError(f"{task.name!r} has a {task.kind} head, but {splits.name} is a {splits.kind} set.")
    if tuple(task.labels) != splits.labels:
        raise TrainingError(f"{splits.name} has other labels than {task.name!r}: load it with labels=task.labels.")


def evaluate_others(
    backbone: Backbone,
    models: Sequence[Task],
    data: Any,
    others: Mapping[str, Any],
    *,
    false_alarms: float = FALSE_ALARMS,
    batch_size: int = 32,
    workers: int | None = None,
    log: Callable[[str], None] = lambda text: None,
    **reading: Any,
) -> dict[str, dict[str, Any]]:
    """For each task: calibration on the test images of its own `data`, and how well it tells `others` from them.

    Images whose familiarity is below `false_alarms` count as unfamiliar.
    `reading` are options of `load_data`; `label_column` is for a task's own images only.
    """
    model = compose(backbone, models)
    sources = dict(data) if type(data) is dict else dict.fromkeys([one.name for one in models], data)
    how: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    unlabelled = {name: value for name, value in reading.items() if name in {"image_column", "allow_absolute", "cache"}}
    unlike = {}
    for other, place in others.items():
        images, skipped = load_any(place, workers, **unlabelled)
        if skipped:
            log(f"note: {other}: {describe_left_out(skipped, 'image', ' that cannot be read')}.")
        unlike[other] = collect_outputs(model, images, list(sources), **how)[0]
    results = {}
    for name, source in sources.items():
        _, images, *_ = load_test_images(source, model.tasks[name], workers=workers, **reading)
        own, targets = collect_outputs(model, images, [name], **how)
        results[name] = _calibration_of(model.tasks[name], own.logits[name], targets)
        if name in own.recognition:
            shares, described = own.recognition[name].familiarity, model.tasks[name].spec.familiarity
            if described is not None and described.images * false_alarms < 1:
                log(
                    f"note: {name}: familiarity is based on {format_count(described.images, 'image')}, too few for a "
                    f"false-alarm rate of {false_alarms:g}: only images more unusual than all of them are unfamiliar."
                )
            results[name] |= {
                "false_alarms": float((shares < false_alarms).double().mean()),
                "histogram": _histogram(shares),
            }
        results[name]["others"] = {}
        for other, found in unlike.items():
            results[name]["others"][other] = _compare(model.tasks[name], own, found)
            if name in found.recognition:
                shares = found.recognition[name].familiarity
                unfamiliar = float((shares < false_alarms).double().mean())
                results[name]["others"][other] |= {"unfamiliar": unfamiliar, "histogram": _histogram(shares)}
    return results


def name_sets(places: Sequence[str]) -> dict[str, str]:
    """Sets by name: that of the file or folder, or the whole path if several have the same name."""
    stems = [Path(place).stem for place in places]
    return {stem if stems.count(stem) == 1 else place: place for stem, place in zip(stems, places, strict=True)}


def _calibration_of(task: Task, logits: Tensor, targets: Tensor) -> dict[str, Any]:
    """For a softmax task: accuracy, calibration error before and after, accuracy over coverage, reliability."""
    found: dict[str, Any] = {"images": len(targets)}
    if not task.head_kind.has_classes:
        return found
    measured = measure_task(task, logits, targets)
    found["accuracy"] = measured["accuracy"]
    if task.spec.calibration is None:
        found["calibration_error_before"] = measured["calibration_error"]
    else:
        found |= {key: measured[key] for key in ("calibration_error_before", "calibration_error")}
    sure, answer = task.probabilities(logits).max(dim=-1)
    right = (answer == targets).double()
    order = sure.argsort(descending=True)
    found["accuracy_over_coverage"] = {
        f"{share:g}": float(right[order[: max(1, round(share * len(order)))]].mean()) for share in COVERAGES
    }
    bins = (sure * 10).long().clamp(max=9)
    found["reliability"] = [
        {"probability": float(sure[bins == at].mean()), "accuracy": float(right[bins == at].mean()), "images": count}
        for at in range(10)
        if (count := int((bins == at).sum()))
    ]
    return found


def _compare(task: Task, own: Outputs, other: Outputs) -> dict[str, Any]:
    name, found = task.name, {"images": len(other.logits[task.name])}
    scores: dict[str, tuple[Tensor, Tensor]] = {}
    if name in own.recognition:
        # The familiarity of most other images is 0: among equals, the score decides.
        first, second = (
            one.familiarity.double() + 1e-7 * one.score for one in (own.recognition[name], other.recognition[name])
        )
        scores["familiarity"] = first, second
    if task.head_kind.has_classes:
        first, second = (task.head_kind.probabilities(one.logits[name]).amax(dim=-1) for one in (own, other))
        scores["softmax"] = first, second
    record: dict[str, Any] = {
        how: {"auroc": auroc(*pair), "false_positives_at_95": false_positives(*pair)} for how, pair in scores.items()
    }
    return {**found, **record}


def _histogram(shares: Tensor) -> list[int]:
    return (shares * 20).long().clamp(max=19).bincount(minlength=20).tolist()


def auroc(own: Tensor, other: Tensor) -> float:
    """How often one of a task's own images has a higher score than one of another set; equal scores count half."""
    ranked = other.double().sort().values
    below = torch.searchsorted(ranked, own.double()) + torch.searchsorted(ranked, own.double(), right=True)
    return float(below.double().mean() / 2 / len(ranked))


def false_positives(own: Tensor, other: Tensor, recall: float = RECALL) -> float:
    """The share of another set's images above the score that `recall` of a task's own images reach."""
    limit = own.double().quantile(1 - recall)
    return float((other.double() >= limit).double().mean())


def others_tables(results: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """The results of `evaluate_others`: a table about the task's own images, one about those of other sets."""
    keys = {
        "calibration_error_before": "calib. error before",
        "calibration_error": "after",
        "false_alarms": "unfamiliar",
    }
    own = [
        [name, str(found["images"]), *(_format(found, key) for key in keys), _coverage(found)]
        for name, found in results.items()
    ]
    columns = ["task", "images", *keys.values(), "accuracy of the surest"]
    tables = [make_table(columns, own, "Own images", left=1)]
    rows = [
        [
            *(name, other, str(record["images"])),
            _format(record, "unfamiliar"),
            *(_format(record.get("familiarity", {}), key) for key in ("auroc", "false_positives_at_95")),
            _format(record.get("softmax", {}), "auroc"),
        ]
        for name, found in results.items()
        for other, record in found["others"].items()
    ]
    heads = ["task", "other set", "images", "unfamiliar", "AUROC", "FPR at 95 %", "softmax AUROC"]
    return [*tables, *([make_table(heads, rows, "Images of other sets", left=2)] if rows else [])]


def _coverage(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{float(k):.0%} {v:.3f}" for k, v in found.get("accuracy_over_coverage", {}).items()) or "-"


def _format(record: Mapping[str, Any], key: str) -> str:
    return f"{record[key]:.4f}" if key in record else "-"
