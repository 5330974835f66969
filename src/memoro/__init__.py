"""memoro teaches one frozen Vision Transformer many tasks. Heavy parts load when they are used."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

# A public name is listed twice: here for type checkers and editors, which take `as` for a re-export …
if TYPE_CHECKING:
    from memoro.backbones import Backbone as Backbone
    from memoro.backbones import load_backbone as load_backbone
    from memoro.data import load_columns as load_columns
    from memoro.data import load_data as load_data
    from memoro.engine.composition import Composition as Composition
    from memoro.engine.composition import compose as compose
    from memoro.errors import BackboneError as BackboneError
    from memoro.errors import CacheError as CacheError
    from memoro.errors import CompositionError as CompositionError
    from memoro.errors import DataError as DataError
    from memoro.errors import ImageError as ImageError
    from memoro.errors import MemoroError as MemoroError
    from memoro.errors import ServeError as ServeError
    from memoro.errors import TaskError as TaskError
    from memoro.errors import TaskFileError as TaskFileError
    from memoro.errors import TeachError as TeachError
    from memoro.errors import TrainingError as TrainingError
    from memoro.evaluation.evaluate import evaluate as evaluate
    from memoro.images import Preprocessing as Preprocessing
    from memoro.serve.client import Client as Client
    from memoro.similar import ImageIndex as ImageIndex
    from memoro.similar import duplicates as duplicates
    from memoro.similar import embed as embed
    from memoro.similar import similar as similar
    from memoro.tasks.importing import import_tasks as import_tasks
    from memoro.tasks.task import Task as Task
    from memoro.tasks.task import new_task as new_task
    from memoro.tasks.taskfile import load_task as load_task
    from memoro.tasks.taskfile import load_tasks as load_tasks
    from memoro.tasks.taskfile import save_task as save_task
    from memoro.tasks.taskfile import save_tasks as save_tasks
    from memoro.teach.session import teach as teach
    from memoro.teach.suspects import suspects as suspects
    from memoro.training import Cache as Cache
    from memoro.training import Recipe as Recipe
    from memoro.training import TrainOptions as TrainOptions
    from memoro.training import fit as fit
    from memoro.training import fit_tasks as fit_tasks
    from memoro.training import train as train

__version__ = "0.1.0"

# … and here for Python, by the module that it is loaded from at first use.
_PUBLIC = {
    "backbones": ["Backbone", "load_backbone"],
    "data": ["load_columns", "load_data"],
    "engine.composition": ["Composition", "compose"],
    "errors": [
        "BackboneError",
        "CacheError",
        "CompositionError",
        "DataError",
        "ImageError",
        "MemoroError",
        "ServeError",
        "TaskError",
        "TaskFileError",
        "TeachError",
        "TrainingError",
    ],
    "evaluation.evaluate": ["evaluate"],
    "images": ["Preprocessing"],
    "serve.client": ["Client"],
    "similar": ["ImageIndex", "duplicates", "embed", "similar"],
    "tasks.importing": ["import_tasks"],
    "tasks.task": ["Task", "new_task"],
    "tasks.taskfile": ["load_task", "load_tasks", "save_task", "save_tasks"],
    "teach.session": ["teach"],
    "teach.suspects": ["suspects"],
    "training": ["Cache", "Recipe", "TrainOptions", "fit", "fit_tasks", "train"],
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # type checkers are to report a name that is not there

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'memoro' has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f"memoro.{_HOME[name]}"), name)
        return value


class _Package(ModuleType):
    """The package, whose function `teach` is not hidden by the submodule that it comes from."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _HOME or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
