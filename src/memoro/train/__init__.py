"""Training: from images to a task."""

from memoro.train.cached import Cache
from memoro.train.evaluate import evaluate
from memoro.train.fit import fit, fit_tasks, teach
from memoro.train.lessons import Lesson
from memoro.train.recipe import Recipe
from memoro.train.results import FitResult

__all__ = ["Cache", "FitResult", "Lesson", "Recipe", "evaluate", "fit", "fit_tasks", "teach"]
