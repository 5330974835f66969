"""Tables of trainings and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from memoro.console import format_bytes, format_count
from memoro.evaluation.metrics import COLUMNS, format_worst
from memoro.tasks.task import Task

if TYPE_CHECKING:
    from memoro.regimes import Baseline
    from memoro.training.sweep import SweepRow


def fit_table(task: Task | Baseline, metrics: dict[str, Any], path: Path) -> Table:
    """What a training gave, for people."""
    table = Table(title=Text(f"{task.name}: {path}"), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    training = task.spec.training
    where = f"{metrics['split']}, {format_count(metrics['images'], 'image')}"
    for name in COLUMNS:
        if metrics.get(name) is not None:
            table.add_row(f"{name.replace('_', ' ')} ({where})", f"{metrics[name]:.4f}")
    if worst := format_worst(metrics, 5):
        table.add_row("worst classes", Text(worst))
    table.add_row("file", format_bytes(path.stat().st_size))
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
