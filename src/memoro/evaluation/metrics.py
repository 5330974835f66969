"""Metrics of a task, from its logits on a set of images: overall, of each class, and the most confident mistakes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from memoro.console import format_count, make_table, printable
from memoro.heads import HEADS, HeadKind, confusion
from memoro.pages.plots import MAX_CONFUSION
from memoro.tasks.calibration import Calibration, decide_unseen
from memoro.tasks.record import finite_number
from memoro.tasks.spec import TaskModule

COLUMNS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "calibration_error": "calibration error",
    "mean_average_precision": "mAP",
    "f1": "F1",
    "exact_match": "exact match",
    "label_accuracy": "label accuracy",
    "r2": "R²",
    "mean_absolute_error": "mean absolute error",
    "loss": "loss",
}
"""The metrics that are shown, in this order, and what they are called everywhere."""

UNEVEN = 10
"""If the largest class has this many times the images of the smallest, accuracy mostly measures the large ones."""

NO_BETTER = 0.05
"""An R² below this is no better than always predicting the mean."""


def measure(kind: HeadKind, labels: Sequence[str], logits: Tensor, targets: Tensor) -> dict[str, Any]:
    """JSON-ready metrics over a whole set: `images`, `loss`, and those of `Head.measure`."""
    head, targets = HEADS[kind], targets.cpu()
    logits, count = logits.detach().float().cpu(), len(targets)
    loss = float(head.loss_sum(logits, targets)) / max(count, 1)
    shown = head.measure(labels, head.probabilities(logits), targets) if count and math.isfinite(loss) else {}
    return {"images": count, "loss": loss, **shown}


def measure_task(task: TaskModule[Any], logits: Tensor, targets: Tensor, *, fitted_on: bool = False) -> dict[str, Any]:
    """The metrics of what `predict` answers: calibrated if the task is. The loss is that of the
    logits.

    `fitted_on`: the calibration was fitted on these very answers, so it is judged by others like it (`decide_unseen`).
    """
    before = measure(task.kind, task.labels, logits, targets)
    if task.spec.calibration is None:
        return before
    decided = decide_unseen(task.kind, logits, targets) if fitted_on else task.spec.calibration.decide(logits)
    if decided is None:
        return before
    after = measure(task.kind, task.labels, decided, targets)
    changed = {name: after[name] for name in task.head_kind.calibrated_metrics if name in after}
    former = {f"{name}_before": before[name] for name in changed if name == "calibration_error"}
    return {**before, **changed, **former}


def score(kind: HeadKind, metrics: dict[str, Any]) -> tuple[float, float]:
    """What runs are compared by, higher is better: the kind's main metric, then a lower loss."""
    value = metrics.get(HEADS[kind].main_metric)
    return (-math.inf if value is None else value), -metrics["loss"]


def add_folds(
    history: Sequence[dict[str, Any]], folds: Sequence[Sequence[dict[str, Any]]], images: Sequence[int]
) -> list[dict[str, Any]]:
    """The history of a run on all images, with what the folds have on those that they hold out: `fold_loss` and the
    like are means of their `val_loss` and the like, weighted by their numbers of `images`."""
    found = [dict(entry) for entry in history]
    for entry, parts in zip(found, zip(*folds, strict=False), strict=False):
        for name in parts[0]:
            if name.startswith("val_") and all(name in part for part in parts):
                total = sum(part[name] * count for part, count in zip(parts, images, strict=True))
                entry[f"fold_{name.removeprefix('val_')}"] = total / sum(images)
    return found


def name_split(split: str) -> str:
    """What a split is called in tables."""
    return "validation" if split == "val" else split


def reported(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics without scores on images that were learned from: these are not a result."""
    return {
        name: value for name, value in metrics.items() if metrics["split"] != "train" or name in {"split", "images"}
    }


def shown_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics to show to people, the most informative one first."""
    keys = [key for key in COLUMNS if metrics.get(key) is not None]
    if _is_uneven(metrics):
        keys.sort(key=lambda key: key != "balanced_accuracy")
    return {key: metrics[key] for key in keys}


def _is_uneven(metrics: Mapping[str, Any]) -> bool:
    return bool(metrics.get("imbalance", 1) >= UNEVEN)


def warn_of(metrics: dict[str, Any], *, balanced: bool = False) -> str | None:
    """What a user must know before using a model with these metrics; None: nothing. `balanced`: whether it was trained
    with weights against uneven classes."""
    split, most = name_split(metrics.get("split", "")), metrics.get("majority_accuracy")
    if split == "train":
        return (
            f"all {format_count(metrics['images'], 'image')} were trained on, so there is no estimate of its accuracy: "
            "add test images, or more images of each class, so that some can be held out."
        )
    advice = "" if balanced else " `balance=True` gives rare classes more weight."
    if most is not None and metrics["accuracy"] <= most < 1:  # 1: all images are of one class
        right = metrics["accuracy"]
        text = f"accuracy is {right:.3f} ({split}): no better than always predicting the most frequent class."
        return text + advice if _is_uneven(metrics) else text
    if _is_uneven(metrics):
        right, even = metrics["accuracy"], metrics["balanced_accuracy"]
        times = f"the largest class has {metrics['imbalance']:.0f} times the images of the smallest"
        return f"balanced accuracy is {even:.3f} ({split}); accuracy, {right:.3f}, says little, as {times}.{advice}"
    value = metrics.get("r2")
    if value is None or value >= NO_BETTER:
        return None
    return f"R² is {value:.3f} ({split}): no better than always predicting the mean."


def recorded(kind: HeadKind, metrics: dict[str, Any], logits: Tensor, targets: Tensor) -> dict[str, Any]:
    """The metrics as a task's file keeps them: without those that are undefined, with the confusion of few classes."""
    found = {name: value for name, value in reported(metrics).items() if value is not None}
    if HEADS[kind].has_classes and logits.shape[-1] <= MAX_CONFUSION and metrics["split"] != "train":
        found["confusion"] = confusion(logits, targets).tolist()
    return found


def metrics_tables(results: dict[str, dict[str, Any]]) -> list[RenderableType]:
    """Metrics of several tasks, a row each, in a table for each kind of task; then the worst classes of each."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, metrics in results.items():
        alike.setdefault(tuple(shown_metrics(metrics)), []).append(name)
    shown: list[RenderableType] = []
    for keys, names in alike.items():
        columns = ["task", "split", "images", *(COLUMNS[key].replace("calibration", "calib.") for key in keys)]
        found = [(name, results[name]) for name in names]
        rows = [
            [name, name_split(metrics["split"]), str(metrics["images"]), *(f"{metrics[key]:.4f}" for key in keys)]
            for name, metrics in found
        ]
        shown.append(make_table(columns, rows, left=2))
    worst = {name: format_worst(metrics, 5) for name, metrics in results.items()}
    return [*shown, *(Text(printable(f"{name}, worst classes: {text}")) for name, text in worst.items() if text)]


def format_worst(metrics: dict[str, Any], most: int) -> str:
    """The classes with the lowest recall; those without a mistake, and values that are not recalls, are left out."""
    found = metrics.get("worst_classes")
    recalls = ((label, finite_number(value)) for label, value in (found.items() if isinstance(found, dict) else ()))
    wrong = [(label, recall) for label, recall in recalls if recall is not None and recall < 1]
    return ", ".join(f"{label} {recall:.3f}" for label, recall in wrong[:most])


def decide(kind: HeadKind, logits: Tensor, calibration: Calibration | None = None) -> tuple[Tensor, Tensor]:
    """The probabilities, calibrated if there is a calibration, and which labels a task with several gives."""
    logits = logits.cpu()  # MPS has no float64
    if calibration is None:
        return HEADS[kind].probabilities(logits), logits >= 0
    return HEADS[kind].probabilities(calibration.apply(logits)), calibration.decide(logits) >= 0
