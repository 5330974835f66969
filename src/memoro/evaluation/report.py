"""Tables for people: what a task file holds, what a benchmark measured.

Names of tasks, labels and files are put in as `Text`: what looks like markup in them is shown as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from memoro.backbones import Backbone
from memoro.console import say_bytes, say_images
from memoro.tasks.spec import BackboneRecord
from memoro.tasks.task import Task

if TYPE_CHECKING:
    from memoro.bench.engine import EngineRow
    from memoro.bench.time_to_accuracy import TimeToAccuracy
    from memoro.bench.train import TrainRow
    from memoro.regimes import Baseline
    from memoro.regimes.baseline import BaselineSpec
    from memoro.training.sweep import SweepRow


def inspect_tasks(path: Path, tasks: Sequence[Task], backbone: Backbone | None = None) -> dict[str, Any]:
    """All that a file says of its tasks, JSON-ready; with a backbone also whether it is theirs."""
    entries = []
    for task in tasks:
        spec = task.spec
        entry: dict[str, Any] = {
            "name": spec.name,
            "kind": spec.kind,
            "labels": list(spec.labels),
            "cells": spec.cells,
            "from_layer": spec.from_layer,
            "memory_norm": spec.memory_norm,
            "parents": [parent.name for parent in task.parents],
            "parameters": sum(parameter.numel() for parameter in task.parameters()),
            "content": task.content_hash(),
            "backbone": _backbone(spec.backbone, backbone),
            "preprocessing": None if spec.preprocessing is None else spec.preprocessing.to_json(),
            "training": dict(spec.training),
            "metrics": dict(spec.metrics),
        }
        entries.append(entry)
    return {"file": str(path), "bytes": os.path.getsize(path), "tasks": entries}


def inspect_baseline(
    path: Path, spec: BaselineSpec, content: str, parameters: int, backbone: Backbone | None = None
) -> dict[str, Any]:
    """The same for a baseline's file."""
    entry = {
        "name": spec.name,
        "kind": spec.kind,
        "labels": list(spec.labels),
        "regime": spec.regime,
        "sizes": dict(spec.sizes),
        "parameters": parameters,
        "content": content,
        "backbone": _backbone(spec.backbone, backbone),
        "preprocessing": None if spec.preprocessing is None else spec.preprocessing.to_json(),
        "training": dict(spec.training),
        "metrics": dict(spec.metrics),
    }
    return {"file": str(path), "bytes": os.path.getsize(path), "baseline": entry}


def _backbone(made: BackboneRecord, here: Backbone | None) -> dict[str, Any]:
    record = {
        "name": made.name,
        "family": made.family,
        "depth": made.depth,
        "dim": made.dim,
        "fingerprint": made.fingerprint.digest,
        "dtype": made.fingerprint.dtype,
    }
    return record if here is None else {**record, "match": made.fingerprint.match(here.fingerprint)}


def inspect_table(record: dict[str, Any]) -> Table:
    """The record of a file as a table, a column a task."""
    tasks = record["tasks"] if "tasks" in record else [record["baseline"]]
    table = Table(title=Text(f"{record['file']}  ({say_bytes(record['bytes'])})"), title_justify="left")
    table.add_column("")
    for task in tasks:
        table.add_column(Text(task["name"]), overflow="fold")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "labels": lambda t: f"{len(t['labels'])}: {_shorten(t['labels'])}",
        "head": lambda t: t["kind"],
        "regime": lambda t: f"{t['regime']}, a pass of its own: cannot be composed" if "regime" in t else "",
        "sizes": lambda t: ", ".join(f"{size} {name}" for name, size in t.get("sizes", {}).items()),
        "memory": lambda t: (
            f"{t['cells']} cells a layer, {'before' if t['memory_norm'] == 'pre' else 'after'} the norm"
            if "cells" in t
            else ""
        ),
        "stream": lambda t: _stream(t["from_layer"], t["backbone"]["depth"]) if "from_layer" in t else "",
        "extends": lambda t: (", ".join(t["parents"]) or "nothing") if "parents" in t else "",
        "parameters": lambda t: f"{t['parameters']:,}",
        "backbone": lambda t: (
            f"{t['backbone']['name']}\n{t['backbone']['family']}, {t['backbone']['depth']} layers of "
            f"{t['backbone']['dim']}, {t['backbone']['dtype']}\nfingerprint {t['backbone']['fingerprint'][:12]}"
        ),
        "this backbone": lambda t: t["backbone"].get("match", ""),
        "images": lambda t: _images(t["preprocessing"]),
        "metrics": lambda t: "\n".join(_lines(t["metrics"])) or "-",
        "training": lambda t: "\n".join(_lines(t["training"])) or "-",
        "content": lambda t: t["content"][:12],
    }
    for name, show in rows.items():
        cells = [show(task) for task in tasks]
        if any(cells):
            table.add_row(name, *map(Text, cells))
    return table


def engine_table(title: str, rows: Sequence[EngineRow]) -> Table:
    """Benchmark rows as a table; every cost in plain base passes."""
    table = Table(title=f"{title}: cost of one pass, in plain base passes", title_justify="left")
    for column in ("tasks", "fork", "memoro", "arithmetic limit", "dense mask", "separate passes"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.tasks),
            str(row.fork),
            f"{row.engine:.2f}",
            f"{row.limit:.2f}",
            "" if row.dense is None else f"{row.dense:.2f}",
            f"{row.separate:.1f}",
        )
    return table


def train_table(title: str, rows: Sequence[TrainRow]) -> Table:
    """Benchmark rows of training steps as a table."""
    table = Table(title=f"{title}: one training step", title_justify="left")
    table.add_column("way")
    for column in ("base passes", "steps per second", "peak memory, MB", "parameters trained"):
        table.add_column(column, justify="right")
    for row in rows:
        peak = "" if row.megabytes is None else f"{row.megabytes:,.0f}"
        table.add_row(row.name, f"{row.step:.2f}", f"{row.steps_per_second:.2f}", peak, f"{row.trained:,}")
    return table


def reach_table(title: str, found: Sequence[TimeToAccuracy]) -> Table:
    """Seconds to a given accuracy, a row for each approach."""
    table = Table(title=Text(title), title_justify="left")
    table.add_column("way")
    for column in ("optimiser", "lr", "seconds to the goal", "epochs", "best accuracy"):
        table.add_column(column, justify="right")
    for reach in found:
        how, seconds = reach.approach, reach.seconds
        reached = "diverged" if not reach.curve else "not reached" if seconds is None else f"{seconds:.0f}"
        best = f"{reach.best:.3f}" if reach.curve else ""
        table.add_row(how.name, how.optimizer, f"{how.lr:g}", reached, str(len(reach.curve)), best)
    return table


def metrics_table(results: dict[str, dict[str, Any]]) -> Table:
    """Figures of several tasks, a row each; columns that none of them fills are left out."""
    columns = [name for name in COLUMNS if any(metrics.get(name) is not None for metrics in results.values())]
    worst = {name: _worst(metrics, 3) for name, metrics in results.items()}
    table = Table()
    table.add_column("task")
    table.add_column("split")
    for column in ["images", *columns]:
        table.add_column(column.replace("_", " ").replace("calibration", "calib."), justify="right")
    if any(worst.values()):
        table.add_column("worst classes")
    for name, metrics in results.items():
        figures = [f"{metrics[column]:.4f}" if metrics.get(column) is not None else "" for column in columns]
        last = [Text(worst[name])] if any(worst.values()) else []
        table.add_row(Text(name), metrics["split"], str(metrics["images"]), *figures, *last)
    return table


COLUMNS = (
    "accuracy",
    "balanced_accuracy",
    "calibration_error",
    "exact_match",
    "mean_average_precision",
    "mean_absolute_error",
    "r2",
    "loss",
)


def fit_table(task: Task | Baseline, metrics: dict[str, Any], path: Path) -> Table:
    """What a training gave, for people."""
    table = Table(title=Text(f"{task.name}: {path}"), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    training = task.spec.training
    where = f"{metrics['split']}, {say_images(metrics['images'])}"
    for name in COLUMNS:
        if metrics.get(name) is not None:
            table.add_row(f"{name.replace('_', ' ')} ({where})", f"{metrics[name]:.4f}")
    if worst := _worst(metrics, 5):
        table.add_row("worst classes", Text(worst))
    table.add_row("file", say_bytes(path.stat().st_size))
    table.add_row("parameters trained", f"{training['trained_parameters']:,}")
    table.add_row("best epoch", f"{training['best_epoch']} of {training['epochs']}")
    table.add_row("time", f"{training['seconds']:.0f} s")
    return table


def sweep_table(name: str, rows: Sequence[SweepRow]) -> Table:
    """Every combination of a sweep, best first by validation; the chosen one is the first."""
    table = Table(title=Text(f"{name}: what was tried, best first"), title_justify="left")
    columns: dict[str, Callable[[SweepRow], str]] = {
        "cells": lambda row: str(row.cells),
        "from layer": lambda row: str(row.from_layer),
        "rate": lambda row: f"{row.lr:g}",
        "validation": lambda row: _spread(row.val),
    }
    if any(row.test for row in rows):
        columns["test"] = lambda row: _spread(row.test)
    if any(row.diverged for row in rows):
        columns["diverged"] = lambda row: str(row.diverged or "")
    for column in columns:
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: row.rank, reverse=True):
        table.add_row(*(show(row) for show in columns.values()))
    return table


def _spread(values: Sequence[float]) -> str:
    """The mean, and the range where there are several."""
    if not values:
        return "-"
    middle = f"{sum(values) / len(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"


def _shorten(labels: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(labels[:most])
    return shown if len(labels) <= most else f"{shown}, …"


def _images(record: dict[str, Any] | None) -> str:
    if record is None:
        return "as the backbone says"
    size = record["crop"] or record["resize"]
    return f"{size[0]}x{size[1]}" if isinstance(size, (list, tuple)) else str(size)


def _stream(first: int, depth: int) -> str:
    """The layers that a task's own token goes through."""
    if first >= depth:
        return "none: a head on the final token"
    return f"layer {first}" if first == depth - 1 else f"layers {first} to {depth - 1}"


def _worst(metrics: dict[str, Any], most: int) -> str:
    """The classes that are wrong most often, with the share that is right; those without a mistake are not bad."""
    wrong = {label: share for label, share in metrics.get("worst_classes", {}).items() if share < 1}
    return ", ".join(f"{label} {share:.3f}" for label, share in list(wrong.items())[:most])


def _lines(record: dict[str, Any]) -> list[str]:
    """A line for each entry that says something."""
    shown = {**record, "worst_classes": _worst(record, 5)} if "worst_classes" in record else record
    return [f"{name.replace('_', ' ')} {_value(value)}" for name, value in shown.items() if value != ""]


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
