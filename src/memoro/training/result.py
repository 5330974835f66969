"""What a training returns, writes and reports: the task, the settings that were compared, its file, its report."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import finite, format_bytes, format_count, make_table
from memoro.data import ImageSet, Splits
from memoro.engine.composition import compose
from memoro.errors import TaskFileError, TrainingError
from memoro.evaluation.metrics import COLUMNS, format_worst, name_split, reported, shown_metrics
from memoro.evaluation.report import TaskReport, write_report
from memoro.files import keep_copy
from memoro.regimes import Regime
from memoro.regimes.start import ancestors
from memoro.tasks.record import SKETCH
from memoro.tasks.spec import Model
from memoro.tasks.task import Task
from memoro.training.recipe import REPORT, TrainOptions

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class SettingRow:
    """One combination of cells, fork, rank and learning rate, over its seeds."""

    cells: int
    from_layer: int
    rank: int
    lr: float
    val: tuple[float, ...]
    """Best validation score of each seed that did not diverge."""
    val_loss: float
    test: tuple[float, ...] = ()
    """Test scores, of the chosen setting only: those of the others would tempt one to choose by them."""
    diverged: int = 0
    chosen: bool = False

    @property
    def order(self) -> tuple[bool, float, float]:
        """Higher is better. A setting that diverged with some seed is not to be trusted: it comes after all others."""
        return self.diverged == 0, mean(self.val) if self.val else float("-inf"), -self.val_loss


@dataclass(frozen=True)
class TrainResult:
    """A trained task and how its training went: the best run, the settings that were tried, the files that were
    written."""

    task: Task
    """With its best weights. (The laboratory has baselines here.)"""
    history: list[dict[str, Any]] = field(repr=False)
    """One entry per epoch. If folds were held out, `fold_loss` and the like are the means over their runs."""
    metrics: dict[str, Any]
    """Those of the test split, or of the validation split if there is none; `split` says which. Empty for a run that
    diverged while others did not; the last note says why."""
    folder: Path | None
    notes: tuple[str, ...]
    logits: Tensor | None = field(default=None, repr=False)
    """Its answers to the images of that split."""
    targets: Tensor | None = field(default=None, repr=False)
    images: ImageSet | None = field(default=None, repr=False)
    rows: Sequence[SettingRow] = field(default=(), repr=False)
    """The settings that were compared, if there were several."""
    score_name: str = ""
    """What they were compared by."""
    file: Path | None = None
    previous: Path | None = None
    """The path at which the earlier file is kept."""
    skipped: Sequence[Any] = field(default=(), repr=False)
    """Images that could not be read: where, and why."""

    def __iter__(self) -> Iterator[Any]:
        """`task, history, metrics = fit(…)`"""
        return iter((self.task, self.history, self.metrics))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready record; `failed` if every run of the task diverged."""
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
        """The settings that were compared, if there were several."""
        return sweep_table(self.task.name, self.rows, self.score_name) if self.rows else None


def fit_table(result: TrainResult) -> Table:
    """Metrics of the chosen run, its file and its training, for people."""
    task, metrics, training = result.task, reported(result.metrics), result.task.spec.training
    where = f"{name_split(metrics['split'])}, {format_count(metrics['images'], 'image')}"
    rows = [(f"{COLUMNS[key]} ({where})", f"{value:.4f}") for key, value in shown_metrics(metrics).items()]
    rows += [
        ("worst classes", format_worst(metrics, 5)),
        ("file", "" if result.file is None else format_bytes(result.file.stat().st_size)),
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


def sweep_table(name: str, rows: Sequence[SettingRow], score_name: str) -> Table:
    """Every combination with its score: the chosen one, then the others, best first."""
    ranked = sorted(rows, key=lambda row: (row.chosen, row.order), reverse=True)
    averaged = sum(row.chosen for row in rows)
    columns = {
        "cells": [str(row.cells) for row in ranked],
        "rank": [str(row.rank) for row in ranked],
        "from layer": [str(row.from_layer) for row in ranked],
        "lr": [f"{row.lr:g}" for row in ranked],
        score_name: [_mean_and_range(row.val) for row in ranked],
    }
    if not any(row.rank for row in rows):
        del columns["rank"]
    if any(row.test for row in rows):
        columns[f"test {score_name.partition(' ')[2]}"] = [
            _mean_and_range(row.test) if row.test else "" for row in ranked
        ]
    first = "the chosen one first" if averaged == 1 else f"the first {averaged} averaged"
    first = "all averaged" if averaged == len(rows) > 1 else first
    if any(row.diverged for row in rows):
        columns["diverged"] = [str(row.diverged or "") for row in ranked]
    return make_table(list(columns), zip(*columns.values(), strict=True), f"{name}: settings tried ({first})", left=0)


def _mean_and_range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = f"{mean(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"


def choose_target(out: str | Path, *, several: bool) -> Path:
    """Where task files are written: a file, or a folder. Raises before the training if they could not be; a folder
    is created if the text ends with a slash, which a Path does not keep."""
    target = Path(out)
    try:
        if str(out).endswith(("/", os.sep)):
            target.mkdir(parents=True, exist_ok=True)
        if several and (target.is_file() or target.suffix == SUFFIX):
            raise TrainingError(f"`out={target}` is a file, but several tasks need a folder, such as `out='tasks/'`.")
        folder = target if several or target.is_dir() else target.absolute().parent
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TrainingError(f"`out={target}` cannot be written ({error.strerror}): choose another place.") from None
    return target


def has_content(file: Path, task: Model, regime: Regime) -> bool:
    """Whether a file holds this very task, as after a finished training was resumed."""
    try:
        return regime.read_hashes(file) == [task.content_hash()]
    except TaskFileError:
        return False


def name_files(target: Path, names: Sequence[str]) -> dict[str, Path]:
    """The file of each task."""
    folder = len(names) > 1 or target.is_dir()
    return {name: target / (name + SUFFIX) if folder else target for name in names}


def save_tasks(
    results: Sequence[TrainResult],
    files: Mapping[str, Path],
    leftovers: Sequence[Path],
    regime: Regime,
    options: TrainOptions,
) -> list[TrainResult]:
    """Writes the tasks' files, and removes the leftovers of writes that were killed before this training began. (What
    another training was writing then has its own name by now.) A task that diverged has no file."""
    saved = []
    for result in results:
        file = files.get(result.task.name) if result.metrics else None
        if file is not None:
            result = replace(result, file=file)
            result = _save(result, file, regime, options) if options.processes.main else result
        saved.append(result)
    for part in leftovers if options.processes.main else ():
        part.unlink(missing_ok=True)
    return saved


def _save(result: TrainResult, file: Path, regime: Regime, options: TrainOptions) -> TrainResult:
    """Writes the task's file; another model that is there already is kept under another name."""
    task, previous = result.task, None
    try:
        if file.is_file() and not has_content(file, task, regime):
            previous = keep_copy(file)
            options.note(f"{file} was there already: the old file is kept as {previous}.")
        regime.save(task, file)
    except TaskFileError as error:
        again = "Fix the problem, then train again with `resume=True` to write the file."
        rest = "" if result.folder is None else f" The weights are saved in {result.folder}. {again}"
        raise TaskFileError(f"{error}{rest}") from None
    return replace(result, previous=previous)


def save_report(
    backbone: Backbone, results: Sequence[TrainResult], splits: Sequence[Splits], options: TrainOptions
) -> None:
    """Writes `report.html` into the run folder, if there is one.

    A training does not fail because of its report: a note says why there is none.
    """
    if options.written is None:
        return
    path = options.written / REPORT
    try:
        pairs = zip(results, splits, strict=True)
        reports = [_report(backbone, result, own) for result, own in pairs if result.metrics]
        write_report(path, ", ".join(report.task.name for report in reports), backbone, reports)
    except Exception as error:
        options.note(f"{path} could not be written: {str(error) or type(error).__name__}")


def _report(backbone: Backbone, result: TrainResult, splits: Splits) -> TaskReport:
    assert result.logits is not None
    assert result.targets is not None
    assert result.images is not None
    task = result.task
    return TaskReport(
        task,
        result.metrics,
        result.logits,
        result.targets,
        result.images,
        splits,
        notes=result.notes,
        model=compose(backbone, [*ancestors([task]), task]) if isinstance(task, Task) else None,
        history=result.history,
        settings=result.settings_table(),
        file=result.file,
    )
