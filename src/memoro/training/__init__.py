"""Training: from images to a task, in four steps: plan, run, finish, save."""

from memoro.training.cached import Cache
from memoro.training.loop import Trainer
from memoro.training.plan import Plan, Setting, combine
from memoro.training.recipe import Recipe, TrainOptions
from memoro.training.result import TrainResult
from memoro.training.run import Run
from memoro.training.train import fit, fit_tasks, train, train_plans, train_runs

__all__ = [
    "Cache",
    "Plan",
    "Recipe",
    "Run",
    "Setting",
    "TrainOptions",
    "TrainResult",
    "Trainer",
    "combine",
    "fit",
    "fit_tasks",
    "train",
    "train_plans",
    "train_runs",
]
