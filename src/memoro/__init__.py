"""memoro teaches one frozen Vision Transformer many tasks. Heavy parts load when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memoro.backbones import Backbone, load_backbone
    from memoro.composition import Composition, compose
    from memoro.errors import (
        BackboneError,
        CompositionError,
        ImageError,
        MemoroError,
        TaskError,
        TaskFileError,
    )
    from memoro.preprocessing import Preprocessing
    from memoro.reproduction import import_tasks
    from memoro.task import Task, new_task
    from memoro.taskfile import load_task, load_tasks, save_task, save_tasks

__version__ = "0.1.0"

_HOME = {
    "Backbone": "backbones",
    "BackboneError": "errors",
    "Composition": "composition",
    "CompositionError": "errors",
    "ImageError": "errors",
    "MemoroError": "errors",
    "Preprocessing": "preprocessing",
    "Task": "task",
    "TaskError": "errors",
    "TaskFileError": "errors",
    "compose": "composition",
    "import_tasks": "reproduction",
    "load_backbone": "backbones",
    "load_task": "taskfile",
    "load_tasks": "taskfile",
    "new_task": "task",
    "save_task": "taskfile",
    "save_tasks": "taskfile",
}

__all__ = [
    "Backbone",
    "BackboneError",
    "Composition",
    "CompositionError",
    "ImageError",
    "MemoroError",
    "Preprocessing",
    "Task",
    "TaskError",
    "TaskFileError",
    "compose",
    "import_tasks",
    "load_backbone",
    "load_task",
    "load_tasks",
    "new_task",
    "save_task",
    "save_tasks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'memoro' has no attribute {name!r}")
    value = getattr(import_module(f"memoro.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
