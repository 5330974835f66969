"""The report of a training, in its run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memoro.backbones import Backbone
from memoro.data import Splits
from memoro.engine.composition import compose
from memoro.evaluation.report import TaskReport, write_report
from memoro.tasks.task import Task
from memoro.training.distributed import find_processes
from memoro.training.finish import FitResult
from memoro.training.recipe import REPORT, TrainOptions
from memoro.training.run import ancestors


def report_training(
    backbone: Backbone,
    results: Sequence[FitResult],
    splits: Sequence[Splits],
    options: TrainOptions,
    more: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Writes `report.html` into the run folder, if there is one. `more` has further fields of each `TaskReport`.

    A training does not fail because of its report: a note says why there is none.
    """
    if options.folder is None or not find_processes(backbone.device).main:
        return
    path = options.folder / REPORT
    try:
        given = zip(results, splits, more or [{}] * len(results), strict=True)
        reports = [_report(backbone, result, own, fields) for result, own, fields in given if result.metrics]
        write_report(path, ", ".join(report.task.name for report in reports), backbone, reports)
    except Exception as error:
        options.note(f"{path} could not be written: {str(error) or type(error).__name__}")


def _report(backbone: Backbone, result: FitResult, splits: Splits, fields: Mapping[str, Any]) -> TaskReport:
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
        **fields,
    )
