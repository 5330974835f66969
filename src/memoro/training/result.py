"""What a training returns: the best run, the settings that were compared, and the files that were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from memoro.console import finite, format_bytes, format_count, make_table
from memoro.evaluation.metrics import COLUMNS, format_worst, name_split, reported, shown_metrics
from memoro.evaluation.training_images import SKETCH
from memoro.training.finish import FitResult
from memoro.training.recipe import REPORT
from memoro.training.sweep import SweepRow, sweep_table


@dataclass(frozen=True)
class TrainResult(FitResult):
    """What `train` returns for a task: the best run, the settings that were tried, and the files that were written."""

    rows: Sequence[SweepRow] = field(default=(), repr=False)
    """The settings that were compared, if there were several."""
    score_name: str = ""
    """What they were compared by."""
    file: Path | None = None
    previous: Path | None = None
    """Where the file that was there before is kept."""
    skipped: Sequence[Any] = field(default=(), repr=False)
    """Images that could not be read: where, and why."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready record; `failed` where every run of the task diverged."""
        task = self.task
        if not self.metrics:
            return {"task": task.name, "failed": self.notes[-1]}
        record = {
            "task": task.name,
            "file": None if self.file is None else str(self.file),
            "bytes": None if self.file is None else self.file.stat().st_size,
            "previous": None if self.previous is None else str(self.previous),
            "folder": None if self.folder is None else str(self.folder),
            "metrics": reported(self.metrics),
            "training": {name: value for name, value in task.spec.training.items() if name != SKETCH},
            "notes": list(self.notes),
            "skipped": [list(entry) for entry in self.skipped],
        }
        if self.rows:
            sizes = {"cells": task.cells, "rank": task.rank, "from_layer": task.from_layer}
            chosen = {**sizes, "lr": task.spec.training["lr"]}
            runs = finite([asdict(row) for row in self.rows])  # a setting whose runs all diverged has no loss
            record |= {"chosen": chosen, "compared_by": self.score_name, "runs": runs}
        return record

    def tables(self) -> list[RenderableType]:
        """The same for people."""
        if not self.metrics:
            return [f"{self.task.name}: no file was written: {self.notes[-1]}."]
        compared = filter(None, [self.settings_table()])
        report = None if self.folder is None else self.folder / REPORT
        return [*compared, fit_table(self), *([f"report: {report}"] if report is not None and report.is_file() else [])]

    def settings_table(self) -> Table | None:
        """The settings that were compared, where there were several."""
        return sweep_table(self.task.name, self.rows, self.score_name) if self.rows else None


def fit_table(result: TrainResult) -> Table:
    """Metrics of the chosen run, its file and its training, for people."""
    task, metrics, training = result.task, reported(result.metrics), result.task.spec.training
    where = f"{name_split(metrics['split'])}, {format_count(metrics['images'], 'image')}"
    rows = [(f"{COLUMNS[key]} ({where})", f"{value:.4f}") for key, value in shown_metrics(metrics).items()]
    rows += [
        ("worst classes", format_worst(metrics, 5)),
        ("file", "" if result.file is None else format_bytes(result.file.stat().st_size)),
        ("ensemble", f"mean of {training['ensemble']} runs" if "ensemble" in training else ""),
        ("parameters trained", f"{training['trained_parameters']:,}"),
        ("best epoch", f"{training['best_epoch']} of {training['epochs']}" if "epochs" in training else ""),
        ("time", _format_time(training["seconds"], training.get("phases", {}))),
    ]
    title = task.name if result.file is None else f"{task.name}: {result.file}"
    table = make_table(["", ""], [row for row in rows if row[1]], title)
    table.show_header, table.columns[0].no_wrap = False, True
    return table


def _format_time(seconds: float, phases: Mapping[str, float]) -> str:
    """`197 s: reading 3, checking 20, …`, without phases of less than half a second."""
    parts = ", ".join(f"{name} {value:.0f}" for name, value in phases.items() if value >= 0.5)
    return f"{seconds:.0f} s" + (f": {parts}" if parts else "")
