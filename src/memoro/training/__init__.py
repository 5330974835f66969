"""Training: from images to a task."""

from memoro.training.cached import Cache
from memoro.training.finish import FitResult
from memoro.training.fit import fit, fit_tasks, train_runs
from memoro.training.group import RunSpec
from memoro.training.loop import Trainer
from memoro.training.recipe import Recipe, TrainOptions
from memoro.training.result import TrainResult
from memoro.training.train import train

__all__ = [
    "Cache",
    "FitResult",
    "Recipe",
    "RunSpec",
    "TrainOptions",
    "TrainResult",
    "Trainer",
    "fit",
    "fit_tasks",
    "train",
    "train_runs",
]
