"""Training: from images to a task."""

from memoro.evaluation.evaluate import evaluate
from memoro.training.cached import Cache
from memoro.training.fit import FitResult, fit, fit_tasks, train_runs
from memoro.training.group import RunSpec
from memoro.training.recipe import Recipe

__all__ = ["Cache", "FitResult", "Recipe", "RunSpec", "evaluate", "fit", "fit_tasks", "train_runs"]
