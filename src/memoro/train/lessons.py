"""Lessons: what is to be trained on what; those over the same images become one course."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import ImageSet, ImageStream, Loader, Splits, Streams
from memoro.errors import TrainingError
from memoro.preprocessing import Preprocessing
from memoro.regimes import Baseline, Regime
from memoro.task import Task
from memoro.train.cached import Cache, CachedLoader, Room
from memoro.train.course import Batches, Course, Exam
from memoro.train.objective import class_weights
from memoro.train.processes import ALONE, Processes
from memoro.train.recipe import Recipe
from memoro.train.runs import Goal, Run, ancestors

SHARED = ("epochs", "steps", "batch_size", "accumulate", "augment", "views", "precision", "data_seed")
"""What runs over the same images must have in common to share a pass."""


@dataclass(frozen=True)
class Lesson:
    """One run to be."""

    task: Task | Baseline
    recipe: Recipe
    regime: Regime
    splits: Splits | Streams
    preprocessing: Preprocessing
    held: npt.NDArray[np.int64] | None = None
    """Training images that it does not learn from but is scored on: a fold."""

    def __post_init__(self) -> None:
        if not self.splits.train:
            raise TrainingError(f"{self.splits.name} has no training images.")

    @property
    def train(self) -> ImageSet | ImageStream:
        assert self.splits.train is not None
        return self.splits.train

    def start(self, first: Lesson) -> Run:
        """The run at its beginning, in a course whose images are those of the `first` lesson."""
        shares = None
        if self.held is not None:
            shares = torch.ones(len(self._set(self.train)))
            shares[torch.from_numpy(self.held)] = 0.0
        other = self.splits is not first.splits
        balance = None
        if self.recipe.balance:
            targets = self._set(self.train).targets
            own = targets if shares is None else targets[shares > 0]
            balance = class_weights(self.splits.kind, own, len(self.splits.labels))
        goal = Goal(
            targets=self._set(self.train).targets if other else None,
            val_targets=self._val_targets(),  # an exam may be shared with courses of other labels
            shares=shares,
            class_weights=balance,
        )
        return Run.start(self.task, self.recipe, self.regime.trains(self.task), goal)

    def _val_targets(self) -> Tensor | None:
        if self.held is not None:
            return self._set(self.train).targets[torch.from_numpy(self.held)]
        return self.splits.val.targets if isinstance(self.splits.val, ImageSet) else None

    def _set(self, images: ImageSet | ImageStream) -> ImageSet:
        if isinstance(images, ImageStream):
            raise TrainingError(
                f"{images.name}: a stream does not tell beforehand what it shows: leave out balance, folds and others."
            )
        return images


class Courses:
    """The courses of some lessons, with the loaders that they share."""

    def __init__(
        self,
        backbone: Backbone,
        lessons: Sequence[Lesson],
        *,
        cache: Cache | None,
        workers: int | None,
        halving: bool = False,
        processes: Processes = ALONE,
    ) -> None:
        self._backbone, self._cache, self._workers, self._halving = backbone, cache, workers, halving
        self._processes = processes
        tasks = [lesson.task for lesson in lessons if lesson.regime.composes]
        self._first = min((task.from_layer for task in [*tasks, *ancestors(tasks)]), default=0)
        self.cached: list[CachedLoader] = []
        self._exams: dict[Any, Batches] = {}
        self._exam_room: Room = {}
        self.runs: list[Run] = []
        """In the order of the lessons."""
        groups: dict[Any, list[Lesson]] = {}
        for lesson in lessons:
            common = [repr(getattr(lesson.recipe, name)) for name in SHARED]
            key = (content_of(lesson.train), lesson.preprocessing, lesson.regime.composes, *common)
            groups.setdefault(key, []).append(lesson)
        precisions = {lesson.recipe.precision for lesson in lessons}
        if len(precisions) > 1:
            raise TrainingError(f"one pass has one precision, not {' and '.join(sorted(precisions))}.")
        started: dict[int, Run] = {}
        self.list = [self._course(group, started, at) for at, group in enumerate(groups.values(), start=1)]
        self.runs = [started[id(lesson)] for lesson in lessons]

    def _course(self, lessons: Sequence[Lesson], started: dict[int, Run], number: int) -> Course:
        first = lessons[0]
        runs = [lesson.start(first) for lesson in lessons]
        started |= {id(lesson): run for lesson, run in zip(lessons, runs, strict=True)}
        recipe = first.recipe
        train = self._loader(
            first, first.train, augment=recipe.augment, shuffle=True, seed=recipe.data_seed, views=recipe.views
        )
        exams: dict[int, tuple[Batches, list[Run]]] = {}
        for lesson, run in zip(lessons, runs, strict=True):
            loader = self.exam(lesson)
            if loader is not None:
                exams.setdefault(id(loader), (loader, []))[1].append(run)
        return Course(
            runs=runs,
            train=train,
            exams=[Exam(loader, some) for loader, some in exams.values()],
            name=f"{number}: {first.splits.name}",
            halving=self._halving,
        )

    def exam(self, lesson: Lesson) -> Batches | None:
        """What a lesson is scored on after every epoch, None where nothing was kept for that."""
        images = lesson.splits.val
        if lesson.held is not None:
            assert isinstance(lesson.train, ImageSet)
            images = lesson.train.subset(lesson.held)
        if images is None:
            return None
        key = (content_of(images), lesson.preprocessing, lesson.regime.composes, lesson.recipe.batch_size)
        if key not in self._exams:
            self._exams[key] = self._loader(lesson, images)
        return self._exams[key]

    def _loader(self, lesson: Lesson, images: ImageSet | ImageStream, **how: Any) -> Batches:
        size, here = lesson.recipe.batch_size, self._processes
        common: dict[str, Any] = {"workers": self._workers, "rank": here.rank, "world": here.world}
        loader = Loader(images, lesson.preprocessing, batch_size=size, **common, **how)
        if self._cache is None or isinstance(images, ImageStream) or not lesson.regime.composes:
            return loader
        if how and lesson.recipe.views is None:
            raise TrainingError("features can be kept of a fixed number of views only: set views, such as views=4.")
        room = None if how else self._exam_room  # exams are held one after the other
        self.cached.append(CachedLoader(loader, self._backbone, self._cache, self._first, room))
        return self.cached[-1]


def content_of(images: ImageSet | ImageStream) -> str:
    """What a set shows, in its order: equal for the same images under other labels."""
    if isinstance(images, ImageStream):
        return f"{images.name} {id(images)}"
    if images.digests is not None:
        return hashlib.sha256(np.ascontiguousarray(images.digests).tobytes()).hexdigest()
    return f"{id(images.source)} {hashlib.sha256(images.rows.tobytes()).hexdigest()}"
