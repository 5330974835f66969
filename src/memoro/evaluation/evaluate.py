"""`evaluate`: metrics of tasks on a test split, alone and together, and how well they notice images of other sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import RenderableType
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import bar, format_count, make_table, plain_console
from memoro.data import ImageSet, Splits, load_data
from memoro.data.columns import left_out as describe_left_out
from memoro.data.open import has_columns, load_any
from memoro.engine.answers import Outputs, Recognition
from memoro.engine.composition import Composition, compose
from memoro.errors import DataError, TrainingError
from memoro.evaluation.logits import collect_outputs
from memoro.evaluation.metrics import measure_task, metrics_tables, warn_of
from memoro.evaluation.report import TaskReport, write_report
from memoro.evaluation.training_images import describe_learned, describe_origin, find_learned, learned_some
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
    others: Mapping[str, Any] | Sequence[str] = (),
    false_alarms: float = FALSE_ALARMS,
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
    the answers is written. With `together`, tasks of classes have `together`: see `measure_together`. With `others`,
    sets of images that are not for these tasks, they have `trust`: see `measure_trust`.
    """
    tasks = several(tasks)
    model, models = compose(backbone, tasks), by_name(tasks)
    # A DatasetDict is a dict of splits: one set.
    sources = dict(data) if type(data) is dict else dict.fromkeys(models, data)
    for name in sources:
        if name not in models:
            raise DataError(f"no task {name!r} among {', '.join(models)}: write NAME=DATA with one of these.")
    how: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    unlike = _run_others(model, others, list(sources), how, log, reading)  # first: they may be mistyped
    options: dict[str, Any] = {"workers": workers, "quiet": quiet, **reading}
    groups: dict[Any, tuple[EvaluationSet, list[str]]] = {}
    for name, source in sources.items():
        task = models[name]
        column = reading.get("label_column")
        own = name if has_columns(source, task=name, kind=task.kind, labels=task.labels, label_column=column) else ""
        key = (source if isinstance(source, (str, Path)) else id(source), task.spec.labels, task.kind, own)
        if key not in groups:
            groups[key] = load_test_images(source, task, measured_only=report is None, **options), []
        groups[key][-1].append(name)
    results: dict[str, dict[str, Any]] = {}
    reports: dict[str, TaskReport] = {}
    for (splits, images, split, unknown), names in groups.values():
        members = [models[name] for name in names]
        if splits.train is None and split == "test" and any(learned_some(task, images, tasks) for task in members):
            every_split = load_test_images(sources[names[0]], members[0], measured_only=False, **options)
            splits, images, split, unknown = every_split
        learned = find_learned(splits, images, split, members, tasks)
        notes = list(splits.notes)
        if unknown:
            notes.append(_describe_unknown(unknown, members, images))
        notes += [f"warning: {name}: {describe_learned(images, which)}" for name, which in learned.items()]
        notes += describe_origin(images, split, [task for task in members if task.name not in learned], tasks)
        for preprocessing, group in model.passes(names).items():
            notes += _check_levels(images, preprocessing, group)
        for text in notes:
            log(text if text.startswith("warning: ") else f"note: {text}")
        for group in model.passes(names).values():
            log(f"{images.name}: one pass over {format_count(len(images), 'image')} for {', '.join(group)}")
            with bar(f"evaluating on {images.name}", len(images), quiet=quiet) as tick:
                every, all_targets = collect_outputs(model, images, group, tick=tick, **how)
            for name in group:
                task, shown, outputs, targets = models[name], images, every, all_targets
                counted: dict[str, Any] = {"unknown_classes": unknown} if unknown else {}
                if splits.skipped:
                    counted["skipped"] = len(splits.skipped)
                if name in learned:
                    kept = np.flatnonzero(~learned[name])
                    shown, outputs, targets = images.subset(kept), _pick(every, name, kept), all_targets[kept]
                    counted["learned_images"] = len(images) - len(kept)
                found = {"split": split, **measure_task(task, outputs.logits[name], targets), **counted}
                if together and task.head_kind.has_classes:
                    found["together"] = measure_together(model, name, shown, how)
                if unlike:
                    found["trust"] = measure_trust(task, found, outputs, targets, unlike, false_alarms, log)
                warning = warn_of(found, balanced=bool(task.spec.training.get("balance")))
                if warning is not None:
                    log(f"warning: {name}: {warning}")
                told = [*notes, *filter(None, [warning])]
                reports[name] = TaskReport(task, found, outputs.logits[name], targets, shown, splits, told, model=model)
                results[name] = found
    if report is not None:
        write_report(Path(report), ", ".join(sources), backbone, [reports[name] for name in sources])
    return {name: results[name] for name in sources}


def _pick(outputs: Outputs, name: str, kept: Any) -> Outputs:
    """What one task gives for some of the images."""
    recognition = {key: Recognition(*(part[kept] for part in one)) for key, one in outputs.recognition.items()}
    return Outputs({name: outputs.logits[name][kept]}, recognition)


def measure_together(model: Composition, name: str, images: ImageSet, how: Mapping[str, Any]) -> dict[str, float]:
    """The accuracy of a task `alone`, `composed` with the others, and `routed`: then an image goes to the task with the
    highest score, and the answer counts if the task and the class are right. `right_task` is how often the task is."""
    alone, targets = collect_outputs(model.alone(name), images, [name], **how)
    composed, _ = collect_outputs(model, images, model.names, **how)
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


def _check_levels(images: ImageSet, preprocessing: Preprocessing, names: Sequence[str]) -> list[str]:
    """A warning if the tasks of a pass have another scale for pixels of more than 8 bits than these images."""
    levels, white = images.levels, preprocessing.white
    if levels is None or (white is not None and levels.high <= white):
        return []
    found = f"warning: {images.name} has pixels of more than 8 bits, with values up to {levels.high:,.6g}, but"
    those = f"the training images of {', '.join(names)}"
    if white is None:
        return [f"{found} no such images were among {those}, so their scale is a guess."]
    return [f"{found} {white:,.6g} is white in {those}: brighter pixels become white."]


def _describe_unknown(unknown: dict[str, int], tasks: Sequence[Task], images: ImageSet) -> str:
    head, names = tasks[0].head_kind, ", ".join(task.name for task in tasks)
    which = ", ".join(f"{label} ({count})" for label, count in list(unknown.items())[:20])
    more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
    rest = "; their images were left out" if head.has_classes else ""
    count = f"{len(unknown)} {head.noun}{'' if len(unknown) == 1 else 'es' if head.has_classes else 's'}"
    return f"{images.name} has {count} that {names} cannot predict: {which}{more}{rest}."


class EvaluationSet(NamedTuple):
    """What a task is measured on."""

    splits: Splits
    images: ImageSet
    split: str
    """The name of their split."""
    unknown: dict[str, int]
    """How many of its images have a label that the task does not know."""


def load_test_images(source: Any, task: Model, *, measured_only: bool = True, **reading: Any) -> EvaluationSet:
    """The test split of a source, or what there is instead. `reading` are options of `load_data`."""
    splits = source
    if not isinstance(source, Splits):
        known: dict[str, Any] = {"kind": task.kind, "labels": task.labels, "task": task.name, "drop_unknown": True}
        splits = load_data(source, **known, val_fraction=0, measured_only=measured_only, **reading)
    check_labels(task, splits)
    split, images = splits.to_measure()
    return EvaluationSet(splits, images, split, dict(splits.unknown.get("train" if split == "all" else split, {})))


def check_labels(task: Model, splits: Splits) -> None:
    """Raises if a set has other labels than the task, or another kind of them."""
    if splits.kind != task.kind:
        raise TrainingError(f"{task.name!r} has a {task.kind} head, but {splits.name} is a {splits.kind} set.")
    if tuple(task.labels) != splits.labels:
        raise TrainingError(f"{splits.name} has other labels than {task.name!r}: load it with labels=task.labels.")


def _run_others(
    model: Composition,
    others: Mapping[str, Any] | Sequence[str],
    names: Sequence[str],
    how: Mapping[str, Any],
    log: Callable[[str], None],
    reading: Mapping[str, Any],
) -> dict[str, Outputs]:
    """What tasks give for sets of other images, by the name of the set. They need no labels."""
    unlabelled = {name: value for name, value in reading.items() if name in {"image_column", "allow_absolute", "cache"}}
    found = {}
    for other, place in (others if isinstance(others, Mapping) else name_sets(others)).items():
        images, skipped = load_any(place, how["workers"], **unlabelled)
        if skipped:
            log(f"note: {other}: {describe_left_out(skipped, 'image', ' that cannot be read')}.")
        if not len(images):
            raise DataError(f"{other}: there are no images.")
        found[other] = collect_outputs(model, images, names, **how)[0]
    return found


def name_sets(places: Sequence[str]) -> dict[str, str]:
    """Sets by name: that of the file or folder, or the whole path if several have the same name."""
    stems = [Path(place).stem for place in places]
    return {stem if stems.count(stem) == 1 else place: place for stem, place in zip(stems, places, strict=True)}


def measure_trust(
    task: Task,
    metrics: Mapping[str, Any],
    own: Outputs,
    targets: Tensor,
    others: Mapping[str, Outputs],
    false_alarms: float,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """How far a task's answers can be trusted: on its own images calibration, accuracy over coverage, reliability; and
    how well it tells `others` from them. Images whose familiarity is below `false_alarms` count as unfamiliar."""
    name, trust = task.name, dict[str, Any](images=len(targets))
    if task.head_kind.has_classes:
        before = metrics.get("calibration_error_before", metrics["calibration_error"])
        trust |= {"accuracy": metrics["accuracy"], "calibration_error_before": before}
        if task.spec.calibration is not None:
            trust["calibration_error"] = metrics["calibration_error"]
        trust |= _reliability(task.probabilities(own.logits[name]), targets)

    def unfamiliar(outputs: Outputs, share: str) -> dict[str, Any]:
        if name not in outputs.recognition:
            return {}
        shares = outputs.recognition[name].familiarity
        counts = (shares * 20).long().clamp(max=19).bincount(minlength=20)
        return {share: float((shares < false_alarms).double().mean()), "histogram": counts.tolist()}

    known = task.spec.familiarity
    if known is not None and known.images * false_alarms < 1:
        log(
            f"note: {name}: familiarity is based on {format_count(known.images, 'image')}, too few for a false-alarm "
            f"rate of {false_alarms:g}: only images more unusual than all of them are unfamiliar."
        )
    compared = {
        other: {"images": len(found.logits[name]), **_compare(task, own, found), **unfamiliar(found, "unfamiliar")}
        for other, found in others.items()
    }
    return {**trust, **unfamiliar(own, "false_alarms"), "others": compared}


def _reliability(probabilities: Tensor, targets: Tensor) -> dict[str, Any]:
    """Accuracy over the surest answers, and over answers of about the same probability."""
    sure, answer = probabilities.max(dim=-1)
    right = (answer == targets).double()
    order = sure.argsort(descending=True)
    bins = (sure * 10).long().clamp(max=9)
    return {
        "accuracy_over_coverage": {
            f"{share:g}": float(right[order[: max(1, round(share * len(order)))]].mean()) for share in COVERAGES
        },
        "reliability": [
            {"probability": float(sure[own].mean()), "accuracy": float(right[own].mean()), "images": int(own.sum())}
            for own in (bins == at for at in range(10))
            if own.any()
        ],
    }


def _compare(task: Task, own: Outputs, other: Outputs) -> dict[str, Any]:
    """How well familiarity, and the largest probability, tell a task's own images from others."""
    name, head = task.name, task.head_kind
    scores: dict[str, Callable[[Outputs], Tensor]] = {}
    if name in own.recognition:
        scores["familiarity"] = lambda one: _rank(one.recognition[name])
    if head.has_classes:
        scores["softmax"] = lambda one: head.probabilities(one.logits[name]).amax(dim=-1)
    return {
        kind: {
            "auroc": auroc(score(own), score(other)),
            "false_positives_at_95": false_positives(score(own), score(other)),
        }
        for kind, score in scores.items()
    }


def _rank(recognition: Recognition) -> Tensor:
    """Familiarity; among equals the score decides, since the familiarity of most other images is 0."""
    return recognition.familiarity.double() + 1e-7 * recognition.score


def auroc(own: Tensor, other: Tensor) -> float:
    """How often one of a task's own images has a higher score than one of another set; equal scores count half."""
    ranked = other.double().sort().values
    below = torch.searchsorted(ranked, own.double()) + torch.searchsorted(ranked, own.double(), right=True)
    return float(below.double().mean() / 2 / len(ranked))


def false_positives(own: Tensor, other: Tensor, recall: float = RECALL) -> float:
    """The share of another set's images above the score that `recall` of a task's own images reach."""
    limit = own.double().quantile(1 - recall)
    return float((other.double() >= limit).double().mean())


def evaluation_tables(results: dict[str, dict[str, Any]]) -> list[RenderableType]:
    """What `evaluate` gives, for people: metrics, what other images were compared with, and accuracy together."""
    trust = {name: metrics["trust"] for name, metrics in results.items() if "trust" in metrics}
    keys = {
        "calibration_error_before": "calib. error before",
        "calibration_error": "after",
        "false_alarms": "unfamiliar",
    }
    own = [
        [name, str(found["images"]), *(_format(found, key) for key in keys), _coverage(found)]
        for name, found in trust.items()
    ]
    compared = [
        [
            *(name, other, str(record["images"])),
            _format(record, "unfamiliar"),
            *(_format(record.get("familiarity", {}), key) for key in ("auroc", "false_positives_at_95")),
            _format(record.get("softmax", {}), "auroc"),
        ]
        for name, found in trust.items()
        for other, record in found["others"].items()
    ]
    accuracies = {"alone": "alone", "composed": "composed", "routed": "routed", "right_task": "right task"}
    together = [
        [name, str(metrics["images"]), *(_format(metrics["together"], key) for key in accuracies)]
        for name, metrics in results.items()
        if "together" in metrics
    ]
    columns = ["task", "other set", "images", "unfamiliar", "AUROC", "FPR at 95 %", "softmax AUROC"]
    tables = [
        make_table(["task", "images", *keys.values(), "accuracy of the surest"], own, "Own images"),
        make_table(columns, compared, "Images of other sets", left=2),
        make_table(["task", "images", *accuracies.values()], together, "Accuracy"),
    ]
    return [*metrics_tables(results), *(table for table in tables if table.row_count)]


def _coverage(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{float(k):.0%} {v:.3f}" for k, v in found.get("accuracy_over_coverage", {}).items()) or "-"


def _format(record: Mapping[str, Any], key: str) -> str:
    return f"{record[key]:.4f}" if key in record else "-"
