"""Training: from images to a task."""

from memoro.train.fit import FitResult, fit, fit_many
from memoro.train.recipe import Recipe

__all__ = ["FitResult", "Recipe", "fit", "fit_many"]
