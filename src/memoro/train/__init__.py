"""Training: from images to a task."""

from memoro.train.evaluate import evaluate
from memoro.train.fit import FitResult, fit, fit_many
from memoro.train.recipe import Recipe

__all__ = ["FitResult", "Recipe", "evaluate", "fit", "fit_many"]
