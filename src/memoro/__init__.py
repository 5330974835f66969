"""memoro teaches one frozen Vision Transformer many tasks. Heavy parts load when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memoro.backbones import Backbone, load_backbone
    from memoro.data import load_columns, load_data
    from memoro.engine.composition import Composition, compose
    from memoro.errors import (
        BackboneError,
        CacheError,
        CompositionError,
        DataError,
        ImageError,
        MemoroError,
        TaskError,
        TaskFileError,
        TrainingError,
    )
    from memoro.evaluation.evaluate import evaluate
    from memoro.images import Preprocessing
    from memoro.regimes import Baseline
    from memoro.regimes.baselinefile import load_baseline, save_baseline
    from memoro.regimes.naive import NaiveConcatenation
    from memoro.tasks.reproduction import import_tasks
    from memoro.tasks.task import Task, new_task
    from memoro.tasks.taskfile import load_task, load_tasks, save_task, save_tasks
    from memoro.training import Cache, Recipe, TrainOptions, fit, fit_tasks, train

__version__ = "0.1.0"

_HOME = {
    "Backbone": "backbones",
    "BackboneError": "errors",
    "Baseline": "regimes",
    "Cache": "training",
    "CacheError": "errors",
    "Composition": "engine.composition",
    "CompositionError": "errors",
    "DataError": "errors",
    "ImageError": "errors",
    "MemoroError": "errors",
    "NaiveConcatenation": "regimes.naive",
    "Preprocessing": "images",
    "Recipe": "training",
    "Task": "tasks.task",
    "TaskError": "errors",
    "TaskFileError": "errors",
    "TrainOptions": "training",
    "TrainingError": "errors",
    "compose": "engine.composition",
    "evaluate": "evaluation.evaluate",
    "fit": "training",
    "fit_tasks": "training",
    "import_tasks": "tasks.reproduction",
    "load_backbone": "backbones",
    "load_baseline": "regimes.baselinefile",
    "load_columns": "data",
    "load_data": "data",
    "load_task": "tasks.taskfile",
    "load_tasks": "tasks.taskfile",
    "new_task": "tasks.task",
    "save_baseline": "regimes.baselinefile",
    "save_task": "tasks.taskfile",
    "save_tasks": "tasks.taskfile",
    "train": "training",
}


__all__ = [
    "Backbone",
    "BackboneError",
    "Baseline",
    "Cache",
    "CacheError",
    "Composition",
    "CompositionError",
    "DataError",
    "ImageError",
    "MemoroError",
    "NaiveConcatenation",
    "Preprocessing",
    "Recipe",
    "Task",
    "TaskError",
    "TaskFileError",
    "TrainOptions",
    "TrainingError",
    "compose",
    "evaluate",
    "fit",
    "fit_tasks",
    "import_tasks",
    "load_backbone",
    "load_baseline",
    "load_columns",
    "load_data",
    "load_task",
    "load_tasks",
    "new_task",
    "save_baseline",
    "save_task",
    "save_tasks",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'memoro' has no attribute {name!r}")
    value = getattr(import_module(f"memoro.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
